"""Moment ratios in closed form against quadrature; shares beyond a chord; refusals."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy import integrate, stats

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.manifolds import (
    CustomDensity,
    Exponential,
    Gaussian,
    RadialDensity,
    StudentT,
    Uniform,
)

DENSITIES = [Gaussian(0.7), Exponential(0.3), Uniform(1.4), StudentT(0.5, dof=6.5)]


def quadrature(density: RadialDensity, dim: int, power: int) -> float:
    """int g(t) t^power dt by scipy, which knows nothing of the closed forms."""

    def integrand(t: float) -> float:
        logs = density.log_density(torch.tensor([t], dtype=torch.float64), dim)
        return math.exp(float(logs)) * t**power

    cuts = [0.0, 1.4, 6.0, 40.0, 3000.0]
    return sum(
        integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-11, limit=200)[0]
        for a, b in pairwise(cuts)
        if a < density.reach
    )


@pytest.mark.parametrize("dim", [1, 2, 5])
@pytest.mark.parametrize("density", DENSITIES, ids=repr)
class TestMomentRatio:
    def test_closed_form_is_the_quotient_of_two_integrals(
        self, density: RadialDensity, dim: int
    ) -> None:
        found = quadrature(density, dim, dim + 1) / quadrature(density, dim, dim - 1)
        # the tail of Student's t beyond the last cut holds 1e-15 of the higher moment
        assert density.eta(dim) == pytest.approx(found, rel=1e-8)

    def test_a_custom_density_of_the_same_profile_integrates_to_the_same(
        self, density: RadialDensity, dim: int
    ) -> None:
        custom = CustomDensity(
            density.scale,
            lambda ratio: density.log_profile(ratio, dim).exp(),
            support=density.reach / density.scale,
        )
        assert custom.eta(dim) == pytest.approx(density.eta(dim), rel=1e-7)

    def test_grows_with_the_square_of_the_scale(self, density: RadialDensity, dim: int) -> None:
        assert density.scaled(3).eta(dim) == pytest.approx(9 * density.eta(dim))


@pytest.mark.parametrize("dim", [1, 2, 7])
def test_share_beyond_a_chord_is_the_tail_of_the_flat_law(dim: int) -> None:
    """chi, gamma, a power, and the F law of ||x||^2 / m for a multivariate t"""
    for chord in (0.2, 1.0, 3.0):
        gaussian = stats.chi(dim).sf(chord / 0.7)
        assert Gaussian(0.7).share_beyond(chord, dim) == pytest.approx(gaussian, rel=1e-8)
        gamma = stats.gamma(dim).sf(chord / 0.3)
        assert Exponential(0.3).share_beyond(chord, dim) == pytest.approx(gamma, rel=1e-8)
        power = max(0.0, 1 - (chord / 1.4) ** dim)
        assert Uniform(1.4).share_beyond(chord, dim) == pytest.approx(power, rel=1e-8)
        ratio = stats.f(dim, 4).sf((chord / 0.5) ** 2 / dim)
        assert StudentT(0.5, 4).share_beyond(chord, dim) == pytest.approx(ratio, rel=1e-8)


class TestRefusals:
    @pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
    def test_scale(self, scale: float) -> None:
        with pytest.raises(TangentValueError, match="scale must be positive and finite, got"):
            Gaussian(scale)

    def test_dimension(self) -> None:
        for density in [*DENSITIES, CustomDensity(1.0, lambda t: (-t).exp())]:
            with pytest.raises(TangentValueError, match="dimension of 1 or more .* got 0"):
                density.eta(0)

    def test_moments_that_do_not_exist(self) -> None:
        with pytest.raises(TangentValueError, match="dof=2 has no finite second moment"):
            StudentT(1.0, dof=2).eta(3)
        heavy = CustomDensity(1.0, lambda t: 1 / (1 + t) ** 4)  # t^{m+1} g has a mean for m < 2
        assert heavy.eta(1) == pytest.approx(1.0, rel=1e-6)  # B(3, 1) / B(1, 3)
        with pytest.raises(TangentValueError, match="does not converge: .* lighter tail"):
            heavy.eta(2)

    def test_a_jump_whose_place_is_not_named(self) -> None:
        def step(t: torch.Tensor) -> torch.Tensor:
            return (t < 0.83).double()

        with pytest.raises(TangentValueError, match="does not settle: .* name the support"):
            CustomDensity(1.0, step).eta(2)
        named = CustomDensity(1.0, step, support=0.83)
        assert named.eta(2) == pytest.approx(0.83**2 / 2)

    @pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
    def test_values_that_are_no_density(self, value: float) -> None:
        density = CustomDensity(1.0, lambda t: torch.full_like(t, value))
        with pytest.raises(TangentValueError, match="must be finite and not negative"):
            density.eta(2)

    def test_a_function_of_another_shape(self) -> None:
        with pytest.raises(TangentValueError, match="one value a point"):
            CustomDensity(1.0, lambda t: t.sum()).eta(2)


def test_it_prints_its_name() -> None:
    assert repr(StudentT(0.5, 4)) == "StudentT(scale=0.5, dof=4)"
    assert repr(CustomDensity(0.5, torch.exp)) == "CustomDensity(scale=0.5, function=exp)"
