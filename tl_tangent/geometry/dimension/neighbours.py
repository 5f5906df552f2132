"""Distances to the nearest rows of a cloud, by differences and in bounded memory.

``||x||^2 + ||y||^2 - 2 <x, y>`` loses all digits of a distance that is 1e-8 of the norms, and near
neighbours far from the origin are what is asked for here; so each distance is the norm of a
difference, in float64. The product, forty times as fast, only finds the rows that are worth a
difference, a few more than asked for; a row is done so where its rounding can't have hidden a
nearer one, and held against all others where it could.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_cloud
from tl_tangent.geometry.linalg import exact_math

CHUNK_BYTES = 2**27
SPARE = 8  # more candidates than neighbours
BY_DIFFERENCE = "donot_use_mm_for_euclid_dist"


class Neighbours(NamedTuple):
    """The k nearest other rows of each row, the nearest first: distances, and where they are."""

    distances: Float[Tensor, "n k"]
    rows: Int[Tensor, "n k"]


def nearest_neighbours(
    x: Float[Tensor, "n d"], k: int, *, chunk_bytes: int = CHUNK_BYTES
) -> Neighbours:
    """Return the distances, in float64, from each row to its k nearest other rows.

    A row that has an equal one elsewhere has a neighbour at distance 0 (see :func:`distinct_rows`).

    Args:
        x: the cloud, one point a row.
        k: number of neighbours, below the number of rows.
        chunk_bytes: memory for one block of distances; one row of n distances is the least.

    Raises:
        TangentValueError: if ``k`` is not in [1, n - 1], or x is not finite and ``[n, d]``.
    """
    check_cloud(x)
    n = len(x)
    if not 1 <= k < n:
        raise TangentValueError(f"{n} rows have from 1 to {n - 1} neighbours, got k={k}")
    with exact_math(x.device):
        x = x.double()
        centred = x - x.mean(0)
        row = 8 * max(n, (k + SPARE) * x.shape[1])
        blocks = torch.arange(n, device=x.device).split(max(1, chunk_bytes // row))
        found = [_nearest(x, centred, block, k) for block in blocks]
    return Neighbours(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def distinct_rows(x: Float[Tensor, "n d"]) -> Float[Tensor, "distinct d"]:
    """Return the rows of ``x`` with exact copies of a row taken once, in an order of their own.

    A continuous distribution has no copies. Activations have them where a token sees the same
    context, as the first position of a text does, and they tell nothing of the dimension around.

    Raises:
        TangentValueError: if x is not finite and ``[n, d]``.
    """
    check_cloud(x)
    return torch.unique(x, dim=0)


def _nearest(x: Tensor, centred: Tensor, block: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The nearest rows of each row in a block, among candidates where these are sure to hold them.

    A rounded square is wrong by ``(d + 8) eps (|x| + |y|)^2`` at the most (Higham 2002, section 3).
    """
    n, norms = len(x), centred.norm(dim=1)
    squares = norms[block, None].square() + norms.square() - 2 * (centred[block] @ centred.mT)
    squares[torch.arange(len(block), device=x.device), block] = torch.inf
    rounded, rows = squares.topk(min(k + SPARE, n - 1), largest=False)
    distances, order = (x[block, None] - x[rows]).norm(dim=-1).sort(dim=1)
    values, rows = distances[:, :k], rows.gather(1, order)[:, :k]
    wrong = (x.shape[1] + 8) * torch.finfo(x.dtype).eps * (norms[block] + norms.max()).square()
    hidden = values[:, -1].square() > rounded[:, -1] - wrong
    if k + SPARE < n - 1 and bool(hidden.any()):
        values[hidden], rows[hidden] = _among_all(x, block[hidden], k)
    return values, rows


def _among_all(x: Tensor, block: Tensor, k: int) -> tuple[Tensor, Tensor]:
    distances = torch.cdist(x[block], x, compute_mode=BY_DIFFERENCE)
    distances[torch.arange(len(block), device=x.device), block] = torch.inf
    values, rows = distances.topk(k, largest=False)
    return values, rows
