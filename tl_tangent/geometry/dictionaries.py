"""Subspaces of the span of a dictionary, whatever found its atoms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_finite
from tl_tangent.geometry.eigen import Eigen, eigen_of
from tl_tangent.geometry.linalg import canonical_signs, full_dtype, one_thread, significant
from tl_tangent.geometry.subspace import TangentSubspace


@dataclass(frozen=True, eq=False)
class Directions:
    """An orthonormal basis and variances, of which the first ones belong to its columns."""

    basis: Float[Tensor, "d rank"]
    variances: Float[Tensor, " n"]


def subspace_from_dictionary(
    dictionary: Float[Tensor, "atom d"],
    mean: Float[Tensor, " d"] | None = None,
    rank: int | None = None,
    *,
    covariance: Float[Tensor, "d d"] | None = None,
    **labels: Any,
) -> TangentSubspace:
    """Make a subspace of the span of any dictionary: an SAE decoder, probes, concept vectors.

    Directions are ordered by the variance that they capture under ``covariance``, or without one
    by the singular values of the dictionary with its atoms scaled to unit norm. Atoms that span
    everything, ordered by variance, give the principal components.

    Args:
        dictionary: one atom a row, of any norm.
        mean: the point around which the subspace splits; zeros if not given.
        rank: how many leading directions to keep; all of the span if not given.
        covariance: second moments of the activations, in squared activation units.
        labels: further arguments of :class:`TangentSubspace`, such as ``site`` or ``metadata``.

    Raises:
        TangentValueError: if the atoms are not finite or span fewer than ``rank`` directions.
    """
    check_finite("dictionary", dictionary)
    dtype = full_dtype(dictionary.dtype)
    atoms = dictionary.detach().double().mT
    if covariance is None:
        basis = canonical_signs(span(atoms, rank)).to(dtype)
        return TangentSubspace(basis, mean, method="dictionary", **labels)
    eigen = eigen_of(covariance.detach().to(atoms), full_dtype(covariance.dtype))
    found = ordered(atoms, eigen, rank)
    return TangentSubspace(
        found.basis.to(dtype),
        mean,
        method="dictionary",
        spectrum=found.variances,
        explained=explained_share(found, eigen),
        **labels,
    )


def ordered(directions: Float[Tensor, "d k"], eigen: Eigen, rank: int | None) -> Directions:
    """Orthonormalise the span of ``directions`` and order it by captured variance.

    Raises:
        TangentValueError: if ``directions`` span fewer than ``rank`` dimensions.
    """
    basis = span(directions)
    if rank is not None and basis.shape[1] < rank:
        raise _too_few(rank, basis.shape[1])
    with one_thread():
        variances, turn = torch.linalg.eigh(eigen.within(basis))
    basis, variances = basis @ turn.flip(1), variances.flip(0).clamp(min=0)
    return Directions(canonical_signs(basis[:, :rank]), variances[:rank])


def explained_share(found: Directions, eigen: Eigen) -> float:
    """Return the share of the trace that the basis captures, in [0, 1]."""
    return min(1.0, float(found.variances[: found.basis.shape[1]].sum()) / eigen.trace)


def span(directions: Float[Tensor, "d k"], rank: int | None = None) -> Float[Tensor, "d rank"]:
    """Return the ``rank`` leading left singular vectors of the columns scaled to unit norm.

    Columns count as dependent at float32 precision; by default all of the span is returned.

    Raises:
        TangentValueError: if the span has fewer dimensions than ``rank``, or none.
    """
    norms = directions.norm(dim=0)
    units = directions[:, norms > 0] / norms[norms > 0]
    if not units.numel():
        raise _too_few(rank or 1, 0)
    with one_thread():
        vectors, values, _ = torch.linalg.svd(units, full_matrices=False)
    found = int(significant(values, max(units.shape), torch.float32).sum())
    if rank is not None and found < rank:
        raise _too_few(rank, found)
    return vectors[:, : rank or found]


def _too_few(rank: int, found: int) -> TangentValueError:
    return TangentValueError(
        f"rank {rank} was asked for, but the directions found span only {found} dimensions: "
        "ask for less, or add atoms that do not depend on each other"
    )
