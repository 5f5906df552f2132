"""Directions of samples have the predicted tensor, harmonics and response; controls have none."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import (
    attenuation_curve,
    direction_harmonics,
    direction_profile,
    direction_response,
    direction_tensor,
    eta_of_density,
    eta_of_points,
    predicted_harmonics,
    predicted_response,
    predicted_tensor,
    profile_variance,
    projected_directions,
    sampled_attenuation,
)
from tl_tangent.geometry.manifolds import (
    Cylinder,
    Exponential,
    FlatTorus,
    Gaussian,
    Linear,
    ManifoldSample,
    Paraboloid,
    QuadraticGraph,
    Sphere,
    StudentT,
    Uniform,
    sample,
)

N = 400_000
S = 0.4


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def even(n: int, m: int, seed: int = 0) -> Tensor:
    u = randn(n, m, seed=seed)
    return u / u.norm(dim=1, keepdim=True)


def directions(cloud: ManifoldSample, kind: str) -> Tensor:
    if kind == "geodesic":
        assert cloud.u is not None
        return cloud.u
    return projected_directions(cloud.x, cloud.mu, cloud.tangent)


@pytest.fixture(scope="module")
def cylinder() -> ManifoldSample:
    return sample(Cylinder(1.0), Gaussian(S), N, seed=1)


class TestCylinder:
    """eta = 2 s^2 = 0.32; errors of four standard errors and a second order of 0.05 eta^2"""

    ETA = 2 * S**2
    SECOND = 0.05 * ETA**2

    @pytest.mark.parametrize("kind", ["geodesic", "projected"])
    def test_harmonics(self, cylinder: ManifoldSample, kind) -> None:
        found = direction_harmonics(directions(cylinder, kind))
        expected = predicted_harmonics(cylinder.second_form, self.ETA, direction=kind)
        assert float(found.error.max()) < 1.1 * math.sqrt(2 / N)
        for values, wanted, error in zip(
            (found.cosine, found.sine), (expected.cosine, expected.sine), found.error, strict=True
        ):
            assert bool(((values - wanted).abs() < 4 * error + self.SECOND).all())

    def test_the_two_kinds_differ_beyond_error(self, cylinder: ManifoldSample) -> None:
        """b = cos^4 / 6 has a second harmonic, b' = sin^2(2f) / 8 a negative fourth."""
        geodesic, projected = (
            direction_harmonics(directions(cylinder, kind)) for kind in ("geodesic", "projected")
        )
        assert float(geodesic.cosine[0]) > 4 * float(geodesic.error[0, 0])
        assert abs(float(projected.cosine[0])) < 3 * float(projected.error[0, 0])
        assert float(projected.cosine[1]) < -4 * float(projected.error[0, 1])

    @pytest.mark.parametrize("kind", ["geodesic", "projected"])
    def test_response_and_tensor(self, cylinder: ManifoldSample, kind) -> None:
        u = directions(cylinder, kind)
        found = direction_response(u, cylinder.second_form, direction=kind)
        expected = predicted_response(cylinder.second_form, self.ETA)
        # the second order in units of the profile, whose spread is above 0.04
        assert abs(found.value - expected) < 4 * found.error + self.SECOND / 0.04
        assert found.value > 4 * found.error
        tensor = direction_tensor(u)
        wanted = predicted_tensor(cylinder.second_form, self.ETA, direction=kind)
        assert bool(((tensor.tensor - wanted).abs() < 4 * tensor.error + self.SECOND).all())

    def test_the_wrong_convention_is_refuted(self, cylinder: ManifoldSample) -> None:
        found = direction_response(cylinder.u, cylinder.second_form, direction="projected")
        expected = predicted_response(cylinder.second_form, self.ETA)
        assert abs(found.value - expected) > 4 * found.error


class TestHigherDimensions:
    def test_response_of_a_graph(self) -> None:
        """m = 4 in three normal directions."""
        form = randn(3, 4, 4)
        manifold = QuadraticGraph(0.5 * (form + form.mT))
        cloud = sample(manifold, Gaussian(0.05), N)
        u = projected_directions(cloud.x, cloud.mu, cloud.tangent)
        found = direction_response(u, cloud.second_form)
        expected = predicted_response(cloud.second_form, 4 * 0.05**2)
        assert abs(found.value - expected) < 4 * found.error + 0.1 * expected
        assert found.value > 3 * found.error


class TestControls:
    @pytest.mark.parametrize("manifold", [Sphere(2), Sphere(4), Linear(3)], ids=repr)
    def test_round_spheres_and_linear_spaces_are_even(self, manifold) -> None:
        cloud = sample(manifold, Gaussian(0.3), 100_000, seed=2)
        for kind in ("geodesic", "projected"):
            found = direction_tensor(directions(cloud, kind))
            assert found.p_value > 0.01
            with pytest.raises(TangentValueError, match="same in all directions"):
                direction_response(directions(cloud, kind), cloud.second_form, direction=kind)

    def test_a_flat_torus_of_equal_radii_passes_the_tensor_and_not_the_response(self) -> None:
        cloud = sample(FlatTorus((1.0, 1.0)), Gaussian(0.4), 200_000, seed=3)
        assert direction_tensor(cloud.u).p_value > 0.01
        found = direction_response(cloud.u, cloud.second_form, direction="geodesic")
        assert found.value > 4 * found.error


class TestEvenDirections:
    def test_the_test_of_evenness_is_uniform(self) -> None:
        """p-values of even directions over seeds, in three dimensions"""
        values = [direction_tensor(even(200, 3, seed)).p_value for seed in range(300)]
        assert stats.kstest(values, "uniform").pvalue > 0.01

    def test_bingham_closed_form_in_the_plane(self) -> None:
        """n m (m + 2) / 2 |T|^2 is n (a^2 + b^2) / 2 of the second harmonic: Rayleigh's, doubled"""
        u = even(500, 2)
        waves = direction_harmonics(u)
        square = float(waves.cosine[0] ** 2 + waves.sine[0] ** 2)
        assert direction_tensor(u).statistic == pytest.approx(500 * square / 2)

    def test_errors_are_calibrated(self) -> None:
        """Standard scores of harmonics, tensors and responses over seeds have a spread of 1."""
        form = Paraboloid((1.0, -0.3)).second_fundamental_form
        scores = []
        for seed in range(300):
            u = even(300, 2, seed)
            waves, tensor = direction_harmonics(u), direction_tensor(u)
            response = direction_response(u, form)
            scores.append(
                [
                    *(waves.cosine / waves.error[0]).tolist(),
                    *(waves.sine / waves.error[1]).tolist(),
                    *(tensor.tensor / tensor.error)[0].tolist(),
                    response.value / response.error,
                ]
            )
        spread = torch.tensor(scores).std(0)
        assert bool(((spread - 1).abs() < 0.2).all())

    def test_a_planted_response_is_found(self) -> None:
        """Directions drawn by rejection from p = 1 + l (b - bbar) in three dimensions"""
        form = 0.7 * (lambda a: a + a.transpose(0, 1))(randn(3, 3, 2))
        u, planted = even(300_000, 3), 0.08
        b = direction_profile(form, u)
        p = 1 + planted * (b - b.mean())
        assert float(p.min()) > 0
        kept = torch.rand(len(u), generator=torch.Generator().manual_seed(5)).double() < p / p.max()
        found = direction_response(u[kept], form)
        assert abs(found.value - planted) < 4 * found.error < planted

    def test_turning_the_basis_turns_the_tensor(self) -> None:
        u, turn = even(50, 3), torch.linalg.qr(randn(3, 3))[0]
        torch.testing.assert_close(
            direction_tensor(u @ turn).tensor, turn.mT @ direction_tensor(u).tensor @ turn
        )


class TestMomentRatio:
    @pytest.mark.parametrize(
        "density", [Gaussian(0.2), Exponential(0.1), Uniform(0.4), StudentT(0.1, 9)], ids=repr
    )
    def test_points_of_a_linear_space_have_that_of_the_density(self, density) -> None:
        cloud = sample(Linear(3), density, 100_000, d=6)
        found = eta_of_points(cloud.x, cloud.mu)
        assert abs(found.value - eta_of_density(density, 3)) < 4 * found.error
        assert found.error < 0.02 * found.value

    def test_bias_on_a_curved_manifold_is_of_second_order(self) -> None:
        """E t^2 = (M_3 + bbar M_5) / (M_1 + bbar M_3) on the unit cylinder, with bbar = 1/16 and
        the moments of a Gaussian, M_1 : M_3 : M_5 = 1 : 2s^2 : 8s^4"""
        s = 0.3
        cloud = sample(Cylinder(1.0), Gaussian(s), N, seed=1)
        found = eta_of_points(cloud.x, cloud.mu)
        ratio = (2 * s**2 + 8 * s**4 / 16) / (1 + 2 * s**2 / 16)
        assert abs(found.value - ratio) < 4 * found.error
        assert abs(found.value - 2 * s**2) > 4 * found.error

    def test_error_is_that_of_a_mean(self) -> None:
        x = randn(50, 4)
        squares = x.square().sum(1)
        found = eta_of_points(x, torch.zeros(4))
        assert found.value == pytest.approx(float(squares.mean()))
        assert found.error == pytest.approx(stats.sem(squares.numpy()))
        assert repr(found).count("±") == 1


class TestAttenuation:
    @pytest.mark.parametrize("kind", ["geodesic", "projected"])
    def test_measured_follows_predicted_down_to_zero(self, kind) -> None:
        curve = sampled_attenuation(
            Cylinder(1.0), Gaussian(0.4), [1, 0.7, 0.3], 200_000, direction=kind
        )
        assert curve.eta == pytest.approx((0.32, 0.1568, 0.0288))
        assert list(curve.predicted) == sorted(curve.predicted, reverse=True)
        for eta, wanted, found in zip(curve.eta, curve.predicted, curve.measured, strict=True):
            assert abs(found.value - wanted) < 4 * found.error + 0.05 * eta**2
        assert curve.measured[0].value > 5 * curve.measured[0].error
        assert repr(curve).count("±") == 3

    def test_predicted_is_the_root_mean_square_of_the_density(self) -> None:
        form = Cylinder(1.0).second_fundamental_form
        curve = attenuation_curve([even(100, 2)], [0.1], form)
        spread = profile_variance(form) ** 0.5
        assert curve.predicted[0] == pytest.approx(0.1 / (1 + 0.1 / 16) * spread)
        response = direction_response(even(100, 2), form)
        assert curve.measured[0].value == pytest.approx(response.value * spread)

    def test_refusals(self) -> None:
        with pytest.raises(TangentValueError, match="no closed form for its geodesics"):
            sampled_attenuation(
                Paraboloid((1.0, 0.2)), Gaussian(0.1), [1], 50, direction="geodesic"
            )
        form = Cylinder(1.0).second_fundamental_form
        with pytest.raises(TangentValueError, match="1 clouds and 2 moment ratios"):
            attenuation_curve([even(10, 2)], [0.1, 0.2], form)


class TestRefusals:
    def test_points(self) -> None:
        basis = torch.eye(4)[:, :2]
        x = randn(5, 4)
        x[2] = torch.tensor([0, 0, 1, 0])
        with pytest.raises(TangentValueError, match="1 of 5 points have no tangent part"):
            projected_directions(x, torch.zeros(4), basis)
        with pytest.raises(TangentValueError, match="2 points or more are needed here, got 1"):
            eta_of_points(x[:1], torch.zeros(4))
        x[0, 0] = math.nan
        with pytest.raises(TangentValueError, match="x has 1 NaN"):
            eta_of_points(x, torch.zeros(4))

    def test_directions(self) -> None:
        with pytest.raises(TangentValueError, match="an angle needs 2 tangent dimensions, got m=3"):
            direction_harmonics(even(10, 3))
        with pytest.raises(
            TangentValueError, match=r"2 or more points and dimensions .* \[10, 1\]"
        ):
            direction_tensor(even(10, 1))
        with pytest.raises(TangentValueError, match="one unit vector a row"):
            direction_tensor(randn(10, 3))
