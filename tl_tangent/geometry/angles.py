"""Angles between subspaces, and random subspaces in a normal space."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.geometry.linalg import one_thread, orthonormal_columns


def principal_angles(
    first: Float[Tensor, "*#head d rank"], second: Float[Tensor, "*#head d other_rank"]
) -> Float[Tensor, "*shape angle"]:
    """Return the ``min(rank, other_rank)`` principal angles in radians, ascending, in float64.

    Cosines cannot resolve angles below the square root of the float precision, so angles below
    pi/4 come from sines (Knyazev & Argentati 2002).
    """
    large, small = orthonormal_columns(first), orthonormal_columns(second)
    if large.shape[-1] < small.shape[-1]:
        large, small = small, large
    shared = large.mT @ small
    with one_thread():
        cosines = torch.linalg.svdvals(shared).clamp(max=1)
        sines = torch.linalg.svdvals(small - large @ shared).flip(-1).clamp(max=1)
    return torch.where(cosines.square() > 0.5, sines.asin(), cosines.acos())


def overlap(
    first: Float[Tensor, "*#head d rank"], second: Float[Tensor, "*#head d other_rank"]
) -> Float[Tensor, "*shape"]:
    """Return ``||Q1^T Q2||_F^2 / min(rank, other_rank)``, the mean squared cosine of the angles."""
    shared = first.double().mT @ second.double()
    return (shared.square().sum((-2, -1)) / min(shared.shape[-2:])).clamp(max=1)


def haar_normal(
    basis: Float[Tensor, "*head d rank"], generator: torch.Generator
) -> Float[Tensor, "*head d rank"]:
    """Draw a Haar subspace of the same rank in the orthogonal complement of ``basis``.

    The second projection removes what rounding left of ``basis`` after the first.
    """
    gaussian = torch.randn(basis.shape, generator=generator, dtype=basis.dtype)
    for _ in range(2):
        gaussian = orthonormal_columns(gaussian - basis @ (basis.mT @ gaussian))
    return gaussian
