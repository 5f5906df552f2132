"""The figure of term shares: its lines, bands, heat map and words are those of the frame."""

from __future__ import annotations

import functools
import io

import numpy as np
import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import build, random_subspaces
from tl_tangent.geometry.score_terms import GROUPS
from tl_tangent.views.share_figure import STYLES, draw_shares

LABEL = {name: label for name, (_, _, label) in STYLES.items()}
UNSIGNED = ("variance_share", "square_share")


@functools.cache
def measured(family: str = "llama", n_controls: int = 3, signed: bool = True, layers=None):
    model = build(("bridge", family, False), torch.float64)
    tokens = families.tiny_tokens(model)
    subspaces = random_subspaces(model, tokens, ["blocks.*.attn.hook_in"])
    return tt.attention_term_shares(
        model, tokens, subspaces, layers, n_controls=n_controls, signed=signed
    )


def groups_of(shares) -> dict[str, tuple[str, ...]]:
    there = set(shares.to_dataframe()["term"])
    return GROUPS | ({"position": ("position",)} if "position" in there else {})


def from_frame(shares, column: str, terms) -> np.ndarray:
    """By layer: the mean over heads of the sum of some terms' values in a column."""
    frame = shares.to_dataframe()
    frame = frame[frame["term"].isin(terms)]
    return frame.groupby(["layer", "head"])[column].sum().groupby("layer").mean().to_numpy()


def lines(figure, style: str = "-") -> dict[str, np.ndarray]:
    """The groups' lines of a style by their colour."""
    coloured = {colour for colour, _, _ in STYLES.values()}
    return {
        line.get_color(): np.asarray(line.get_ydata(), dtype=float)
        for line in figure.axes[0].lines
        if line.get_linestyle() == style and line.get_color() in coloured
    }


@pytest.mark.parametrize("family", ["llama", "bert", "bloom"])
@pytest.mark.parametrize("share", [*UNSIGNED, "score_share"])
def test_a_line_a_group_with_the_values_of_the_frame(family, share):
    shares = measured(family)
    figure = draw_shares(shares, share)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    found, groups = lines(figure), groups_of(shares)
    assert sorted(labels[:-1]) == sorted(LABEL[name] for name in groups)
    assert ("position (ALiBi)" in labels) == (family == "bloom")
    assert len(found) == len(groups)
    for name, terms in groups.items():
        np.testing.assert_allclose(found[STYLES[name][0]], from_frame(shares, share, terms))
    np.testing.assert_allclose(sum(found.values()), 1.0)


@pytest.mark.parametrize("share", [*UNSIGNED, "score_share"])
def test_controls_are_dashed_in_the_colour_of_their_group(share):
    shares = measured()
    dashed = lines(draw_shares(shares, share), "--")
    assert len(dashed) == len(GROUPS)
    for name, terms in GROUPS.items():
        mean = from_frame(shares, f"control_{share}_mean", terms)
        np.testing.assert_allclose(dashed[STYLES[name][0]], mean)


def test_bands_reach_from_the_lowest_to_the_highest_control():
    shares = measured()
    figure = draw_shares(shares)
    bands = figure.axes[0].collections
    assert len(bands) == len(GROUPS)
    shown = [name for name in STYLES if name in GROUPS]
    for name, band in zip(shown, bands, strict=True):
        rows = [[_share(moments, name) for moments in one.controls] for one in shares.layers]
        for layer, values in enumerate(rows):
            points = band.get_paths()[0].vertices
            heights = points[points[:, 0] == layer, 1]
            assert (heights.min(), heights.max()) == pytest.approx((min(values), max(values)))
            assert heights.max() > heights.min()


def _share(moments, group: str) -> float:
    """The variance share of a group from the sums over cells, by hand."""
    inside = [moments.names.index(term) for term in GROUPS[group]]
    return float((moments.spread[inside].sum(0) / moments.spread.sum(0)).mean())


def test_without_controls_there_is_nothing_dashed():
    figure = draw_shares(measured(n_controls=0))
    assert not lines(figure, "--")
    assert not figure.axes[0].collections
    assert len(figure.axes[0].get_legend().get_texts()) == len(GROUPS)


def test_unsigned_shares_start_at_zero_and_signed_ones_where_they_are():
    for share in UNSIGNED:
        assert draw_shares(measured(), share).axes[0].get_ylim()[0] == 0
    figure = draw_shares(measured(), "score_share")
    lowest = min(values.min() for style in ("-", "--") for values in lines(figure, style).values())
    assert figure.axes[0].get_ylim()[0] < min(lowest, 0)


@pytest.mark.parametrize("share", ["variance_share", "score_share"])
def test_the_heat_map_is_the_share_of_each_layer_and_head(share):
    shares = measured()
    frame = shares.to_dataframe()
    (image,) = draw_shares(shares, share).axes[1].images
    array = np.asarray(image.get_array())
    assert array.shape == (families.N_HEADS, families.N_LAYERS)
    for row in frame[frame["term"] == "tangent_tangent"].to_dict("records"):
        assert array[row["head"], row["layer"]] == row[share]
    low, high = image.get_clim()
    assert high == np.abs(array).max()
    assert low == (-high if share == "score_share" else 0)


def test_words():
    figure = draw_shares(measured())
    title = figure.get_suptitle()
    for part in (str(measured().conventions[0]["model"]), "rank 3", "input space"):
        assert part in title
    assert "variance" in figure.axes[0].get_ylabel()
    assert figure.axes[1].get_xlabel() == "layer"
    assert figure.axes[1].get_ylabel() == "head"


def test_layers_are_labelled_by_their_number():
    figure = draw_shares(measured(layers=1))
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["1"]
    assert all(len(values) == 1 for values in lines(figure).values())


def test_a_share_that_was_not_measured_is_refused():
    with pytest.raises(tt.TangentValueError, match="'score_share'.*signed=True"):
        draw_shares(measured(signed=False), "score_share")
    for share in ("head", "control_variance_share_mean", "varianc"):
        with pytest.raises(tt.TangentValueError, match=f"'{share}'.*variance_share"):
            draw_shares(measured(), share)


def test_a_plain_figure_that_pyplot_does_not_hold():
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    held = pyplot.get_fignums()
    figure = measured().plot("square_share")
    assert isinstance(figure, Figure)
    assert pyplot.get_fignums() == held
    written = io.BytesIO()
    figure.savefig(written, format="png")
    assert written.getvalue().startswith(b"\x89PNG")
