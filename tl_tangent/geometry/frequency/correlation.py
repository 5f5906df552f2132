"""Correlations of two columns with confidence intervals.

Fisher's ``atanh r`` of n independent pairs is nearly normal with the variance ``1 / (n - 3)`` if r
is Pearson's and the pairs are Gaussian, and ``(1 + r^2 / 2) / (n - 3)`` if r is Spearman's (Bonett
& Wright 2000; adequate for r between -0.95 and 0.95). The bootstrap draws pairs again, and assumes
no shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_finite

Interval = Literal["fisher", "bootstrap"]
LEVEL = 0.95
DRAWS = 1000


@dataclass(frozen=True)
class Correlation:
    """A correlation and what chance leaves open about it.

    Attributes:
        r: in [-1, 1].
        low, high: confidence interval.
        n: number of pairs.
        level: of the interval.
        kind: ``"pearson"`` or ``"spearman"``.
        interval: ``"fisher"`` (for Spearman with the variance of Bonett and Wright) or
            ``"bootstrap"`` (percentiles).
    """

    r: float
    low: float
    high: float
    n: int
    level: float
    kind: str
    interval: str

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.r:+.3f} [{self.low:+.3f}, {self.high:+.3f}] at "
            f"{100 * self.level:g} % ({self.interval}, n = {self.n})"
        )


def pearson(
    x: Float[Tensor, " n"],
    y: Float[Tensor, " n"],
    *,
    level: float = LEVEL,
    interval: Interval = "fisher",
    draws: int = DRAWS,
    seed: int = 0,
) -> Correlation:
    """Return the correlation of two columns.

    Args:
        x, y: one pair a row.
        level: of the confidence interval, in (0, 1).
        interval: ``"fisher"`` or ``"bootstrap"``.
        draws, seed: of the bootstrap.

    Raises:
        TangentValueError: if there are fewer than 4 pairs, a column is constant or not finite, or
            ``level``, ``interval`` or ``draws`` is not accepted.
    """
    return _correlation(x, y, "pearson", level, interval, draws, seed)


def spearman(
    x: Float[Tensor, " n"],
    y: Float[Tensor, " n"],
    *,
    level: float = LEVEL,
    interval: Interval = "fisher",
    draws: int = DRAWS,
    seed: int = 0,
) -> Correlation:
    """Return the correlation of the ranks of two columns; equal values share their mean rank.

    Args and Raises: as :func:`pearson`.
    """
    return _correlation(x, y, "spearman", level, interval, draws, seed)


def mid_ranks(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return ranks from 1 to n in float64; equal values have the mean of the ranks they take."""
    _, own, counts = torch.unique(x, return_inverse=True, return_counts=True)
    counts = counts.double()
    return (counts.cumsum(0) - (counts - 1) / 2)[own]


def _correlation(
    x: Tensor, y: Tensor, kind: str, level: float, interval: str, draws: int, seed: int
) -> Correlation:
    _check(x, y, level)
    x, y = x.detach().double(), y.detach().double()
    measure = _r if kind == "pearson" else _rank_r
    r = measure(x, y)
    if r != r:
        raise TangentValueError(
            f"a column of the {len(x)} pairs is constant, and a constant correlates with nothing"
        )
    if interval == "fisher":
        low, high = _fisher(r, len(x), level, kind)
    elif interval == "bootstrap":
        low, high = _bootstrap(measure, x, y, level, draws, seed)
    else:
        raise TangentValueError(f"interval is 'fisher' or 'bootstrap', got {interval!r}")
    return Correlation(r, low, high, len(x), level, kind, interval)


def _check(x: Tensor, y: Tensor, level: float) -> None:
    if x.shape != y.shape or x.ndim != 1 or len(x) < 4:
        raise TangentValueError(
            f"a correlation takes two columns of 4 values or more, got {list(x.shape)} and "
            f"{list(y.shape)}"
        )
    check_finite("x", x)
    check_finite("y", y)
    if not 0 < level < 1:
        raise TangentValueError(f"level is in (0, 1), got {level}")


def _r(x: Tensor, y: Tensor) -> float:
    """Return Pearson's r; NaN if a column is constant."""
    if bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return math.nan
    x, y = (z / z.abs().max() for z in (x, y))  # else squares leave the range of float64
    x, y = (z / z.abs().max() for z in (x - x.mean(), y - y.mean()))
    return float((x @ y / (x.norm() * y.norm())).clamp(-1, 1))


def _rank_r(x: Tensor, y: Tensor) -> float:
    return _r(mid_ranks(x), mid_ranks(y))


def _fisher(r: float, n: int, level: float, kind: str) -> tuple[float, float]:
    if abs(r) == 1:
        return r, r
    z = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
    variance = (1 + r**2 / 2 if kind == "spearman" else 1) / (n - 3)
    half = z * math.sqrt(variance)
    return math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def _bootstrap(
    measure: Callable[[Tensor, Tensor], float],
    x: Tensor,
    y: Tensor,
    level: float,
    draws: int,
    seed: int,
) -> tuple[float, float]:
    """Percentiles over resampled pairs; draws with a constant column have no value and are left."""
    if draws < 100:
        raise TangentValueError(f"percentiles take 100 draws or more, got {draws}")
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.randint(len(x), (len(x),), generator=generator) for _ in range(draws))
    found = torch.tensor([measure(x[i], y[i]) for i in chosen], dtype=torch.float64)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = found.nanquantile(tails).tolist()
    return low, high
