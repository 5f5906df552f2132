"""The figure of gradient energies: its points are those of the frame, and its words fit them."""

from __future__ import annotations

import io
import itertools

import matplotlib
import numpy as np
import pandas as pd
import pytest

import tl_tangent as tt
from tests.analysis.gradients.cases import measure, measured
from tl_tangent.views.gradient_figure import STYLES, draw_gradients

LABEL = {kind: label for kind, (_, _, label) in STYLES.items()}
SPECS = [("hf", "llama"), ("hf", "gpt2")]
IDS = ["llama", "gpt2"]
ROWS = [
    ("energy_ratio_exact", "pairing_ratio"),
    ("excess_pairing", None),
    ("delta_tangent", "delta_normal"),
]


def by_panel(figure) -> dict[tuple[int, str], object]:
    """The axes by their row and side, told by the titles of the uppermost."""
    sides = [ax.get_title(loc="left").split()[0] for ax in figure.axes if ax.get_title(loc="left")]
    return {
        (i // len(sides), sides[i % len(sides)]): ax for i, ax in enumerate(figure.axes) if sides
    }


def filled(ax) -> dict[str, np.ndarray]:
    """The filled line of each kind."""
    lines = {line.get_label(): line for line in ax.lines if line.get_linestyle() == "-"}
    return {
        kind: np.asarray(lines[label].get_ydata(), float)
        for kind, label in LABEL.items()
        if label in lines
    }


def hollow(ax) -> list[np.ndarray]:
    lines = [line for line in ax.lines if line.get_linestyle() == ":" and len(line.get_ydata())]
    assert all(line.get_markerfacecolor() == "white" for line in lines)
    return [np.asarray(line.get_ydata(), float) for line in lines]


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_a_point_a_weight_with_the_values_of_the_frame(spec):
    frame = measured(*spec).to_dataframe()
    panels = by_panel(draw_gradients(frame, title=""))
    assert set(panels) == {(row, side) for row in range(3) for side in ("input", "output")}
    for (row, side), ax in panels.items():
        column, beside = ROWS[row]
        of_side = frame[frame["side"] == side]
        found = filled(ax)
        assert set(found) == set(of_side["kind"])
        for kind, values in found.items():
            np.testing.assert_array_equal(values, of_side[of_side["kind"] == kind][column])
        expected = [] if beside is None else [*of_side.groupby("kind", sort=False)[beside]]
        assert len(hollow(ax)) == len(expected)
        for values, (_, column_values) in zip(hollow(ax), expected, strict=True):
            np.testing.assert_array_equal(values, column_values)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_points_stand_at_their_layer_and_the_rest_around_them(spec):
    frame = measured(*spec).to_dataframe()
    panels = by_panel(draw_gradients(frame))
    ticks = {
        text.get_text(): place
        for text, place in zip(
            panels[2, "input"].get_xticklabels(), panels[2, "input"].get_xticks(), strict=True
        )
    }
    assert set(ticks) == {"0", "1", "embed", "unembed"}
    assert ticks["embed"] < ticks["0"] < ticks["1"] < ticks["unembed"]
    for side in ("input", "output"):
        for line in panels[0, side].lines:
            kinds = [kind for kind, label in LABEL.items() if label == line.get_label()]
            if kinds:
                outside = {"embed": "embed", "pos": "embed"}.get(kinds[0], "unembed")
                lone = {(ticks[outside],)}
                assert tuple(line.get_xdata()) in {(ticks["0"], ticks["1"])} | lone


def test_ratios_are_logarithmic_around_one_and_changes_linear_around_zero():
    panels = by_panel(draw_gradients(measured().to_dataframe()))
    for (row, _), ax in panels.items():
        logarithmic = row < 2
        assert ax.get_yscale() == ("log" if logarithmic else "linear")
        level = [line for line in ax.lines if list(line.get_ydata()) == [int(logarithmic)] * 2]
        assert len(level) == 1
        assert ax.get_ylabel() or ax is not panels[row, "input"]


def test_sides_share_an_axis_so_that_they_compare():
    panels = by_panel(draw_gradients(measured().to_dataframe()))
    for row in range(3):
        assert panels[row, "input"].get_ylim() == panels[row, "output"].get_ylim()


def test_what_was_not_measured_is_not_drawn():
    figure = draw_gradients(measure(nulls=False).to_dataframe())
    panels = by_panel(figure)
    assert set(panels) == {(0, "input"), (0, "output")}
    assert not any(hollow(ax) for ax in panels.values())
    words = [text.get_text() for text in panels[0, "input"].get_legend().get_texts()]
    assert words == [LABEL[kind] for kind in ("q", "k", "v", "gate", "in", "unembed")]


def test_one_side_is_one_column():
    panels = by_panel(draw_gradients(measure(kinds=("o", "out")).to_dataframe()))
    assert set(panels) == {(0, "output"), (1, "output")}
    ticks = [text.get_text() for text in panels[1, "output"].get_xticklabels()]
    assert ticks == ["0", "1"]


def test_a_legend_tells_kinds_and_what_is_hollow():
    panels = by_panel(draw_gradients(measured().to_dataframe()))
    words = [text.get_text() for text in panels[0, "output"].get_legend().get_texts()]
    assert words == ["embedding", "W_O", "W_out", "gradient", "paired at random"]
    words = [text.get_text() for text in panels[2, "output"].get_legend().get_texts()]
    assert words == ["without Q_T", "without a normal"]
    assert panels[1, "output"].get_legend() is None


def test_kinds_of_one_side_differ_in_colour_and_in_marker():
    frame = measured("hf", "llama").to_dataframe()
    for kinds in frame.groupby("side")["kind"].unique():
        assert len({STYLES[kind][0] for kind in kinds}) == len(kinds)
        assert len({STYLES[kind][1] for kind in kinds}) == len(kinds)


def test_many_layers_are_labelled_here_and_there():
    """A frame of 40 layers: labels that do not touch, the last of them that of the unembedding."""
    block = measured().to_dataframe()
    block = block[block["layer"].eq(0) | block["kind"].eq("unembed")]
    one = block[block["layer"].eq(0)]
    frames = [one.assign(layer=float(layer)) for layer in range(40)]
    frame = pd.concat([*frames, block[block["kind"].eq("unembed")]])
    figure = draw_gradients(frame)
    figure.draw_without_rendering()
    labels = by_panel(figure)[2, "input"].get_xticklabels()
    assert labels[-1].get_text() == "unembed"
    boxes = [label.get_window_extent() for label in labels]
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def test_weights_without_a_gradient_leave_a_gap():
    frame = measured().to_dataframe()
    measures = frame.columns.drop(["weight", "kind", "layer", "side", "d", "rank"])
    frame.loc[frame["weight"] == "blocks.0.attn.W_Q", measures] = np.nan
    values = filled(by_panel(draw_gradients(frame))[0, "input"])["q"]
    assert np.isnan(values).tolist() == [True, False]


def test_infinite_and_zero_ratios_do_not_break_the_axis():
    frame = measured().to_dataframe()
    frame.loc[1, ["energy_ratio_exact", "excess_pairing"]] = np.inf
    frame.loc[2, ["energy_ratio_exact", "excess_pairing"]] = 0.0
    figure = draw_gradients(frame)
    figure.savefig(io.BytesIO())
    assert all(np.isfinite(ax.get_ylim()).all() for ax in figure.axes)


def test_a_frame_of_something_else_is_refused():
    with pytest.raises(
        tt.TangentValueError, match=r"columns kind, weights, .* not one row a weight"
    ):
        draw_gradients(measured().to_dataframe("kind"))
    zero = measured().to_dataframe().assign(energy_ratio_exact=np.nan)
    with pytest.raises(tt.TangentValueError, match="no weight in this frame has a gradient"):
        draw_gradients(zero)
    with pytest.raises(tt.TangentValueError, match="no weight in this frame has a gradient"):
        draw_gradients(zero.drop(columns="energy_ratio_exact"))


def test_a_result_draws_itself_without_a_display(monkeypatch):
    monkeypatch.setattr(matplotlib, "rcParams", matplotlib.rcParams.copy())
    figure = measured().plot()
    assert figure.get_suptitle() == str(measured().conventions["model"])
    assert len(figure.axes) == 6
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue()[:4] == b"\x89PNG"
