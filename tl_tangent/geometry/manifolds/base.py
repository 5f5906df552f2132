"""What a manifold has to know about itself to be sampled exactly.

Each manifold is given by a chart: coordinates w in R^m, and a point for each, written in the
tangent directions at the base point first and then in the normal ones. The base point is w = 0 and
is mapped to 0; near it the chart is the identity, ``point(w) = (w, II(w, w) / 2) + O(|w|^3)``. One
chart covers all of the manifold but a set of volume 0.

Two bounds make rejection sampling exact. Within ``|w| <= rho``, for every rho,

    ||point(w)|| >= chord_ratio(rho) |w|     and     log_volume(w) <= log_volume_bound(rho).
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@runtime_checkable
class Manifold(Protocol):
    """A manifold of dimension m in R^D around a base point, with its chart."""

    @property
    def dim(self) -> int:
        """The dimension m."""

    @property
    def ambient(self) -> int:
        """The smallest dimension D of a space that holds it."""

    @property
    def second_fundamental_form(self) -> Float[Tensor, "m m codim"]:
        """II at the base point: the normal coordinates of ``II(e_i, e_j)``."""

    @property
    def geodesic(self) -> bool:
        """Whether w are geodesic normal coordinates: |w| the distance, w / |w| the direction."""

    @property
    def chart_radius(self) -> float:
        """The largest |w|; infinite for a manifold without end."""

    @property
    def chord_limit(self) -> float:
        """The chord at which the manifold comes round again; infinite where it does not."""

    def point(self, w: Float[Tensor, "n m"]) -> Float[Tensor, "n D"]:
        """Return the points at w, tangent coordinates before normal ones."""

    def inside(self, w: Float[Tensor, "n m"]) -> Bool[Tensor, " n"]:
        """Return whether w lies in the chart, which covers no point twice."""

    def log_volume(self, w: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """Return the logarithm of the Riemannian volume of a unit of dw."""

    def chord_ratio(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """Return a non-increasing lower bound of ``||point(w)|| / |w|`` in the ball of rho."""

    def log_volume_bound(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """Return a non-decreasing upper bound of the log volume in the ball of rho."""


class Defaults:
    """What holds for a manifold without end that lies flat in its chart."""

    geodesic = False
    chart_radius = math.inf
    chord_limit = math.inf

    def inside(self, w: Float[Tensor, "n m"]) -> Bool[Tensor, " n"]:
        """All of R^m."""
        return torch.ones(len(w), dtype=torch.bool)

    def log_volume(self, w: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """A chart that keeps volumes."""
        return w.new_zeros(len(w))

    def log_volume_bound(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """A chart that never enlarges volumes."""
        return torch.zeros_like(rho)


def sinc(angle: Tensor) -> Tensor:
    """Return ``sin(angle) / angle``."""
    return torch.sinc(angle / math.pi)


def half_circle_ratio(rho: Tensor, radius: float) -> Tensor:
    """Return chord over arc on a circle, ``sinc(rho / 2 radius)``, until half way round."""
    return sinc((rho / (2 * radius)).clamp(max=math.pi / 2))


def hypersurface_form(curvatures: list[float]) -> Float[Tensor, "m m codim"]:
    """Return II of a hypersurface whose tangent basis is along these principal curvatures."""
    return torch.tensor(curvatures, dtype=torch.float64).diag()[:, :, None]
