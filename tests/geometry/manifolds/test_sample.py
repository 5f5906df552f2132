"""Samples follow their laws exactly: closed forms, quadrature over the chart, frames, seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor

from tests.geometry.manifolds.known import CUBICS, FORMS, LARGER, MANIFOLDS
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.manifolds import (
    CubicGraph,
    CustomDensity,
    Cylinder,
    Exponential,
    FlatTorus,
    Gaussian,
    Helix,
    Linear,
    Manifold,
    ManifoldSample,
    QuadraticGraph,
    RadialDensity,
    Sphere,
    StudentT,
    Uniform,
    sample,
)

N = 50_000
LIMIT = 1.95 / math.sqrt(N)  # Kolmogorov's distance at the level of 0.1 %
DENSITIES = [Gaussian(0.3), Exponential(0.1), Uniform(0.6), StudentT(0.2, dof=5)]


def distance(values: Tensor, cdf) -> float:
    return float(stats.kstest(values.numpy(), cdf).statistic)


def flat_cdf(density: RadialDensity, m: int):
    """The law of t on R^m, from scipy's own distributions."""
    return {
        Gaussian: lambda t: stats.chi(m).cdf(t / density.scale),
        Exponential: lambda t: stats.gamma(m).cdf(t / density.scale),
        Uniform: lambda t: (t / density.scale).clip(0, 1) ** m,
        StudentT: lambda t: stats.f(m, 5).cdf((t / density.scale) ** 2 / m),
    }[type(density)]


@pytest.mark.parametrize("density", DENSITIES, ids=repr)
class TestClosedForms:
    @pytest.mark.parametrize("m", [1, 2, 6])
    def test_linear(self, density: RadialDensity, m: int) -> None:
        found = sample(Linear(m), density, N, seed=m)
        assert distance(found.t, flat_cdf(density, m)) < LIMIT
        torch.testing.assert_close(found.t, found.r)

    def test_on_a_two_sphere_t_has_the_flat_law_up_to_the_diameter(
        self, density: RadialDensity
    ) -> None:
        """Archimedes: areas of caps are those of discs of the same chord."""
        found = sample(Sphere(2, 0.7), density, N, seed=3)
        cdf = flat_cdf(density, 2)
        assert distance(found.t, lambda t: cdf(t) / cdf(torch.tensor(1.4).numpy())) < LIMIT

    @pytest.mark.parametrize("m", [1, 5])
    def test_on_other_spheres_the_angle_weighs(self, density: RadialDensity, m: int) -> None:
        """t has the density g(t) t^{m-1} (1 - t^2 / 4R^2)^{(m-2)/2}, r the one with sin^{m-1}."""
        found = sample(Sphere(m, 1.0), density, N, seed=4)
        r = torch.linspace(0, math.pi, 200_001, dtype=torch.float64)
        weight = density.log_density(2 * (r / 2).sin(), m).exp() * r.sin() ** (m - 1)
        cumulative = torch.cumulative_trapezoid(weight, r)
        cumulative = torch.cat([cumulative.new_zeros(1), cumulative]) / cumulative[-1]

        def cdf(t):
            return np.interp(2 * np.arcsin(t / 2), r, cumulative)

        assert distance(found.t, cdf) < LIMIT


def test_uniform_on_a_cylinder_fills_elliptic_areas() -> None:
    """The area within chord t is int 2 sqrt(t^2 - 4R^2 sin^2(s/2R)) ds = 8R [E - (1 - k^2) K] R
    with k = t / 2R, complete elliptic integrals of that modulus."""
    radius, reach = 0.5, 0.9
    found = sample(Cylinder(radius), Uniform(reach), N, seed=1)

    def area(t):
        k2 = (t / (2 * radius)) ** 2
        return 16 * radius**2 * (special.ellipe(k2) - (1 - k2) * special.ellipk(k2))

    by_hand = integrate.quad(
        lambda s: 2 * math.sqrt(0.81 - 4 * radius**2 * math.sin(s / (2 * radius)) ** 2),
        -2 * radius * math.asin(0.9),
        2 * radius * math.asin(0.9),
    )[0]
    assert area(0.9) == pytest.approx(by_hand, rel=1e-8)
    assert distance(found.t, lambda t: area(t) / area(reach)) < LIMIT
    assert float(found.t.max()) <= reach


def over_chart(manifold: Manifold, density: RadialDensity) -> tuple[Tensor, Tensor]:
    """Points of a fine grid of the chart and their masses, by automatic differentiation alone.

    Each point is shifted at random in its cell, lest coordinates of rows tie."""
    m, reach = manifold.dim, min(manifold.chart_radius, 3.0)
    cells = 20_000 if m == 1 else 300
    one = torch.arange(cells, dtype=torch.float64)
    w = one[:, None] if m == 1 else torch.cartesian_prod(one, one)
    shift = torch.rand(w.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = (w + shift) / cells * 2 * reach - reach
    w = w[manifold.inside(w)]
    jacobian = torch.func.vmap(torch.func.jacrev(lambda x: manifold.point(x[None])[0]))(w)
    volume = (jacobian.mT @ jacobian).det().clamp(min=0).sqrt()
    x = manifold.point(w)
    mass = density.log_density(x.norm(dim=1), m).exp() * volume
    return x, mass / mass.sum()


def farthest(found: ManifoldSample, x: Tensor, mass: Tensor) -> float:
    """The largest of Kolmogorov's distances of the chord and all coordinates."""
    drawn = (found.x - found.mu) @ torch.cat([found.tangent, found.normal], dim=1)
    steps, distances = (torch.arange(len(drawn)).double() + 0.5) / len(drawn), []
    for sampled, expected in [(found.t, x.norm(dim=1)), *zip(drawn.mT, x.mT, strict=True)]:
        order = expected.argsort()
        cumulative = torch.cat([mass.new_zeros(1), mass[order].cumsum(0)])
        at = torch.searchsorted(expected[order].contiguous(), sampled.sort().values)
        distances.append(float((cumulative[at] - steps).abs().max()))
    return max(distances)


WIDE = Gaussian(0.48)  # near the width at which the smaller manifolds come round again
ON_CHART_LIMIT = LIMIT + 0.002  # what the grid adds


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=repr)
def test_chords_and_every_coordinate_have_the_law_of_the_volume(manifold: Manifold) -> None:
    found = sample(manifold, WIDE, N, seed=5)
    assert farthest(found, *over_chart(manifold, WIDE)) < ON_CHART_LIMIT


@pytest.mark.parametrize(
    "manifold", [m for m in MANIFOLDS if m.dim == 2 and m.ambient > 2], ids=repr
)
def test_the_check_above_refuses_coordinates_taken_for_chords_and_volumes(
    manifold: Manifold,
) -> None:
    found = sample(manifold, WIDE, N, seed=5, measure="chart")
    assert farthest(found, *over_chart(manifold, WIDE)) > 1.2 * ON_CHART_LIMIT


def test_chart_measure_makes_coordinates_of_a_graph_gaussian() -> None:
    found = sample(CubicGraph(FORMS, CUBICS), Gaussian(0.3), N, measure="chart", seed=2)
    w = (found.x - found.mu) @ found.tangent
    for column in w.mT:
        assert distance(column, stats.norm(scale=0.3).cdf) < LIMIT
    assert abs(float(torch.corrcoef(w.mT)[0, 1])) < 4 / math.sqrt(N)


class TestCustomDensity:
    def test_same_profile_same_law(self) -> None:
        custom = CustomDensity(0.3, lambda t: (-t.square() / 2).exp())
        found = sample(Sphere(2, 0.7), custom, N, seed=3)
        assert torch.equal(found.x, sample(Sphere(2, 0.7), Gaussian(0.3), N, seed=3).x)

    def test_a_shell_with_a_bound(self) -> None:
        """g = 1 between 0.5 and 1: in the plane t^2 is uniform between 0.25 and 1."""
        shell = CustomDensity(
            1.0, lambda t: ((t > 0.5) & (t < 1)).double(), bound=torch.ones_like, support=1
        )
        found = sample(Linear(2), shell, N)
        assert distance(found.t.square(), stats.uniform(0.25, 0.75).cdf) < LIMIT
        assert found.acceptance == pytest.approx(0.75, abs=0.02)

    def test_an_increasing_density_without_a_bound(self) -> None:
        with pytest.raises(TangentValueError, match="increases somewhere: .* as its bound"):
            sample(Linear(2), CustomDensity(1.0, lambda t: t * (-t).exp()), 10)

    def test_a_bound_that_is_none(self) -> None:
        wrong = CustomDensity(1.0, lambda t: (-t).exp(), bound=lambda t: 0.5 * (-t).exp())
        with pytest.raises(TangentValueError, match="exceeds its bound by a factor of 1.9"):
            sample(Linear(2), wrong, 1000)

    def test_one_that_never_ends(self) -> None:
        flat = CustomDensity(1.0, torch.ones_like)
        with pytest.raises(TangentValueError, match="does not decay fast enough"):
            sample(Linear(2), flat, 10)
        assert len(sample(FlatTorus((1.0, 1.0)), CustomDensity(0.1, flat_to_one), 10)) == 10


def flat_to_one(t: Tensor) -> Tensor:
    return (t < 1).double()


@pytest.mark.parametrize("manifold", [*MANIFOLDS, *LARGER], ids=repr)
class TestAnswers:
    @staticmethod
    def of(manifold: Manifold, **options) -> ManifoldSample:
        return sample(manifold, Gaussian(0.2), 300, d=manifold.ambient + 3, **options)

    def test_frames_are_orthonormal_and_hold_all_of_the_manifold(self, manifold: Manifold) -> None:
        found = self.of(manifold)
        frame = torch.cat([found.tangent, found.normal], dim=1)
        assert frame.shape == (manifold.ambient + 3, manifold.ambient)
        torch.testing.assert_close(frame.mT @ frame, torch.eye(manifold.ambient).double())
        centred = found.x - found.mu
        torch.testing.assert_close(centred @ frame @ frame.mT, centred)

    def test_parts_add_up_and_are_orthogonal(self, manifold: Manifold) -> None:
        found = self.of(manifold)
        torch.testing.assert_close(found.mu + found.v + found.n, found.x)
        assert float((found.n @ found.tangent).abs().max()) < 1e-12
        torch.testing.assert_close(found.t**2, found.v.square().sum(1) + found.n.square().sum(1))

    def test_normal_parts_are_half_of_ii_near_the_base_point(self, manifold: Manifold) -> None:
        found = sample(manifold, Gaussian(1e-4), 300, d=manifold.ambient + 3)
        w = (found.x - found.mu) @ found.tangent
        expected = torch.einsum("ijc,ni,nj->nc", found.second_form, w, w) / 2
        torch.testing.assert_close(found.n @ found.normal, expected, atol=1e-10, rtol=0)

    def test_geodesic_distances_and_directions(self, manifold: Manifold) -> None:
        found = self.of(manifold)
        if not manifold.geodesic:
            assert found.r is None and found.u is None
            return
        torch.testing.assert_close(found.u.norm(dim=1), torch.ones(300).double())
        assert bool((found.r >= found.t - 1e-12).all())
        frame = torch.cat([found.tangent, found.normal], dim=1)
        again = manifold.point(found.r[:, None] * found.u) @ frame.mT
        torch.testing.assert_close(found.mu + again, found.x)

    def test_noise_is_added_to_the_same_points(self, manifold: Manifold) -> None:
        found, noisy = self.of(manifold), self.of(manifold, noise=0.05)
        assert torch.equal(noisy.clean.x, found.x) and noisy.clean.noise == 0
        shift = (noisy.x - found.x).flatten()
        assert float(shift.std()) == pytest.approx(0.05, rel=4 / math.sqrt(2 * len(shift)))
        assert float(noisy.n.norm()) > float(found.n.norm())

    def test_equal_seeds_equal_results(self, manifold: Manifold) -> None:
        one, same, other = (self.of(manifold, noise=0.1, seed=s) for s in (1, 1, 2))
        assert torch.equal(one.x, same.x) and torch.equal(one.tangent, same.tangent)
        assert not torch.equal(one.x, other.x) and not torch.equal(one.mu, other.mu)


class TestPlacement:
    def test_place_is_of_the_seed_and_not_of_the_number_of_points(self) -> None:
        few, many = (sample(Sphere(2), Gaussian(0.2), n, d=7, seed=3) for n in (5, 900))
        assert torch.equal(few.mu, many.mu) and torch.equal(few.normal, many.normal)

    def test_it_prints_what_it_is(self) -> None:
        text = repr(sample(Helix(1.0, 0.5), Gaussian(0.2), 50, d=6, noise=0.1))
        assert text.startswith("ManifoldSample(50 points of Helix(radius=1.0, rise=0.5) in R^6, ")
        assert "Gaussian(scale=0.2), noise 0.1" in text and "accepted, r known" in text
        graph = sample(QuadraticGraph(FORMS), Gaussian(0.2), 50, measure="chart")
        assert "Gaussian(scale=0.2) of its chart" in repr(graph) and "r None" in repr(graph)

    def test_most_proposals_are_accepted_in_concentrated_laws(self) -> None:
        for manifold in MANIFOLDS:
            assert sample(manifold, Gaussian(0.02), 2000).acceptance > 0.9


class TestRefusals:
    @pytest.mark.parametrize(
        ("manifold", "density"),
        [
            (Sphere(2, 1.0), Gaussian(1.0)),
            (Sphere(2, 1.0), Uniform(2.2)),
            (Cylinder(0.1), Exponential(0.1)),
            (FlatTorus((1.0, 0.2)), Gaussian(0.3)),
        ],
    )
    def test_a_law_too_wide_for_a_closed_manifold(self, manifold, density) -> None:
        with pytest.raises(TangentValueError, match="too wide for .* take a smaller scale"):
            sample(manifold, density, 10)

    def test_the_whole_sphere_is_not_too_wide(self) -> None:
        found = sample(Sphere(2, 1.0), Uniform(2.0), N)
        assert distance(found.t.square() / 4, stats.uniform.cdf) < LIMIT

    def test_a_tail_too_heavy_for_the_volume_of_a_graph(self) -> None:
        with pytest.raises(TangentValueError, match="does not decay fast enough .* lighter tail"):
            sample(QuadraticGraph(FORMS), StudentT(0.1, dof=1), 10)

    def test_arguments(self) -> None:
        with pytest.raises(TangentValueError, match="n must be 1 or more, got 0"):
            sample(Linear(2), Gaussian(1.0), 0)
        with pytest.raises(TangentValueError, match="needs 3 dimensions or more, got d=2"):
            sample(Sphere(2), Gaussian(0.1), 5, d=2)
        for noise in (-0.1, math.nan, math.inf):
            with pytest.raises(TangentValueError, match="noise must be finite and not negative"):
                sample(Linear(2), Gaussian(1.0), 5, noise=noise)

    def test_a_bound_so_loose_that_nothing_is_accepted(self) -> None:
        needle = CustomDensity(
            1.0, lambda t: (t < 1e-4).double(), bound=lambda t: (t <= 1).double(), support=1
        )
        with pytest.raises(TangentValueError, match="were accepted: take a smaller scale"):
            sample(Linear(2), needle, 1000)
