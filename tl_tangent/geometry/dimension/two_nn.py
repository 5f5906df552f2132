"""Intrinsic dimension from the two nearest neighbours of each point (Facco et al. 2017).

Where the density is even over the ball that holds two neighbours, the ratio ``mu = r_2 / r_1`` of
their distances has ``P(mu <= x) = 1 - x^-m`` on a manifold of dimension m, whatever the density is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.dimension.neighbours import (
    CHUNK_BYTES,
    distinct_rows,
    nearest_neighbours,
)

DISCARD = 0.1


@dataclass(frozen=True)
class TwoNN:
    """Two estimates of one dimension.

    Attributes:
        mle: ``(n - 1) / sum ln mu``, unbiased if the ratios are independent.
        mle_error: its standard deviation ``mle / sqrt(n - 2)`` if they are. Points that are each
            other's neighbours share a distance: what is found over draws is up to 1.4 times that,
            most in low dimension.
        fit: slope through the origin of ``-ln(1 - F)`` over ``ln mu``.
        n: number of distinct points.
        copies: number of rows left out as copies of another.
        first: where the empirical F starts, see :func:`two_nn`.
        discard: share of the largest ratios that ``fit`` leaves out.
    """

    mle: float
    mle_error: float
    fit: float
    n: int
    copies: int
    first: int
    discard: float


def two_nn(
    x: Float[Tensor, "n d"],
    *,
    discard: int | float = DISCARD,
    first: Literal[0, 1] = 1,
    chunk_bytes: int = CHUNK_BYTES,
) -> TwoNN:
    """Estimate the intrinsic dimension of a cloud at the scale of its nearest neighbours.

    Exact copies of a row count once, since their ratio is undefined.

    Args:
        x: the cloud, one point a row.
        discard: share of the largest ratios that the fit leaves out. Those come from sparse
            regions, and the last has no finite ``-ln(1 - F)`` where ``first`` is 1.
        first: the i-th smallest of n ratios has ``F = i / n`` with i from 1 to n, as the paper
            counts; or from 0 to n - 1, as some code does. The two differ by O(1 / n).
        chunk_bytes: as :func:`~tl_tangent.geometry.dimension.neighbours.nearest_neighbours`.

    Raises:
        TangentValueError: if fewer than 3 rows are distinct, entries are NaN or infinite, all
            ratios are 1, or ``discard`` or ``first`` is out of range or leaves nothing to fit.
    """
    distinct = distinct_rows(x)
    n = len(distinct)
    if n < 3:
        raise TangentValueError(f"two neighbours take 3 distinct rows, and {n} of {len(x)} are")
    distances = nearest_neighbours(distinct, 2, chunk_bytes=chunk_bytes).distances
    log_ratio = log_ratios(distances)[:, 0].sort().values
    mle = (n - 1) / float(log_ratio.sum())
    return TwoNN(
        mle=mle,
        mle_error=mle / math.sqrt(n - 2),
        fit=_fit(log_ratio, discard, first),
        n=n,
        copies=len(x) - n,
        first=first,
        discard=float(discard),
    )


def log_ratios(distances: Float[Tensor, "n k"]) -> Float[Tensor, "n smaller"]:
    """Return ``ln(T_k / T_j)`` for each j < k.

    Raises:
        TangentValueError: if a distance is 0, or all distances of all rows are alike.
    """
    zero = int((distances[:, 0] == 0).sum())
    if zero:
        raise TangentValueError(
            f"{zero} of {len(distances)} rows have a neighbour at distance 0, which has no "
            "logarithm: drop copies with distinct_rows, or scale up rows whose squares underflow"
        )
    logs = (distances[:, -1:] / distances[:, :-1]).log()
    if not bool((logs > 0).any()):
        raise TangentValueError(
            f"all {len(distances)} rows have their neighbours at one distance, as on a lattice: "
            "ratios of distances tell no dimension"
        )
    return logs


def _fit(log_ratio: Float[Tensor, " n"], discard: int | float, first: int) -> float:
    """Fit through the origin, as ``sum x y / sum x^2``."""
    n = len(log_ratio)
    kept = int(n * (1 - discard))
    if first not in (0, 1) or not 0 <= discard < 1 or not 2 <= kept <= n - first:
        raise TangentValueError(
            f"first is 0 or 1 and got {first}; discard={discard} keeps {kept} of {n} ratios, and "
            f"a fit takes 2 to {n - 1} of them (n as well if first is 0)"
        )
    x = log_ratio[:kept]
    y = -torch.log1p(-torch.arange(first, first + kept).to(x) / n)
    if float(x[-1]) == 0:
        raise TangentValueError(f"all of the {kept} ratios that are kept are 1: lower discard")
    return float((x * y).sum() / x.square().sum())
