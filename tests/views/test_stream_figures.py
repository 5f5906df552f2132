"""The pictures of transfer gains and of recoveries: every mark is a number of their tables."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import build
from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.views.stream_lines import clip_first, draw_control

F64 = torch.float64


@functools.cache
def model_and_subspace():
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(families.D_MODEL, 3, generator=generator, dtype=F64)
    mean = torch.randn(families.D_MODEL, generator=generator, dtype=F64)
    subspace = tt.TangentSubspace(basis, mean, orthonormalize=True)
    return build(("bridge", "gpt2", False), F64), subspace


@functools.cache
def gains(start=None, stop=None, n_controls: int = 2):
    model, subspace = model_and_subspace()
    tokens, options = families.tiny_tokens(model), {"n_controls": n_controls, "n_directions": 2}
    return tt.transfer_gains(model, tokens, subspace, start, stop, **options)


@functools.cache
def recovery(part: str):
    model, subspace = model_and_subspace()
    return tt.part_recovery(model, families.tiny_tokens(model), subspace, 0, part=part)


def panels(figure: Figure) -> dict[str, object]:
    return {ax.get_title("left"): ax for ax in figure.axes}


def drawn(ax, values) -> bool:
    return any(np.array_equal(line.get_ydata(), values) for line in ax.lines)


# Gains --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", PARTS)
@pytest.mark.parametrize("target", PARTS)
def test_each_pair_of_parts_with_copy_errors_and_controls(source, target):
    figure = gains().plot()
    assert isinstance(figure, Figure)
    ax, table = panels(figure)[f"{source} to {target}"], gains().to_dataframe()
    rows = table[(table["source"] == source) & (table["target"] == target)]
    for name in ("gain", "copy", "control_gain_mean"):
        assert drawn(ax, rows[name])
    segments = ax.containers[0].lines[2][0].get_segments()
    for (low, high), value, error in zip(segments, rows["gain"], rows["gain_se"], strict=True):
        assert (low[1], high[1]) == pytest.approx((value - 2 * error, value + 2 * error))
    assert all(tick == int(tick) for tick in ax.get_xticks())


def test_other_stretches_than_layers_are_drawn_and_named():
    ax = panels(gains((0, 1), 2).plot())["tangent to tangent"]
    assert ax.get_xlabel() == "changed at depth (read at 2)"
    assert len(panels(gains(0, 2, n_controls=0).plot())) == 4


# Recoveries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_coefficients_whole_and_centred_beside_controls_and_unchanged_layers(part):
    shown, table = panels(recovery(part).plot()), recovery(part).to_dataframe()
    for one in PARTS:
        rows, removed = table[table["part"] == one], ", removed" if one == part else ""
        for words, name in (
            ("whole", "coefficient"),
            ("what differs between tokens", "coefficient_centred"),
        ):
            ax = shown[f"{one} part{removed}: {words}"]
            for column in (name, f"{name}_unchanged", f"control_{name}_mean"):
                assert drawn(ax, rows[column])
    assert next(iter(shown)).startswith(f"{part} part, removed")  # above the other


# Lines --------------------------------------------------------------------------------------------


def table_of(values: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"layer": range(len(values)), "x": values, "y": values})


def test_a_first_layer_of_another_size_is_noted_and_does_not_stretch_the_axis():
    ax = Figure().subplots()
    clip_first([ax], [table_of([17.0, 1.1, 0.9, 1.2, 1.0])], "x", "y")
    low, high = ax.get_ylim()
    assert 0.8 < low < 0.9 and 1.2 < high < 1.3
    assert [text.get_text() for text in ax.texts] == ["layer 0: 17 (pooled 17)"]


@pytest.mark.parametrize("values", [[1.15, 1.1, 0.9, 1.2], [17.0, 1.1, 3.0]])
def test_a_first_layer_that_fits_or_is_one_of_few_is_drawn(values):
    ax = Figure().subplots()
    clip_first([ax], [table_of(values)], "x")
    assert not ax.texts and ax.get_ylim()[1] > max(values)


def test_controls_that_are_all_alike_are_still_seen():
    rows = pd.DataFrame({"at": [0, 1], **{f"control_x_{n}": [1.0, 1.0] for n in ("mean", "min")}})
    ax = Figure().subplots()
    draw_control(ax, rows.assign(control_x_max=[1.0, 1.0]), "at", "x")
    assert ax.collections[0].get_linewidth()[0] > 1
    draw_control(ax, rows[["at"]], "at", "x")
    assert len(ax.collections) == len(ax.lines) == 1
