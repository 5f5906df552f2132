"""The regression of normal parts on quadratic tangent coordinates: its columns and its solver."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.energy import upper_p_value
from tl_tangent.geometry.linalg import one_thread

INDEPENDENT = 1e-10  # ratio of singular values below which the points cannot tell columns apart


class Design(NamedTuple):
    """Columns ``[1, w_i,] w_i^2 / 2 and w_i w_j``, of coordinates in units of ``scale``.

    Attributes:
        matrix: one row a point.
        pairs: (i, j) of the quadratic columns, which are the last ones.
    """

    matrix: Float[Tensor, "n p"]
    pairs: Int[Tensor, "pair two"]
    scale: float

    @property
    def columns(self) -> int:
        """Number of coefficients of each normal direction."""
        return self.matrix.shape[1]

    @property
    def diagonal(self) -> Bool[Tensor, " pair"]:
        """Which pairs have i = j."""
        return self.pairs[:, 0] == self.pairs[:, 1]

    def spread(self, values: Tensor, m: int) -> Float[Tensor, "m m d"]:
        """Write one row a pair into a symmetric ``[m, m, d]``."""
        form = values.new_zeros(m, m, values.shape[1])
        i, j = self.pairs.mT
        form[i, j] = values
        form[j, i] = values
        return form


class QuadraticRows(NamedTuple):
    """What gives II from normal parts, and II itself.

    Attributes:
        rows: P, with ``II_ij = sum_k P_k n_k`` over the points k.
        values: II.
        weights: 1 for i = j and 2 for others, which stand for two entries.
    """

    rows: Float[Tensor, "pair n"]
    values: Float[Tensor, "pair d"]
    weights: Float[Tensor, " pair"]

    @classmethod
    def of(cls, solver: Tensor, design: Design, normal: Tensor) -> QuadraticRows:
        """Take the quadratic rows of the solver, back in the unit of the points."""
        rows = solver[design.columns - len(design.pairs) :] / design.scale**2
        weights = torch.where(design.diagonal, 1.0, 2.0).to(rows)
        return cls(rows, rows @ normal, weights)

    def square(self, values: Float[Tensor, "pair d"]) -> float:
        """Return the sum of squares of all m^2 entries, ``||II||^2`` of ``values``."""
        return float((self.weights[:, None] * values.square()).sum())

    def null_square(self, normal: Float[Tensor, "n d"]) -> float:
        """Return the mean of ``||II||^2`` over all permutations of the points' normal parts."""
        n, sums = len(normal), self.rows.sum(1)
        mean = normal.mean(0)
        spread = float((normal - mean).square().sum()) / (n - 1)
        drawn = spread * (self.rows.square().sum(1) - sums.square() / n)
        return float(self.weights @ (sums.square() * float(mean.square().sum()) + drawn))

    def p_value(
        self, normal: Float[Tensor, "n d"], raw: float, permutations: int, seed: int
    ) -> float:
        """Return ``(1 + #{||II||^2 >= raw}) / (1 + B)`` over B random permutations."""
        generator = torch.Generator().manual_seed(seed)
        orders = (torch.randperm(len(normal), generator=generator) for _ in range(permutations))
        return upper_p_value(raw, [self.square(self.rows @ normal[order]) for order in orders])


def quadratic_design(w: Float[Tensor, "n m"], through_centre: bool) -> Design:
    """Return the columns, without the constant and the linear ones if ``through_centre``."""
    scale = max(float(w.square().mean().sqrt()), 1e-300)
    w, m = w / scale, w.shape[1]
    pairs = torch.triu_indices(m, m, device=w.device).mT
    products = w[:, pairs[:, 0]] * w[:, pairs[:, 1]]
    products = torch.where(pairs[:, 0] == pairs[:, 1], products / 2, products)
    below = [] if through_centre else [torch.ones(len(w), 1).to(w), w]
    return Design(torch.cat([*below, products], dim=1), pairs, scale)


def solve(design: Design) -> tuple[Float[Tensor, "p n"], Float[Tensor, " n"]]:
    """Return the pseudoinverse of the design and the leverage of each point.

    Raises:
        TangentValueError: if the columns are linearly dependent.
    """
    with one_thread():
        left, values, right = torch.linalg.svd(design.matrix, full_matrices=False)
    if float(values[-1]) <= INDEPENDENT * float(values[0]):
        raise TangentValueError(
            f"the tangent coordinates do not determine a quadratic form: {len(values)} columns "
            f"have singular values from {float(values[0]):.3g} to {float(values[-1]):.3g}; do the "
            "points fill all tangent directions?"
        )
    return right.mT @ (left / values).mT, left.square().sum(1)
