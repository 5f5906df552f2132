"""Energies and their ratio: identities, invariances, bounds, and laws under random directions."""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from scipy import stats
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import TangentSubspace
from tl_tangent.geometry.angles import haar_normal
from tl_tangent.geometry.energy import (
    EnergyRatio,
    check_stack,
    energies,
    energy_ratio,
    moment_energies,
    stack_bases,
    total_energy,
    upper_p_value,
)
from tl_tangent.geometry.energy_bounds import efficiency, haar_fraction_moments

D, RANK, OUT, NORMALS = 24, 3, 7, 20
LEAST_P = 1e-3  # of a seeded distribution test: it fails if the law is off, never by chance


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(d: int, columns: int | None = None, seed: int = 0) -> Tensor:
    return torch.linalg.qr(randn(d, columns or d, seed=seed))[0]


def uneven(seed: int = 0) -> Tensor:
    """A gradient [o, d] whose directions carry very different energies."""
    return randn(OUT, D, seed=seed) * torch.arange(1, D + 1) ** -0.7


SUBSPACE = TangentSubspace(orthogonal(D, RANK, seed=9))
STACKED = stack_bases(SUBSPACE, SUBSPACE.random_normals(NORMALS, seed=1))


def normals_of(basis: Tensor, n: int, seed: int) -> Tensor:
    """Draw the controls of one basis all at once, side by side."""
    generator = torch.Generator().manual_seed(seed)
    return haar_normal(basis.expand(n, *basis.shape), generator).movedim(0, 1).flatten(1)


def ratio_of(gradient: Tensor, basis: Tensor) -> EnergyRatio:
    return energy_ratio(gradient, basis, basis.shape[1])


class TestStack:
    def test_holds_each_span_in_order_orthonormal_in_float64(self) -> None:
        stored = TangentSubspace(orthogonal(D, RANK, seed=9).float())
        normals = stored.random_normals(4, seed=1)
        blocks = stack_bases(stored, normals).unflatten(1, (5, RANK)).movedim(1, 0)
        for block, one in zip(blocks, (stored, *normals), strict=True):
            torch.testing.assert_close(block @ block.T, (one.basis @ one.basis.T).double())
        gram = blocks.mT @ blocks
        torch.testing.assert_close(
            gram, torch.eye(RANK).double().expand_as(gram), atol=1e-14, rtol=0
        )
        assert stack_bases(stored, normals, dtype=torch.float32).dtype == torch.float32

    def test_refusals(self) -> None:
        per_head = TangentSubspace(orthogonal(8, 2).expand(3, 8, 2))
        with pytest.raises(TangentValueError, match=r"\.head\(i\)"):
            stack_bases(per_head)
        with pytest.raises(TangentValueError, match="rank 3 of Q_T, got width 24 and rank 2"):
            stack_bases(SUBSPACE, [SUBSPACE.truncate(2)])
        wide = TangentSubspace(orthogonal(5, 3))
        with pytest.raises(TangentValueError, match=r"2 \* 3 > 5.*rank 2 or less"):
            stack_bases(wide, [wide])
        assert stack_bases(wide).shape == (5, 3)


class TestEnergies:
    def test_are_squared_norms_of_projections_in_three_ways(self) -> None:
        gradient = uneven()
        found = energies(gradient, STACKED, RANK)
        bases = STACKED.split(RANK, dim=1)
        expected = torch.stack([(gradient @ q @ q.T).square().sum() for q in bases])
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(moment_energies(gradient.T @ gradient, STACKED, RANK), expected)

    def test_complementary_subspaces_share_the_total(self) -> None:
        whole = orthogonal(D, seed=4)
        gradient = uneven()
        inside, outside = (
            energies(gradient, q, q.shape[1]) for q in whole.split([5, D - 5], dim=1)
        )
        torch.testing.assert_close((inside + outside).squeeze(), total_energy(gradient))

    def test_of_summed_moments_are_summed_energies(self) -> None:
        several = [uneven(seed) for seed in range(4)]
        moment = sum(g.T @ g for g in several)
        summed = torch.stack([energies(g, STACKED, RANK) for g in several]).sum(0)
        torch.testing.assert_close(moment_energies(moment, STACKED, RANK), summed)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_tiny_low_precision_gradients_keep_their_energy(self, dtype: torch.dtype) -> None:
        scale = 1e-4 if dtype == torch.float16 else 1e-25  # squares are below each dtype's range
        gradient = (scale * uneven()).to(dtype)
        found = energies(gradient, STACKED, RANK)
        exact = energies(gradient.double(), STACKED, RANK)
        assert found.dtype == torch.float64 and float(found.min()) > 0
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)
        torch.testing.assert_close(total_energy(gradient), gradient.double().square().sum())

    def test_autocast_does_not_lower_the_precision(self) -> None:
        gradient = uneven().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            found = energies(gradient, STACKED, RANK)
        torch.testing.assert_close(found, energies(gradient, STACKED, RANK), rtol=0, atol=0)
        assert not found.requires_grad

    def test_refusals(self) -> None:
        with pytest.raises((TangentValueError, TypeCheckError)):
            energies(uneven().T, STACKED, RANK)
        with pytest.raises(TangentValueError, match="width 24, but this side has width 7"):
            check_stack(STACKED, OUT, RANK)
        with pytest.raises(TangentValueError, match="63 columns are not a whole number .* rank 4"):
            energies(uneven(), STACKED, 4)
        with pytest.raises(TangentValueError, match="positive semi-definite"):
            moment_energies(-uneven().T @ uneven(), STACKED, RANK)


class TestInvariances:
    def test_scale_output_rotation_and_basis_change(self) -> None:
        gradient, turn = uneven(), orthogonal(RANK, seed=5)
        expected = energy_ratio(gradient, STACKED, RANK)
        other_basis = torch.cat([q @ turn for q in STACKED.split(RANK, dim=1)], dim=1)
        for same in (
            energy_ratio(1e-9 * gradient, STACKED, RANK),
            energy_ratio(orthogonal(OUT, seed=6) @ gradient, STACKED, RANK),
            energy_ratio(gradient, other_basis, RANK),
        ):
            assert same.ratio == pytest.approx(expected.ratio, rel=1e-12)
            assert same.fraction == pytest.approx(expected.fraction, rel=1e-12)
            assert same.p_value == expected.p_value

    def test_rotation_of_gradient_and_subspace_together(self) -> None:
        turn = orthogonal(D, seed=7)
        turned = energy_ratio(uneven() @ turn, turn.T @ STACKED, RANK)
        assert turned.ratio == pytest.approx(energy_ratio(uneven(), STACKED, RANK).ratio, rel=1e-12)
        alone = energy_ratio(uneven() @ turn, STACKED, RANK)
        assert abs(alone.ratio / turned.ratio - 1) > 0.01

    def test_output_side_is_that_of_the_transpose(self) -> None:
        """For a rank-one gradient b a^T either side sees its own vector."""
        b, a = randn(OUT), randn(D, seed=1)
        gradient, q = torch.outer(b, a), orthogonal(OUT, 2)
        found = ratio_of(gradient.T, q)
        assert found.d == OUT
        assert found.fraction == pytest.approx(float((b @ q).square().sum() / b.square().sum()))


class TestRatio:
    @pytest.mark.parametrize("seed", range(5))
    def test_fraction_is_a_share_under_the_bound_of_its_rank(self, seed: int) -> None:
        gradient = uneven(seed)
        values = torch.linalg.svdvals(gradient).square()
        found = energy_ratio(gradient, STACKED, RANK)
        assert 0 <= found.fraction <= float(values[:RANK].sum() / values.sum())
        moment = gradient.T @ gradient
        share = efficiency(moment, found.tangent, RANK)
        assert share == pytest.approx(found.tangent / float(values[:RANK].sum()), rel=1e-10)

    def test_leading_right_singular_vectors_reach_the_bound(self) -> None:
        gradient = uneven()
        best = torch.linalg.svd(gradient)[2][:RANK].T
        energy = float(energies(gradient, best, RANK))
        assert efficiency(gradient.T @ gradient, energy, RANK) == pytest.approx(1, abs=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_subspace_that_spans_the_batch_holds_all_energy(self, dtype: torch.dtype) -> None:
        """Rows of ``sum g x^T`` lie in the span of the x, whatever the g."""
        x = randn(6, D).to(dtype)
        q = torch.linalg.qr(x.double().T)[0]
        found = ratio_of(randn(OUT, 6, seed=1).to(dtype) @ x, q)
        assert 1 - 1e-6 < found.fraction <= 1
        assert found.exact_ratio > 1e5  # inf but for rounding

    def test_mean_over_many_normals_tends_to_the_exact_ratio(self) -> None:
        stacked = torch.cat([SUBSPACE.basis, normals_of(SUBSPACE.basis, 2000, seed=3)], dim=1)
        found = energy_ratio(uneven(), stacked, RANK)
        assert found.ratio == pytest.approx(found.exact_ratio, rel=0.02)
        assert abs(found.exact_ratio - 1) > 0.1

    def test_an_isotropic_gradient_has_ratio_one(self) -> None:
        found = energy_ratio(3 * orthogonal(D), STACKED, RANK)
        for value in (found.ratio, found.exact_ratio, found.concentration):
            assert value == pytest.approx(1, abs=1e-12)
        assert found.fraction == pytest.approx(RANK / D)
        assert found.p_value == 1  # every normal ties

    def test_by_hand(self) -> None:
        found = EnergyRatio(6.0, (1.0, 2.0, 6.0), 12.0, 8, 2)
        assert found.fraction == 1 / 2
        assert found.ratio == 2  # over the mean of the normals, not the mean of three ratios
        assert found.exact_ratio == 3
        assert found.concentration == 2
        assert found.p_value == 2 / 4 and found.p_floor == 1 / 4
        other = EnergyRatio(2.0, (2.0, 2.0, 2.0), 8.0, 8, 2)
        assert found.excess(other) == 2
        assert found.exact_excess(other) == 3

    def test_normals_without_energy(self) -> None:
        one_sided = EnergyRatio(2.0, (0.0, 0.0), 2.0, 8, 2)
        assert one_sided.ratio == math.inf and one_sided.exact_ratio == math.inf
        assert one_sided.p_value == 1 / 3
        plain = EnergyRatio(1.0, (1.0, 1.0), 4.0, 8, 2)
        assert one_sided.excess(plain) == math.inf and plain.excess(one_sided) == 0
        with pytest.raises(TangentValueError, match="both infinite"):
            one_sided.excess(one_sided)
        with pytest.raises(TangentValueError, match="both infinite"):
            one_sided.exact_excess(one_sided)
        above_by_rounding = EnergyRatio(2.0000001, (), 2.0, 8, 2)
        assert above_by_rounding.fraction == 1 and above_by_rounding.exact_ratio == math.inf
        outside = EnergyRatio(0.0, (0.0, 0.0), 2.0, 8, 2)
        assert outside.fraction == outside.exact_ratio == 0
        with pytest.raises(TangentValueError, match="nor in any of its normals"):
            _ = outside.ratio

    def test_refusals(self) -> None:
        with pytest.raises(TangentValueError, match="the gradient is zero"):
            energy_ratio(torch.zeros(OUT, D), STACKED, RANK)
        with pytest.raises(TangentValueError, match="nan"):
            energy_ratio(torch.full((OUT, D), torch.nan), STACKED, RANK)
        with pytest.raises(TangentValueError, match=r"2 \* 3 > 5"):
            EnergyRatio(1.0, (1.0,), 4.0, 5, 3)
        with pytest.raises(TangentValueError, match="rank must be from 1 to d - 1 = 4, got 5"):
            EnergyRatio(1.0, (), 4.0, 5, 5)
        with pytest.raises(TangentValueError, match="energy 5 of a total of 4"):
            EnergyRatio(1.0, (5.0,), 4.0, 8, 2)
        with pytest.raises(TangentValueError, match="no normals"):
            _ = EnergyRatio(1.0, (), 4.0, 5, 3).ratio
        for energy, rank in ((5.0, 2), (1.0, 0)):
            with pytest.raises(TangentValueError, match="what rank 2|from 1 to d = 4"):
                efficiency(torch.eye(4), energy, rank)
        with pytest.raises(TangentValueError, match="not zero"):
            efficiency(torch.zeros(4, 4), 0.0, 2)


class TestLaws:
    """A Gaussian gradient in fixed subspaces, and a fixed gradient in random subspaces."""

    DRAWS = 1500

    def fractions(self, rows: int) -> list[EnergyRatio]:
        both = STACKED[:, : 2 * RANK]
        drawn = randn(self.DRAWS, rows, D, seed=11)
        return [energy_ratio(gradient, both, RANK) for gradient in drawn]

    @pytest.mark.parametrize("rows", [1, 4])
    def test_gaussian_rows(self, rows: int) -> None:
        k, rest = RANK * rows, (D - RANK) * rows
        found = self.fractions(rows)
        fraction = stats.kstest([x.fraction for x in found], stats.beta(k / 2, rest / 2).cdf)
        ratio = stats.kstest([x.ratio for x in found], stats.f(k, k).cdf)
        exact = stats.kstest([x.exact_ratio for x in found], stats.f(k, rest).cdf)
        assert min(fraction.pvalue, ratio.pvalue, exact.pvalue) > LEAST_P
        # the tests tell these laws from their neighbours
        off = stats.kstest([x.ratio for x in found], stats.f(k, rest).cdf)
        assert off.pvalue < LEAST_P

    @pytest.mark.parametrize("power", [0.0, 0.7, 3.0])
    def test_moments_over_random_subspaces(self, power: float) -> None:
        values = torch.arange(1, D + 1, dtype=torch.float64) ** -power
        turn, draws = orthogonal(D, seed=2), 4000
        moment = turn @ values.diag() @ turn.T
        bases = torch.linalg.qr(randn(draws, D, RANK, seed=12))[0]
        stacked = bases.movedim(0, 1).flatten(1)
        fractions = moment_energies(moment, stacked, RANK) / values.sum()
        mean, variance = haar_fraction_moments(values, RANK)
        assert haar_fraction_moments(moment, RANK) == pytest.approx((mean, variance), abs=1e-14)
        assert mean == RANK / D
        if power == 0:
            assert variance < 1e-15 and float((fractions - mean).abs().max()) < 1e-12
            return
        assert abs(float(fractions.mean()) - mean) < 5 * (variance / draws) ** 0.5
        assert float(fractions.var()) == pytest.approx(variance, rel=0.15)

    def test_one_direction_is_the_beta_law(self) -> None:
        spike = torch.zeros(D).double()
        spike[0] = 5.0
        mean, variance = stats.beta(RANK / 2, (D - RANK) / 2).stats("mv")
        found = haar_fraction_moments(spike, RANK)
        assert found == pytest.approx((float(mean), float(variance)))
        for rank in (0, D):
            with pytest.raises(TangentValueError, match=f"got {rank}"):
                haar_fraction_moments(spike, rank)

    def test_p_values_are_uniform_where_d_is_far_above_rank(self) -> None:
        d, draws, controls = 96, 1500, 9
        basis = orthogonal(d, 1)
        normals = normals_of(basis, draws * controls, seed=4).split(controls, dim=1)
        found = [
            energy_ratio(gradient, torch.cat([basis, some], dim=1), 1).p_value
            for gradient, some in zip(randn(draws, 1, d, seed=13), normals, strict=True)
        ]
        counts = torch.bincount((torch.tensor(found) * 10).round().long(), minlength=11)
        assert counts[0] == 0 and int(counts.sum()) == draws
        assert stats.chisquare(counts[1:].numpy()).pvalue > LEAST_P

    def test_p_value_has_two_values_where_all_normals_are_one_subspace(self) -> None:
        d = 2 * RANK
        subspace = TangentSubspace(orthogonal(d, RANK))
        stacked = stack_bases(subspace, subspace.random_normals(NORMALS, seed=0))
        found = [energy_ratio(randn(1, d, seed=s), stacked, RANK).p_value for s in range(400)]
        floor = 1 / (1 + NORMALS)
        assert set(found) == {floor, 1.0}
        assert found.count(floor) / 400 == pytest.approx(0.5, abs=0.1)  # 4 standard errors

    def test_upper_p_value_counts_ties_and_rounding(self) -> None:
        assert upper_p_value(2.0, [1.0, 2.0, 3.0]) == 3 / 4
        assert upper_p_value(2.0, [2.0 - 1e-15, 0.0], rounding=1e-12) == 2 / 3
        assert upper_p_value(2.0, []) == 1


def test_shapes_are_checked_here() -> None:
    with pytest.raises((TangentValueError, TypeCheckError)):
        energies(randn(D), STACKED, RANK)
