"""Eigenvalues and eigenvectors of a second-moment matrix, and how far they can be trusted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.geometry.linalg import one_thread

NOISE_FACTOR = 2.0
TINY_SHIFT = 1e-200


@dataclass(frozen=True, eq=False)
class Eigen:
    """``C ~ U diag(values) U^T`` with the trace of ``C`` itself.

    Attributes:
        values: eigenvalues, descending, not negative.
        vectors: orthonormal columns, in the order of the values.
        trace: trace of the matrix that was decomposed.
        rank: number of eigenvalues above the rounding noise of the sums.
        missed: upper bound on what any subspace can capture beyond what ``values`` tell, as a
            share of the trace; None for an exact decomposition.
    """

    values: Float[Tensor, " n"]
    vectors: Float[Tensor, "d n"]
    trace: float
    rank: int
    missed: float | None = None

    def within(self, basis: Float[Tensor, "d k"]) -> Float[Tensor, "k k"]:
        """Return ``Q^T C Q`` for orthonormal columns ``Q``."""
        inside = self.vectors.mT @ basis
        return inside.mT @ (self.values[:, None] * inside)

    def diagonal(self) -> Float[Tensor, " d"]:
        """Return the variance of each coordinate, the diagonal of ``C``."""
        return self.vectors.square() @ self.values


def eigen_of(matrix: Float[Tensor, "d d"], precision: torch.dtype) -> Eigen:
    """Decompose a symmetric float64 matrix whose entries were computed in ``precision``."""
    with one_thread():
        values, vectors = torch.linalg.eigh(matrix)
    values = values.flip(0).clamp(min=0)
    return Eigen(
        values=values,
        vectors=vectors.flip(1),
        trace=float(matrix.trace()),
        rank=_rank(values, matrix.shape[0], precision),
    )


def nystrom_eigen(
    image: Float[Tensor, "d width"],
    omega: Float[Tensor, "d width"],
    trace: float,
    precision: torch.dtype,
) -> Eigen:
    """Decompose a positive semi-definite ``C`` from ``C Omega`` (Tropp et al. 2017, Algorithm 3).

    The Nystrom approximation lies below ``C``, so the trace it lacks bounds what any subspace can
    capture beyond the eigenvalues found: that bound is ``missed``.
    """
    size = float(torch.linalg.matrix_norm(image))
    shift = max(size * torch.finfo(precision).eps, TINY_SHIFT)
    shifted = image + shift * omega
    core = omega.mT @ shifted
    factor = torch.linalg.cholesky((core + core.mT) / 2)
    left = torch.linalg.solve_triangular(factor, shifted.mT, upper=False).mT
    with one_thread():
        vectors, singular, _ = torch.linalg.svd(left, full_matrices=False)
    values = (singular.square() - shift).clamp(min=0)
    return Eigen(
        values=values,
        vectors=vectors,
        trace=trace,
        rank=_rank(values, image.shape[0], precision),
        missed=max(0.0, 1 - float(values.sum()) / trace) if trace > 0 else 0.0,
    )


def _rank(values: Tensor, d: int, precision: torch.dtype) -> int:
    """Count the eigenvalues above what rounding leaves: of the products, then of the solver."""
    relative = NOISE_FACTOR * torch.finfo(precision).eps + d * torch.finfo(values.dtype).eps
    return int((values > float(values[0]) * relative).sum())
