"""Validation of the tensors that make a subspace and of the activations it is applied to."""

from __future__ import annotations

from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.linalg import numerical_rank, orthonormality_error

ORTHONORMAL_TOLERANCE = 1e-4


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse integer tensors and NaN or infinite entries."""
    if not tensor.is_floating_point():
        raise TangentValueError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
    bad = int((~tensor.isfinite()).sum())
    if bad:
        raise TangentValueError(f"{name} has {bad} NaN or infinite entries out of {tensor.numel()}")


def check_points(x: Tensor, centre: Tensor, least: int = 1, name: str = "centre") -> None:
    """Refuse fewer points than ``least``, NaN, and a centre of another width."""
    check_finite("x", x)
    check_finite(name, centre)
    if x.ndim != 2 or list(centre.shape) != list(x.shape[1:]):
        raise TangentValueError(
            f"x is [n, d] and a {name} [d], got {list(x.shape)} and {list(centre.shape)}"
        )
    if len(x) < least:
        raise TangentValueError(f"{least} points or more are needed here, got {len(x)}")


def check_cloud(x: Tensor) -> None:
    """Refuse anything but finite points, one a row."""
    check_finite("x", x)
    if x.ndim != 2 or not x.shape[1]:
        raise TangentValueError(f"a cloud is [n, d], one point a row, got {list(x.shape)}")


def check_basis(basis: Tensor) -> None:
    """Refuse anything but finite ``[d, rank]`` or ``[head, d_head, rank]`` with ``rank <= d``."""
    check_finite("basis", basis)
    if basis.ndim not in (2, 3) or 0 in basis.shape:
        raise TangentValueError(
            f"a basis is [d, rank] or [head, d_head, rank], got shape {list(basis.shape)}"
        )
    if basis.shape[-1] > basis.shape[-2]:
        raise TangentValueError(
            f"rank {basis.shape[-1]} exceeds the width {basis.shape[-2]}: columns are directions, "
            "so a dictionary [k, d] must be transposed"
        )


def check_orthonormal(basis: Tensor) -> None:
    """Refuse columns whose Gram matrix is off the identity by more than 1e-4."""
    error = orthonormality_error(basis)
    if error > ORTHONORMAL_TOLERANCE:
        raise TangentValueError(
            f"basis columns are not orthonormal: |Q^T Q - I| reaches {error:.2e}, accepted is "
            f"{ORTHONORMAL_TOLERANCE:.0e}; pass orthonormalize=True to make them so"
        )


def check_full_rank(basis: Tensor) -> None:
    """Refuse columns that are linearly dependent at their own precision."""
    found = numerical_rank(basis)
    if found < basis.shape[-1]:
        raise TangentValueError(
            f"the {basis.shape[-1]} columns span only {found} dimensions and cannot be made "
            "orthonormal: drop dependent columns"
        )


def check_mean(mean: Tensor, basis: Tensor) -> None:
    """Refuse a mean that is not finite or not shaped like one column of each basis."""
    check_finite("mean", mean)
    if mean.shape != basis.shape[:-1]:
        raise TangentValueError(
            f"a basis of shape {list(basis.shape)} needs a mean of shape "
            f"{list(basis.shape[:-1])}, got {list(mean.shape)}"
        )


def check_spectrum(spectrum: Tensor, basis: Tensor) -> None:
    """Refuse a spectrum that is not finite or does not cover every direction of the basis."""
    check_finite("spectrum", spectrum)
    heads, rank = list(basis.shape[:-2]), basis.shape[-1]
    if list(spectrum.shape[:-1]) != heads or spectrum.shape[-1] < rank:
        raise TangentValueError(
            f"a basis of shape {list(basis.shape)} needs a spectrum of shape "
            f"{[*heads, rank]} or longer, got {list(spectrum.shape)}"
        )


def check_activations(x: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse activations that are not floating point or do not end in the axes ``shape``."""
    if not x.is_floating_point():
        raise TangentValueError(f"activations must be floating point, got {x.dtype}")
    if x.ndim < len(shape) or tuple(x.shape[x.ndim - len(shape) :]) != shape:
        raise TangentValueError(
            f"activations here are [..., {', '.join(map(str, shape))}], got {list(x.shape)}"
        )
