"""The figures of local geometry: every mark is a number of their tables"""

from __future__ import annotations

import functools
import io

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import tl_tangent as tt
from tests import families
from tests.analysis.local.planted import a_model, rows_of
from tl_tangent.views.local_figure import DIMENSIONS, draw_geometry, draw_slopes

COUNTS = {10: 150, 11: 120, 12: 90}
SITES = [f"blocks.{layer}.hook_{part}" for layer in (0, 1) for part in ("mlp_out", "resid_post")]


@functools.cache
def slopes(n_controls: int = 3):
    options = {"n_controls": n_controls, "slow_controls": 0, "dimension_points": 0}
    return tt.token_geometry(a_model(), rows_of(COUNTS), list(COUNTS), SITES[:3], **options)


@functools.cache
def layers(n_controls: int = 2):
    tokens = families.tiny_tokens(batch=6, pos=20)
    return tt.layer_geometry(a_model(), tokens, SITES, n_controls=n_controls)


def points(ax, label):
    """Middle and ends of the error bars of one label."""
    (bars,) = [one for one in ax.containers if one.get_label().startswith(label)]
    line, _, (ends,) = bars
    spans = np.array([segment[:, 1] for segment in ends.get_segments()])
    return line.get_xdata(), line.get_ydata(), spans


def drawn(ax, values) -> bool:
    return any(np.array_equal(line.get_ydata(), values) for line in ax.lines)


def test_a_panel_a_site_and_a_point_a_type_with_intervals_and_controls():
    frame = slopes().to_dataframe()
    figure = slopes().plot()
    assert isinstance(figure, Figure)
    panels = [ax for ax in figure.axes if ax.get_visible()]
    assert [ax.get_title("left") for ax in panels] == SITES[:3]
    for ax in panels:
        rows = frame[frame["site"] == ax.get_title("left")]
        x, y, spans = points(ax, "slope")
        assert x.tolist() == rows["count"].tolist() == [150, 120, 90]
        assert y.tolist() == rows["slope"].tolist()
        np.testing.assert_allclose(spans, rows[["slope_low", "slope_high"]])
        _, mean, spans = points(ax, "Gaussian")
        assert mean.tolist() == rows["control_slope_mean"].tolist()
        np.testing.assert_allclose(spans, rows[["control_slope_min", "control_slope_max"]])
        assert ax.get_xscale() == "log"


def test_either_slope_is_drawn():
    frame = slopes().to_dataframe()
    ax = slopes().plot("normal_slope").axes[0]
    rows = frame[frame["site"] == SITES[0]]
    _, y, spans = points(ax, "slope")
    assert y.tolist() == rows["normal_slope"].tolist()
    np.testing.assert_allclose(spans, rows[["normal_slope_low", "normal_slope_high"]])
    _, mean, _ = points(ax, "Gaussian")
    assert mean.tolist() == rows["control_normal_slope_mean"].tolist()
    with pytest.raises(tt.TangentValueError, match="measure is one of slope, normal_slope, got"):
        draw_slopes(frame, measure="eta")


def test_filled_where_curvature_is_visible():
    frame = slopes().to_dataframe()
    frame["visible"] = [True, False, None] * 3
    ax = draw_slopes(frame).axes[0]
    (line,) = [line for line in ax.lines if line.get_label() == "beyond every null"]
    assert line.get_ydata().tolist() == [frame["slope"][0]]


@pytest.mark.parametrize("sites, visible, hidden", [(1, 1, 0), (4, 4, 0), (5, 5, 3)])
def test_panels_are_laid_out_in_rows(sites, visible, hidden):
    frame = slopes().to_dataframe()
    one = frame[frame["site"] == SITES[0]]
    many = pd.concat([one.assign(site=f"site {i}") for i in range(sites)])
    axes = draw_slopes(many).axes
    assert [ax.get_visible() for ax in axes] == [True] * visible + [False] * hidden


def test_types_without_a_slope_and_runs_without_controls():
    frame = slopes().to_dataframe()
    frame.loc[0, "slope"] = float("nan")
    x, _, _ = points(draw_slopes(frame).axes[0], "slope")
    assert x.tolist() == [120, 90]
    ax = slopes(0).plot().axes[0]
    assert not [one for one in ax.containers if one.get_label().startswith("Gaussian")]


def test_layers_show_every_dimension_and_entropy_with_its_controls():
    frame = layers().to_dataframe()
    figure = layers().plot()
    dimensions, entropies, gaps, scores = figure.axes
    for name in DIMENSIONS:
        assert drawn(dimensions, frame[name])
        assert drawn(dimensions, frame[f"control_{name}_mean"])
    for name in ("gaussian", "neighbour"):
        assert drawn(entropies, frame[f"unit_{name}_entropy"])
    assert drawn(gaps, frame["negentropy"]) and drawn(gaps, frame["control_negentropy_mean"])
    assert drawn(scores, frame["isoscore"]) and drawn(scores, frame["tangent_share"])
    assert len(dimensions.collections) == 3 and len(gaps.collections) == 1
    assert [label.get_text() for label in scores.get_xticklabels()] == SITES


def test_layers_without_controls_and_with_many_sites():
    bare = layers(0).plot()
    assert not bare.axes[0].collections and not bare.axes[2].collections
    frame = layers().to_dataframe()
    many = pd.concat([frame] * 20, ignore_index=True)
    assert len(draw_geometry(many).axes[-1].get_xticks()) <= 32


def test_they_are_saved_without_a_display():
    for figure in (slopes().plot(), layers().plot()):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        assert buffer.getvalue().startswith(b"\x89PNG")


def test_one_type_alone_is_in_sight():
    frame = slopes().to_dataframe()
    figure = draw_slopes(frame[frame["count"] == 120])
    for ax in figure.axes[:3]:
        low, high = ax.get_xlim()
        assert low < 110 < 130 < high
