"""Charts by differentiation: tangent space, II, volume, geodesics, the bounds of the sampler."""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from tests.geometry.manifolds.known import CUBICS, FORMS, LARGER, MANIFOLDS, randn
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.manifolds import (
    CubicGraph,
    Cylinder,
    Ellipsoid,
    FlatTorus,
    Helix,
    Linear,
    Manifold,
    Paraboloid,
    QuadraticGraph,
    RevolutionTorus,
    Sphere,
)

ALL = [*MANIFOLDS, *LARGER]
every = pytest.mark.parametrize("manifold", ALL, ids=repr)
STEP = 1e-3


def jacobian(manifold: Manifold, w: Tensor) -> Tensor:
    """Derivatives [n, D, m] of the chart by automatic differentiation."""
    return torch.func.vmap(torch.func.jacrev(lambda one: manifold.point(one[None])[0]))(w)


def in_chart(manifold: Manifold, n: int = 400, seed: int = 0) -> Tensor:
    """Points all over the chart, or within a radius of 3 if it has no end."""
    radius = min(manifold.chart_radius, 3.0)
    w = randn(20 * n, manifold.dim, seed=seed)
    share = torch.rand(20 * n, 1, generator=torch.Generator().manual_seed(seed)).double()
    w = radius * share * w / w.norm(dim=1, keepdim=True)
    return w[manifold.inside(w)][:n]


@every
class TestChart:
    def test_base_point_tangent_space_and_second_form_by_finite_differences(
        self, manifold: Manifold
    ) -> None:
        """The second difference of point(w) along e_i and e_j is (0, II(e_i, e_j))."""
        m, wide = manifold.dim, manifold.ambient
        e = STEP * torch.eye(m, dtype=torch.float64)
        assert manifold.point(torch.zeros(1, m).double()).abs().max() == 0
        first = (manifold.point(e) - manifold.point(-e)) / (2 * STEP)
        torch.testing.assert_close(first, torch.eye(m, wide).double(), atol=1e-5, rtol=0)
        assert manifold.second_fundamental_form.shape == (m, m, wide - m)
        for i in range(m):
            for j in range(m):
                a, b, c, d = (
                    manifold.point((s * e[i] + t * e[j])[None])[0]
                    for s, t in ((1, 1), (1, -1), (-1, 1), (-1, -1))
                )
                second = (a - b - c + d) / (4 * STEP**2)
                expected = torch.cat(
                    [torch.zeros(m).double(), manifold.second_fundamental_form[i, j]]
                )
                torch.testing.assert_close(second, expected, atol=2e-5, rtol=0)

    def test_volume_is_the_determinant_of_the_jacobian(self, manifold: Manifold) -> None:
        w = in_chart(manifold)
        j = jacobian(manifold, w)
        expected = (j.mT @ j).det().clamp(min=0).sqrt()
        torch.testing.assert_close(manifold.log_volume(w).exp(), expected, atol=1e-7, rtol=1e-7)

    def test_bounds_hold_in_every_ball_and_are_monotone(self, manifold: Manifold) -> None:
        w = in_chart(manifold, 3000)
        radius = w.norm(dim=1)
        ratio = manifold.point(w).norm(dim=1) / radius
        grid = torch.linspace(0, float(radius.max()), 200, dtype=torch.float64)
        lower, upper = manifold.chord_ratio(grid), manifold.log_volume_bound(grid)
        assert bool((lower.diff() <= 1e-12).all()) and bool((upper.diff() >= -1e-12).all())
        assert bool((lower > 0).all())
        assert bool((ratio >= manifold.chord_ratio(radius) - 1e-12).all())
        assert bool((manifold.log_volume(w) <= manifold.log_volume_bound(radius) + 1e-12).all())

    def test_bounds_are_exact_at_the_base_point(self, manifold: Manifold) -> None:
        zero = torch.zeros(1, dtype=torch.float64)
        assert float(manifold.chord_ratio(zero)) == pytest.approx(1)
        assert float(manifold.log_volume_bound(zero)) == pytest.approx(0)

    def test_rays_are_unit_speed_geodesics_where_coordinates_are_geodesic(
        self, manifold: Manifold
    ) -> None:
        """Their acceleration has no tangent part; elsewhere r is not claimed."""
        w = in_chart(manifold, 50)
        u = w / w.norm(dim=1, keepdim=True)
        ahead, behind = manifold.point(w + STEP * u), manifold.point(w - STEP * u)
        speed = (ahead - behind).norm(dim=1) / (2 * STEP)
        acceleration = (ahead + behind - 2 * manifold.point(w)) / STEP**2
        j = jacobian(manifold, w)
        sideways = float((j.mT @ acceleration[:, :, None]).abs().max())
        off = float((speed - 1).abs().max())
        if manifold.geodesic:
            assert off < 1e-5 and sideways < 1e-5
        else:
            assert off > 1e-3 or sideways > 1e-3

    def test_it_keeps_to_the_protocol(self, manifold: Manifold) -> None:
        assert isinstance(manifold, Manifold)


@pytest.mark.parametrize(
    ("manifold", "known"),
    [
        (Sphere(1, 0.8), 2 * math.pi * 0.8),
        (Sphere(2, 1.3), 4 * math.pi * 1.3**2),
        (Sphere(4, 1.3), 8 * math.pi**2 / 3 * 1.3**4),
        (FlatTorus((1.0, 0.6)), 4 * math.pi**2 * 0.6),
        (FlatTorus((1.0, 0.6, 0.8)), 8 * math.pi**3 * 0.48),
        (RevolutionTorus(1.2, 0.7), 4 * math.pi**2 * 1.2 * 0.7),
        (Ellipsoid((1.3, 1.3), 1.3), 4 * math.pi * 1.3**2),
        (Ellipsoid((1.0, 1.0), 2.0), 2 * math.pi * (1 + 4 * math.pi / 3 / math.sqrt(3))),
    ],
    ids=repr,
)
def test_a_chart_covers_its_manifold_once(manifold: Manifold, known: float) -> None:
    """The volume over the chart is that of the whole, by Monte Carlo within 2 %; the prolate
    spheroid's area is ``2 pi a^2 (1 + c asin(e) / (a e))`` with ``e^2 = 1 - a^2 / c^2``."""
    m, radius = manifold.dim, manifold.chart_radius
    n = 400_000
    w = radius * (2 * torch.rand(n, m, generator=torch.Generator().manual_seed(0)).double() - 1)
    inside = manifold.inside(w)
    volume = manifold.log_volume(w[inside]).exp().sum() * (2 * radius) ** m / n
    assert float(volume) == pytest.approx(known, rel=0.02)


class TestPlaces:
    """Points satisfy the equations of their manifolds, seen from the base point."""

    def test_sphere(self) -> None:
        x = Sphere(4, 1.3).point(in_chart(Sphere(4, 1.3)))
        centre = torch.tensor([0, 0, 0, 0, 1.3], dtype=torch.float64)
        torch.testing.assert_close((x - centre).norm(dim=1), torch.full((len(x),), 1.3).double())

    def test_ellipsoid(self) -> None:
        manifold = Ellipsoid((1.0, 1.6), 1.2)
        x = manifold.point(in_chart(manifold))
        height = 1.2 - x[:, 2]  # the normal points inwards from the pole
        level = (x[:, 0] / 1.0) ** 2 + (x[:, 1] / 1.6) ** 2 + (height / 1.2) ** 2
        torch.testing.assert_close(level, torch.ones_like(level))

    def test_torus_of_revolution(self) -> None:
        manifold = RevolutionTorus(1.2, 0.7)
        x = manifold.point(in_chart(manifold))
        from_axis = torch.stack([1.9 - x[:, 2], x[:, 1]]).norm(dim=0)
        level = (from_axis - 1.2) ** 2 + x[:, 0] ** 2
        torch.testing.assert_close(level, torch.full_like(level, 0.49))

    def test_helix_chord(self) -> None:
        s = torch.linspace(-9, 9, 181, dtype=torch.float64)[:, None]
        turn = 1 / math.hypot(0.8, 0.3)
        square = 4 * 0.64 * (turn * s / 2).sin() ** 2 + (0.3 * turn * s) ** 2
        found = Helix(0.8, 0.3).point(s).norm(dim=1)
        torch.testing.assert_close(found, square.sqrt()[:, 0], atol=1e-12, rtol=1e-12)

    def test_flat_torus_chord(self) -> None:
        w = in_chart(FlatTorus((1.0, 0.6)))
        square = 4 * (w[:, 0] / 2).sin() ** 2 + 4 * 0.36 * (w[:, 1] / 1.2).sin() ** 2
        torch.testing.assert_close(FlatTorus((1.0, 0.6)).point(w).norm(dim=1), square.sqrt())

    def test_cubic_graph_without_cubics_is_the_quadratic_one(self) -> None:
        w = randn(20, 2)
        cubic = CubicGraph(FORMS, torch.zeros_like(CUBICS))
        torch.testing.assert_close(cubic.point(w), QuadraticGraph(FORMS).point(w))
        height = torch.einsum("aijk,ni,nj,nk->na", CUBICS, w, w, w) / 6
        found = CubicGraph(FORMS, CUBICS).point(w)[:, 2:] - cubic.point(w)[:, 2:]
        torch.testing.assert_close(found, height)


class TestRefusals:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: Linear(0),
            lambda: Sphere(2, -1.0),
            lambda: Sphere(0),
            lambda: Cylinder(1.0, dim=1),
            lambda: FlatTorus(()),
            lambda: FlatTorus((1.0, 0.0)),
            lambda: RevolutionTorus(0.5, 0.5),
            lambda: Ellipsoid((1.0, math.nan), 1.0),
            lambda: Helix(1.0, 0.0),
            lambda: Paraboloid((math.inf,)),
        ],
    )
    def test_numbers(self, make) -> None:
        with pytest.raises(TangentValueError, match=r"got|needed"):
            make()

    def test_forms(self) -> None:
        with pytest.raises(TangentValueError, match="forms must be symmetric in their last 2 axes"):
            QuadraticGraph(randn(1, 3, 3))
        with pytest.raises(TangentValueError, match="cubics must be symmetric in their last 3"):
            CubicGraph(FORMS, randn(3, 2, 2, 2))
        with pytest.raises(TangentValueError, match="1 NaN or infinite"):
            QuadraticGraph(torch.tensor([[[math.nan]]]))
        with pytest.raises((TangentValueError, TypeCheckError)):
            QuadraticGraph(randn(1, 3, 2))
        with pytest.raises((TangentValueError, TypeCheckError)):
            CubicGraph(FORMS, CUBICS[:2])
