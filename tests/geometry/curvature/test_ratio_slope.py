"""The order of the normal part: 1 on curved manifolds, 0 for noise, and the interval's coverage."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import ratio_slope
from tl_tangent.geometry.manifolds import (
    Cylinder,
    Ellipsoid,
    Exponential,
    Gaussian,
    Linear,
    Manifold,
    Paraboloid,
    QuadraticGraph,
    Sphere,
    sample,
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "manifold",
    [
        Sphere(3, 1.3),
        Cylinder(1.0),
        Ellipsoid((1.0, 1.6), 1.2),
        Paraboloid((1.5, -0.5)),
        QuadraticGraph((lambda a: a + a.mT)(randn(3, 4, 4))),
    ],
    ids=repr,
)
def test_curved_manifolds_have_slope_one(manifold: Manifold) -> None:
    cloud = sample(manifold, Exponential(0.003), 20_000, d=manifold.ambient + 2)
    found = ratio_slope(cloud.x, cloud.mu, cloud.tangent)
    assert abs(found.slope - 1) < 4 * found.error + 1e-3  # the next order in t
    assert found.error < 0.01


def test_on_a_sphere_bins_follow_the_exact_ratio() -> None:
    """n / v = tan(r / 2R) = (t / 2R) / sqrt(1 - t^2 / 4R^2)"""
    cloud = sample(Sphere(2, 1.3), Gaussian(0.05), 5000)
    found = ratio_slope(cloud.x, cloud.mu, cloud.tangent, bins=20)
    half = found.t / 2.6
    # a bin's t^2 is a mean over the bin; t^4 has a mean above its square in wide outer bins
    inner = slice(2, 17)
    torch.testing.assert_close(
        found.ratio[inner], (half / (1 - half**2).sqrt())[inner], rtol=0.02, atol=0
    )
    assert int(found.counts.sum()) == 5000 and set(found.counts.tolist()) == {250}


def test_noise_around_a_flat_cloud_has_no_positive_slope() -> None:
    """Isotropic noise has one size at every t, and the ratio falls as 1 / t."""
    cloud = sample(Linear(2), Gaussian(1.0), 20_000, d=6, noise=0.01)
    found = ratio_slope(cloud.x, cloud.mu, cloud.tangent)
    assert found.slope == pytest.approx(-1, abs=0.02)
    even = ratio_slope(randn(20_000, 6), torch.zeros(6).double(), torch.eye(6).double()[:, :2])
    assert abs(even.slope) < 3.5 * even.error < 0.1  # size and direction are independent


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 3.0])
def test_an_exact_power_is_found_exactly(power: float) -> None:
    w = randn(500, 2)
    size = w.norm(dim=1, keepdim=True)
    x = torch.cat([w, 1e-6 * size ** (power + 1)], dim=1)
    turn = torch.linalg.qr(randn(9, 9))[0][:, :3]
    found = ratio_slope(1e3 * x @ turn.mT, torch.zeros(9).double(), turn[:, :2])
    assert found.slope == pytest.approx(power, abs=1e-6)
    assert found.error < 1e-6
    torch.testing.assert_close(found.t.sort().values, found.t)


def test_directions_without_a_normal_part_count_as_points() -> None:
    """Half of the points lie in the tangent plane: energies halve and the slope stays."""
    w = randn(400, 2).repeat(2, 1)
    height = w[:, :1].square() * (torch.arange(800) < 400)[:, None]
    x = torch.cat([w, 1e-6 * height], dim=1)
    args = (torch.zeros(3).double(), torch.eye(3).double()[:, :2])
    all_points, half = ratio_slope(x, *args), ratio_slope(x[:400], *args)
    assert all_points.slope == pytest.approx(half.slope, abs=1e-9)
    torch.testing.assert_close(all_points.ratio, half.ratio / 2**0.5, rtol=0.2, atol=0)


def test_interval_covers_the_limit_of_many_points() -> None:
    """Over 300 clouds of 400 points: 90 % is 90 +- 1.7"""
    manifold = Paraboloid((1.5, -0.5))
    many = sample(manifold, Gaussian(0.05), 400_000, seed=999)
    truth = ratio_slope(many.x, many.mu, many.tangent).slope
    scores = []
    for seed in range(300):
        cloud = sample(manifold, Gaussian(0.05), 400, seed=seed)
        found = ratio_slope(cloud.x, cloud.mu, cloud.tangent, level=0.9)
        scores.append((found.slope - truth) / found.error)
        assert (found.low <= truth <= found.high) == (abs(scores[-1]) <= 1.6448536269514722)
    spread = torch.tensor(scores)
    assert float(spread.std()) == pytest.approx(1, abs=0.15)
    assert float((spread.abs() <= 1.6449).double().mean()) == pytest.approx(0.9, abs=0.05)


def test_the_mean_as_a_centre_flattens_the_slope() -> None:
    cloud = sample(Sphere(2, 1.0), Gaussian(0.1), 5000)
    at_base = ratio_slope(cloud.x, cloud.mu, cloud.tangent)
    at_mean = ratio_slope(cloud.x, cloud.x.mean(0), cloud.tangent)
    assert at_base.slope > 0.99 > 0.5 > at_mean.slope


def test_levels_and_units() -> None:
    cloud = sample(Cylinder(1.0), Gaussian(0.1), 1000)
    args = (cloud.x, cloud.mu, cloud.tangent)
    one, wide = ratio_slope(*args), ratio_slope(*args, level=0.99)
    assert wide.low < one.low < one.slope < one.high < wide.high
    assert one.high - one.slope == pytest.approx(1.959964 * one.error)
    big = ratio_slope(1e5 * cloud.x, 1e5 * cloud.mu, cloud.tangent, bins=3)
    assert big.slope == pytest.approx(one.slope) and big.error == pytest.approx(one.error)
    assert "95% interval" in repr(one) and "1000 points" in repr(one) and "8 bins" in repr(one)


class TestRefusals:
    CLOUD = sample(Cylinder(1.0), Gaussian(0.1), 100)

    def test_a_flat_cloud(self) -> None:
        cloud = sample(Linear(2), Gaussian(1.0), 100, d=5)
        with pytest.raises(TangentValueError, match="normal part is rounding in 8 of 8 bins"):
            ratio_slope(cloud.x, cloud.mu, cloud.tangent)
        with pytest.raises(TangentValueError, match="normal part is rounding in 8 of 8 bins"):
            ratio_slope(cloud.x.float(), cloud.mu.float(), cloud.tangent.float())

    def test_options(self) -> None:
        c = self.CLOUD
        with pytest.raises(TangentValueError, match="100 points in 2 bins: a slope needs 3 bins"):
            ratio_slope(c.x, c.mu, c.tangent, bins=2)
        with pytest.raises(TangentValueError, match="39 points in 8 bins"):
            ratio_slope(c.x[:39], c.mu, c.tangent)
        for level in (0.0, 1.0, math.nan):
            with pytest.raises(TangentValueError, match=r"a level in \(0, 1\), got"):
                ratio_slope(c.x, c.mu, c.tangent, level=level)

    def test_no_slope_in_range(self) -> None:
        t = torch.linspace(1, 1.5, 80, dtype=torch.float64)[:, None]
        args = (torch.zeros(2).double(), torch.eye(2).double()[:, :1])
        assert ratio_slope(torch.cat([t, 1e-9 * t**31], 1), *args).slope == pytest.approx(30)
        with pytest.raises(TangentValueError, match="no slope between -50 and 50 fits"):
            ratio_slope(torch.cat([t, 1e-13 * t**61], 1), *args)

    def test_one_size(self) -> None:
        x = randn(100, 3)
        x = x / x.norm(dim=1, keepdim=True)
        with pytest.raises(TangentValueError, match="chords fill only 1 different bins of 8"):
            ratio_slope(x, torch.zeros(3).double(), torch.eye(3).double()[:, :2])
