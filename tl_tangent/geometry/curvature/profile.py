"""How curvature makes some directions more frequent than others.

A law of density g(t) with respect to the volume has, in the directions u seen from its centre,

    p(u) = (1 / |S^{m-1}|) (1 + eta_g b(u)) / (1 + eta_g bbar),

to first order in eta_g; the next terms are of order eta_g^2 where the manifold is symmetric about
the centre, and of order eta_g^{3/2} elsewhere. What b is depends on what a direction is:

    geodesic    b(u)  = (m + 2) / 24 ||II(u, u)||^2 - Ric(u, u) / 6
    projected   b'(w) = 1/2 sum_i ||II(w, e_i)||^2 - (m + 2) / 8 ||II(w, w)||^2

for the initial direction of the geodesic, and for the normalised tangent part of ``x - mu``, which
is all that activations show. They have one mean, ``bbar = (2 ||II||^2 - ||H||^2) / 8m``, and little
else in common: on a cylinder b is largest along the curved direction, and b' is 0 there.

Both are ``b(u) = a ||II(u, u)||^2 + u^T B u``. Their parts of degree 2 and 4 on the sphere follow
from II in closed form.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature.local import Direction, check_choice
from tl_tangent.geometry.curvature.second_form import (
    along,
    checked,
    mean_curvature,
    ricci,
    square_form,
    square_norm,
)


def direction_profile(
    second_form: Float[Tensor, "m m c"],
    u: Float[Tensor, "n m"],
    *,
    direction: Direction = "projected",
) -> Float[Tensor, " n"]:
    """Return ``b(u)`` or ``b'(u)`` for each unit row u.

    Raises:
        TangentValueError: if II is not ``[m, m, c]``, finite and symmetric, u does not fit it or is
            not of unit length, or ``direction`` is neither.
    """
    a, matrix = coefficients(second_form, direction)
    check_unit(u)
    u = u.double()
    return a * along(second_form, u).square().sum(1) + torch.einsum("ni,ij,nj->n", u, matrix, u)


def profile_mean(second_form: Float[Tensor, "m m c"]) -> float:
    """Return ``bbar = (2 ||II||^2 - ||H||^2) / 8m``, the mean of either b over directions.

    Raises:
        TangentValueError: as :func:`direction_profile`.
    """
    square = float(mean_curvature(second_form).square().sum())
    return (2 * square_norm(second_form) - square) / (8 * len(second_form))


def profile_variance(
    second_form: Float[Tensor, "m m c"], *, direction: Direction = "projected"
) -> float:
    """Return the variance of b over even directions; 0 where curvature has no directional effect.

    In closed form: a function ``u^T B u`` of trace 0 has the mean square ``2 ||B||^2 / m(m+2)``,
    one of degree 4 without a trace, ``24 ||S||^2 / m(m+2)(m+4)(m+6)``.

    Raises:
        TangentValueError: as :func:`direction_profile`.
    """
    form, m = checked(second_form), len(second_form)
    a, _ = coefficients(second_form, direction)
    gram = torch.einsum("ijc,klc->ijkl", form, form)
    whole = (gram.square().sum() + 2 * (gram * gram.transpose(1, 2)).sum()) / 3
    second = _without_trace(_quartic_trace(second_form)) * 6 / (m + 4)
    mean = (
        2 * gram.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).sum()
        + mean_curvature(second_form).square().sum()
    ) / (m * (m + 2))
    fourth = whole - (m + 4) / 6 * second.square().sum() - m * (m + 2) / 3 * mean.square()
    even = 2 * degree_two(second_form, direction).square().sum() / (m * (m + 2))
    top = 24 * fourth.clamp(min=0) / (m * (m + 2) * (m + 4) * (m + 6))
    return float(even + a**2 * top)


def direction_density(
    second_form: Float[Tensor, "m m c"],
    u: Float[Tensor, "n m"],
    eta: int | float,
    *,
    direction: Direction = "projected",
) -> Float[Tensor, " n"]:
    """Return p(u), a density on the unit sphere of R^m.

    Raises:
        TangentValueError: as :func:`direction_profile`, or if ``eta`` is negative or so large that
            the first order leaves no positive density.
    """
    profile = direction_profile(second_form, u, direction=direction)
    weight = 1 + eta * profile
    whole = 1 + check_eta(eta) * profile_mean(second_form)
    if not bool((weight > 0).all()) or whole <= 0:
        raise TangentValueError(
            f"eta={eta:.4g} is too large for the first order: 1 + eta b falls to "
            f"{float(weight.min()):.3g}; it describes concentrated laws"
        )
    area = 2 * math.pi ** (u.shape[1] / 2) / math.gamma(u.shape[1] / 2)
    return weight / (whole * area)


def surface_profile(
    k1: int | float,
    k2: int | float,
    angle: Float[Tensor, "*n"],
    *,
    direction: Direction = "projected",
) -> Float[Tensor, "*n"]:
    """Return b of a surface in R^3 with principal curvatures k1 and k2, at angles from the first.

    ``b = [(k1 cos^2 + k2 sin^2)^2 - k1 k2] / 6`` and
    ``b' = (k1^2 cos^2 + k2^2 sin^2) / 2 - (k1 cos^2 + k2 sin^2)^2 / 2``.

    Raises:
        TangentValueError: if ``direction`` is neither.
    """
    check_choice(direction)
    c, s = angle.double().cos().square(), angle.double().sin().square()
    bent = (k1 * c + k2 * s).square()
    if direction == "geodesic":
        return (bent - k1 * k2) / 6
    return (k1**2 * c + k2**2 * s) / 2 - bent / 2


def extrinsic_volume(second_form: Float[Tensor, "m m c"], t: Float[Tensor, "*n"]) -> Tensor:
    """Return the volume of the manifold within chord t, to the second order (Karp & Pinsky 1989).

    ``omega_m t^m [1 + (2 ||II||^2 - ||H||^2) t^2 / 8(m + 2)]`` with the unit ball's volume omega_m.

    Raises:
        TangentValueError: as :func:`direction_profile`.
    """
    m, t = len(second_form), t.double()
    ball = math.pi ** (m / 2) / math.gamma(m / 2 + 1)
    return ball * t**m * (1 + m / (m + 2) * profile_mean(second_form) * t.square())


def coefficients(second_form: Tensor, direction: Direction) -> tuple[float, Float[Tensor, "m m"]]:
    """Return a and B of ``b(u) = a ||II(u, u)||^2 + u^T B u``.

    Raises:
        TangentValueError: as :func:`direction_profile`.
    """
    check_choice(direction)
    m = len(checked(second_form))
    if direction == "geodesic":
        return (m + 2) / 24, -ricci(second_form) / 6
    return -(m + 2) / 8, square_form(second_form) / 2


def degree_two(second_form: Tensor, direction: Direction) -> Float[Tensor, "m m"]:
    """Return the traceless matrix whose form is the part of b of degree 2 on the sphere.

    Raises:
        TangentValueError: as :func:`direction_profile`.
    """
    a, matrix = coefficients(second_form, direction)
    m = len(second_form)
    return _without_trace(6 * a / (m + 4) * _quartic_trace(second_form) + matrix)


def check_unit(u: Tensor) -> None:
    """Refuse rows that are not finite unit vectors."""
    off = (u.double().norm(dim=1) - 1).abs()
    if not len(u) or not bool((off < 1e-4).all()):
        raise TangentValueError(
            f"directions are one unit vector a row and at least one, got {list(u.shape)} with a "
            f"length off 1 by {float(off.max()) if len(u) else math.nan:.3g}: divide by the norms"
        )


def check_eta(eta: int | float) -> int | float:
    """Refuse a moment ratio that is negative or not finite."""
    if not 0 <= eta < math.inf:
        raise TangentValueError(f"eta must be finite and not negative, got {eta}")
    return eta


def _quartic_trace(second_form: Tensor) -> Float[Tensor, "m m"]:
    """Return ``(<H, II> + 2K) / 3``, the trace of the symmetric tensor of ``||II(u, u)||^2``."""
    return (checked(second_form) @ mean_curvature(second_form) + 2 * square_form(second_form)) / 3


def _without_trace(matrix: Tensor) -> Tensor:
    return matrix - matrix.trace() / len(matrix) * torch.eye(len(matrix)).to(matrix)
