"""Intrinsic dimension from k nearest neighbours, by maximum likelihood (Levina & Bickel 2004).

Around a point on a manifold of dimension m with an even density, ``S = sum_{j<k} ln(T_k / T_j)``
has a Gamma distribution of shape k - 1 and rate m. So ``(k - 1) / S`` is the maximum of the
likelihood, ``(k - 2) / S`` is unbiased for m, and ``S / (k - 1)`` is unbiased for 1 / m. The first
two differ by the factor ``(k - 1) / (k - 2)``, 12 % at k = 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.dimension.neighbours import (
    CHUNK_BYTES,
    distinct_rows,
    nearest_neighbours,
)
from tl_tangent.geometry.dimension.two_nn import log_ratios


@dataclass(frozen=True, eq=False)
class LevinaBickel:
    """Estimates around each point, and three averages of them.

    Attributes:
        local: ``(k - 2) / S`` at each distinct point, in the order of
            :func:`~tl_tangent.geometry.dimension.neighbours.distinct_rows`.
        mean: the mean of ``local``; unbiased.
        mean_of_mle: the mean of ``(k - 1) / S``, as the paper writes it first; too large by
            ``(k - 1) / (k - 2)``.
        inverse_mean: ``(k - 1) / mean(S)``, the likelihood of all points together (MacKay &
            Ghahramani 2005); few points with a large ``local`` hardly move it.
        inverse_mean_error: its standard deviation ``inverse_mean / sqrt(n (k - 1))`` if the points
            were independent. They share neighbours: what is found over draws is up to 1.4 times
            that.
        k: number of neighbours.
        n: number of distinct points.
        copies: number of rows left out as copies of another.
    """

    local: Float[Tensor, " n"]
    mean: float
    mean_of_mle: float
    inverse_mean: float
    inverse_mean_error: float
    k: int
    n: int
    copies: int

    def __str__(self) -> str:
        return (
            f"dimension {self.inverse_mean:.3f} by the mean of inverses (at least ± "
            f"{self.inverse_mean_error:.3f}), {self.mean:.3f} by the mean of {self.n} local "
            f"estimates, from {self.k} neighbours"
        )


def levina_bickel(
    x: Float[Tensor, "n d"], k: int = 10, *, chunk_bytes: int = CHUNK_BYTES
) -> LevinaBickel:
    """Estimate the intrinsic dimension of a cloud at the scale of k neighbours.

    A larger k varies less, and sees a larger ball in which the density and the tangent space may
    not be constant. Exact copies of a row count once.

    Args:
        x: the cloud, one point a row.
        k: number of neighbours, 3 or more.
        chunk_bytes: as :func:`~tl_tangent.geometry.dimension.neighbours.nearest_neighbours`.

    Raises:
        TangentValueError: if ``k`` is below 3 or not below the number of distinct rows, entries are
            NaN or infinite, or a point has all k neighbours at one distance.
    """
    if k < 3:
        raise TangentValueError(f"an unbiased estimate takes k of 3 or more, got k={k}")
    distinct = distinct_rows(x)
    distances = nearest_neighbours(distinct, k, chunk_bytes=chunk_bytes).distances
    sums = log_ratios(distances).sum(1)
    alike = int((sums == 0).sum())
    if alike:
        raise TangentValueError(
            f"{alike} of {len(sums)} rows have their {k} neighbours at one distance: use a larger k"
        )
    n, inverse = len(sums), float(sums.reciprocal().mean())
    together = (k - 1) / float(sums.mean())
    return LevinaBickel(
        local=(k - 2) / sums,
        mean=(k - 2) * inverse,
        mean_of_mle=(k - 1) * inverse,
        inverse_mean=together,
        inverse_mean_error=together / math.sqrt(n * (k - 1)),
        k=k,
        n=n,
        copies=len(x) - n,
    )
