"""Chord and arc: remainders of the series, exact circles and spheres, tori, the norm's sphere."""

from __future__ import annotations

import math

import pytest
import torch

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import (
    arc_from_chord,
    chord_from_arc,
    circle_arc,
    circle_chord,
    normal_curvature,
    sphere_parts,
)
from tl_tangent.geometry.manifolds import FlatTorus, Gaussian, Helix, Sphere, sample

R = 1.7


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_slope_of(error: torch.Tensor, x: torch.Tensor) -> float:
    return float((error[1] / error[0]).log() / (x[1] / x[0]).log())


class TestSeries:
    @pytest.mark.parametrize(("order", "power"), [(1, 3), (3, 5), (5, 7)])
    def test_order_of_the_remainder_on_a_circle(self, order: int, power: int) -> None:
        at = torch.tensor([0.1, 0.2], dtype=torch.float64) * R
        chord = circle_chord(at, R) - chord_from_arc(at, 1 / R, order=order)
        arc = circle_arc(at, R) - arc_from_chord(at, 1 / R, order=order)
        assert log_slope_of(chord.abs(), at) == pytest.approx(power, abs=0.02)
        assert log_slope_of(arc.abs(), at) == pytest.approx(power, abs=0.02)

    def test_remainders_of_the_third_order(self) -> None:
        """r^5 / 1920 R^4 and 3 t^5 / 640 R^4."""
        at = torch.tensor([0.15], dtype=torch.float64) * R
        chord = circle_chord(at, R) - chord_from_arc(at, 1 / R)
        assert float(chord / at**5) == pytest.approx(1 / (1920 * R**4), rel=1e-3)
        arc = circle_arc(at, R) - arc_from_chord(at, 1 / R)
        assert float(arc / at**5) == pytest.approx(3 / (640 * R**4), rel=2e-2)

    def test_one_way_and_back(self) -> None:
        r = torch.linspace(0, math.pi * R, 50, dtype=torch.float64)
        torch.testing.assert_close(circle_arc(circle_chord(r, R), R), r, atol=1e-7, rtol=1e-7)
        small = r / 100
        again = arc_from_chord(chord_from_arc(small, 1 / R, order=5), 1 / R, order=5)
        torch.testing.assert_close(again, small, atol=1e-12, rtol=0)

    def test_straight_lines_have_one_length(self) -> None:
        r = torch.linspace(0, 9, 10)
        torch.testing.assert_close(chord_from_arc(r, 0.0, order=5), r.double())

    @pytest.mark.parametrize("manifold", [FlatTorus((1.0, 0.6)), Helix(1.0, 0.5)], ids=repr)
    def test_third_order_with_the_curvature_of_each_direction(self, manifold) -> None:
        """The curvature along their geodesics is constant, so that the remainder is of order 5."""
        errors = []
        for scale in (0.02, 0.04):
            found = sample(manifold, Gaussian(scale), 4000, seed=1)
            curvature = normal_curvature(found.second_form, found.u)
            error = (found.t - chord_from_arc(found.r, curvature)).abs()
            errors.append(float(error.mean()))
            straight = float((found.t - found.r).abs().mean())
            assert errors[-1] < 0.01 * straight
        assert math.log2(errors[1] / errors[0]) == pytest.approx(5, abs=0.3)

    def test_torus_formula(self) -> None:
        found = sample(FlatTorus((1.0, 0.6)), Gaussian(0.3), 500, d=9)
        c, s = found.u.mT
        square = 4 * (found.r * c / 2).sin() ** 2 + 4 * 0.36 * (found.r * s / 1.2).sin() ** 2
        torch.testing.assert_close(found.t, square.sqrt(), atol=1e-13, rtol=1e-12)
        kappa = (c**4 + s**4 / 0.36).sqrt()
        torch.testing.assert_close(normal_curvature(found.second_form, found.u), kappa)


class TestSphere:
    def test_identities_of_a_sample(self) -> None:
        """n = t^2 / 2R, v = t sqrt(1 - t^2 / 4R^2), n / v = tan(r / 2R), to rounding."""
        found = sample(Sphere(3, R), Gaussian(0.5), 2000, d=8)
        tangent, normal = sphere_parts(found.t, R)
        torch.testing.assert_close(found.n.norm(dim=1), normal, atol=1e-13, rtol=0)
        torch.testing.assert_close(found.v.norm(dim=1), tangent, atol=1e-13, rtol=0)
        torch.testing.assert_close(normal / tangent, (found.r / (2 * R)).tan(), rtol=1e-9, atol=0)
        torch.testing.assert_close(circle_chord(found.r, R), found.t)

    def test_activations_after_a_norm_lie_on_one(self) -> None:
        """<z - z0, z0 / |z0|> = -|z - z0|^2 / 2 sqrt d: one normal direction, learned or not."""
        d = 64
        z = torch.nn.functional.layer_norm(3 * randn(200, d) + 1, (d,), eps=0)
        away = z[1:] - z[0]
        inwards = -(away @ z[0]) / z[0].norm()
        normal = sphere_parts(away.norm(dim=1), d**0.5)[1]
        torch.testing.assert_close(inwards, normal, atol=1e-12, rtol=0)


class TestRefusals:
    def test_ranges(self) -> None:
        for r in (-1e-3, math.pi * R + 1e-3, math.nan):
            with pytest.raises(TangentValueError, match=r"r must lie in \[0, 5.34071\]"):
                circle_chord(torch.tensor([r]), R)
        with pytest.raises(TangentValueError, match=r"t must lie in \[0, 3.4\]"):
            sphere_parts(torch.tensor([3.5]), R)
        with pytest.raises(TangentValueError, match="curvature must lie in"):
            chord_from_arc(torch.ones(2), -1.0)

    def test_order(self) -> None:
        with pytest.raises(TangentValueError, match="order is one of 1, 3, 5, got 4"):
            arc_from_chord(torch.ones(2), 1.0, order=4)
