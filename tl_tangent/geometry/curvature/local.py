"""A cloud around a centre, split into tangent and normal parts, with everything checked."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import ORTHONORMAL_TOLERANCE, check_finite, check_points
from tl_tangent.geometry.linalg import full_dtype, one_thread, orthonormality_error

Direction = Literal["geodesic", "projected"]
ROUNDING = 4  # of the float resolution at which the points came


class Estimate(NamedTuple):
    """A number from data and its standard error."""

    value: float
    error: float

    def __repr__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.2g}"


class LocalParts(NamedTuple):
    """``x - centre = T w + n``, in float64.

    Attributes:
        tangent: the coordinates w in the basis T.
        normal: the normal parts n, as vectors of R^d.
        chord: the distances t to the centre.
        rounding: size below which a normal part is rounding of the points as they came.
    """

    tangent: Float[Tensor, "d m"]
    normal: Float[Tensor, "n d"]
    chord: Float[Tensor, " n"]
    rounding: float


def local_parts(
    x: Float[Tensor, "n d"], centre: Float[Tensor, " d"], tangent: Float[Tensor, "d m"]
) -> LocalParts:
    """Split points around a centre into their tangent and normal parts.

    A basis that is orthonormal to float32 precision is made exactly so, without turning it.

    Args:
        x: the points, one a row.
        centre: ``[d]``.
        tangent: ``[d, m]``, orthonormal columns.

    Raises:
        TangentValueError: if there are no points, an entry is NaN or infinite, the shapes do not
            fit, m is not in 1 ... d, or the columns are not orthonormal.
    """
    check_points(x, centre)
    d = x.shape[1]
    check_finite("tangent basis", tangent)
    if tangent.ndim != 2 or len(tangent) != d or not 1 <= tangent.shape[1] <= d:
        raise TangentValueError(
            f"points in R^{d} need a tangent basis [{d}, m] with m from 1 to {d}, got "
            f"{list(tangent.shape)}"
        )
    error = orthonormality_error(tangent)
    if error > ORTHONORMAL_TOLERANCE:
        raise TangentValueError(
            f"tangent columns are not orthonormal: |T^T T - I| reaches {error:.2e}, accepted is "
            f"{ORTHONORMAL_TOLERANCE:.0e}; take the Q of their QR decomposition"
        )
    x, centre = x.detach(), centre.detach()
    centred = x.double() - centre.double()
    basis = _polished(tangent.detach().double())
    w = centred @ basis
    eps = torch.finfo(full_dtype(x.dtype)).eps
    size = float(x.double().norm(dim=1).max() + centre.double().norm())
    return LocalParts(w, centred - w @ basis.mT, centred.norm(dim=1), ROUNDING * eps * size)


def check_choice(direction: str) -> None:
    """Refuse anything but the two conventions of a direction."""
    if direction not in ("geodesic", "projected"):
        raise TangentValueError(f"direction is 'geodesic' or 'projected', got {direction!r}")


def _polished(basis: Tensor) -> Tensor:
    """Return the nearest matrix with exactly orthonormal columns."""
    with one_thread():
        left, _, right = torch.linalg.svd(basis, full_matrices=False)
    return left @ right
