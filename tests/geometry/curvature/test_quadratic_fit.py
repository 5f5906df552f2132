"""II by least squares: exact on quadratic graphs, calibrated errors, the permuted null, refusals"""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import (
    SecondFormFit,
    fit_second_form,
    local_parts,
    mean_curvature,
    scalar_curvature,
    square_norm,
)
from tl_tangent.geometry.manifolds import (
    CubicGraph,
    Ellipsoid,
    FlatTorus,
    Gaussian,
    Linear,
    ManifoldSample,
    Paraboloid,
    QuadraticGraph,
    RevolutionTorus,
    Sphere,
    sample,
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FORMS = (lambda a: (a + a.mT) / 2)(randn(3, 4, 4))
GRAPH = QuadraticGraph(FORMS)


def in_space(cloud: ManifoldSample) -> Tensor:
    """The known II as vectors of R^d."""
    return torch.einsum("ijc,dc->ijd", cloud.second_form, cloud.normal)


class TestExact:
    @pytest.mark.parametrize("through", [True, False])
    def test_a_quadratic_graph_is_recovered_to_rounding(self, through: bool) -> None:
        cloud = sample(GRAPH, Gaussian(0.3), 60, d=12)
        fit = fit_second_form(cloud.x, cloud.mu, cloud.tangent, through_centre=through)
        torch.testing.assert_close(fit.second_form, in_space(cloud), atol=1e-11, rtol=0)
        torch.testing.assert_close(fit.mean_curvature, mean_curvature(in_space(cloud)))
        assert fit.second_form_square == pytest.approx(square_norm(cloud.second_form))
        assert fit.scalar.value == pytest.approx(scalar_curvature(cloud.second_form))
        assert fit.scalar.error < 1e-9 and float(fit.error.max()) < 1e-10
        assert fit.explained == pytest.approx(1)

    def test_the_centroid_as_a_centre_changes_nothing(self) -> None:
        """The mean is off the manifold by s^2 H / 2, which the constant takes up; moving it along
        the tangent space re-expands the same quadratic form."""
        cloud = sample(GRAPH, Gaussian(0.3), 100, d=12)
        fit = fit_second_form(cloud.x, cloud.x.mean(0), cloud.tangent)
        torch.testing.assert_close(fit.second_form, in_space(cloud), atol=1e-10, rtol=0)

    def test_it_is_covariant_under_turns_and_scales(self) -> None:
        cloud = sample(GRAPH, Gaussian(0.3), 100, d=12, noise=0.01)
        turn, inner = (torch.linalg.qr(randn(k, k, seed=k))[0] for k in (12, 4))
        fit = fit_second_form(cloud.x, cloud.mu, cloud.tangent)
        other = fit_second_form(
            10 * cloud.x @ turn, 10 * cloud.mu @ turn, turn.mT @ cloud.tangent @ inner
        )
        expected = torch.einsum("ik,jl,ijd,de->kle", inner, inner, fit.second_form, turn) / 10
        torch.testing.assert_close(other.second_form, expected)
        assert other.second_form_square == pytest.approx(fit.second_form_square / 100)
        assert other.scalar.error == pytest.approx(fit.scalar.error / 100)
        assert other.null_square == pytest.approx(fit.null_square / 100)

    @pytest.mark.parametrize(
        "manifold",
        [
            Sphere(3, 1.3),
            FlatTorus((1.0, 0.6)),
            RevolutionTorus(1.2, 0.5),
            Ellipsoid((1, 1.6), 1.2),
        ],
        ids=repr,
    )
    def test_curved_manifolds_in_the_limit(self, manifold) -> None:
        """The error of a form fitted over a radius t falls as t^2."""
        errors = []
        for scale in (0.01, 0.02):
            cloud = sample(manifold, Gaussian(scale), 2000, d=6, seed=1)
            fit = fit_second_form(cloud.x, cloud.mu, cloud.tangent)
            errors.append(float((fit.second_form - in_space(cloud)).norm()))
        assert errors[0] < 0.02 * square_norm(manifold.second_fundamental_form) ** 0.5
        assert math.log2(errors[1] / errors[0]) == pytest.approx(2, abs=0.4)


@pytest.fixture(scope="module")
def known_and_fits() -> tuple[Tensor, list[SecondFormFit]]:
    """400 samples of one cloud with noise in its normal coordinates, 5 more than it needs"""
    cloud = sample(Paraboloid((1.5, -0.5)), Gaussian(0.2), 60, d=8)
    found = []
    for seed in range(400):
        noise = 0.02 * randn(*cloud.x.shape, seed=seed)
        noise = noise - noise @ cloud.tangent @ cloud.tangent.mT
        found.append(fit_second_form(cloud.x + noise, cloud.mu, cloud.tangent))
    return in_space(cloud), found


class TestErrors:
    """Tangent coordinates are exact, so that least squares are unbiased."""

    @staticmethod
    def mean_and_error(values: list[float]) -> tuple[float, float]:
        found = torch.tensor(values)
        return float(found.mean()), float(found.std()) / len(values) ** 0.5

    def test_standard_errors_are_those_of_the_spread(self, known_and_fits) -> None:
        """HC2 is unbiased for the variance of even noise."""
        known, fits = known_and_fits
        for name, error in (
            ("second_form", "error"),
            ("mean_curvature", "mean_curvature_error"),
        ):
            values = torch.stack([getattr(fit, name) for fit in fits])
            squares = torch.stack([getattr(fit, error).square() for fit in fits])
            # entries add up to the noise that lies in the normal space
            assert float(squares.mean(0).sum()) == pytest.approx(
                float(values.var(0).sum()), rel=0.08
            )
        scores = torch.stack([(fit.second_form - known) / fit.error for fit in fits])
        # 60 points, few of high leverage: the errors are noisy themselves, and scores have tails
        assert 0.95 < float(scores.std()) < 1.2

    def test_squares_are_rid_of_their_bias(self, known_and_fits) -> None:
        known, fits = known_and_fits
        mean, error = self.mean_and_error([fit.second_form_square for fit in fits])
        assert abs(mean - square_norm(known)) < 4 * error
        raw, error = self.mean_and_error([fit.raw_square for fit in fits])
        assert raw - square_norm(known) > 8 * error
        mean, error = self.mean_and_error([fit.mean_curvature_square for fit in fits])
        assert abs(mean - float(mean_curvature(known).square().sum())) < 4 * error

    def test_scalar_curvature_and_its_error(self, known_and_fits) -> None:
        known, fits = known_and_fits
        mean, error = self.mean_and_error([fit.scalar.value for fit in fits])
        assert abs(mean - scalar_curvature(known)) < 4 * error
        claimed = sum(fit.scalar.error for fit in fits) / len(fits)
        assert claimed == pytest.approx(error * len(fits) ** 0.5, rel=0.15)


class TestNull:
    def test_expectation_over_permutations_is_exact(self) -> None:
        """All 720 orders of 6 points in one tangent direction"""
        from itertools import permutations

        w, normal = randn(6, 1), randn(6, 2, seed=1)
        basis = torch.eye(3).double()[:, :1]
        for through in (True, False):
            squares = []
            for order in permutations(range(6)):
                x = torch.cat([w, normal[list(order)]], dim=1)
                fit = fit_second_form(x, torch.zeros(3), basis, through_centre=through)
                squares.append(fit.raw_square)
            assert fit.null_square == pytest.approx(sum(squares) / 720, rel=1e-9)

    def test_flat_clouds_have_even_p_values_and_their_own_null(self) -> None:
        found = []
        for seed in range(150):
            cloud = sample(Linear(2), Gaussian(1.0), 40, d=6, noise=0.3, seed=seed)
            found.append(
                fit_second_form(cloud.x, cloud.mu, cloud.tangent, permutations=19, seed=seed)
            )
        share = sum(fit.p_value <= 0.25 for fit in found) / 150
        assert share == pytest.approx(0.25, abs=0.12)
        raw, null = (
            sum(getattr(fit, name) for fit in found) for name in ("raw_square", "null_square")
        )
        assert raw == pytest.approx(null, rel=0.15)
        squares = torch.tensor([fit.second_form_square for fit in found])
        assert abs(float(squares.mean())) < 4 * float(squares.std()) / 150**0.5

    def test_curvature_stands_out(self) -> None:
        cloud = sample(GRAPH, Gaussian(0.2), 300, d=20, noise=0.02)
        fit = fit_second_form(cloud.x, cloud.mu, cloud.tangent, permutations=19)
        assert fit.p_value == pytest.approx(1 / 20)
        assert fit.raw_square > 3 * fit.null_square
        again = fit_second_form(cloud.x, cloud.mu, cloud.tangent, permutations=19)
        assert again.p_value == fit.p_value and torch.equal(again.second_form, fit.second_form)
        assert "p 0.05" in repr(fit) and "300 points, m=4" in repr(fit)


def test_cubic_terms_tie_normal_to_tangent_parts() -> None:
    """Cov(w_i, n_a) = s^4 / 2 sum_k C_aikk for Gaussian w, and 0 without cubic terms."""
    cubics = torch.zeros(1, 2, 2, 2, dtype=torch.float64)
    cubics[0, 0, 0, 0], cubics[0, 0, 1, 1], cubics[0, 1, 0, 1], cubics[0, 1, 1, 0] = 3, 1, 1, 1
    forms = torch.tensor([[[1.0, 0.0], [0.0, -0.5]]], dtype=torch.float64)
    for manifold, wanted in ((CubicGraph(forms, cubics), 2.0), (QuadraticGraph(forms), 0.0)):
        cloud = sample(manifold, Gaussian(0.5), 200_000, measure="chart")
        parts = local_parts(cloud.x, cloud.mu, cloud.tangent)
        products = parts.tangent * (parts.normal @ cloud.normal)
        error = products.std(0) / len(products) ** 0.5
        expected = torch.tensor([wanted * 0.5**4, 0.0])
        assert bool(((products.mean(0) - expected).abs() < 4 * error).all())


class TestRefusals:
    CLOUD = sample(GRAPH, Gaussian(0.3), 60, d=12)

    def test_too_few_points(self) -> None:
        c = self.CLOUD
        with pytest.raises(TangentValueError, match="15 points cannot determine the 15 coeffic"):
            fit_second_form(c.x[:15], c.mu, c.tangent)
        assert fit_second_form(c.x[:15], c.mu, c.tangent, through_centre=True).columns == 10

    def test_points_that_miss_a_direction(self) -> None:
        c = self.CLOUD
        flat = c.x - (c.x - c.mu) @ c.tangent[:, :1] @ c.tangent[:, :1].mT
        with pytest.raises(TangentValueError, match="do not determine a quadratic form"):
            fit_second_form(flat, c.mu, c.tangent)

    def test_frames(self) -> None:
        c = self.CLOUD
        with pytest.raises(TangentValueError, match="tangent columns are not orthonormal"):
            fit_second_form(c.x, c.mu, 1.01 * c.tangent)
        with pytest.raises(TangentValueError, match=r"tangent basis \[12, m\] with m from 1 to 12"):
            local_parts(c.x, c.mu, c.tangent[:, :0])
        with pytest.raises(TangentValueError, match="all of R\\^12: there is no normal part"):
            fit_second_form(c.x, c.mu, torch.eye(12).double())
        with pytest.raises((TangentValueError, TypeCheckError)):
            local_parts(c.x, c.mu[:5], c.tangent)
        with pytest.raises((TangentValueError, TypeCheckError)):
            local_parts(c.x, c.mu, c.tangent[:5])

    def test_values(self) -> None:
        c = self.CLOUD
        bad = c.x.clone()
        bad[3, 4] = math.inf
        with pytest.raises(TangentValueError, match="x has 1 NaN or infinite"):
            fit_second_form(bad, c.mu, c.tangent)
        with pytest.raises(TangentValueError, match="centre has 12 NaN"):
            local_parts(c.x, torch.full((12,), math.nan), c.tangent)
        with pytest.raises(TangentValueError, match="1 points or more are needed here, got 0"):
            local_parts(c.x[:0], c.mu, c.tangent)

    def test_activations_with_a_gradient_in_float32(self) -> None:
        c = self.CLOUD
        x = c.x.float().requires_grad_()
        fit = fit_second_form(x, c.mu.float(), c.tangent.float())
        assert not fit.second_form.requires_grad and fit.second_form.dtype == torch.float64
        torch.testing.assert_close(fit.second_form, in_space(c), atol=1e-4, rtol=0)

    def test_float32_frames_leave_no_tangent_part_in_the_normal_one(self) -> None:
        cloud = sample(Linear(3), Gaussian(1.0), 50, d=9)
        parts = local_parts(cloud.x, cloud.mu, cloud.tangent.float())
        coordinates = (cloud.x - cloud.mu) @ cloud.tangent
        torch.testing.assert_close(parts.tangent, coordinates, atol=1e-6, rtol=0)
        basis = torch.linalg.lstsq(parts.tangent, cloud.x - cloud.mu - parts.normal).solution
        torch.testing.assert_close(basis @ basis.mT, torch.eye(3).double())
