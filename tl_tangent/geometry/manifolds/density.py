"""Densities g(t) of the distance t to a base point, with respect to the volume of a manifold.

A density is known up to a factor: a law of points y has the density ``g(||y - mu||)``. Its scale
sets how concentrated it is, ``g(t) = profile(t / scale)``, and its moment ratio is, in a manifold
of dimension m and with ``M_j = int g(t) t^j dt``,

    eta_g = M_{m+1} / M_{m-1},

the mean squared distance to mu where the manifold is flat. It grows with the square of the scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.manifolds.checks import check_dim, check_positive
from tl_tangent.geometry.manifolds.quadrature import moment_ratio, share_beyond


@dataclass(frozen=True)
class RadialDensity(ABC):
    """A non-increasing density g(t), or one below a non-increasing bound.

    Attributes:
        scale: unit of t; a smaller one concentrates the law at the base point.
    """

    scale: int | float

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    @abstractmethod
    def log_profile(self, ratio: Float[Tensor, "*t"], dim: int) -> Float[Tensor, "*t"]:
        """Return log g at ``t = ratio * scale``, up to a constant; only Student's t uses ``dim``"""

    def log_profile_bound(self, ratio: Float[Tensor, "*t"], dim: int) -> Float[Tensor, "*t"]:
        """Return a non-increasing function that :meth:`log_profile` never exceeds."""
        return self.log_profile(ratio, dim)

    @property
    def reach(self) -> float:
        """The largest t at which the density is not zero."""
        return math.inf

    def log_density(self, t: Float[Tensor, "*t"], dim: int) -> Float[Tensor, "*t"]:
        """Return log g(t), up to a constant."""
        return self.log_profile(t.double() / self.scale, dim)

    def eta(self, dim: int) -> float:
        """Return the moment ratio ``M_{m+1} / M_{m-1}``, in closed form where it has one.

        Raises:
            TangentValueError: if ``dim`` is not positive or the moments do not exist.
        """
        check_dim(dim)
        unit = moment_ratio(lambda ratio: self.log_profile(ratio, dim), dim, self._unit_reach)
        return unit * self.scale**2

    def share_beyond(self, chord: int | float, dim: int) -> float:
        """Return the share of the flat law, of density ``g(t) t^{m-1}``, with t beyond ``chord``.

        Raises:
            TangentValueError: if the density has no finite mass in ``dim`` dimensions.
        """
        return share_beyond(
            lambda ratio: self.log_profile(ratio, dim), dim, self._unit_reach, chord / self.scale
        )

    def scaled(self, factor: int | float) -> RadialDensity:
        """Return the same density with ``factor`` times the scale."""
        return replace(self, scale=self.scale * factor)

    @property
    def _unit_reach(self) -> float:
        return self.reach / self.scale


@dataclass(frozen=True)
class Gaussian(RadialDensity):
    """``exp(-t^2 / 2 s^2)``, with ``eta = m s^2``."""

    def log_profile(self, ratio: Float[Tensor, "*t"], dim: int) -> Float[Tensor, "*t"]:
        """Return ``-ratio^2 / 2``."""
        return -ratio.square() / 2

    def eta(self, dim: int) -> float:
        """Return ``m s^2``."""
        check_dim(dim)
        return dim * self.scale**2


@dataclass(frozen=True)
class Exponential(RadialDensity):
    """``exp(-t / s)``, with ``eta = m (m + 1) s^2``."""

    def log_profile(self, ratio: Float[Tensor, "*t"], dim: int) -> Float[Tensor, "*t"]:
        """Return ``-ratio``."""
        return -ratio

    def eta(self, dim: int) -> float:
        """Return ``m (m + 1) s^2``."""
        check_dim(dim)
        return dim * (dim + 1) * self.scale**2


@dataclass(frozen=True)
class Uniform(RadialDensity):
    """1 up to the distance s and 0 beyond, with ``eta = m s^2 / (m + 2)``."""

    def log_profile(self, ratio: Float[Tensor, "*t"], dim: int) -> Float[Tensor, "*t"]:
        """Return 0, and -inf beyond the ball."""
        return torch.where(ratio <= 1, 0.0, -math.inf).to(ratio)

    @property
    def reach(self) -> float:
        """The scale."""
        return float(self.scale)

    def eta(self, dim: int) -> float:
        """Return ``m s^2 / (m + 2)``."""
        check_dim(dim)
        return dim * self.scale**2 / (dim + 2)


@dataclass(frozen=True)
class StudentT(RadialDensity):
    """``(1 + t^2 / nu s^2)^{-(nu + m) / 2}``, with ``eta = m s^2 nu / (nu - 2)``.

    Attributes:
        dof: nu, degrees of freedom; eta is finite above 2.
    """

    dof: int | float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("dof", self.dof)

    def log_profile(self, ratio: Float[Tensor, "*t"], dim: int) -> Float[Tensor, "*t"]:
        """Return ``-(nu + m) / 2 log(1 + ratio^2 / nu)``."""
        return -(self.dof + dim) / 2 * (ratio.square() / self.dof).log1p()

    def eta(self, dim: int) -> float:
        """Return ``m s^2 nu / (nu - 2)``.

        Raises:
            TangentValueError: if there are 2 degrees of freedom or fewer.
        """
        check_dim(dim)
        if self.dof <= 2:
            raise TangentValueError(
                f"Student's t of dof={self.dof} has no finite second moment: take more than 2"
            )
        return dim * self.scale**2 * self.dof / (self.dof - 2)


@dataclass(frozen=True)
class CustomDensity(RadialDensity):
    """Any ``function(t / scale)``; its moments are integrated numerically.

    Attributes:
        function: takes a float64 tensor of ratios and returns one of the same shape, not negative.
        bound: a non-increasing function that it never exceeds. By default itself: it then has to be
            non-increasing, or samplers refuse it. Sampling is exact with any valid bound, and fast
            with a close one.
        support: the largest ratio at which it is not zero. Name it where there is a jump.
    """

    function: Callable[[Tensor], Tensor]
    bound: Callable[[Tensor], Tensor] | None = None
    support: int | float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.support > 0:
            raise TangentValueError(f"support must be positive, got {self.support}")

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"CustomDensity(scale={self.scale}, function={name})"

    @property
    def reach(self) -> float:
        """The support, in the unit of t."""
        return self.support * self.scale

    def log_profile(self, ratio: Float[Tensor, "*t"], dim: int) -> Float[Tensor, "*t"]:
        """Return the logarithm of the function, -inf beyond its support.

        Raises:
            TangentValueError: if it returns anything but finite values that are not negative.
        """
        return self._log(self.function, "function", ratio)

    def log_profile_bound(self, ratio: Float[Tensor, "*t"], dim: int) -> Float[Tensor, "*t"]:
        """Return the logarithm of the bound, -inf beyond the support.

        Raises:
            TangentValueError: as :meth:`log_profile`.
        """
        return self._log(self.bound or self.function, "bound or function", ratio)

    def _log(self, function: Callable[[Tensor], Tensor], name: str, ratio: Tensor) -> Tensor:
        found = function(ratio)
        if found.shape != ratio.shape or not bool(((found >= 0) & found.isfinite()).all()):
            raise TangentValueError(
                f"the {name} of a density must be finite and not negative, one value a point: it "
                f"returned {list(found.shape)} from {list(ratio.shape)}, "
                f"lowest {float(found.min()):.3g}, highest {float(found.max()):.3g}"
            )
        return torch.where(ratio <= self.support, found.to(ratio).log(), -math.inf)
