"""The order of the normal in the tangent part: 2 on curved manifolds, 0 where they know nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import normal_slope
from tl_tangent.geometry.manifolds import Cylinder, Gaussian, Linear, Paraboloid, Sphere, sample

ORIGIN, AXES = torch.zeros(6).double(), torch.eye(6).double()[:, :2]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "manifold", [Sphere(3, 1.3), Cylinder(1.0), Paraboloid((1.5, -0.5))], ids=repr
)
def test_curved_manifolds_have_slope_two(manifold) -> None:
    cloud = sample(manifold, Gaussian(0.01), 5000, d=manifold.ambient + 2)
    found = normal_slope(cloud.x, cloud.mu, cloud.tangent)
    assert found.slope == pytest.approx(2, abs=0.03)
    assert (found.n, found.left_out) == (5000, 0)


def test_independent_parts_have_slope_zero_and_a_tilted_basis_one() -> None:
    x = randn(5000, 6)
    found = normal_slope(x, ORIGIN, AXES)
    assert abs(found.slope) < 0.03 and found.low < 0 < found.high
    flat = torch.cat([x[:, :1], torch.zeros(5000, 5).double()], dim=1)
    tilted = torch.linalg.qr(torch.tensor([[1.0], [0.2], [0], [0], [0], [0]]).double())[0]
    assert normal_slope(flat, ORIGIN, tilted).slope == pytest.approx(1, abs=1e-9)


def test_the_line_is_that_of_least_squares_and_has_no_interval_without_draws() -> None:
    x = randn(50, 6)
    found = normal_slope(x, ORIGIN, AXES, draws=0)
    logs = torch.stack([x[:, :2].norm(dim=1), x[:, 2:].norm(dim=1)]).log()
    covariance = logs.cov()
    assert found.slope == pytest.approx(float(covariance[0, 1] / covariance[0, 0]))
    assert math.isnan(found.low) and math.isnan(found.high)


def test_interval_covers_the_limit_of_many_points() -> None:
    """Over 200 clouds of 200 points: 90 % is 90 +- 2.1"""
    covered = 0
    for seed in range(200):
        w = randn(200, 2, seed=seed)
        noise = randn(200, 1, seed=1000 + seed) * w.norm(dim=1, keepdim=True)  # uneven on purpose
        x = torch.cat([w, w.norm(dim=1, keepdim=True).pow(1.5) * noise.exp()], dim=1)
        cloud = (x, torch.zeros(3).double(), torch.eye(3).double()[:, :2])
        found = normal_slope(*cloud, level=0.9, draws=400)
        covered += found.low <= 1.5 <= found.high
    assert covered / 200 == pytest.approx(0.9, abs=0.06)


def test_points_in_the_tangent_plane_are_left_out() -> None:
    w = randn(400, 2)
    height = w.square().sum(1, keepdim=True) * (torch.arange(400) % 4 > 0)[:, None]
    x = torch.cat([w, height, torch.zeros(400, 3).double()], dim=1)
    found = normal_slope(x, ORIGIN, AXES)
    assert (found.n, found.left_out) == (300, 100) and found.slope == pytest.approx(2, abs=1e-9)


def test_units_seeds_and_levels() -> None:
    x = randn(300, 6)
    one, same, other, wide = (
        normal_slope(x, ORIGIN, AXES, **options)
        for options in ({}, {}, {"seed": 1}, {"level": 0.99})
    )
    assert (one.low, one.high) == (same.low, same.high) != (other.low, other.high)
    assert wide.low < one.low < one.slope < one.high < wide.high
    assert normal_slope(1e5 * x, ORIGIN, AXES).slope == pytest.approx(one.slope)
    assert "95% interval" in repr(one) and "300 points" in repr(one)


def test_what_it_refuses() -> None:
    cloud = sample(Linear(2), Gaussian(1.0), 100, d=5)
    with pytest.raises(TangentValueError, match="rounding in 100 of 100 points"):
        normal_slope(cloud.x, cloud.mu, cloud.tangent)
    with pytest.raises(TangentValueError, match="5 points or more are needed here, got 3"):
        normal_slope(randn(3, 6), ORIGIN, AXES)
    with pytest.raises(TangentValueError, match=r"level in \(0, 1\), got 1.0"):
        normal_slope(randn(9, 6), ORIGIN, AXES, level=1.0)
    with pytest.raises(TangentValueError, match="100 draws or more, got 9"):
        normal_slope(randn(9, 6), ORIGIN, AXES, draws=9)
    angle = torch.arange(50).double()
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    for x in (circle, circle.float(), torch.full((50, 2), 0.1).double()):
        with pytest.raises(TangentValueError, match="of one size"):
            normal_slope(torch.cat([x, randn(50, 4).to(x)], dim=1), ORIGIN, AXES)
