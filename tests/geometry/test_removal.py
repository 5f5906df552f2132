"""What removal does to IsoScore: spikes, isotropic spectra, both conventions, order of steps."""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import (
    TangentSubspace,
    isoscore,
    isoscore_from_covariance,
    isoscore_star,
    participation_ratio,
    shrink_covariance,
)
from tl_tangent.geometry.covariance import second_moment
from tl_tangent.geometry.energy import moment_energies, stack_bases
from tl_tangent.geometry.energy_nulls import pairing_moment, sign_flip_moment
from tl_tangent.geometry.removal import RemovalEffect, Space, cloud_removal, removal

D, RANK, NORMALS = 12, 2, 20
SPACES: tuple[Space, ...] = ("reduced", "ambient")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(d: int, columns: int | None = None, seed: int = 0) -> Tensor:
    return torch.linalg.qr(randn(d, columns or d, seed=seed))[0]


def stacked_of(basis: Tensor, n: int = NORMALS) -> Tensor:
    subspace = TangentSubspace(basis)
    return stack_bases(subspace, subspace.random_normals(n, seed=1))


def covariance(seed: int = 0) -> Tensor:
    return torch.cov(randn(D, 40, seed=seed) * torch.arange(1, D + 1)[:, None] ** -0.5)


STACKED = stacked_of(orthogonal(D, RANK, seed=9))
SPIKE = torch.tensor([100.0] + [1] * 63, dtype=torch.float64).diag()
AXES = torch.eye(64, dtype=torch.float64)


def complement(basis: Tensor) -> Tensor:
    """Orthonormal columns of what a basis leaves."""
    return torch.linalg.svd(basis, full_matrices=True)[0][:, basis.shape[1] :]


def scores(effect: RemovalEffect) -> list[float]:
    return [effect.without_tangent, *effect.without_normals]


class TestAgainstTheDefinition:
    @pytest.mark.parametrize("zeta", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("target", ["default", "identity", "given"])
    def test_shrinks_then_projects_then_measures(self, zeta: float, target: str) -> None:
        c0 = {"default": None, "identity": "identity", "given": covariance(5)}[target]
        found = removal(covariance(), STACKED, RANK, zeta=zeta, c0=c0)
        shrunk = shrink_covariance(covariance(), c0, zeta)
        left = [complement(q) for q in STACKED.split(RANK, dim=1)]
        expected = [float(isoscore_from_covariance(z.T @ shrunk @ z)) for z in left]
        assert scores(found) == pytest.approx(expected, abs=1e-12)
        assert found.isoscore == pytest.approx(float(isoscore_from_covariance(shrunk)), abs=1e-14)
        assert (found.zeta, found.space) == (zeta, "reduced")
        assert found.target == {"default": "trace-matched identity"}.get(target, target)

    def test_shrinking_after_projecting_would_refill_and_fake_isotropy(self) -> None:
        q = STACKED[:, :RANK]
        p = torch.eye(D) - q @ q.T
        found = removal(covariance(), q, RANK, zeta=0.3, space="ambient").without_tangent
        refilled = isoscore_from_covariance(shrink_covariance(p @ covariance() @ p, None, 0.3))
        assert float(refilled) > found + 0.02

    def test_conventions_share_a_participation_ratio(self) -> None:
        reduced, ambient = (removal(covariance(), STACKED, RANK, space=s) for s in SPACES)
        assert reduced.isoscore == ambient.isoscore
        factor = (D - RANK - 1) / (D - 1)
        assert scores(ambient) == pytest.approx([factor * x for x in scores(reduced)])

    def test_ambient_is_setting_coordinates_to_zero(self) -> None:
        x = randn(30, D) * torch.arange(1, D + 1)
        axes = torch.eye(D, dtype=torch.float64)[:, [0, 3]]
        emptied = x.clone()
        emptied[:, [0, 3]] = 0
        found = cloud_removal(x, axes, RANK, centred=True, space="ambient")
        assert found.without_tangent == pytest.approx(float(isoscore(emptied)), abs=1e-13)
        assert found.isoscore == pytest.approx(float(isoscore(x)), abs=1e-13)

    def test_invariances(self) -> None:
        c, turn, inner = covariance(), orthogonal(D, seed=3), orthogonal(RANK, seed=4)
        expected = removal(c, STACKED, RANK, zeta=0.2)
        other_basis = torch.cat([q @ inner for q in STACKED.split(RANK, dim=1)], dim=1)
        for same in (
            removal(1e-18 * c, STACKED, RANK, zeta=0.2),
            removal(turn @ c @ turn.T, turn @ STACKED, RANK, zeta=0.2),
            removal(c, other_basis, RANK, zeta=0.2),
        ):
            assert scores(same) == pytest.approx(scores(expected), abs=1e-12)
            assert same.p_value == expected.p_value


class TestClosedForms:
    def test_removing_a_spike_or_a_bulk_axis(self) -> None:
        for space, spike in (("reduced", 1.0), ("ambient", 62 / 63)):
            found = removal(SPIKE, AXES[:, :1], 1, space=space)  # type: ignore[arg-type]
            assert found.isoscore == pytest.approx(0.026035973367783, abs=1e-14)
            assert found.without_tangent == pytest.approx(spike, abs=1e-13)
        bulk = removal(SPIKE, AXES[:, 1:2], 1, space="ambient")
        assert bulk.without_tangent == pytest.approx(0.025527, abs=1e-6)
        assert bulk.delta_tangent < 0

    def test_a_spike_stands_out_among_its_normals(self) -> None:
        found = removal(SPIKE, stacked_of(AXES[:, :1]), 1)
        assert found.contrast == pytest.approx(0.974, abs=0.002)
        assert found.p_value == found.p_floor == 1 / 21

    @pytest.mark.parametrize("rank", [1, 5])
    def test_an_isotropic_matrix_stays_even(self, rank: int) -> None:
        stacked = stacked_of(orthogonal(64, rank))
        reduced, ambient = (removal(3e-9 * AXES, stacked, rank, space=s) for s in SPACES)
        assert scores(reduced) == pytest.approx([1.0] * 21, abs=1e-12)
        assert scores(ambient) == pytest.approx([(63 - rank) / 63] * 21, abs=1e-12)
        assert abs(reduced.contrast) < 1e-12
        assert reduced.p_value == 1  # every normal ties

    @pytest.mark.parametrize("place", range(10))
    def test_an_eigendirection_raises_the_ratio_iff_its_share_exceeds_two_over_pr_plus_one(
        self, place: int
    ) -> None:
        values = torch.arange(1, 11, dtype=torch.float64).pow(-1.5)
        turn = orthogonal(10)
        c = turn @ values.diag() @ turn.T
        found = removal(c, turn[:, place : place + 1], 1, space="ambient")
        threshold = 2 / (float(participation_ratio(c)) + 1)
        assert (found.delta_tangent > 0) == (float(values[place] / values.sum()) > threshold)

    def test_traces_add(self) -> None:
        c = covariance()
        inside = moment_energies(c, STACKED, RANK)
        for at, q in enumerate(STACKED.split(RANK, dim=1)):
            z = complement(q)
            torch.testing.assert_close(inside[at] + (z.T @ c @ z).trace(), c.trace())

    @pytest.mark.parametrize("spike", [1e2, 1e4, 1e8, 1e11])
    def test_accurate_when_nearly_all_of_the_variance_goes(self, spike: float) -> None:
        """Differences would lose ``spike^2 * 1e-16`` of squares of order 1 to rounding."""
        values = torch.tensor([spike, 4, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
        turn = orthogonal(8)
        c = turn @ values.diag() @ turn.T
        found = removal(c, turn[:, :1], 1)
        assert found.without_tangent == pytest.approx((100 / 22 - 1) / 6, rel=1e-15 * spike + 1e-8)


class TestEffect:
    def test_by_hand(self) -> None:
        found = RemovalEffect(0.5, 0.75, (0.5, 0.25, 0.75), 8, 2, "reduced", 0.0, "identity")
        assert found.delta_tangent == 0.25
        assert found.delta_normals == (0, -0.25, 0.25)
        assert found.contrast == 0.25
        assert found.p_value == 2 / 4 and found.p_floor == 1 / 4

    def test_a_contrast_needs_normals(self) -> None:
        alone = removal(covariance(), STACKED[:, :RANK], RANK)
        assert alone.without_normals == () and alone.p_value == alone.p_floor == 1
        with pytest.raises(TangentValueError, match="needs some"):
            _ = alone.contrast


class TestClouds:
    @pytest.mark.parametrize("shape", [(40, D), (5, D)])
    @pytest.mark.parametrize("ddof", [0, 1])
    def test_centred_is_the_covariance(self, shape: tuple[int, int], ddof: int) -> None:
        x = 2 * randn(*shape) + 5
        found = cloud_removal(
            x, STACKED, RANK, centred=True, ddof=ddof, zeta=0.3, c0="identity", space="ambient"
        )
        expected = removal(
            torch.cov(x.T, correction=ddof), STACKED, RANK, zeta=0.3, c0="identity", space="ambient"
        )
        assert scores(found) == pytest.approx(scores(expected), abs=1e-12)
        star = isoscore_star(x, "identity", 0.3, ddof=ddof)
        assert found.isoscore == pytest.approx(float(star), abs=1e-12)

    def test_a_mean_is_a_direction_of_the_second_moment_only(self) -> None:
        mean = orthogonal(D, 1, seed=2)
        x = randn(2000, D) + 30 * mean.T
        whole, around = (cloud_removal(x, mean, 1, centred=c) for c in (False, True))
        assert whole.delta_tangent > 0.9
        assert abs(around.delta_tangent) < 0.01

    def test_second_moment(self) -> None:
        x = randn(7, 3).float()
        torch.testing.assert_close(second_moment(x), x.double().T @ x.double() / 7)
        torch.testing.assert_close(second_moment(x, centred=True, ddof=1), torch.cov(x.double().T))
        with pytest.raises(TangentValueError, match="1 rows leave no freedom with ddof=1"):
            second_moment(x[:1], ddof=1)

    def test_of_the_nulls(self) -> None:
        """Signs of equally long gradients leave the anisotropy that the activations have."""
        x, g = randn(60, D) * torch.arange(1, D + 1), randn(60, 4, seed=1)
        unit = g / g.norm(dim=1, keepdim=True)
        plain = cloud_removal(x, STACKED, RANK, centred=False)
        signs = removal(sign_flip_moment(x, unit), STACKED, RANK)
        assert scores(signs) == pytest.approx(scores(plain), abs=1e-12)
        around = cloud_removal(x, STACKED, RANK, centred=True)
        pairing = removal(pairing_moment(x, g - g.mean(0)), STACKED, RANK)
        assert scores(pairing) == pytest.approx(scores(around), abs=1e-12)


class TestRefusals:
    def test_nothing_left(self) -> None:
        q = STACKED[:, :RANK]
        inside = q @ torch.diag(torch.tensor([3.0, 1.0]).double()) @ q.T
        with pytest.raises(TangentValueError, match="1 of 21 bases hold all"):
            removal(inside, STACKED, RANK)
        rest = inside + 1e-7 * torch.eye(D)  # known in float64, rounding noise in float32
        assert removal(rest, STACKED, RANK).without_tangent == pytest.approx(1, abs=1e-6)
        with pytest.raises(TangentValueError, match="1 of 21 bases hold all"):
            removal(rest.float(), STACKED, RANK)

    def test_values(self) -> None:
        c = covariance()
        with pytest.raises(TangentValueError, match="not orthonormal: .* reaches 3.00"):
            removal(c, 2 * STACKED, RANK)
        with pytest.raises((TangentValueError, TypeCheckError)):
            removal(c, STACKED, RANK, space="whole")  # type: ignore[arg-type]
        with pytest.raises(TangentValueError, match=r"zeta must be in \[0, 1\]"):
            removal(c, STACKED, RANK, zeta=2)
        with pytest.raises(TangentValueError, match="NaN or infinite"):
            removal(c * torch.nan, STACKED, RANK)
        with pytest.raises(TangentValueError, match="positive and finite"):
            removal(0 * c, STACKED, RANK)
        with pytest.raises(TangentValueError, match="2 or more dimensions"):
            removal(torch.eye(4).double(), orthogonal(4, 3), 3)
        with pytest.raises(TangentValueError, match=r"2 \* 3 > 5"):
            removal(torch.eye(5), torch.cat([orthogonal(5, 3)] * 2, dim=1), 3)


def test_a_basis_that_holds_all_leaves_nan_where_that_is_asked_for():
    moment = torch.zeros(8, 8, dtype=torch.float64)
    moment[0, 0] = moment[1, 1] = 1
    stacked = torch.eye(8, dtype=torch.float64)[:, :4]
    found = removal(moment, stacked, 2, empty="nan")
    assert math.isnan(found.without_tangent)
    assert found.without_normals == (pytest.approx(1 / 5),)
