"""Chord t and arc r: the distance through R^d and the one along the manifold.

Along a geodesic of curvature ``k = ||II(u, u)||`` at its start,

    t = r - k^2 r^3 / 24 + k^4 r^5 / 1920 - ...     r = t + k^2 t^3 / 24 + 3 k^4 t^5 / 640 + ...

The third order holds up to O(r^4) on any manifold, the fifth only where geodesics are plane circles
(round spheres); elsewhere the rate of change of the curvature enters at order four.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError

TO_CHORD = {1: 0.0, 3: -1 / 24, 5: 1 / 1920}
TO_ARC = {1: 0.0, 3: 1 / 24, 5: 3 / 640}


def chord_from_arc(
    r: Float[Tensor, "*#n"], curvature: int | float | Float[Tensor, "*#n"], *, order: int = 3
) -> Float[Tensor, "*n"]:
    """Return t from r, up to and with the power ``order``: 1, 3 or 5.

    Args:
        r: distances along the manifold, not negative.
        curvature: k of each direction (see
            :func:`~tl_tangent.geometry.curvature.second_form.normal_curvature`).

    Raises:
        TangentValueError: if ``order`` is another, or r or k is negative or not finite.
    """
    return _series(TO_CHORD, order, "r", r, curvature)


def arc_from_chord(
    t: Float[Tensor, "*#n"], curvature: int | float | Float[Tensor, "*#n"], *, order: int = 3
) -> Float[Tensor, "*n"]:
    """Return r from t, up to and with the power ``order``: 1, 3 or 5.

    Raises:
        TangentValueError: as :func:`chord_from_arc`.
    """
    return _series(TO_ARC, order, "t", t, curvature)


def circle_chord(r: Float[Tensor, "*n"], radius: int | float) -> Float[Tensor, "*n"]:
    """Return ``t = 2R sin(r / 2R)``, exact on circles and spheres.

    Raises:
        TangentValueError: if r is not in 0 ... pi R, half way round.
    """
    _check_range("r", r, math.pi * radius)
    return 2 * radius * (r.double() / (2 * radius)).sin()


def circle_arc(t: Float[Tensor, "*n"], radius: int | float) -> Float[Tensor, "*n"]:
    """Return ``r = 2R arcsin(t / 2R)``, exact on circles and spheres.

    Raises:
        TangentValueError: if t is not in 0 ... 2R.
    """
    _check_range("t", t, 2 * radius)
    return 2 * radius * (t.double() / (2 * radius)).clamp(max=1).asin()


def sphere_parts(
    t: Float[Tensor, "*n"], radius: int | float
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """Return ``||v|| = t sqrt(1 - t^2 / 4R^2)`` and ``||n|| = t^2 / 2R``, exact on a sphere.

    Activations after a norm without affine weights lie on the sphere of ``R = sqrt(d)``: they have
    this normal part whatever a model has learned.

    Raises:
        TangentValueError: as :func:`circle_arc`.
    """
    _check_range("t", t, 2 * radius)
    t = t.double()
    return t * (1 - (t / (2 * radius)).square()).clamp(min=0).sqrt(), t.square() / (2 * radius)


def _series(
    terms: dict[int, float], order: int, name: str, length: Tensor, curvature: int | float | Tensor
) -> Tensor:
    if order not in terms:
        raise TangentValueError(f"order is one of {', '.join(map(str, terms))}, got {order}")
    _check_range(name, length, math.inf)
    k = torch.as_tensor(curvature, dtype=torch.float64)
    _check_range("curvature", k, math.inf)
    length = length.double()
    square = (k * length).square()
    powers = {power: square ** ((power - 1) // 2) for power in terms if 1 < power <= order}
    factor = sum((terms[power] * value for power, value in powers.items()), torch.ones_like(square))
    return length * factor


def _check_range(name: str, value: Tensor, top: float) -> None:
    limit = top * (1 + 1e-12)
    if not bool(((value >= 0) & (value <= limit) & value.isfinite()).all()):
        raise TangentValueError(
            f"{name} must lie in [0, {top:.6g}] and be finite, got {float(value.min()):.4g} to "
            f"{float(value.max()):.4g}"
        )
