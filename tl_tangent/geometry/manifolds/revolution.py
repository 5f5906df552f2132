"""The torus of revolution, whose Gauss curvature changes its sign."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.geometry.manifolds.base import Defaults, half_circle_ratio, hypersurface_form
from tl_tangent.geometry.manifolds.checks import check_positive


@dataclass(frozen=True)
class RevolutionTorus(Defaults):
    """A tube around a circle in R^3, at its outer equator; the normal points into the tube.

    Coordinates are arc lengths of the base point's two circles: ``w_1`` round the tube, with
    ``k_1 = 1 / tube``, and ``w_2`` along the equator, with ``k_2 = 1 / (radius + tube)``. The
    Gauss curvature is positive here and negative on the inner side.

    Attributes:
        radius: of the circle that the tube follows.
        tube: radius of the tube, the smaller one.
    """

    radius: int | float
    tube: int | float

    def __post_init__(self) -> None:
        check_positive("radius", self.radius - self.tube, self.radius)
        check_positive("tube", self.tube)

    @property
    def dim(self) -> int:
        """2."""
        return 2

    @property
    def ambient(self) -> int:
        """3."""
        return 3

    @property
    def second_fundamental_form(self) -> Float[Tensor, "m m codim"]:
        """``diag(1 / tube, 1 / (radius + tube))``."""
        return hypersurface_form([1 / self.tube, 1 / self._equator])

    @property
    def chart_radius(self) -> float:  # type: ignore[override]
        """Half way round both circles."""
        return math.pi * math.hypot(self.tube, self._equator)

    @property
    def chord_limit(self) -> float:  # type: ignore[override]
        """The chord through the tube to the inner side."""
        return 2.0 * self.tube

    def point(self, w: Float[Tensor, "n m"]) -> Float[Tensor, "n D"]:
        """Go round the tube, then round the axis."""
        around, along = w[:, 0] / self.tube, w[:, 1] / self._equator
        distance = self.radius + self.tube * around.cos()
        inwards = 2 * self.tube * (around / 2).sin().square()
        inwards = inwards + 2 * distance * (along / 2).sin().square()
        return torch.stack([self.tube * around.sin(), distance * along.sin(), inwards], dim=1)

    def inside(self, w: Float[Tensor, "n m"]) -> Bool[Tensor, " n"]:
        """At most half way round each circle."""
        return (w.abs() <= math.pi * w.new_tensor([self.tube, self._equator])).all(1)

    def log_volume(self, w: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """The distance to the axis over that of the equator."""
        return self._nearness(w[:, 0]).log()

    def chord_ratio(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """From ``t^2 = 4 tube^2 sin^2(around/2) + 4 equator distance sin^2(along/2)``."""
        nearest = self._nearness(rho.clamp(max=math.pi * self.tube))
        return half_circle_ratio(rho, self.tube) * nearest.sqrt()

    @property
    def _equator(self) -> float:
        return float(self.radius + self.tube)

    def _nearness(self, around: Tensor) -> Tensor:
        return (self.radius + self.tube * (around / self.tube).cos()) / self._equator
