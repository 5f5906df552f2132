"""Distances of token types: from sums as from the vectors, and their means over draws."""

from __future__ import annotations

import pytest
import torch

from tl_tangent.geometry.frequency import TokenMoments, TypeStatistics


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def statistics_of(x: torch.Tensor) -> TypeStatistics:
    """Each ``x[w]`` holds the occurrences of one type."""
    n_types, n, d = x.shape
    moments = TokenMoments(d, n_types)
    moments.update(x.flatten(0, 1), torch.arange(n_types).repeat_interleave(n))
    return moments.statistics()


def test_are_those_of_the_vectors() -> None:
    x = randn(4, 6, 3) + 2
    found = statistics_of(x)
    variance = x.var(1, correction=1).sum(-1)
    torch.testing.assert_close(found.dispersion, variance)
    torch.testing.assert_close(found.naive_dispersion, variance * 5 / 6)
    torch.testing.assert_close(found.centre_norm, x.mean(1).norm(dim=-1))
    torch.testing.assert_close(found.centre_square, found.centre_norm.square() - variance / 6)


def test_leave_one_out_is_the_distance_to_the_centre_of_the_others() -> None:
    x = randn(4, 6, 3) + 2
    others = (x.sum(1, keepdim=True) - x) / 5
    expected = (x - others).square().sum(-1).mean(-1)
    torch.testing.assert_close(statistics_of(x).leave_one_out, expected)


@pytest.mark.parametrize("n", [2, 5])
def test_means_over_many_types(n: int) -> None:
    """Total variance V = 1 + 4 + 9, mean (2, 0, 0)."""
    x = randn(20000, n, 3) * torch.tensor([1.0, 2, 3]) + torch.tensor([2.0, 0, 0])
    found = statistics_of(x)
    assert float(found.dispersion.mean()) == pytest.approx(14, rel=0.02)
    assert float(found.naive_dispersion.mean()) == pytest.approx(14 * (n - 1) / n, rel=0.02)
    assert float(found.leave_one_out.mean()) == pytest.approx(14 * n / (n - 1), rel=0.02)
    assert float(found.centre_norm.square().mean()) == pytest.approx(4 + 14 / n, rel=0.02)
    assert float(found.centre_square.mean()) == pytest.approx(4, rel=0.04)


def test_logarithm_is_low_by_the_participation_ratio() -> None:
    scales = torch.tensor([1.0, 1, 1, 1, 0.5, 0.5]).double()
    ratio = float(scales.square().sum() ** 2 / scales.pow(4).sum())
    n = 12
    found = statistics_of(randn(20000, n, 6) * scales).dispersion.log().mean()
    gap = float(scales.square().sum().log() - found)
    assert gap == pytest.approx(1 / (ratio * (n - 1)), rel=0.12)


def test_too_few_occurrences_have_none() -> None:
    moments = TokenMoments(2, 3)
    moments.update(torch.tensor([[1.0, 2], [3, 4], [3, 4]]), torch.tensor([0, 2, 2]))
    found = moments.statistics()
    assert found.counts.tolist() == [1, 0, 2]
    for name in ("dispersion", "leave_one_out", "centre_square"):
        assert getattr(found, name).isnan().tolist() == [True, True, False]
    assert found.naive_dispersion.isnan().tolist() == [False, True, False]
    assert found.naive_dispersion[0] == 0
    assert found.centre_norm.isnan().tolist() == [False, True, False]


def test_do_not_change_with_the_moments() -> None:
    moments = TokenMoments(2, 2)
    moments.update(randn(6, 2), torch.tensor([0, 0, 0, 1, 1, 1]))
    found = moments.statistics()
    before = found.dispersion
    moments.update(randn(6, 2, seed=1), torch.tensor([0, 0, 0, 1, 1, 1]))
    assert torch.equal(found.dispersion, before)
