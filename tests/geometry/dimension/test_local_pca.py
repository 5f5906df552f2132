"""Local PCA: its variances, the error law of its tangent spaces term by term, its dimensions."""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import TypeCheckError

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.angles import principal_angles
from tl_tangent.geometry.dimension import (
    ball_radii,
    local_dimension,
    local_pca,
    local_pca_dimension,
)

REFUSED = (TangentValueError, TypeCheckError)  # the second where the shape checker runs


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slope(curve: torch.Tensor, t: float) -> float:
    """Slope of the leading direction at the origin of a curve whose tangent there has slope 0."""
    found = local_pca(curve, torch.zeros(2, dtype=torch.float64), t)
    return float(found.basis[1, 0] / found.basis[0, 0])


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 5), (60, 1)])
def test_a_base_of_another_shape_is_not_spread_over_the_points(shape: tuple[int, ...]) -> None:
    base = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(REFUSED):
        local_pca(randn(60, 5), base, 9.0)
    with pytest.raises(REFUSED):
        ball_radii(randn(60, 5), base, 10, 50)


class TestTangentError:
    line = torch.linspace(-1, 1, 200001, dtype=torch.float64)

    @pytest.mark.parametrize("t", [0.05, 0.1])
    def test_bias_from_a_change_of_curvature(self, t: float) -> None:
        c = 0.7
        curve = torch.stack([self.line, c * self.line**3], 1)
        assert slope(curve, t) == pytest.approx(3 / 5 * c * t**2, rel=1e-2)

    @pytest.mark.parametrize("t", [0.05, 0.1])
    def test_bias_from_a_change_of_density(self, t: float) -> None:
        """Points at the quantiles of the density (1 + g x) / 2 on [-1, 1]."""
        a, g = 0.8, 0.5
        q = (self.line + 1) / 2
        x = (-1 + (1 - 2 * g + g**2 + 4 * g * q).sqrt()) / g
        assert slope(torch.stack([x, a / 2 * x**2], 1), t) == pytest.approx(
            2 / 15 * a * g * t**2, rel=2e-2
        )

    def test_no_bias_where_both_sides_are_alike(self) -> None:
        circle = torch.stack([self.line.sin(), 1 - self.line.cos()], 1)
        assert abs(slope(circle, 0.5)) < 1e-10

    @pytest.mark.parametrize("t", [0.05, 0.1])
    def test_bias_at_a_border(self, t: float) -> None:
        a, half = 0.8, self.line[self.line >= 0]
        assert slope(torch.stack([half, a / 2 * half**2], 1), t) == pytest.approx(
            a * t / 2, rel=1e-2
        )

    def test_sampling_error_on_a_sphere(self) -> None:
        radius, t, n = 2.0, 0.3, 500
        cosine_of_rim = 1 - t**2 / (2 * radius**2)  # area-even cap: the cosine is even
        squares = []
        for seed in range(200):
            u, angle = rand(2, n, seed=seed)
            z = cosine_of_rim + (1 - cosine_of_rim) * u
            across, angle = (1 - z**2).sqrt(), 2 * math.pi * angle
            x = radius * torch.stack([across * angle.cos(), across * angle.sin(), z], 1)
            north = torch.tensor([0, 0, radius], dtype=torch.float64)
            found = local_pca(x, north, t * (1 + 1e-9))
            assert found.n == n
            plane = torch.eye(3, 2, dtype=torch.float64)
            squares.append(float(principal_angles(found.basis[:, :2], plane)[-1]) ** 2)
        rms = math.sqrt(sum(squares) / 200)
        assert rms == pytest.approx(t / (radius * math.sqrt(6 * n)), rel=0.15)

    def test_noise(self) -> None:
        t, n, s = 1.0, 400, 0.01
        squares = []
        for seed in range(300):
            x = torch.stack([2 * t * rand(n, seed=seed) - t, s * randn(n, seed=seed + 1)], 1)
            squares.append(slope(x, 1.1 * t) ** 2)
        rms = math.sqrt(sum(squares) / 300)
        assert rms == pytest.approx(s * math.sqrt(3 / n) / t, rel=0.15)


class TestLocalPca:
    @pytest.mark.parametrize("m", [1, 2, 3])
    def test_variances_of_an_even_ball(self, m: int) -> None:
        grid = torch.linspace(-1, 1, {1: 20001, 2: 201, 3: 61}[m], dtype=torch.float64)
        x = torch.cartesian_prod(*[grid] * m).reshape(-1, m)
        found = local_pca(x, torch.zeros(m, dtype=torch.float64), 0.8)
        expected = torch.full((m,), 0.8**2 / (m + 2), dtype=torch.float64)
        assert torch.allclose(found.variances, expected, rtol=0.02)

    def test_is_the_covariance_of_the_points_within(self) -> None:
        x, base = randn(80, 4), randn(4, seed=1)
        inside = x[(x - base).norm(dim=1) <= 2]
        found = local_pca(x, base, 2)
        assert found.n == len(inside) and 2 < len(inside) < 80
        assert torch.allclose(found.mean, inside.mean(0))
        covariance = found.basis * found.variances @ found.basis.T
        assert torch.allclose(covariance, torch.cov(inside.T))

    def test_mean_is_off_a_curve_by_its_bend(self) -> None:
        line = torch.linspace(-1, 1, 20001, dtype=torch.float64)
        parabola = torch.stack([line, line**2 / 2], 1)
        found = local_pca(parabola, torch.zeros(2, dtype=torch.float64), 0.1)
        assert float(found.mean[1]) == pytest.approx(0.1**2 / 6, rel=1e-2)

    def test_refused(self) -> None:
        with pytest.raises(TangentValueError, match="1 of 9 points are within 1e-06"):
            local_pca(randn(9, 2), randn(9, 2)[0], 1e-6)
        with pytest.raises(TangentValueError, match="base has 1 NaN"):
            local_pca(randn(9, 2), torch.tensor([math.nan, 0.0]), 1.0)


class TestDimension:
    def test_rules_on_known_spectra(self) -> None:
        variances = torch.tensor([[10.0, 9, 1, 0], [10, 0.4, 0.1, 0], [5, 5, 5, 5]])
        assert local_dimension(variances).tolist() == [2, 1, 4]
        assert local_dimension(variances, threshold=0.9).tolist() == [2, 1, 4]
        assert local_dimension(variances, threshold=0.96).tolist() == [3, 2, 4]
        assert local_dimension(variances, "ratio").tolist() == [3, 1, 4]
        assert local_dimension(variances, "ratio", 0.2).tolist() == [2, 1, 4]

    @pytest.mark.parametrize("rule", ["share", "ratio"])
    def test_of_a_plane_and_of_a_sphere(self, rule: str) -> None:
        turn = torch.linalg.qr(randn(7, 3, seed=1))[0]
        plane = rand(400, 2) @ turn[:, :2].T
        threshold = {"share": 1 - 1e-6, "ratio": 1e-6}[rule]
        assert set(local_pca_dimension(plane, 12, rule, threshold).tolist()) == {2}
        x = randn(1500, 3)
        sphere = x / x.norm(dim=1, keepdim=True) @ turn.T
        found = local_pca_dimension(sphere, 15, rule)
        assert float((found == 2).double().mean()) > 0.95

    def test_is_that_of_the_points_around(self) -> None:
        x = randn(300, 5) * torch.tensor([1, 1, 0.3, 0.1, 0.1])
        found = local_pca_dimension(x, 9, chunk_bytes=1)
        for at in (0, 7, 299):
            near = (x - x[at]).norm(dim=1).argsort()[:10]
            values = torch.linalg.eigvalsh(torch.cov(x[near].T)).flip(0)
            assert int(found[at]) == int(local_dimension(values))

    def test_k_points_tell_at_most_k_dimensions(self) -> None:
        assert int(local_pca_dimension(randn(50, 10), 3, threshold=1 - 1e-9).max()) == 3

    def test_refused(self) -> None:
        with pytest.raises(REFUSED):
            local_dimension(torch.ones(3), "gap")
        with pytest.raises(TangentValueError, match=r"share in \(0, 1\), got 1.0"):
            local_dimension(torch.ones(3), threshold=1.0)
        x = randn(9, 2)[[*range(9), 0, 0]]
        with pytest.raises(TangentValueError, match="3 of 11 rows have 2 or more exact copies"):
            local_pca_dimension(x, 2)
