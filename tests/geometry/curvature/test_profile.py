"""Profiles b and b' against quadrature on real surfaces, their moments, ranges and volumes."""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import (
    direction_density,
    direction_profile,
    extrinsic_volume,
    mean_curvature,
    normal_curvature,
    predicted_harmonics,
    predicted_tensor,
    profile_mean,
    profile_range,
    profile_variance,
    ricci,
    scalar_curvature,
    square_norm,
    surface_profile,
    visibility_index,
)
from tl_tangent.geometry.manifolds import (
    Cylinder,
    Ellipsoid,
    FlatTorus,
    Linear,
    Manifold,
    Paraboloid,
    QuadraticGraph,
    RevolutionTorus,
    Sphere,
)

BOTH = pytest.mark.parametrize("direction", ["geodesic", "projected"])


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(n: int, m: int, seed: int = 0) -> Tensor:
    u = randn(n, m, seed=seed)
    return u / u.norm(dim=1, keepdim=True)


def random_form(m: int, c: int, seed: int = 0) -> Tensor:
    form = randn(m, m, c, seed=seed)
    return (form + form.transpose(0, 1)) / 2


def plane(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], dim=1)


ANGLES = torch.arange(720, dtype=torch.float64) * (2 * math.pi / 720)


class TestInvariants:
    @pytest.mark.parametrize("m", [1, 2, 5])
    def test_sphere(self, m: int) -> None:
        form = Sphere(m, 1.3).second_fundamental_form
        torch.testing.assert_close(ricci(form), (m - 1) / 1.69 * torch.eye(m).double())
        assert scalar_curvature(form) == pytest.approx(m * (m - 1) / 1.69)
        assert float(mean_curvature(form)) == pytest.approx(m / 1.3)

    def test_surfaces_have_twice_the_gauss_curvature(self) -> None:
        for k1, k2 in ((2.0, 0.5), (1.5, -0.7), (1.0, 0.0)):
            form = Paraboloid((k1, k2)).second_fundamental_form
            assert scalar_curvature(form) == pytest.approx(2 * k1 * k2)
            torch.testing.assert_close(ricci(form), k1 * k2 * torch.eye(2).double())

    def test_flat_manifolds_are_flat_inside(self) -> None:
        for manifold in (Cylinder(0.7, dim=3), FlatTorus((1.0, 0.6, 0.3)), Linear(3)):
            assert float(ricci(manifold.second_fundamental_form).abs().max()) < 1e-14

    def test_scalar_is_the_trace_of_ricci_and_bases_do_not_matter(self) -> None:
        form = random_form(4, 3)
        assert scalar_curvature(form) == pytest.approx(float(ricci(form).trace()))
        a, b = (torch.linalg.qr(randn(k, k, seed=k))[0] for k in (4, 3))
        wide = torch.linalg.qr(randn(9, 3))[0]  # normal coordinates as vectors of R^9
        turned = torch.einsum("ik,jl,klc,dc->ijd", a, a, form @ b, wide)
        assert scalar_curvature(turned) == pytest.approx(scalar_curvature(form))
        assert square_norm(turned) == pytest.approx(square_norm(form))
        u = unit(5, 4)
        torch.testing.assert_close(normal_curvature(turned, u @ a.mT), normal_curvature(form, u))

    def test_curvature_of_the_torus_of_revolution(self) -> None:
        form = RevolutionTorus(1.2, 0.5).second_fundamental_form
        assert scalar_curvature(form) == pytest.approx(2 / (0.5 * 1.7))

    @pytest.mark.parametrize(
        ("form", "match"),
        [
            (randn(3, 3, 2), "symmetric in its first two axes"),
            (torch.full((2, 2, 1), math.nan), "4 NaN"),
        ],
    )
    def test_refusals(self, form: Tensor, match: str) -> None:
        with pytest.raises(TangentValueError, match=match):
            mean_curvature(form)


class TestProfile:
    @BOTH
    @pytest.mark.parametrize(("k1", "k2"), [(1.0, 0.0), (2.0, 0.5), (1.5, -0.7), (0.8, 0.8)])
    def test_surfaces_have_their_closed_forms(self, k1: float, k2: float, direction) -> None:
        form = Paraboloid((k1, k2)).second_fundamental_form
        found = direction_profile(form, plane(ANGLES), direction=direction)
        expected = surface_profile(k1, k2, ANGLES, direction=direction)
        torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)

    def test_cylinder_favours_its_curved_direction_in_geodesics_only(self) -> None:
        form = Cylinder(1.0).second_fundamental_form
        c, s = ANGLES.cos(), ANGLES.sin()
        geodesic = direction_profile(form, plane(ANGLES), direction="geodesic")
        torch.testing.assert_close(geodesic, c**4 / 6)
        projected = direction_profile(form, plane(ANGLES), direction="projected")
        torch.testing.assert_close(projected, (c * s) ** 2 / 2)
        assert profile_mean(form) == pytest.approx(1 / 16)

    @BOTH
    @pytest.mark.parametrize("m", [2, 3, 5])
    def test_spheres_favour_no_direction(self, m: int, direction) -> None:
        form = Sphere(m, 1.3).second_fundamental_form
        found = direction_profile(form, unit(50, m), direction=direction)
        torch.testing.assert_close(found, torch.full((50,), (2 - m) / (8 * 1.69)).double())
        assert profile_mean(form) == pytest.approx((2 - m) / (8 * 1.69))
        assert profile_variance(form, direction=direction) < 1e-15

    @BOTH
    @pytest.mark.parametrize(("m", "c"), [(2, 1), (3, 2), (5, 4)])
    def test_mean_variance_and_second_moment_by_sampling(self, m: int, c: int, direction) -> None:
        """Even directions and their negatives; five standard errors."""
        form, n = random_form(m, c), 200_000
        u = unit(n, m, seed=1)
        b = direction_profile(form, u, direction=direction)
        sd = float(b.std())
        assert float(b.mean()) == pytest.approx(profile_mean(form), abs=5 * sd / n**0.5)
        square = (b - b.mean()).square()
        error = 5 * float(square.std()) / n**0.5
        assert float(square.mean()) == pytest.approx(
            profile_variance(form, direction=direction), abs=error
        )
        tensor = (u * (b - b.mean())[:, None]).mT @ u / n
        expected = predicted_tensor(form, 1e-9, direction=direction) * 1e9
        torch.testing.assert_close(tensor, expected, atol=5 * sd / n**0.5, rtol=0)

    @BOTH
    def test_variance_of_surfaces_to_rounding(self, direction) -> None:
        form = random_form(2, 3)
        b = direction_profile(form, plane(ANGLES), direction=direction)
        expected = float((b - b.mean()).square().mean())
        assert profile_variance(form, direction=direction) == pytest.approx(expected, rel=1e-10)

    @BOTH
    def test_density_is_one(self, direction) -> None:
        form = 0.5 * random_form(3, 2)
        p = direction_density(form, unit(100_000, 3), 0.2, direction=direction)
        assert float(p.mean()) * 4 * math.pi == pytest.approx(1, abs=2e-3)
        even = direction_density(form, unit(10, 3), 0.0, direction=direction)
        torch.testing.assert_close(even, torch.full((10,), 1 / (4 * math.pi)).double())

    @BOTH
    def test_harmonics_are_those_of_the_density(self, direction) -> None:
        form, eta = 0.5 * random_form(2, 3), 0.3
        p = 2 * math.pi * direction_density(form, plane(ANGLES), eta, direction=direction)
        found = predicted_harmonics(form, eta, direction=direction)
        series = torch.ones_like(ANGLES)
        for k, a, b in zip((2, 4), found.cosine, found.sine, strict=True):
            series = series + a * (k * ANGLES).cos() + b * (k * ANGLES).sin()
        torch.testing.assert_close(p, series, atol=1e-12, rtol=0)

    def test_refusals(self) -> None:
        form = Cylinder(1.0).second_fundamental_form
        with pytest.raises((TangentValueError, TypeCheckError), match="tangent"):
            surface_profile(1.0, 0.0, ANGLES, direction="tangent")  # type: ignore[arg-type]
        with pytest.raises(TangentValueError, match="length off 1 by 1: divide"):
            direction_profile(form, 2 * plane(ANGLES))
        saddle = Paraboloid((1.0, -1.0)).second_fundamental_form
        with pytest.raises(TangentValueError, match="eta=9 is too large for the first order"):
            direction_density(
                Sphere(4).second_fundamental_form, unit(5, 4), 9.0, direction="geodesic"
            )
        with pytest.raises(TangentValueError, match="eta must be finite and not negative, got -1"):
            direction_density(saddle, plane(ANGLES), -1.0)


def polar(r: Tensor, angle: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(r * angle.cos(), r * angle.sin()), -1)


class TestQuadrature:
    """p(angle) of a Gaussian, integrated on the surface itself, without an expansion."""

    ANGLE = torch.arange(180, dtype=torch.float64) * (2 * math.pi / 180)

    def geodesic(self, s: float) -> Tensor:
        """On the unit cylinder t^2 = 4 sin^2(x / 2) + z^2 at the coordinates x, z."""
        r = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000 * 9 * s
        x, z = polar(r, self.ANGLE[:, None]).unbind(-1)
        square = 4 * (x / 2).sin().square() + z.square()
        p = ((-square / (2 * s**2)).exp() * r * (x.abs() < math.pi)).sum(1)
        return p / p.mean()

    def projected(self, s: float) -> Tensor:
        """With y = sin x: dx = dy / cos x on the near half of the cylinder."""
        r = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000 * 9 * s
        y, z = polar(r, self.ANGLE[:, None]).unbind(-1)
        cosine = (1 - y.square()).clamp(min=1e-9).sqrt()
        square = 2 * (1 - cosine) + z.square()
        p = ((-square / (2 * s**2)).exp() * r / cosine * (y.abs() < 1)).sum(1)
        return p / p.mean()

    @pytest.mark.parametrize(
        ("direction", "spread", "remainder"),
        [("geodesic", 0.10417, 0.0426), ("projected", 0.0625, 0.0254)],
    )
    def test_cylinder(self, direction, spread: float, remainder: float) -> None:
        form = Cylinder(1.0).second_fundamental_form
        law = {"geodesic": self.geodesic, "projected": self.projected}[direction]
        b = direction_profile(form, plane(self.ANGLE), direction=direction) - profile_mean(form)
        for s in (0.05, 0.1):
            eta = 2 * s**2
            p = law(s) - 1
            assert float(p.abs().max()) / eta == pytest.approx(spread, rel=0.02)
            assert float((p - eta * b).abs().max()) / eta**2 == pytest.approx(remainder, rel=0.1)

    def test_the_other_convention_does_not_fit(self) -> None:
        form = Cylinder(1.0).second_fundamental_form
        b = direction_profile(form, plane(self.ANGLE), direction="projected") - 1 / 16
        assert float((self.geodesic(0.1) - 1 - 0.02 * b).abs().max()) > 0.5 * 0.02 * 0.104

    def test_any_surface_in_projected_directions(self) -> None:
        """A quadratic graph of codimension 2, whose chart is made of projected coordinates."""
        forms = random_form(2, 2).permute(2, 0, 1).contiguous()
        manifold = QuadraticGraph(forms)
        errors = []
        for s in (0.025, 0.05):
            r = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000 * 9 * s
            w = polar(r, self.ANGLE[:, None]).reshape(-1, 2)
            square = manifold.point(w).square().sum(1)
            mass = (manifold.log_volume(w) - square / (2 * s**2)).exp()
            p = (mass.reshape(len(self.ANGLE), -1) * r).sum(1)
            expected = direction_density(
                manifold.second_fundamental_form, plane(self.ANGLE), 2 * s**2
            )
            errors.append(float((p / p.mean() - 2 * math.pi * expected).abs().max()))
        assert errors[0] < 0.05 * 2 * 0.025**2
        assert math.log2(errors[1] / errors[0]) == pytest.approx(4, abs=0.2)  # O(eta^2)


class TestVolume:
    def test_flat_torus(self) -> None:
        """(Vol / pi t^2 - 1) / t^2 = .118056 for radii 1 and 0.6, by counting cells of its chart"""
        form = FlatTorus((1.0, 0.6)).second_fundamental_form
        coefficient = extrinsic_volume(form, torch.tensor(1.0)) / math.pi - 1
        assert float(coefficient) == pytest.approx(0.118056, abs=1e-6)

        t = 0.3
        x = torch.linspace(0, 2 * math.asin(t / 2), 200_001, dtype=torch.float64)[:-1]
        left = (t**2 - 4 * (x / 2).sin().square()).clamp(min=0).sqrt()
        half = 1.2 * (left / 1.2).asin()
        exact = 4 * float(torch.trapezoid(torch.cat([half, half.new_zeros(1)]), dx=float(x[1])))
        found = float(extrinsic_volume(form, torch.tensor(t, dtype=torch.float64)))
        assert found == pytest.approx(exact, rel=3 * t**4 * 0.118)
        assert (exact / (math.pi * t**2) - 1) / t**2 == pytest.approx(0.118056, rel=0.05)

    def test_archimedes(self) -> None:
        t = torch.tensor([0.1, 1.0], dtype=torch.float64)
        found = extrinsic_volume(Sphere(2, 0.7).second_fundamental_form, t)
        torch.testing.assert_close(found, math.pi * t.square())


class TestVisibility:
    @BOTH
    @pytest.mark.parametrize(("k1", "k2"), [(1.0, 0.0), (2.0, 0.5), (1.5, -0.7)])
    def test_range_on_surfaces(self, k1: float, k2: float, direction) -> None:
        fine = torch.linspace(0, math.pi, 100_001, dtype=torch.float64)
        b = surface_profile(k1, k2, fine, direction=direction)
        found = profile_range(Paraboloid((k1, k2)).second_fundamental_form, direction=direction)
        assert found == pytest.approx((float(b.min()), float(b.max())), abs=1e-7)

    @BOTH
    def test_range_holds_for_all_directions_and_is_taken(self, direction) -> None:
        form = random_form(4, 3)
        low, high = profile_range(form, direction=direction)
        b = direction_profile(form, unit(300_000, 4), direction=direction)
        width = high - low
        assert low - 1e-9 <= float(b.min()) < low + 0.02 * width
        assert high - 0.02 * width < float(b.max()) <= high + 1e-9
        wide = torch.linalg.qr(randn(40, 3))[0]
        assert profile_range(form @ wide.mT, direction=direction) == pytest.approx((low, high))

    def test_index(self) -> None:
        form = Cylinder(1.0).second_fundamental_form
        assert visibility_index(form, 0.3, direction="geodesic") == pytest.approx(0.05)
        assert visibility_index(form, 0.3, direction="projected") == pytest.approx(0.0375)
        assert visibility_index(form, 0.0) == 0
        sharp = Cylinder(0.5).second_fundamental_form
        assert visibility_index(sharp, 0.3) == pytest.approx(4 * visibility_index(form, 0.3))

    @pytest.mark.parametrize(
        "manifold", [Sphere(2), Sphere(4, 0.5), Linear(3), Sphere(1)], ids=repr
    )
    def test_controls_are_invisible(self, manifold: Manifold) -> None:
        for direction in ("geodesic", "projected"):
            index = visibility_index(manifold.second_fundamental_form, 10.0, direction=direction)
            assert index == pytest.approx(0, abs=1e-10)

    @pytest.mark.parametrize(
        "manifold",
        [Ellipsoid((1.0, 1.6), 1.2), RevolutionTorus(1.2, 0.5), FlatTorus((1.0, 1.0))],
        ids=repr,
    )
    def test_others_are_not(self, manifold: Manifold) -> None:
        for direction in ("geodesic", "projected"):
            assert (
                visibility_index(manifold.second_fundamental_form, 0.1, direction=direction) > 0.005
            )
