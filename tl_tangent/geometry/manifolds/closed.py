"""Round spheres, and ellipsoids around a pole."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.geometry.manifolds.base import Defaults, half_circle_ratio, hypersurface_form, sinc
from tl_tangent.geometry.manifolds.checks import check_dim, check_numbers, check_positive


@dataclass(frozen=True)
class Sphere(Defaults):
    """The round sphere S^m; a circle for m = 1. The normal points to the centre.

    Coordinates are geodesic: ``t = 2R sin(r / 2R)``, and the normal part is ``t^2 / 2R``.

    Attributes:
        dim: m.
        radius: R.
    """

    dim: int
    radius: int | float = 1.0
    geodesic = True

    def __post_init__(self) -> None:
        check_dim(self.dim)
        check_positive("radius", self.radius)

    @property
    def ambient(self) -> int:
        """m + 1."""
        return self.dim + 1

    @property
    def second_fundamental_form(self) -> Float[Tensor, "m m codim"]:
        """``delta_ij / R``."""
        return hypersurface_form([1 / self.radius] * self.dim)

    @property
    def chart_radius(self) -> float:  # type: ignore[override]
        """The distance to the opposite point."""
        return math.pi * self.radius

    @property
    def chord_limit(self) -> float:  # type: ignore[override]
        """The diameter."""
        return 2.0 * self.radius

    def point(self, w: Float[Tensor, "n m"]) -> Float[Tensor, "n D"]:
        """Follow the great circle that starts along w for the length |w|."""
        angle = w.norm(dim=1, keepdim=True) / self.radius
        return torch.cat([sinc(angle) * w, 2 * self.radius * (angle / 2).sin().square()], dim=1)

    def inside(self, w: Float[Tensor, "n m"]) -> Bool[Tensor, " n"]:
        """Up to the opposite point."""
        return w.norm(dim=1) <= self.chart_radius

    def log_volume(self, w: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """``(sin(r/R) / (r/R))^{m-1}``."""
        return (self.dim - 1) * sinc(w.norm(dim=1) / self.radius).clamp(min=0).log()

    def chord_ratio(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """The ratio itself."""
        return half_circle_ratio(rho, self.radius)


@dataclass(frozen=True)
class Ellipsoid(Defaults):
    """``sum (x_i / a_i)^2 + (z / c)^2 = 1`` around the pole z = c; the normal points inwards.

    Coordinates are ``w_i = a_i angle_i``, where the angles are geodesic ones on the unit sphere
    that the axes stretch. Curvatures at the pole are ``k_i = c / a_i^2``.

    Attributes:
        axes: a_i, the half axes across.
        height: c, the half axis to the pole.
    """

    axes: tuple[int | float, ...]
    height: int | float

    def __post_init__(self) -> None:
        check_numbers("axes", self.axes)
        check_positive("each half axis", *self.axes, self.height)

    @property
    def dim(self) -> int:
        """One less than the number of all axes."""
        return len(self.axes)

    @property
    def ambient(self) -> int:
        """m + 1."""
        return self.dim + 1

    @property
    def second_fundamental_form(self) -> Float[Tensor, "m m codim"]:
        """``c / a_i^2`` on the diagonal."""
        return hypersurface_form([self.height / a**2 for a in self.axes])

    @property
    def chart_radius(self) -> float:  # type: ignore[override]
        """Half way round the longest section, in coordinates."""
        return math.pi * max(self.axes)

    @property
    def chord_limit(self) -> float:  # type: ignore[override]
        """The chord to the other pole."""
        return 2.0 * self.height

    def point(self, w: Float[Tensor, "n m"]) -> Float[Tensor, "n D"]:
        """Stretch a point of the unit sphere."""
        angle = self._angle(w)[:, None]
        return torch.cat([sinc(angle) * w, 2 * self.height * (angle / 2).sin().square()], dim=1)

    def inside(self, w: Float[Tensor, "n m"]) -> Bool[Tensor, " n"]:
        """Up to the other pole."""
        return self._angle(w) <= math.pi

    def log_volume(self, w: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """The unit sphere's, times ``c |A^-1 y|`` for the stretching A at the point y."""
        angle = self._angle(w)
        across = sinc(angle)[:, None] * w / self._half.square()
        stretch = self.height**2 * across.square().sum(1) + angle.cos().square()
        return (self.dim - 1) * sinc(angle).clamp(min=0).log() + stretch.log() / 2

    def chord_ratio(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """``sinc^2(f/2) (cos^2(f/2) + (c/a)^2 sin^2(f/2))`` at the largest angle f and axis a."""
        angle = self._largest_angle(rho)
        lost = max(0.0, 1 - (self.height / max(self.axes)) ** 2)
        return sinc(angle / 2) * (1 - lost * (angle / 2).sin().square()).sqrt()

    def log_volume_bound(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """``cos^2 + (c / a)^2 sin^2`` at most, for the shortest axis a."""
        angle = self._largest_angle(rho).clamp(max=math.pi / 2)
        gained = max(0.0, (self.height / min(self.axes)) ** 2 - 1)
        return (gained * angle.sin().square()).log1p() / 2

    @property
    def _half(self) -> Float[Tensor, " m"]:
        return torch.tensor(self.axes, dtype=torch.float64)

    def _angle(self, w: Tensor) -> Tensor:
        return (w / self._half).norm(dim=1)

    def _largest_angle(self, rho: Tensor) -> Tensor:
        return (rho / min(self.axes)).clamp(max=math.pi)
