"""Validation of the numbers that a density or a manifold is made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_finite

SYMMETRY = 1e-9  # of the largest entry


def check_positive(name: str, *values: int | float) -> None:
    """Refuse anything but positive finite numbers."""
    for value in values:
        if not 0 < value < math.inf:
            raise TangentValueError(f"{name} must be positive and finite, got {value}")


def check_dim(dim: int, least: int = 1) -> None:
    """Refuse a dimension below the least."""
    if dim < least:
        raise TangentValueError(f"a dimension of {least} or more is needed here, got {dim}")


def check_forms(name: str, forms: Tensor, degree: int) -> None:
    """Refuse anything but one finite symmetric form of this degree a normal direction."""
    check_finite(name, forms)
    sizes = set(forms.shape[1:])
    if forms.ndim != degree + 1 or len(sizes) != 1 or 0 in forms.shape:
        axes = ", ".join(["codim", *["m"] * degree])
        raise TangentValueError(f"{name} must be [{axes}], got {list(forms.shape)}")
    for axis in range(1, degree):
        error = float((forms - forms.transpose(axis, axis + 1)).abs().max())
        if error > SYMMETRY * float(forms.abs().max()):
            raise TangentValueError(
                f"{name} must be symmetric in their last {degree} axes: exchanging two of them "
                f"changes an entry by {error:.3g}; average over the exchanges first"
            )


def check_numbers(name: str, values: tuple[int | float, ...]) -> None:
    """Refuse an empty tuple, NaN and infinite numbers."""
    if not values or not bool(torch.tensor(values, dtype=torch.float64).isfinite().all()):
        raise TangentValueError(f"{name} must be one finite number or more, got {values}")
