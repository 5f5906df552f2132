"""A curve with torsion: the helix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.geometry.manifolds.base import Defaults, sinc
from tl_tangent.geometry.manifolds.checks import check_positive


@dataclass(frozen=True)
class Helix(Defaults):
    """``(a cos f, a sin f, h f)`` in R^3; its coordinate is the arc length s.

    With ``w = 1 / sqrt(a^2 + h^2)``: ``t^2 = 4 a^2 sin^2(w s / 2) + (h w s)^2``, and the curvature
    is ``a w^2``. Normals are the principal one and the binormal.

    Attributes:
        radius: a.
        rise: h, the way along the axis for a turn of one radian.
    """

    radius: int | float
    rise: int | float
    geodesic = True

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)
        check_positive("rise", self.rise)

    @property
    def dim(self) -> int:
        """1."""
        return 1

    @property
    def ambient(self) -> int:
        """3."""
        return 3

    @property
    def second_fundamental_form(self) -> Float[Tensor, "m m codim"]:
        """The curvature ``a / (a^2 + h^2)`` along the principal normal."""
        return torch.tensor([[[self.radius * self._turn**2, 0.0]]], dtype=torch.float64)

    def point(self, w: Float[Tensor, "n m"]) -> Float[Tensor, "n D"]:
        """Follow the curve for the length w."""
        angle = self._turn * w
        sideways, upwards = self.radius * angle.sin(), self.rise * angle
        across, along = self._turn * self.radius, self._turn * self.rise
        return torch.cat(
            [
                across * sideways + along * upwards,
                2 * self.radius * (angle / 2).sin().square(),
                across * upwards - along * sideways,
            ],
            dim=1,
        )

    def chord_ratio(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """``w sqrt(a^2 sinc^2(w rho / 2) + h^2)`` for the first turn, then its last value."""
        circle = self.radius * sinc((self._turn * rho / 2).clamp(max=math.pi))
        return self._turn * (circle.square() + self.rise**2).sqrt()

    @property
    def _turn(self) -> float:
        return 1 / math.hypot(self.radius, self.rise)
