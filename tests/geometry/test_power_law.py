"""Log-log slopes of exact power laws and against numpy; bins; sizes over pairs by brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.power_law import (
    SIZES,
    bin_moments,
    different_bins,
    log_slope,
    orders,
    quantile_edges,
)
from tl_tangent.geometry.score_terms import TERMS, SideParts, term_maps


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestLogSlope:
    def test_an_exact_power_law_has_its_exponent_and_no_error(self):
        t = torch.logspace(-3, 2, 7, dtype=torch.float64)
        powers = torch.tensor([0.0, 1.0, 2.5, -3.0], dtype=torch.float64)
        found = log_slope(t, 7.0 * t ** powers[:, None])
        assert torch.allclose(found.slope, powers, atol=1e-12)
        assert found.error.max() < 1e-12

    def test_slope_and_error_are_those_of_numpy(self):
        t, y = randn(2, 3, 12).exp(), randn(2, 3, 12, seed=1).exp()
        found = log_slope(t, y)
        assert found.slope.shape == found.error.shape == (2, 3)
        for at in np.ndindex(2, 3):
            fit, covariance = np.polyfit(t[at].log().numpy(), y[at].log().numpy(), 1, cov=True)
            assert float(found.slope[at]) == pytest.approx(fit[0], abs=1e-10)
            assert float(found.error[at]) == pytest.approx(covariance[0, 0] ** 0.5, rel=1e-10)

    def test_units_do_not_matter(self):
        t, y = randn(9).exp(), randn(9, seed=1).exp()
        assert torch.allclose(log_slope(t, y).slope, log_slope(1e3 * t, 1e-4 * y).slope)

    def test_points_that_do_not_count_are_left_out(self):
        t, y = randn(3, 9).exp(), randn(3, 9, seed=1).exp()
        counted = torch.ones(3, 9, dtype=torch.bool)
        counted[0, 4] = counted[2, :5] = False
        y[~counted], t[0, 4] = torch.nan, 0.0
        found = log_slope(t, y, counted)
        for row in range(3):
            alone = log_slope(t[row][counted[row]], y[row][counted[row]])
            assert torch.allclose(found.slope[row], alone.slope)
            assert torch.allclose(found.error[row], alone.error)

    @pytest.mark.parametrize("value", [0.1, 0.7, 3.0, 1e8])
    def test_equal_x_have_no_slope(self, value):
        """Also where their mean is rounded, and where they differ by rounding."""
        for n in (3, 7, 50, 201):
            x = torch.full((2, n), value, dtype=torch.float64)
            x[1] *= 1 + 1e-15 * randn(n)
            found = log_slope(x, randn(2, n).exp())
            assert bool(found.slope.isnan().all() and found.error.isnan().all())

    def test_float32_is_fitted_in_float64(self):
        found = log_slope(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 4.0]))
        assert found.slope.dtype == torch.float64

    def test_a_size_of_zero_has_no_slope(self):
        t = torch.tensor([1.0, 2.0, 3.0])
        assert log_slope(t, torch.zeros(3)).slope.isnan()

    def test_two_points_have_a_slope_without_an_error_and_one_has_none(self):
        found = log_slope(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        assert float(found.slope) == pytest.approx(2.0)
        assert found.error.isnan()
        with pytest.raises(TangentValueError, match="2 points or more, and there are 1"):
            log_slope(torch.ones(1), torch.ones(1))


class TestQuantileEdges:
    def test_bins_hold_equally_many_tokens(self):
        t = randn(2, 40).exp()
        bins = torch.searchsorted(quantile_edges(t, 8), t)
        assert all(torch.bincount(row).tolist() == [5] * 8 for row in bins)

    def test_equal_tokens_share_a_bin(self):
        t = torch.tensor([[1.0] * 6 + [2.0, 3.0]])
        bins = torch.searchsorted(quantile_edges(t, 4), t)
        assert bins[0, :6].unique().numel() == 1
        assert bins[0, 0] < bins[0, 6] == bins[0, 7]

    def test_only_bins_of_different_t_are_counted(self):
        assert different_bins(randn(2, 40).exp(), 8) == 8
        assert different_bins(torch.ones(1, 40) + 1e-6 * torch.randn(1, 40), 8) == 1
        two = torch.tensor([1.0, 2.0]).repeat(20)
        assert different_bins(torch.stack([torch.linspace(1, 2, 40), two]), 8) == 2


class TestBinMoments:
    """Two key heads for four query heads, a mean part that all rows share, some tokens not taken"""

    @staticmethod
    def sides(kv_heads: int = 2) -> tuple[SideParts, SideParts]:
        q = [randn(n, 4, 7, 5, seed=i) for i, n in enumerate((1, 3, 3))]
        k = [randn(n, kv_heads, 7, 5, seed=i) for i, n in enumerate((1, 3, 3), 10)]
        return SideParts(*q), SideParts(*k)

    @staticmethod
    def brute_force(query: SideParts, key: SideParts, inside: torch.Tensor) -> torch.Tensor:
        """rms over pairs of the maps, the tokens of one bin [batch, pos] laid out in one row."""
        one_row = [
            SideParts(*(p.expand_as(s.tangent).transpose(0, 1)[:, inside][None] for p in s))
            for s in (query, key)
        ]
        maps = term_maps(*one_row)
        maps["cross"] = maps["tangent_normal"] + maps["normal_tangent"]
        return torch.stack([maps[name].square().mean((0, 2, 3)).sqrt() for name in SIZES[:10]])

    def test_sizes_are_those_over_all_pairs_of_a_bin(self):
        query, key = self.sides()
        taken = torch.ones(3, 7, dtype=torch.bool)
        taken[0, :2] = taken[2, 5:] = False
        norms = randn(3, 1, int(taken.sum())).abs()
        edges = torch.tensor([[0.4, 0.9]], dtype=torch.float64)
        bins = torch.bucketize(norms[0, 0], edges[0])
        found = bin_moments(query, key, taken, norms, edges).sizes()
        for one in range(3):
            inside = torch.zeros(3, 7, dtype=torch.bool)
            inside[taken] = bins == one
            assert torch.allclose(found.sizes[:10, :, one], self.brute_force(query, key, inside))
            rms = norms[:, 0, bins == one].square().mean(-1).sqrt()
            assert torch.allclose(found.t[:, one], rms[0].expand(4))
            assert torch.allclose(found.sizes[10:, :, one], rms[1:, None].expand(2, 4))

    def test_each_head_can_have_bins_of_its_own(self):
        query, key = self.sides(kv_heads=4)
        taken = torch.ones(3, 7, dtype=torch.bool)
        norms = randn(3, 4, 21).abs()
        edges = quantile_edges(norms[0], 3)
        found = bin_moments(query, key, taken, norms, edges).sizes()
        for head, one in np.ndindex(4, 3):
            inside = torch.bucketize(norms[0, head], edges[head]) == one
            expected = self.brute_force(query, key, inside.reshape(3, 7))[:, head]
            assert torch.allclose(found.sizes[:10, head, one], expected)
            assert found.t[head, one] == pytest.approx(
                float(norms[0, head, inside].square().mean().sqrt())
            )

    def test_batches_add_up(self):
        query, key = self.sides()
        norms = randn(3, 1, 21).abs()
        edges = quantile_edges(norms[0], 4)
        one = torch.ones(1, 7, dtype=torch.bool)
        whole = bin_moments(query, key, one, norms, edges)
        a, b, c = (
            bin_moments(
                *(SideParts(*(p.expand(3, -1, -1, -1)[[i]] for p in s)) for s in (query, key)),
                one,
                norms[..., 7 * i : 7 * i + 7],
                edges,
            )
            for i in range(3)
        )
        summed = a + b + c
        assert torch.equal(summed.counts, whole.counts)
        assert torch.allclose(summed.sizes().sizes, whole.sizes().sizes)
        assert torch.allclose(summed.sizes().t, whole.sizes().t)

    def test_an_empty_bin_has_no_size_and_does_not_count(self):
        query, key = self.sides()
        norms = randn(3, 1, 21).abs()
        edges = torch.tensor([[0.4, 0.9, 50.0]], dtype=torch.float64)
        one = torch.ones(1, 7, dtype=torch.bool)
        found = bin_moments(query, key, one, norms, edges).sizes()
        assert found.counts[0, 3] == 0 and found.sizes[..., 3].isnan().all()
        without = bin_moments(query, key, one, norms, edges[:, :2]).sizes()
        assert torch.allclose(found.slopes().slope, without.slopes().slope)
        assert not found.slopes().slope.isnan().any()


def test_orders_of_curved_and_flat_clouds():
    curved, flat = orders(2), orders(1)
    assert [curved[name] for name in TERMS] == [0, 1, 2, 1, 2, 3, 2, 3, 4]
    assert [flat[name] for name in TERMS] == [0, 1, 1, 1, 2, 2, 1, 2, 2]
    assert (curved["cross"], flat["cross"]) == (3, 2)
    assert tuple(curved) == tuple(flat) == SIZES
