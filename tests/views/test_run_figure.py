"""The figure of a recorded training run."""

from __future__ import annotations

import pandas as pd
import pytest

from tl_tangent.views.run_figure import PALE, draw_run


def frame(steps=range(8)) -> pd.DataFrame:
    rows = [
        {
            "step": step,
            "side": side,
            "loss": 3.0 - step / 10,
            "energy_ratio_exact": 2.0 + step,
            "activation_ratio": 3.0 if step % 2 else float("nan"),
            "coupling": 1.5 if step % 2 else float("nan"),
        }
        for step in steps
        for side in ("input", "output")
    ]
    return pd.DataFrame(rows)


def told(**changed):
    return {"model": "m", "proxy": "early", "freeze_at": 4, "rank": 2, "fits": [0, 4]} | changed


def lines(axes, alpha):
    return [one for one in axes.lines if one.get_alpha() == alpha and len(one.get_xdata()) > 2]


def test_what_was_held_against_a_moving_proxy_is_pale():
    ratios = draw_run(frame(), told()).axes[0]
    moving, still = lines(ratios, PALE), lines(ratios, 1.0) or lines(ratios, None)
    assert next(list(one.get_xdata()) for one in moving) == [0, 1, 2, 3, 4]
    assert [5, 6, 7] in [list(one.get_xdata()) for one in still]
    labels = ratios.get_legend_handles_labels()[1]
    assert len(labels) == len(set(labels)) == 4  # gradients and activations of two sides


@pytest.mark.parametrize(
    ("changed", "pale"),
    [
        ({"proxy": "frozen", "fits": []}, False),
        ({"proxy": "follow", "freeze_at": None}, False),
        ({"freeze_at": 20}, False),
        ({}, True),
    ],
)
def test_only_an_early_phase_that_ended_is_pale(changed, pale):
    figure = draw_run(frame(), told(**changed))
    assert any(one.get_alpha() == PALE for one in figure.axes[0].lines) == pale


def test_the_legend_hides_no_line():
    figure = draw_run(frame(), told())
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
