"""Entropies in closed form, without bias, with units, and on curved manifolds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.covariance import effective_rank
from tl_tangent.geometry.dimension import (
    gaussian_entropy,
    gaussian_entropy_of,
    neighbour_entropy,
    spectral_entropy,
)

UNIT = math.log(2 * math.pi * math.e) / 2  # of a standard normal variable


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestGaussian:
    def test_of_a_covariance(self) -> None:
        scales = torch.tensor([3.0, 1.0, 0.2], dtype=torch.float64)
        turn = torch.linalg.qr(randn(3, 3))[0]
        covariance = turn @ scales.square().diag() @ turn.T
        expected = 3 * UNIT + math.log(0.6)
        assert gaussian_entropy(covariance) == pytest.approx(expected, abs=1e-12)
        assert gaussian_entropy(100 * covariance) == pytest.approx(expected + 3 * math.log(10))

    @pytest.mark.parametrize(("n", "d"), [(6, 4), (30, 4)])
    def test_of_a_cloud_is_unbiased_and_knows_its_error(self, n: int, d: int) -> None:
        mix = randn(d, d, seed=99)
        truth = gaussian_entropy(mix @ mix.T)
        draws = [gaussian_entropy_of(randn(n, d, seed=seed) @ mix.T + 5) for seed in range(1500)]
        nats = np.array([one.nats for one in draws])
        assert abs(nats.mean() - truth) < 4 * nats.std() / math.sqrt(1500)
        assert nats.std() == pytest.approx(draws[0].error, rel=0.08)
        plugged = [gaussian_entropy(torch.cov(randn(n, d, seed=s).T)) for s in range(300)]
        assert np.mean(plugged) < d * UNIT - (0.1 if n > 6 else 1)  # what the correction is for

    def test_correction_vanishes_with_more_points(self) -> None:
        x = randn(20000, 3)
        plugged = gaussian_entropy(torch.cov(x.T))
        assert gaussian_entropy_of(x).nats == pytest.approx(plugged, abs=1e-3)
        assert gaussian_entropy_of(x).error == pytest.approx(math.sqrt(3 / (2 * 20000)), rel=1e-3)

    def test_bounds_the_entropy_of_any_other_density(self) -> None:
        x = rand(2000, 2)
        assert gaussian_entropy_of(x).nats > neighbour_entropy(x).nats + 0.3

    def test_refused(self) -> None:
        with pytest.raises(TangentValueError, match="4 points in 4 dimensions .* give 5 or more"):
            gaussian_entropy_of(randn(4, 4))
        flat = randn(20, 2) @ randn(2, 3, seed=1)
        for call in (
            lambda: gaussian_entropy_of(flat),
            lambda: gaussian_entropy_of(flat.float()),
            lambda: gaussian_entropy(torch.cov(flat.T)),
            lambda: gaussian_entropy(-torch.eye(2)),
            lambda: gaussian_entropy(torch.zeros(2, 2)),
        ):
            with pytest.raises(TangentValueError, match="minus infinity"):
                call()
        with pytest.raises(TangentValueError, match="NaN or infinite"):
            gaussian_entropy(torch.full((2, 2), math.nan))


class TestNeighbours:
    def test_three_points_by_hand(self) -> None:
        """First neighbours at 1, 1, 2; psi(3) - psi(1) = 3/2; the unit ball of a line is 2 long."""
        found = neighbour_entropy(torch.tensor([[0.0], [1.0], [3.0]]), 1)
        assert found.nats == pytest.approx(1.5 + math.log(2) + math.log(2) / 3, abs=1e-12)
        assert found.error == pytest.approx(math.log(2) / 3, abs=1e-12)  # std of (0, 0, ln 2)

    @pytest.mark.parametrize("k", [1, 3, 6])
    def test_without_borders_an_even_density_has_no_bias(self, k: int) -> None:
        """Points of a circle; chords fall short of arcs by a share of (k / n)^2."""
        draws = []
        for seed in range(150):
            angle = 2 * math.pi * rand(300, seed=seed)
            draws.append(neighbour_entropy(torch.stack([angle.cos(), angle.sin()], 1), k, dim=1))
        nats = np.array([one.nats for one in draws])
        assert abs(nats.mean() - math.log(2 * math.pi)) < 4 * nats.std() / math.sqrt(150)

    def test_gaussian_and_uniform(self) -> None:
        found = neighbour_entropy(randn(3000, 2))
        assert found.nats == pytest.approx(2 * UNIT, abs=4 * found.error)
        found = neighbour_entropy(rand(3000, 2))
        assert found.nats == pytest.approx(0, abs=4 * found.error)

    def test_spread_over_draws_beside_the_error(self) -> None:
        for m, k, low, high in ((2, 2, 0.85, 1.3), (5, 20, 1.25, 1.75)):
            draws = [neighbour_entropy(randn(500, m, seed=seed), k) for seed in range(120)]
            spread = np.std([one.nats for one in draws])
            assert low < spread / np.mean([one.error for one in draws]) < high

    def test_units_and_isometries(self) -> None:
        x = randn(80, 3)
        found = neighbour_entropy(x).nats
        turn = torch.linalg.qr(randn(3, 3, seed=1))[0]
        assert neighbour_entropy(x @ turn + 7).nats == pytest.approx(found, abs=1e-9)
        assert neighbour_entropy(1e5 * x).nats == pytest.approx(found + 15 * math.log(10))

    def test_on_a_sphere_it_is_the_logarithm_of_the_area(self) -> None:
        x = randn(3000, 3)
        sphere = 2 * x / x.norm(dim=1, keepdim=True) @ torch.linalg.qr(randn(6, 3, seed=1))[0].T
        found = neighbour_entropy(sphere, dim=2)
        assert (found.dim, found.n) == (2, 3000)
        assert found.nats == pytest.approx(math.log(16 * math.pi), abs=4 * found.error)

    def test_a_graph_has_the_stretch_of_volume_more_than_its_coordinates(self) -> None:
        a, v = 1.5, randn(4000, 1)
        graph = torch.cat([v, a / 2 * v.square()], 1)
        grid = torch.linspace(-9, 9, 20001, dtype=torch.float64)
        density = (-grid.square() / 2).exp() / math.sqrt(2 * math.pi)
        stretch = float(torch.trapezoid(density * (1 + (a * grid) ** 2).log() / 2, grid))
        found = neighbour_entropy(graph, dim=1)
        assert found.nats == pytest.approx(UNIT + stretch, abs=4 * found.error)
        assert stretch > 10 * found.error

    def test_copies(self) -> None:
        x = randn(40, 2)[[*range(40), 0, 1]]
        with pytest.raises(TangentValueError, match="4 of 42 rows have 1 or more exact copies"):
            neighbour_entropy(x, 1)
        assert math.isfinite(neighbour_entropy(x, 2).nats)

    @pytest.mark.parametrize("dim", [0, 3])
    def test_dim_is_refused(self, dim: int) -> None:
        with pytest.raises(TangentValueError, match=f"from 1 to the width 2, got {dim}"):
            neighbour_entropy(randn(9, 2), dim=dim)


def test_spectral_entropy_is_the_logarithm_of_the_effective_rank() -> None:
    covariance = torch.stack([torch.eye(4), torch.diag(torch.tensor([1.0, 1, 0, 0]))]).double()
    expected = torch.tensor([4.0, 2.0], dtype=torch.float64).log()
    assert torch.allclose(spectral_entropy(covariance), expected)
    other = torch.cov(randn(5, 30))
    assert float(spectral_entropy(other).exp()) == pytest.approx(float(effective_rank(other)))
    assert torch.allclose(spectral_entropy(1e4 * other), spectral_entropy(other))
