"""Directions of a cloud around its centre, and how unevenly they lie.

Three measurements, each with standard errors:

- :func:`direction_tensor`, ``E[u u^T] - I/m``, needs no curvature to be known and tests evenness in
  any dimension. It sees the part of degree 2 only: the directions of a flat torus with equal radii
  pass for even.
- :func:`~tl_tangent.geometry.curvature.harmonics.direction_harmonics`, the second and fourth
  Fourier coefficients of the angle, hold all of the first-order law of a surface (m = 2).
- :func:`direction_response` projects p on the known profile b. If
  ``p = (1 + l (b - bbar)) / |S|`` then ``E[b(u)] - bbar = l Var(b)`` over even directions, so that
  ``l = (mean b(u_i) - bbar) / Var(b)`` is a regression on all of b, in any dimension. The
  prediction is ``l = eta / (1 + eta bbar)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature.local import Direction, Estimate, local_parts
from tl_tangent.geometry.curvature.profile import (
    check_eta,
    check_unit,
    degree_two,
    direction_profile,
    profile_mean,
    profile_variance,
)
from tl_tangent.geometry.curvature.second_form import square_norm

CONSTANT = 1e-12  # variance of a profile, in units of ||II||^4, that is rounding


def projected_directions(
    x: Float[Tensor, "n d"], centre: Float[Tensor, " d"], tangent: Float[Tensor, "d m"]
) -> Float[Tensor, "n m"]:
    """Return the normalised tangent parts of ``x - centre``, in the coordinates of the basis.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.curvature.local.local_parts`, or if a
            point has no tangent part.
    """
    w = local_parts(x, centre, tangent).tangent
    size = w.norm(dim=1, keepdim=True)
    without = int((size == 0).sum())
    if without:
        raise TangentValueError(
            f"{without} of {len(x)} points have no tangent part and so no direction: leave them out"
        )
    return w / size


@dataclass(frozen=True, eq=False)
class DirectionTensor:
    """The second moment of directions less that of even ones.

    Attributes:
        tensor: ``mean u u^T - I/m``.
        error: standard error of each entry.
        statistic: ``n m (m + 2) / 2 ||tensor||^2``, chi-squared under evenness in large samples
            (Bingham's test).
        freedom: its degrees of freedom, ``(m - 1)(m + 2) / 2``.
        n: number of points.
    """

    tensor: Float[Tensor, "m m"]
    error: Float[Tensor, "m m"]
    statistic: float
    freedom: int
    n: int

    @property
    def p_value(self) -> float:
        """The upper tail of chi-squared: how often even directions are as uneven as these."""
        half = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))

    def __repr__(self) -> str:
        return (
            f"DirectionTensor({self.n} directions in R^{len(self.tensor)}, norm "
            f"{float(self.tensor.norm()):.4g}, chi2 {self.statistic:.4g} on {self.freedom} degrees "
            f"of freedom, p {self.p_value:.2g})"
        )


def direction_tensor(u: Float[Tensor, "n m"]) -> DirectionTensor:
    """Return ``mean u u^T - I/m`` of unit rows, and the test of evenness.

    Raises:
        TangentValueError: if rows are not of unit length, m is 1, or there are fewer than 2.
    """
    check_directions(u)
    n, m = u.shape
    u = u.detach().double()
    tensor = u.mT @ u / n - torch.eye(m).to(u) / m
    square = u.square()
    variance = square.mT @ square / n - (u.mT @ u / n).square()
    return DirectionTensor(
        tensor=tensor,
        error=(variance.clamp(min=0) / (n - 1)).sqrt(),
        statistic=n * m * (m + 2) / 2 * float(tensor.square().sum()),
        freedom=(m - 1) * (m + 2) // 2,
        n=n,
    )


def predicted_tensor(
    second_form: Float[Tensor, "m m c"], eta: int | float, *, direction: Direction = "projected"
) -> Float[Tensor, "m m"]:
    """Return ``E[u u^T] - I/m`` under p, ``2 eta B_2 / m(m+2)(1 + eta bbar)`` with b's degree 2.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.curvature.profile.direction_density`.
    """
    m = len(second_form)
    return predicted_response(second_form, eta) * (
        2 * degree_two(second_form, direction) / (m * (m + 2))
    )


def direction_response(
    u: Float[Tensor, "n m"],
    second_form: Float[Tensor, "m m c"],
    *,
    direction: Direction = "projected",
) -> Estimate:
    """Return l of ``p = (1 + l (b - bbar)) / |S|``, to be compared with :func:`predicted_response`.

    Args:
        u: unit directions of the kind that ``direction`` names.
        second_form: II in the same tangent basis.

    Raises:
        TangentValueError: if b is the same in all directions (round spheres, linear spaces), rows
            are not of unit length, or there are fewer than 2.
    """
    check_directions(u)
    variance = profile_variance(second_form, direction=direction)
    if variance <= CONSTANT * square_norm(second_form) ** 2:
        raise TangentValueError(
            "the profile b is the same in all directions, so that no response along it is defined: "
            "take direction_tensor to test that directions are even"
        )
    excess = direction_profile(second_form, u, direction=direction) - profile_mean(second_form)
    error = float(excess.std()) / len(u) ** 0.5
    return Estimate(float(excess.mean()) / variance, error / variance)


def predicted_response(second_form: Float[Tensor, "m m c"], eta: int | float) -> float:
    """Return ``eta / (1 + eta bbar)``.

    Raises:
        TangentValueError: if ``eta`` is negative, or so large that ``1 + eta bbar`` is not
            positive.
    """
    whole = 1 + check_eta(eta) * profile_mean(second_form)
    if whole <= 0:
        raise TangentValueError(
            f"eta={eta:.4g} is too large for the first order: 1 + eta bbar is {whole:.3g}"
        )
    return eta / whole


def check_directions(u: Tensor) -> None:
    check_unit(u)
    if len(u) < 2 or u.shape[1] < 2:
        raise TangentValueError(
            f"directions need 2 or more points and dimensions to vary, got {list(u.shape)}"
        )
