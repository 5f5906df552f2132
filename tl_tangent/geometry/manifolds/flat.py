"""Manifolds without inner curvature: products of circles and lines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.geometry.manifolds.base import Defaults, half_circle_ratio
from tl_tangent.geometry.manifolds.checks import check_dim, check_numbers, check_positive


class _CirclesAndLines(Defaults):
    """Circles of given radii, each in a plane of its own, times a linear space.

    The coordinates are arc lengths and keep distances, so that ``r = |w|``, and
    ``t^2 = sum 4 a_i^2 sin^2(w_i / 2 a_i) + sum z_j^2``.
    """

    geodesic = True

    @property
    def _circles(self) -> tuple[int | float, ...]:
        return ()

    @property
    def _lines(self) -> int:
        return 0

    @property
    def _radii(self) -> Float[Tensor, " circle"]:
        return torch.tensor(self._circles, dtype=torch.float64)

    @property
    def ambient(self) -> int:
        """2 for each circle and 1 for each line."""
        return 2 * len(self._circles) + self._lines

    @property
    def second_fundamental_form(self) -> Float[Tensor, "m m codim"]:
        """``1 / a_i`` along circle i, towards its centre."""
        count = len(self._circles)
        size = count + self._lines
        form = torch.zeros(size, size, count, dtype=torch.float64)
        for i, radius in enumerate(self._circles):
            form[i, i, i] = 1 / radius
        return form

    @property
    def chart_radius(self) -> float:  # type: ignore[override]
        """Half way round every circle; infinite with a line."""
        return math.inf if self._lines else math.pi * math.hypot(*self._circles)

    @property
    def chord_limit(self) -> float:  # type: ignore[override]
        """The diameter of the smallest circle."""
        return 2.0 * min(self._circles, default=math.inf)

    def point(self, w: Float[Tensor, "n m"]) -> Float[Tensor, "n D"]:
        """Wind the first coordinates round the circles."""
        a, k = self._radii, len(self._circles)
        angle = w[:, :k] / a
        return torch.cat([a * angle.sin(), w[:, k:], 2 * a * (angle / 2).sin().square()], dim=1)

    def inside(self, w: Float[Tensor, "n m"]) -> Bool[Tensor, " n"]:
        """At most half way round each circle."""
        return (w[:, : len(self._circles)].abs() <= math.pi * self._radii).all(1)

    def chord_ratio(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """That of the smallest circle."""
        return half_circle_ratio(rho, min(self._circles, default=math.inf))


@dataclass(frozen=True)
class Linear(_CirclesAndLines):
    """The linear space R^m: no normal part at all.

    Attributes:
        dim: m.
    """

    dim: int

    def __post_init__(self) -> None:
        check_dim(self.dim)

    @property
    def _lines(self) -> int:
        return self.dim


@dataclass(frozen=True)
class Cylinder(_CirclesAndLines):
    """A circle times R^{m-1}; the first tangent direction is the curved one.

    Attributes:
        radius: of the circle.
        dim: m, 2 or more.
    """

    radius: int | float
    dim: int = 2

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)
        check_dim(self.dim, least=2)

    @property
    def _circles(self) -> tuple[int | float, ...]:
        return (self.radius,)

    @property
    def _lines(self) -> int:
        return self.dim - 1


@dataclass(frozen=True)
class FlatTorus(_CirclesAndLines):
    """A product of m circles in R^2m, the Clifford torus for two: flat inside, curved outside.

    Attributes:
        radii: of the circles, one for each dimension.
    """

    radii: tuple[int | float, ...]

    def __post_init__(self) -> None:
        check_numbers("radii", self.radii)
        check_positive("each radius", *self.radii)

    @property
    def dim(self) -> int:
        """One for each circle."""
        return len(self.radii)

    @property
    def _circles(self) -> tuple[int | float, ...]:
        return self.radii
