"""The fitted centre lies on the manifold and the fitted basis is tangent to it there"""

from __future__ import annotations

import pytest
import torch

from tests.analysis.local.planted import randn
from tl_tangent.analysis.local.base_point import base_point
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import local_parts
from tl_tangent.geometry.manifolds import Gaussian, Paraboloid, Sphere, sample

CLOUD = sample(Paraboloid((1.5, -0.5)), Gaussian(0.1), 500, d=7, seed=3)


def graph_error(point, tangent):
    """How far a point is off the paraboloid, and a basis off the tangent space there."""
    y = point - CLOUD.mu
    w, height = y @ CLOUD.tangent, y @ CLOUD.normal
    form = CLOUD.second_form
    off = height - torch.einsum("ijc,i,j->c", form, w, w) / 2
    true = CLOUD.tangent + CLOUD.normal @ torch.einsum("ijc,j->ci", form, w)
    q = torch.linalg.qr(true)[0]
    return float(off.norm()), float((tangent - q @ (q.T @ tangent)).norm())


def test_it_is_nearer_to_the_manifold_than_the_mean_by_orders():
    fitted, mean = base_point(CLOUD.x, 2), base_point(CLOUD.x, 2, "mean")
    (off, tilt), (off_mean, tilt_mean) = (
        graph_error(one.point, one.tangent) for one in (fitted, mean)
    )
    # s^2 H / 2 with H = 1; sampling changes it by its share of some per cent
    assert off_mean == pytest.approx(0.005, rel=0.2)
    assert off < 0.01 * off_mean and tilt < 0.05 * tilt_mean
    assert fitted.shift == pytest.approx(off_mean, rel=0.05) and mean.shift == 0
    assert torch.equal(mean.tangent, fitted.principal)
    torch.testing.assert_close(mean.point, CLOUD.x.mean(0))


def test_constant_and_slopes_are_those_of_the_joint_least_squares_fit():
    x = randn(80, 6) + randn(80, 6, seed=1).square()
    found = base_point(x, 2)
    w, normal, *_ = local_parts(x, x.mean(0), found.principal)
    one = torch.ones(80, dtype=torch.float64)
    a, b = w.T
    columns = torch.stack([one, a, b, a * a, a * b, b * b], dim=1)
    joint = torch.linalg.lstsq(columns, normal).solution
    torch.testing.assert_close(found.point, x.mean(0) + joint[0])
    span = torch.linalg.qr(found.principal + joint[1:3].T)[0]
    torch.testing.assert_close(span @ span.T, found.tangent @ found.tangent.T)


def test_it_moves_with_the_cloud():
    cloud = sample(Sphere(2, 1.0), Gaussian(0.2), 300, d=5, seed=1)
    turn = torch.linalg.qr(randn(5, 5))[0]
    here, there = base_point(cloud.x, 2), base_point(3 * cloud.x @ turn.T + 1, 2)
    torch.testing.assert_close(there.point, 3 * turn @ here.point + 1)
    image = turn @ here.tangent
    torch.testing.assert_close(there.tangent @ there.tangent.T, image @ image.T)
    assert there.shift == pytest.approx(3 * here.shift)


def test_what_it_refuses():
    with pytest.raises(TangentValueError, match="centre is 'fitted' or 'mean', got 'origin'"):
        base_point(CLOUD.x, 2, "origin")
    with pytest.raises(TangentValueError, match="6 points cannot determine the 6 coefficients"):
        base_point(CLOUD.x[:6], 2)
    with pytest.raises(TangentValueError, match="do not determine a quadratic form"):
        base_point(randn(40, 1) @ randn(1, 5), 2)
