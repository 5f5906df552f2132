"""Phases of made-up checkpoints: what is a mean of what, and what no order changes."""

from __future__ import annotations

import pytest
import torch

from tl_tangent.analysis.gradients.removals import Removals
from tl_tangent.analysis.gradients.statistics import GradientStatistics, Label
from tl_tangent.geometry.token_energies import KINDS
from tl_tangent.studies.alignment_rows import phase_summary
from tl_tangent.studies.measured import MeasuredCheckpoint


def made_up(step: int, energies: list[list[float]], totals: list[float], deltas=None):
    """A checkpoint with these energies in Q_T and the normals, a row a weight; d = 8, rank 2."""
    labels = tuple(Label(f"w{i}", "q", i, "input", "site", 8, 2, 0.5) for i in range(len(totals)))
    kinds = torch.full((len(totals), len(KINDS), len(energies[0])), torch.nan).double()
    kinds[:, 0] = torch.tensor(energies)
    sums = torch.full((len(totals), len(KINDS)), torch.nan).double()
    sums[:, 0] = torch.tensor(totals)
    statistics = GradientStatistics(labels, kinds, sums, n_batches=1)
    removals = None
    if deltas is not None:
        removals = Removals(sums[:, 0] * 0, torch.tensor(deltas).double(), sums[:, 0] * 0)
    return MeasuredCheckpoint(step, statistics, removals)


def test_three_orders_of_pooling():
    one = made_up(1, [[4.0, 1.0, 1.0]], [8.0])
    two = made_up(2, [[20.0, 20.0, 60.0]], [160.0])
    told = phase_summary([one, two], [0])
    assert told["energy_ratio"] == pytest.approx((4 * 0.5) ** 0.5)
    assert told["energy_ratio_pooled"] == pytest.approx(24 / 41)
    shares = (4 / 8 + 20 / 160) / (1 / 8 + 40 / 160)
    assert told["energy_ratio_normalised"] == pytest.approx(shares)
    exact = [4 / 4 * 3, 20 / 140 * 3]
    assert told["energy_ratio_exact"] == pytest.approx((exact[0] * exact[1]) ** 0.5)
    assert "pairing_ratio" not in told and "delta_tangent" not in told


def test_the_p_value_is_that_of_the_mean_logarithm():
    """The second normal beats Q_T in one checkpoint, but not in both together."""
    one = made_up(1, [[4.0, 1.0, 1.0]], [8.0])
    two = made_up(2, [[2.0, 1.0, 4.0]], [8.0])
    assert phase_summary([one, two], [0])["p_value"] == 1 / 3
    three = made_up(3, [[1.0, 0.0, 3.0]], [8.0])
    assert phase_summary([one, two, three], [0])["p_value"] == 2 / 3
    long = made_up(4, [[4.0, 6.0, 1.0]], [8.0])  # a long gradient outweighs no other
    short = made_up(5, [[1.0, 0.1, 0.1]], [8.0])
    assert phase_summary([long, short], [0])["p_value"] == 1 / 3


def test_the_p_value_of_changes_of_isoscore():
    one = made_up(1, [[4.0, 1.0, 1.0]], [8.0], [[0.4, 0.1, 0.1]])
    two = made_up(2, [[4.0, 1.0, 1.0]], [8.0], [[0.1, 0.1, 0.3]])
    told = phase_summary([one, two], [0])
    assert told["delta_tangent"] == pytest.approx(0.25)
    assert told["delta_normal"] == pytest.approx((0.1 + 0.2) / 2)
    assert told["delta_p_value"] == 1 / 3


def test_a_gradient_of_zero_has_no_ratio_and_is_not_counted():
    one = made_up(1, [[4.0, 1.0, 1.0], [0.0, 0.0, 0.0]], [8.0, 0.0])
    two = made_up(2, [[4.0, 2.0, 2.0], [2.0, 2.0, 2.0]], [8.0, 8.0])
    told = phase_summary([one, two], [0, 1])
    assert told["pairs"] == 3
    assert told["energy_ratio"] == pytest.approx((4 * 2 * 1) ** (1 / 3))
    assert told["energy_ratio_pooled"] == pytest.approx((8 / 3 * 1) ** 0.5)
    assert phase_summary([one], [1]) == {"pairs": 0}


def test_the_order_of_checkpoints_does_not_change_a_bit():
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(9, 2, 4, generator=generator).double() ** 8
    found = [
        made_up(i, one.tolist(), (one.sum(1) * 1.3).tolist(), (one / 7).tolist())
        for i, one in enumerate(draw)
    ]
    straight = phase_summary(found, [0, 1])
    assert phase_summary(found[::-1], [1, 0]) == straight
    assert phase_summary(found[3:] + found[:3], [0, 1]) == straight
