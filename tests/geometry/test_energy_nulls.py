"""Nulls of the gradient's energy against every sign and permutation; orders in the radius t."""

from __future__ import annotations

import math
from itertools import permutations, product

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import TangentSubspace
from tl_tangent.geometry.covariance import second_moment
from tl_tangent.geometry.energy import energies, moment_energies, stack_bases, total_energy
from tl_tangent.geometry.energy_nulls import (
    null_energies,
    pairing_moment,
    per_sample_ratio,
    sign_flip_moment,
)
from tl_tangent.geometry.power_law import log_slope
from tl_tangent.geometry.token_energies import KINDS, NullEnergies

D, OUT, RANK, NORMALS = 8, 5, 2, 3
WHOLE = torch.eye(D, dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SUBSPACE = TangentSubspace(torch.linalg.qr(randn(D, RANK, seed=9))[0])
STACKED = stack_bases(SUBSPACE, SUBSPACE.random_normals(NORMALS, seed=1))


def batch(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs off the origin, and upstream gradients that depend on them."""
    x = randn(n, D, seed=seed) * torch.arange(1, D + 1) ** -0.5 + 0.7
    return x, x[:, :OUT] ** 2 - 0.5 + 0.3 * randn(n, OUT, seed=seed + 1)


def row(found: NullEnergies, kind: str) -> Tensor:
    """Energies of a kind in every basis and then in all directions."""
    at = KINDS.index(kind)
    return torch.cat([found.energies[at], found.totals[at, None]])


def measured(gradient: Tensor) -> Tensor:
    return torch.cat([energies(gradient, STACKED, RANK), total_energy(gradient)[None]])


def of_moment(moment: Tensor) -> Tensor:
    return torch.cat([moment_energies(moment, STACKED, RANK), moment.trace()[None]])


def close(found: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)


class TestExpectations:
    @pytest.mark.parametrize("labels", [[0, 0, 0, 0], [3, 1, 3, 1], [1, 7, 7, 7], [0, 1, 2, 3]])
    def test_within_strata_is_the_mean_over_their_pairings(self, labels: list[int]) -> None:
        x, g = batch(4)
        orders = [o for o in permutations(range(4)) if [labels[i] for i in o] == labels]
        mean = torch.stack([measured(g.T @ x[list(o)]) for o in orders]).mean(0)
        found = null_energies(x, g, STACKED, RANK, strata=torch.tensor(labels))
        close(row(found, "within_pairing"), mean)

    def test_one_stratum_is_the_pairing_and_one_each_is_the_gradient(self) -> None:
        x, g = batch(9)
        one = null_energies(x, g, STACKED, RANK, strata=torch.zeros(9, dtype=torch.int64))
        close(row(one, "within_pairing"), row(one, "pairing"))
        each = null_energies(x, g, STACKED, RANK, strata=torch.arange(9))
        close(row(each, "within_pairing"), row(each, "gradient"))
        assert row(null_energies(x, g, STACKED, RANK), "within_pairing").isnan().all()

    @pytest.mark.parametrize("n", [1, 2, 6])
    def test_sign_flip_is_the_mean_over_all_signs(self, n: int) -> None:
        x, g = batch(n)
        flips = [torch.tensor(signs).double() for signs in product((-1, 1), repeat=n)]
        mean = torch.stack([measured((e[:, None] * g).T @ x) for e in flips]).mean(0)
        close(row(null_energies(x, g, STACKED, RANK), "sign_flip"), mean)
        close(of_moment(sign_flip_moment(x, g)), mean)

    @pytest.mark.parametrize("n", [1, 2, 3, 6])
    def test_pairing_is_the_mean_over_all_permutations(self, n: int) -> None:
        x, g = batch(n)
        mean = torch.stack([measured(g.T @ x[list(p)]) for p in permutations(range(n))]).mean(0)
        close(row(null_energies(x, g, STACKED, RANK), "pairing"), mean)
        close(of_moment(pairing_moment(x, g)), mean)

    def test_pairing_in_its_other_form(self) -> None:
        """``A S_g / N + (s_a - A) (s_g - S_g) / (N (N - 1))``, with sums and sums of squares."""
        n = 40
        x, g = batch(n)
        s_g, g_sum = g.square().sum(), g.sum(0).square().sum()
        expected = []
        for q in (*STACKED.split(RANK, dim=1), WHOLE):
            a = x @ q
            s_a, a_sum = a.square().sum(), a.sum(0).square().sum()
            expected.append(s_a * s_g / n + (a_sum - s_a) * (g_sum - s_g) / (n * (n - 1)))
        found = null_energies(x, g, STACKED, RANK)
        close(row(found, "pairing"), torch.stack(expected), rtol=1e-10)

    def test_pairing_stays_exact_where_terms_cancel(self) -> None:
        """Equal inputs and gradients that sum to zero: every pairing gives a zero gradient."""
        x = torch.full((20, D), 3.0).double()
        g = randn(20, OUT)
        found = null_energies(x, g - g.mean(0), STACKED, RANK)
        assert (
            0 <= float(row(found, "pairing").max()) < 1e-24 * float(found.totals.nan_to_num().max())
        )


class TestParts:
    @pytest.mark.parametrize("mean", [None, randn(D, seed=7)], ids=["own mean", "given mean"])
    def test_mean_part_and_centred_gradient(self, mean: Tensor | None) -> None:
        x, g = batch(30)
        mu = x.mean(0) if mean is None else mean
        gradient, constant = g.T @ x, torch.outer(g.sum(0), mu)
        found = null_energies(x, g, STACKED, RANK, mean=mean)
        close(row(found, "gradient"), measured(gradient))
        close(row(found, "mean_part"), measured(constant))
        close(row(found, "centred_gradient"), measured(gradient - constant))
        close(row(found, "activations"), of_moment(30 * second_moment(x)))
        around = x - mu
        close(row(found, "centred_activations"), of_moment(around.T @ around))

    def test_a_large_mean_costs_the_centred_energies_no_precision(self) -> None:
        """Float32 rounds the inputs themselves, but no energy further."""
        x, g = batch(200)
        x = (x + 3000 * randn(D, seed=3)).float()
        found = null_energies(x, g.float(), STACKED, RANK)
        exact = null_energies(x.double(), g.float().double(), STACKED, RANK)
        assert found.energies.dtype == torch.float64
        of_sum = KINDS.index("centred_gradient")  # a small rest of G, which is in float32
        others = [row for row in range(len(KINDS)) if row != of_sum]
        close(found.energies[others], exact.energies[others], rtol=2e-6)
        close(found.energies[of_sum], exact.energies[of_sum], rtol=5e-3)
        close(found.totals[others], exact.totals[others], rtol=2e-6)
        close(found.totals[of_sum], exact.totals[of_sum], rtol=2e-3)

    def test_a_known_gradient_gives_the_same(self) -> None:
        x, g = batch(30)
        plain = null_energies(x, g, STACKED, RANK)
        known = null_energies(x, g, STACKED, RANK, gradient=g.T @ x)
        close(known.energies, plain.energies, rtol=1e-10)
        close(known.totals, plain.totals, rtol=1e-10)
        low = (g.T @ x).bfloat16()
        close(null_energies(x, g, STACKED, RANK, gradient=low).totals, plain.totals, rtol=0.02)
        for wrong in (g.T @ x / 30, -g.T @ x, g.T @ x.flip(0)):
            with pytest.raises(TangentValueError, match="same tokens and loss scale"):
                null_energies(x, g, STACKED, RANK, gradient=wrong)

    def test_output_side_swaps_the_roles(self) -> None:
        x, g = batch(25)
        outer = TangentSubspace(torch.linalg.qr(randn(OUT, RANK, seed=4))[0])
        stacked = stack_bases(outer, outer.random_normals(2, seed=0))
        found = null_energies(g, x, stacked, RANK)
        assert found.d == OUT
        close(found.energies[KINDS.index("gradient")], energies((g.T @ x).T, stacked, RANK))
        inner = null_energies(x, g, STACKED, RANK)
        for kind in ("gradient", "sign_flip", "pairing"):  # the same nulls, whatever is projected
            close(row(found, kind)[-1], row(inner, kind)[-1])

    def test_batches_add_up_and_widths_do_not(self) -> None:
        one, two = (null_energies(*batch(12, seed=s), STACKED, RANK) for s in (0, 5))
        close((one + two).energies, one.energies + two.energies)
        moments = [sign_flip_moment(*batch(12, seed=s)) for s in (0, 5)]
        close(row(one + two, "sign_flip"), of_moment(moments[0] + moments[1]))
        other = null_energies(*batch(12), STACKED, 1)
        with pytest.raises(TangentValueError, match="one site at a time"):
            _ = one + other

    def test_half_precision_is_computed_in_float32(self) -> None:
        x, g = batch(30)
        x, g = x.bfloat16(), (1e-6 * g).bfloat16()
        exact = null_energies(x.double(), g.double(), STACKED, RANK)
        close(null_energies(x, g, STACKED, RANK).energies, exact.energies, rtol=1e-4)

    def test_refusals(self) -> None:
        x, g = batch(4)
        with pytest.raises((TangentValueError, TypeCheckError)):
            null_energies(x, g[:3], STACKED, RANK)
        with pytest.raises(TangentValueError, match="at least one"):
            null_energies(x[:0], g[:0], STACKED, RANK)
        found = null_energies(x, g, STACKED, RANK)
        with pytest.raises(TangentValueError, match="kind is one of gradient"):
            found.ratio("shuffle")
        silent = null_energies(x, torch.zeros_like(g), STACKED, RANK)
        with pytest.raises(TangentValueError, match="the gradient is zero"):
            silent.ratio("pairing")


class TestMechanical:
    """What a subspace of the activations holds of any gradient, tied to them or not."""

    def test_pairing_of_gradients_without_a_mean_has_the_activations_fractions(self) -> None:
        x, g = batch(50)
        found = null_energies(x, g - g.mean(0), STACKED, RANK)
        pairing, around = (row(found, kind) for kind in ("pairing", "centred_activations"))
        close(pairing / pairing[-1], around / around[-1])
        assert found.ratio("pairing").exact_excess(
            found.ratio("centred_activations")
        ) == pytest.approx(1, abs=1e-10)

    def test_signs_of_equally_long_gradients_have_the_activations_fractions(self) -> None:
        x, g = batch(50)
        found = null_energies(x, g / g.norm(dim=1, keepdim=True), STACKED, RANK)
        signs, plain = (row(found, kind) for kind in ("sign_flip", "activations"))
        close(signs / signs[-1], plain / plain[-1])

    def test_pca_directions_stand_out_under_independence_and_their_excess_does_not(self) -> None:
        """Gradients independent of inputs: the ratio is far above 1, the excess is 1 to noise."""
        n, out = 4000, 200
        x = randn(n, D, seed=2) * torch.arange(1, D + 1) ** -1.5
        top = TangentSubspace(torch.linalg.svd(x, full_matrices=False)[2][:RANK].T)
        stacked = stack_bases(top, top.random_normals(20, seed=3))
        found = null_energies(x, randn(n, out, seed=4), stacked, RANK)
        assert found.ratio("gradient").ratio > 10
        assert found.ratio("gradient").p_value == 1 / 21
        for kind in ("pairing", "sign_flip", "activations"):
            # one of out = 200 Gaussian rows: each energy is off by sqrt(2 / (rank * out)) = 7 %
            assert found.ratio("gradient").excess(found.ratio(kind)) == pytest.approx(1, abs=0.3)

    def test_gradients_tied_to_the_tangent_part_exceed_every_null(self) -> None:
        x = randn(400, D, seed=2)
        g = (x @ SUBSPACE.basis) @ randn(RANK, OUT, seed=5)
        found = null_energies(x, g, STACKED, RANK)
        for kind in ("pairing", "sign_flip", "activations"):
            assert found.ratio("gradient").excess(found.ratio(kind)) > 10


TANGENT, NORMAL = 2, 3
FORMS = randn(NORMAL, TANGENT, TANGENT, seed=21)
FORMS = FORMS + FORMS.mT
JACOBIAN, CONSTANT = randn(OUT, TANGENT, seed=22), randn(OUT, seed=23)
RADII = torch.logspace(-5, -3, 5, dtype=torch.float64)
ONE_SIDED = randn(40, TANGENT, seed=24).abs()
SYMMETRIC = torch.cat([ONE_SIDED - 0.8, 0.8 - ONE_SIDED])


def graph(v: Tensor) -> tuple[Tensor, Tensor]:
    """Tangent and normal parts of points ``(v, A(v, v) / 2)`` on a quadratic graph."""
    n = torch.einsum("ij,ajk,ik->ia", v, FORMS, v) / 2
    zeros = v.new_zeros
    return torch.cat([v, zeros(len(v), NORMAL)], 1), torch.cat([zeros(len(v), TANGENT), n], 1)


def aggregated(v: Tensor, g: Tensor, *, centred: bool) -> Tensor:
    """``||G P_T||`` and ``||G P_N||`` of the summed gradient, from the library's energies."""
    x = sum(graph(v))
    gradient = g.T @ (x - x.mean(0) if centred else x)
    axes = torch.eye(TANGENT + NORMAL, dtype=torch.float64).split([TANGENT, NORMAL], dim=1)
    return torch.cat([energies(gradient, q, q.shape[1]) for q in axes]).sqrt()


def slopes(v: Tensor, constant: Tensor, jacobian: Tensor, *, centred: bool) -> list[float]:
    """Log-log slopes in t of ``||G P_T||`` and of ``||G P_N||``, with ``g = constant + J v``."""
    sizes = [aggregated(t * v, constant + t * v @ jacobian.T, centred=centred) for t in RADII]
    return log_slope(RADII, torch.stack(sizes, dim=1)).slope.tolist()


class TestOrders:
    """On a quadratic graph ||n|| ~ t^2 and ||v|| ~ t; what of it the summed gradient shows."""

    @pytest.mark.parametrize("v", [ONE_SIDED, SYMMETRIC], ids=["one-sided", "symmetric"])
    @pytest.mark.parametrize("upstream", ["random", "constant", "affine"])
    def test_per_sample_ratio_is_of_order_one_for_any_gradient(
        self, v: Tensor, upstream: str
    ) -> None:
        found = []
        for t in RADII:
            g = {
                "random": randn(len(v), OUT, seed=25),
                "constant": CONSTANT.expand(len(v), OUT),
                "affine": CONSTANT + t * v @ JACOBIAN.T,
            }[upstream]
            tangent, normal = graph(t * v)
            found.append(per_sample_ratio(tangent, normal, g))
            each = normal.norm(dim=1) / tangent.norm(dim=1)
            assert float(each.min()) <= found[-1] <= float(each.max())
        slope = float(log_slope(RADII, torch.tensor(found, dtype=torch.float64)).slope)
        assert slope == pytest.approx(1, abs=1e-10 if upstream != "affine" else 0.01)

    @pytest.mark.parametrize(
        ("v", "constant", "centred", "tangent", "normal"),
        [
            (SYMMETRIC, CONSTANT, False, 2, 2),
            (ONE_SIDED, CONSTANT, False, 1, 2),
            (ONE_SIDED, CONSTANT, True, 2, 3),
            (ONE_SIDED, 0 * CONSTANT, True, 2, 3),
        ],
        ids=["symmetric, base point", "one-sided, base point", "mean", "mean, no constant"],
    )
    def test_summed_gradient(
        self, v: Tensor, constant: Tensor, centred: bool, tangent: int, normal: int
    ) -> None:
        """The ratio of the parts is O(1), not O(t), under symmetric sampling at a base point."""
        assert slopes(v, constant, JACOBIAN, centred=centred) == pytest.approx(
            [tangent, normal], abs=0.02
        )

    @pytest.mark.parametrize(("constant", "centred"), [(0, False), (0, True), (1, True)])
    def test_normal_part_cancels_where_third_moments_vanish(
        self, constant: int, centred: bool
    ) -> None:
        g = constant * CONSTANT + SYMMETRIC @ JACOBIAN.T
        tangent, normal = aggregated(SYMMETRIC, g, centred=centred).tolist()
        assert normal < 1e-13 * tangent

    def test_a_constant_gradient_has_no_tangent_part_and_is_not_of_order_t(self) -> None:
        """x = (u, u^2) with u symmetric and g constant: only the normal part of the sum is left."""
        g = CONSTANT.expand(len(SYMMETRIC), OUT)
        tangent, normal = aggregated(1e-2 * SYMMETRIC, g, centred=False).tolist()
        assert tangent < 1e-12 * normal
        sizes = [float(aggregated(t * SYMMETRIC, g, centred=False)[1]) for t in RADII]
        assert float(
            log_slope(RADII, torch.tensor(sizes, dtype=torch.float64)).slope
        ) == pytest.approx(2)
        parts = graph(1e-2 * SYMMETRIC)
        assert 0 < per_sample_ratio(*parts, g) < 0.1  # and this one still is

    def test_bounds_of_both_parts(self) -> None:
        """Cauchy-Schwarz: ``||sum g v^T|| <= sqrt(sum ||g||^2 sum ||v||^2)``, attained by one."""
        g = CONSTANT + ONE_SIDED @ JACOBIAN.T
        found = aggregated(ONE_SIDED, g, centred=False)
        sizes = torch.stack([part.norm() for part in graph(ONE_SIDED)])
        assert bool((found <= g.norm() * sizes).all())
        close(aggregated(ONE_SIDED[:1], g[:1], centred=False)[0], g[0].norm() * ONE_SIDED[0].norm())

    def test_per_sample_ratio_by_hand_and_refusals(self) -> None:
        v, n = torch.tensor([[1.0, 0], [2.0, 0]]), torch.tensor([[0, 3.0], [0, 1.0]])
        g = torch.tensor([[1.0], [2.0]])
        assert per_sample_ratio(v, n, g) == pytest.approx(math.sqrt((9 + 4) / (1 + 16)))
        with pytest.raises(TangentValueError, match="have the energy 0"):
            per_sample_ratio(0 * v, n, g)
