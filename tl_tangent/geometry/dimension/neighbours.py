"""Distances to the nearest rows of a cloud, by differences and in bounded memory.

``||x||^2 + ||y||^2 - 2 <x, y>`` loses all digits of a distance that is 1e-8 of the norms, and near
neighbours far from the origin are what is asked for here; so each distance is the norm of a
difference, in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_finite
from tl_tangent.geometry.linalg import exact_math

CHUNK_BYTES = 2**27
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
        TangentValueError: if ``k`` is not in [1, n - 1], or an entry is NaN or infinite.
    """
    check_finite("x", x)
    n = len(x)
    if not 1 <= k < n:
        raise TangentValueError(f"{n} rows have from 1 to {n - 1} neighbours, got k={k}")
    with exact_math(x.device):
        x = x.double()
        blocks = torch.arange(n, device=x.device).split(max(1, chunk_bytes // (8 * n)))
        found = [_nearest(x, block, k) for block in blocks]
    return Neighbours(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def distinct_rows(x: Float[Tensor, "n d"]) -> Float[Tensor, "distinct d"]:
    """Return the rows of ``x`` with exact copies of a row taken once, in an order of their own.

    A continuous distribution has no copies. Activations have them where a token sees the same
    context, as the first position of a text does, and they tell nothing of the dimension around.

    Raises:
        TangentValueError: if an entry is NaN or infinite.
    """
    check_finite("x", x)
    return torch.unique(x, dim=0)


def _nearest(x: Tensor, block: Tensor, k: int) -> tuple[Tensor, Tensor]:
    distances = torch.cdist(x[block], x, compute_mode=BY_DIFFERENCE)
    distances[torch.arange(len(block), device=x.device), block] = torch.inf
    values, rows = distances.topk(k, largest=False)
    return values, rows
