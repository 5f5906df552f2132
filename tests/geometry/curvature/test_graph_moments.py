"""Moments of a Gaussian on a quadratic graph: sampled, in closed form, and PCA's threshold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import isoscore_from_covariance
from tl_tangent.geometry.angles import principal_angles
from tl_tangent.geometry.curvature import graph_moments, mean_curvature, square_norm
from tl_tangent.geometry.manifolds import (
    Gaussian,
    Linear,
    ManifoldSample,
    Paraboloid,
    QuadraticGraph,
    sample,
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FORMS = (lambda a: (a + a.mT) / 2)(randn(2, 3, 3))
GRAPH = QuadraticGraph(FORMS)
FORM = GRAPH.second_fundamental_form
S, D, N = 0.6, 8, 400_000


@pytest.fixture(scope="module")
def cloud() -> ManifoldSample:
    return sample(GRAPH, Gaussian(S), N, d=D, measure="chart")


def test_shift_and_covariance_of_a_sample(cloud: ManifoldSample) -> None:
    found = graph_moments(FORM, S, d=D)
    coordinates = (cloud.x - cloud.mu) @ torch.cat([cloud.tangent, cloud.normal], dim=1)
    expected = torch.cat([torch.zeros(3).double(), S**2 / 2 * mean_curvature(FORM)])
    torch.testing.assert_close(found.shift, expected[3:])
    error = coordinates.std(0) / N**0.5
    assert bool(((coordinates.mean(0) - expected).abs() < 4 * error).all())
    assert float(found.shift.norm()) > 10 * float(error.max())

    covariance = torch.block_diag(S**2 * torch.eye(3).double(), found.normal_covariance)
    centred = coordinates - coordinates.mean(0)
    products = centred[:, :, None] * centred[:, None]
    assert bool(((products.mean(0) - covariance).abs() < 4.5 * products.std(0) / N**0.5).all())
    square = cloud.n.square().sum(1)
    assert abs(float(square.mean()) - found.normal_square) < 4 * float(square.std()) / N**0.5


def test_normal_square_is_that_of_shift_and_covariance() -> None:
    found = graph_moments(FORM, S)
    total = found.shift.square().sum() + found.normal_covariance.trace()
    assert found.normal_square == pytest.approx(float(total))
    assert found.normal_square == pytest.approx(
        S**4 / 4 * (float(mean_curvature(FORM).square().sum()) + 2 * square_norm(FORM))
    )


@pytest.mark.parametrize("s", [0.01, 0.3, 1.0, 3.0])
def test_isoscore_in_closed_form(s: float) -> None:
    """((m s^2 + s^4 tr G / 2)^2 / (m s^4 + s^8 |G|^2 / 4) - 1) / (d - 1)"""
    gamma = torch.einsum("aij,bij->ab", FORMS, FORMS)
    up = (3 * s**2 + s**4 / 2 * float(gamma.trace())) ** 2
    down = 3 * s**4 + s**8 / 4 * float(gamma.square().sum())
    found = graph_moments(FORM, s, d=D)
    assert found.isoscore == pytest.approx((up / down - 1) / (D - 1), rel=1e-10)
    covariance = torch.block_diag(
        s**2 * torch.eye(3).double(), found.normal_covariance, torch.zeros(3, 3).double()
    )
    assert found.isoscore == pytest.approx(float(isoscore_from_covariance(covariance)))


def test_isoscore_of_a_concentrated_cloud_is_that_of_its_tangent_space() -> None:
    errors = []
    for s in (0.02, 0.01):
        found = graph_moments(FORM, s, d=D)
        assert found.flat_isoscore == pytest.approx(2 / 7)
        errors.append(found.isoscore - found.flat_isoscore)
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize(("factor", "recovered"), [(0.8, True), (1.25, False)])
def test_principal_directions_are_tangent_below_the_threshold_only(
    factor: float, recovered: bool
) -> None:
    threshold = graph_moments(FORM, 1.0).threshold
    gamma = torch.einsum("aij,bij->ab", FORMS, FORMS)
    assert threshold == pytest.approx((2 / float(torch.linalg.eigvalsh(gamma)[-1])) ** 0.5)
    found = sample(GRAPH, Gaussian(factor * threshold), 100_000, d=D, measure="chart")
    leading = torch.linalg.eigh(torch.cov(found.x.mT))[1][:, -3:]
    angle = float(principal_angles(leading, found.tangent)[-1])
    assert angle < 0.05 if recovered else angle > 1.5


def test_at_the_threshold_two_variances_are_equal() -> None:
    found = graph_moments(FORM, graph_moments(FORM, 1.0).threshold)
    top = float(torch.linalg.eigvalsh(found.normal_covariance)[-1])
    assert top == pytest.approx(found.scale**2)


def test_flat_and_saddle() -> None:
    flat = graph_moments(Linear(3).second_fundamental_form, 0.5, d=5)
    assert flat.threshold == math.inf and flat.isoscore == pytest.approx(0.5)
    saddle = graph_moments(Paraboloid((1.0, -1.0)).second_fundamental_form, 0.5)
    assert float(saddle.shift.abs().max()) == 0
    assert "IsoScore" in repr(saddle) and "lead below s=1" in repr(saddle)


def test_refusals() -> None:
    with pytest.raises(TangentValueError, match=r"lies in R\^5; d must be that or more, got 4"):
        graph_moments(FORM, 0.5, d=4)
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(TangentValueError, match="scale must be positive and finite"):
            graph_moments(FORM, scale)
    with pytest.raises(TangentValueError, match="d must be that or more, got 1"):
        graph_moments(Linear(1).second_fundamental_form, 0.5)
