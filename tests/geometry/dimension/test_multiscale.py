"""Exponents over scales on graphs whose tangent, curvature and noise directions are known."""

from __future__ import annotations

import math

import pytest
import torch

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.angles import principal_angles
from tl_tangent.geometry.dimension import MultiscalePca, ball_radii, multiscale_pca
from tl_tangent.geometry.power_law import log_slope

RADII = torch.logspace(math.log10(0.15), math.log10(0.55), 8, dtype=torch.float64)
ORIGIN = torch.zeros(6, dtype=torch.float64)
TURN = torch.linalg.qr(
    torch.randn(6, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
)[0]


def graph(n: int, noise: float, seed: int = 0) -> torch.Tensor:
    """Two tangent directions, two in which the graph bends, two of noise alone."""
    generator = torch.Generator().manual_seed(seed)
    w = 1.2 * torch.rand(n, 2, generator=generator, dtype=torch.float64) - 0.6
    bends = [w[:, 0] ** 2 / 2 + 0.35 * w[:, 1] ** 2, 0.4 * w[:, 0] * w[:, 1]]
    x = torch.cat([w, torch.stack(bends, 1), torch.zeros(n, 2)], 1)
    return x + noise * torch.randn(n, 6, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def noisy() -> MultiscalePca:
    return multiscale_pca(graph(6000, 1e-3) @ TURN.T, ORIGIN, RADII)


class TestKinds:
    def test_are_told_apart(self, noisy: MultiscalePca) -> None:
        assert noisy.kinds() == ("tangent",) * 2 + ("curvature",) * 2 + ("noise",) * 2
        expected = torch.tensor([1, 1, 2, 2, 0, 0], dtype=torch.float64)
        assert float((noisy.exponents - expected).abs().max()) < 0.25
        assert float(noisy.errors.max()) < 0.1

    def test_directions_are_those_of_the_graph(self, noisy: MultiscalePca) -> None:
        for kind, columns in (("tangent", [0, 1]), ("curvature", [2, 3]), ("noise", [4, 5])):
            angles = principal_angles(noisy.directions(kind), TURN[:, columns])
            assert len(angles) == 2 and float(angles[-1]) < 0.1
        assert noisy.directions("higher").shape == (6, 0)

    def test_noise_has_its_standard_deviation(self, noisy: MultiscalePca) -> None:
        assert torch.allclose(noisy.sizes[-1, 4:], torch.tensor(1e-3).double(), rtol=0.1)

    def test_nothing_is_empty_and_rounding_is_nothing(self) -> None:
        found = multiscale_pca(graph(6000, 0) @ TURN.T, ORIGIN, RADII)
        assert found.kinds()[:4] == ("tangent",) * 2 + ("curvature",) * 2
        assert found.kinds()[4:] == ("empty",) * 2
        assert found.exponents[4:].isnan().all() and not found.sizes[:, 4:].any()

    def test_a_twisted_curve_has_a_third_order(self) -> None:
        s = torch.linspace(-1, 1, 40001, dtype=torch.float64)
        helix = torch.stack([s.cos(), s.sin(), s], 1)
        found = multiscale_pca(helix, helix[20000], torch.tensor([0.05, 0.1, 0.2, 0.4]).double())
        assert found.kinds() == ("tangent", "curvature", "higher")
        assert torch.allclose(found.exponents, torch.tensor([1.0, 2, 3]).double(), atol=0.05)

    def test_a_bend_that_crosses_the_noise_is_unclear(self) -> None:
        generator = torch.Generator().manual_seed(0)
        w = 2 * torch.rand(20000, generator=generator, dtype=torch.float64) - 1
        x = torch.stack([w, w**2 / 2], 1)
        x = x + 0.02 * torch.randn(20000, 2, generator=generator, dtype=torch.float64)
        found = multiscale_pca(x, ORIGIN[:2], torch.logspace(-1, -0.1, 8, dtype=torch.float64))
        assert found.kinds() == ("tangent", "unclear")
        assert 0.65 < float(found.exponents[1]) < 0.75 and float(found.errors[1]) < 0.02
        assert float(found.bends[1]) > 1 > 0.2 > abs(float(found.bends[0]))

    def test_tolerance(self) -> None:
        for exponent, bend, kind in (
            (1.3, 0.6, "tangent"),
            (1.3, -0.8, "unclear"),
            (0.6, 0.0, "unclear"),
            (2.0, 0.0, "curvature"),
            (3.8, 0.0, "higher"),
            (2.6, 0.0, "unclear"),
            (-0.3, 0.0, "noise"),
            (-0.6, 0.0, "unclear"),
            (math.nan, math.nan, "empty"),
        ):
            p, b = (torch.tensor([one], dtype=torch.float64) for one in (exponent, bend))
            found = MultiscalePca(RADII, RADII.long(), RADII[:, None], p, p, b, TURN[:, :1])
            assert found.kinds() == (kind,), exponent
            strict = (kind,) if kind == "empty" or exponent in (2.0, 3.8) else ("unclear",)
            assert found.kinds(0.2) == strict


class TestExponents:
    def test_sizes_are_those_of_each_ball(self, noisy: MultiscalePca) -> None:
        x = graph(6000, 1e-3)
        for i in (0, 7):
            inside = x[x.norm(dim=1) <= RADII[i]]
            assert int(noisy.counts[i]) == len(inside)
            values = torch.linalg.eigvalsh(torch.cov(inside.T)).flip(0)
            assert torch.allclose(noisy.sizes[i].square(), values, rtol=1e-8)
        assert torch.allclose(noisy.exponents, log_slope(RADII, noisy.sizes.T).slope)

    def test_units_and_place_do_not_matter(self) -> None:
        x = graph(1500, 1e-3)
        found = multiscale_pca(x, ORIGIN, RADII, groups=5)
        other = multiscale_pca(50 * x @ TURN + 3, ORIGIN + 3, 50 * RADII, groups=5)
        assert torch.allclose(other.exponents, found.exponents, atol=1e-8)
        assert torch.allclose(other.errors, found.errors, atol=1e-8)

    def test_errors_are_the_spread_over_draws_and_residuals_tell_half_of_it(self) -> None:
        draws = [multiscale_pca(graph(1500, 1e-3, seed=s), ORIGIN, RADII) for s in range(30)]
        spread = torch.stack([one.exponents for one in draws]).std(0)
        jackknife = torch.stack([one.errors for one in draws]).mean(0)
        lines = torch.stack([log_slope(RADII, one.sizes.T).error for one in draws]).mean(0)
        assert float((spread / jackknife)[:4].mean()) == pytest.approx(1, abs=0.25)
        assert float((spread / lines)[:4].mean()) > 1.6

    def test_equal_seeds_give_equal_errors(self) -> None:
        x = graph(1500, 1e-3)
        one, two, other = (multiscale_pca(x, ORIGIN, RADII, groups=5, seed=s) for s in (0, 0, 1))
        assert torch.equal(one.errors, two.errors) and not torch.equal(one.errors, other.errors)
        assert torch.equal(one.exponents, other.exponents)

    def test_no_more_directions_than_the_smallest_ball_tells(self) -> None:
        x = graph(60, 1e-3)
        radii = torch.tensor([0.2, 0.4, 0.8], dtype=torch.float64)
        found = multiscale_pca(x, ORIGIN, radii, groups=60)  # a point each
        assert found.sizes.shape[1] == found.basis.shape[1] == min(6, int(found.counts[0]) - 2)
        assert found.sizes.shape[1] < 6

    def test_prints(self, noisy: MultiscalePca) -> None:
        shown = str(noisy).splitlines()
        assert len(shown) == 7 and shown[0].startswith("t from 0.15 (") and "curvature" in shown[3]


class TestRadii:
    def test_hold_what_was_asked_for(self) -> None:
        x = graph(500, 1e-3)
        radii = ball_radii(x, ORIGIN, 50, 400, 5)
        counts = [int((x.norm(dim=1) <= t).sum()) for t in radii]
        assert counts[-1] == 400 and counts[0] in (49, 50)
        assert torch.allclose(radii[1:] / radii[:-1], radii[1] / radii[0])

    def test_refused(self) -> None:
        x = graph(50, 0)
        with pytest.raises(TangentValueError, match="fewest=40 and most=60"):
            ball_radii(x, ORIGIN, 40, 60)
        with pytest.raises(TangentValueError, match="as large as that of 9"):
            ball_radii(x[:1].expand(9, 6), ORIGIN, 2, 9)
        with pytest.raises(TangentValueError, match="3 or more ascending positive radii, got"):
            multiscale_pca(x, ORIGIN, RADII[:2])
        with pytest.raises(TangentValueError, match="3 or more ascending"):
            multiscale_pca(x, ORIGIN, RADII.flip(0))
        with pytest.raises(TangentValueError, match="2 groups or more, got 1"):
            multiscale_pca(x, ORIGIN, RADII, groups=1)
        with pytest.raises(TangentValueError, match="smallest ball holds 0 points"):
            multiscale_pca(x, ORIGIN, torch.tensor([1e-6, 0.5, 1.0]).double())
