"""Orders of growth: how a size, and each term of a score, scales with a radius t.

Tokens are put in bins of t. Where a size follows ``c t^p``, its logarithm is a line of slope p in
``log t``. The size of a term in a bin is its root mean square over all pairs of a query and a key
of that bin, which takes no map of scores: with ``A = E[a a^T]`` over queries and ``B = E[b b^T]``
over keys, ``E[(a . b)^2] = tr(A B)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.score_terms import PARTS, TERMS, SideParts

CROSS, TANGENT_NORM, NORMAL_NORM = "cross", "tangent_norm", "normal_norm"
ROUNDING = 1e-12  # relative spread of an x below which all are equal
SIZES: tuple[str, ...] = (*TERMS, CROSS, TANGENT_NORM, NORMAL_NORM)


def orders(normal: int) -> dict[str, int]:
    """Return the order in t of each of :data:`SIZES` where ``||v|| ~ t`` and ``||n|| ~ t^normal``.

    2 is a curved manifold, a graph over its tangent space that starts with a quadratic form; 1 is a
    flat cloud with noise around it.
    """
    of_part = {"mean": 0, "tangent": 1, "normal": normal}
    terms = {f"{a}_{b}": of_part[a] + of_part[b] for a in PARTS for b in PARTS}
    return {**terms, CROSS: 1 + normal, TANGENT_NORM: 1, NORMAL_NORM: normal}


class LogSlope(NamedTuple):
    """Slope of ``log y`` in ``log x``, and its standard error (NaN from fewer than 3 points)."""

    slope: Float[Tensor, "*axes"]
    error: Float[Tensor, "*axes"]


def log_slope(
    x: Float[Tensor, "*#axes point"],
    y: Float[Tensor, "*#axes point"],
    counted: Bool[Tensor, "*#axes point"] | None = None,
) -> LogSlope:
    """Fit ``log y = slope * log x + intercept`` by ordinary least squares, in float64.

    The standard error is the textbook one of a simple regression, ``sqrt(s^2 / sum (log x - mean)
    ^2)`` with ``s^2`` the sum of squared residuals over ``points - 2``.

    Args:
        x, y: positive, in any unit; the last axis holds the points.
        counted: False at points to leave out; by default all count.

    Returns:
        One slope for each of the leading axes; NaN where a counted y is 0 or all x are equal up
        to rounding.

    Raises:
        TangentValueError: fewer than 2 points.
    """
    if x.shape[-1] < 2:
        raise TangentValueError(f"a slope needs 2 points or more, and there are {x.shape[-1]}.")
    if counted is None:
        counted = torch.ones_like(x, dtype=torch.bool)
    x, y, counted = torch.broadcast_tensors(x.double(), y.double(), counted)
    n = counted.sum(-1, keepdim=True)
    log_x, log_y = (_centred(torch.where(counted, z, 1.0).log(), counted, n) for z in (x, y))
    spread = log_x.square().sum(-1)
    spread = torch.where(spread > n.squeeze(-1) * ROUNDING**2, spread, torch.nan)
    slope = (log_x * log_y).sum(-1) / spread
    residual = (log_y - slope[..., None] * log_x).square().sum(-1)
    freedom = (n.squeeze(-1) - 2).double()
    error = (residual / freedom / spread).sqrt()
    return LogSlope(slope, torch.where(freedom > 0, error, torch.nan))


def _centred(z: Tensor, counted: Tensor, n: Tensor) -> Tensor:
    return torch.where(counted, z - z.sum(-1, keepdim=True) / n, 0.0)


def quantile_edges(t: Float[Tensor, "group token"], n_bins: int) -> Float[Tensor, "group edge"]:
    """Return the ``n_bins - 1`` inner edges of bins that hold equally many tokens.

    An edge lies halfway between two neighbours. Where many tokens share one t, bins may be empty.
    """
    ordered = t.sort(dim=-1).values
    first = torch.arange(1, n_bins, device=t.device) * t.shape[-1] // n_bins
    return (ordered[:, first - 1] + ordered[:, first]) / 2


def different_bins(t: Float[Tensor, "group token"], n_bins: int) -> int:
    """Count the bins whose median t is above that of the one before, the smallest count of groups.

    Relative differences below 1e-4 do not count: they may be float32 noise.
    """
    middle = torch.arange(1, 2 * n_bins, 2, device=t.device) * t.shape[-1] // (2 * n_bins)
    medians = t.sort(dim=-1).values[:, middle]
    return 1 + int((medians[:, 1:] > medians[:, :-1] * (1 + 1e-4)).sum(-1).min())


MOMENTS = (("mean", "mean"), ("tangent", "tangent"), ("normal", "normal"), ("tangent", "normal"))


@dataclass(frozen=True)
class BinMoments:
    """Second moments over the tokens of each bin, in float64; those of two batches add up.

    Attributes:
        counts: number of tokens; all heads share the bins where there is one group.
        squares: sums of ``t^2``, ``||v||^2`` and ``||n||^2``.
        query, key: sums of ``a b^T`` for the parts (a, b) in :data:`MOMENTS`.
    """

    counts: Int[Tensor, "group bin"]
    squares: Float[Tensor, "3 group bin"]
    query: Float[Tensor, "moment bin head d_head d_head"]
    key: Float[Tensor, "moment bin kv_head d_head d_head"]

    def __add__(self, other: BinMoments) -> BinMoments:
        return BinMoments(
            counts=self.counts + other.counts,
            squares=self.squares + other.squares,
            query=self.query + other.query,
            key=self.key + other.key,
        )

    def sizes(self) -> BinSizes:
        """Return the root mean squares; NaN in empty bins."""
        heads, n_bins = self.query.shape[2], self.counts.shape[-1]
        t, *norms = (self.squares / self.counts).sqrt().expand(3, heads, n_bins)
        sizes = torch.stack([*self._terms(), *norms])
        return BinSizes(self.counts.expand(heads, n_bins), t, sizes)

    def _terms(self) -> list[Float[Tensor, "head bin"]]:
        """The nine terms and their cross sum, over all pairs of a bin.

        The product of tangent_normal and normal_tangent has the mean
        ``E[(q_v . k_n) (q_n . k_v)] = tr(E[q_v q_n^T] E[k_v k_n^T])``.
        """
        n = self.counts.mT[..., None, None].double()
        query, key = self.query / n, self.key / n
        key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
        squares = [(a * b).sum((-2, -1)) for a in query[:3] for b in key[:3]]
        by_name = dict(zip(TERMS, squares, strict=True))
        both = (query[3] * key[3].mT).sum((-2, -1))
        cross = by_name["tangent_normal"] + by_name["normal_tangent"] + 2 * both
        return [x.clamp(min=0).sqrt().mT for x in (*squares, cross)]


@dataclass(frozen=True)
class BinSizes:
    """Sizes in bins of t.

    Attributes:
        counts: number of tokens in each bin.
        t: root mean square of t in each bin, in the unit of the activations.
        sizes: root mean square of each of :data:`SIZES`; norms are the same in all heads that share
            a subspace.
    """

    counts: Int[Tensor, "head bin"]
    t: Float[Tensor, "head bin"]
    sizes: Float[Tensor, "size head bin"]

    def slopes(self) -> LogSlope:
        """Return slopes and their errors ``[size, head]``, over the bins that are not empty."""
        return log_slope(self.t, self.sizes, self.counts > 0)


def bin_moments(
    query: SideParts,
    key: SideParts,
    taken: Bool[Tensor, "_ pos"],
    norms: Float[Tensor, "3 group token"],
    edges: Float[Tensor, "group edge"],
) -> BinMoments:
    """Sum second moments over the tokens of each bin.

    Args:
        query, key: the parts of both sides; keys may have fewer heads.
        taken: which tokens count.
        norms: t, ``||v||`` and ``||n||`` of those, row by row; one group for all heads, or one a
            head (then keys have as many heads as queries).
        edges: of the bins of t, without the outer ones.
    """
    bins = torch.searchsorted(edges, norms[0].contiguous())
    inside = [bins == one for one in range(edges.shape[-1] + 1)]
    return BinMoments(
        counts=torch.stack([one.sum(-1) for one in inside], dim=-1),
        squares=torch.stack([(norms.double().square() * one).sum(-1) for one in inside], dim=-1),
        query=_side_moments(query, taken, inside),
        key=_side_moments(key, taken, inside),
    )


def _side_moments(
    parts: SideParts, taken: Tensor, inside: list[Tensor]
) -> Float[Tensor, "moment bin head d_head d_head"]:
    rows = {name: _rows(part, parts.tangent, taken) for name, part in parts._asdict().items()}
    found = [torch.stack([_products(rows[a], rows[b], one) for one in inside]) for a, b in MOMENTS]
    return torch.stack(found)


def _rows(part: Tensor, like: Tensor, taken: Tensor) -> Float[Tensor, "head token d_head"]:
    """Return the tokens that count, in float64: squares of small parts differ by many digits."""
    by_head = part.expand_as(like).transpose(0, 1)
    return by_head[:, taken.expand(by_head.shape[1:3])].double()


def _products(
    a: Float[Tensor, "head token d_head"],
    b: Float[Tensor, "head token d_head"],
    inside: Bool[Tensor, "group token"],
) -> Float[Tensor, "head d_head d_head"]:
    if len(inside) == 1:
        return a[:, inside[0]].mT @ b[:, inside[0]]
    return (a * inside[..., None]).mT @ b
