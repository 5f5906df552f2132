"""Correlations against scipy, the coverage of their intervals, ties and invariances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from scipy import stats

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency import mid_ranks, pearson, spearman

BOTH = pytest.mark.parametrize("function", [pearson, spearman])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(rho: float, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x, noise = randn(2, n, seed=seed)
    return x, rho * x + math.sqrt(1 - rho**2) * noise


def test_pearson_and_its_interval_are_those_of_scipy() -> None:
    x, y = pairs(0.6, 40)
    expected = stats.pearsonr(x.numpy(), y.numpy())
    found = pearson(x, y, level=0.9)
    assert found.r == pytest.approx(expected.statistic, abs=1e-14)
    low, high = expected.confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


def test_spearman_is_that_of_scipy_with_ties() -> None:
    x, y = (2 * z.round(decimals=0) for z in pairs(0.6, 60))
    assert len(x.unique()) < 10
    expected = stats.spearmanr(x.numpy(), y.numpy()).statistic
    assert spearman(x, y).r == pytest.approx(expected, abs=1e-14)


def test_mid_ranks() -> None:
    assert mid_ranks(torch.tensor([3.0, 1, 3, 2, 3])).tolist() == [4, 1, 4, 2, 4]
    x = randn(200).round(decimals=1)
    assert mid_ranks(x).tolist() == stats.rankdata(x.numpy()).tolist()
    assert float(mid_ranks(x).sum()) == 200 * 201 / 2


def test_bonett_wright_variance() -> None:
    x, y = pairs(0.5, 30)
    found = spearman(x, y)
    half = (math.atanh(found.high) - math.atanh(found.low)) / 2
    assert half == pytest.approx(1.959963985 * math.sqrt((1 + found.r**2 / 2) / 27), rel=1e-8)


@pytest.mark.parametrize(
    ("function", "rho", "interval", "draws"),
    [
        (pearson, 0.0, "fisher", 800),
        (pearson, 0.7, "fisher", 800),
        (spearman, 0.0, "fisher", 800),
        (spearman, 0.7, "fisher", 800),
        (pearson, 0.7, "bootstrap", 120),
    ],
)
def test_intervals_hold_the_truth_as_often_as_they_say(
    function, rho: float, interval: str, draws: int
) -> None:
    """Of Gaussian pairs the rank correlation is ``(6 / pi) asin(rho / 2)``."""
    truth = rho if function is pearson else 6 / math.pi * math.asin(rho / 2)
    hits = []
    for seed in range(draws):
        found = function(*pairs(rho, 60, seed=seed), level=0.9, interval=interval, draws=150)
        hits.append(found.low < truth < found.high)
    assert np.mean(hits) == pytest.approx(0.9, abs=0.035 if draws > 500 else 0.08)


@BOTH
def test_bootstrap_is_near_fisher_seeded_and_of_pairs(function) -> None:
    x, y = pairs(0.5, 300)
    fisher = function(x, y)
    one, two, other = (function(x, y, interval="bootstrap", seed=s) for s in (0, 0, 1))
    assert one == two and one.low != other.low and one.r == fisher.r
    assert (one.low, one.high) == pytest.approx((fisher.low, fisher.high), abs=0.04)


def test_invariances() -> None:
    x, y = pairs(0.4, 50)
    assert pearson(3 * x + 1, -2 * y).r == pytest.approx(-pearson(x, y).r, abs=1e-14)
    assert pearson(1e9 + x, y).r == pytest.approx(pearson(x, y).r, abs=1e-6)
    for unit in (1e-200, 1e200, 1e307):
        assert pearson(unit * x, y).r == pytest.approx(pearson(x, y).r, abs=1e-14)
    assert spearman(x.exp(), y**3).r == spearman(x, y).r
    assert pearson(x.exp(), y).r != pearson(x, y).r


@BOTH
def test_perfect_agreement_leaves_nothing_open(function) -> None:
    x = torch.tensor([1.0, 2, 4, 8, 16])
    for y, r in ((x, 1.0), (-x, -1.0)):
        found = function(x, y)
        assert (found.r, found.low, found.high) == pytest.approx((r, r, r), abs=1e-12)


def test_prints() -> None:
    shown = str(spearman(*pairs(-0.5, 90)))
    assert shown.startswith("spearman -0.") and shown.endswith("at 95 % (fisher, n = 90)")


class TestRefused:
    def test_too_few(self) -> None:
        with pytest.raises(TangentValueError, match=r"4 values or more, got \[3\] and \[3\]"):
            pearson(randn(3), randn(3))

    @BOTH
    def test_constant(self, function) -> None:
        for x in (torch.full((9,), 0.1), torch.full((9,), 1e300, dtype=torch.float64)):
            with pytest.raises(TangentValueError, match="a column of the 9 pairs is constant"):
                function(randn(9), x)

    def test_options(self) -> None:
        x, y = pairs(0.5, 9)
        with pytest.raises(TangentValueError, match=r"level is in \(0, 1\), got 95.0"):
            pearson(x, y, level=95.0)
        with pytest.raises(TangentValueError, match="100 draws or more, got 10"):
            pearson(x, y, interval="bootstrap", draws=10)
        with pytest.raises((TangentValueError, TypeCheckError)):
            pearson(x, y, interval="exact")
        with pytest.raises(TangentValueError, match="y has 1 NaN"):
            pearson(x, torch.where(y == y.max(), math.nan, y))
