"""Does the spread of a token type's vectors go with how frequent the type is.

Types are the sample: one point a type, all of equal weight. A correlation over them is one of their
frequency with a distance, not of occurrences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency.correlation import (
    DRAWS,
    LEVEL,
    Correlation,
    Interval,
    pearson,
    spearman,
)
from tl_tangent.geometry.frequency.type_statistics import TypeStatistics
from tl_tangent.geometry.power_law import log_slope

Measure = Literal["dispersion", "naive", "leave_one_out", "centre_norm"]
Scale = Literal["log", "plain"]
MEASURES = ("dispersion", "naive", "leave_one_out", "centre_norm")


@dataclass(frozen=True)
class FrequencyVariance:
    """How a distance of types goes with the logarithm of their frequency.

    Attributes:
        pearson: of log frequency with the distance in its scale.
        spearman: of the ranks of both, which is the same in either scale.
        exponent: p of ``distance^2 ~ f^p`` by least squares on logarithms; NaN where a distance
            is 0.
        exponent_error: its standard error.
        n_types: number of types that count.
        without_spread: number of types left out for a distance of 0, which has no logarithm.
        measure: which distance.
        scale: ``"log"`` or ``"plain"``.
        min_count: fewest occurrences that a type counts from.
    """

    pearson: Correlation
    spearman: Correlation
    exponent: float
    exponent_error: float
    n_types: int
    without_spread: int
    measure: str
    scale: str
    min_count: int

    def __str__(self) -> str:
        left = f", {self.without_spread} without spread left out" if self.without_spread else ""
        return "\n".join(
            [
                f"{self.measure} ({self.scale}) and log frequency of {self.n_types} types with "
                f"{self.min_count} occurrences or more{left}",
                f"  {self.pearson}",
                f"  {self.spearman}",
                f"  squared distance ~ f^{self.exponent:.3f} ± {self.exponent_error:.3f}",
            ]
        )


def frequency_variance(
    statistics: TypeStatistics,
    *,
    frequencies: Float[Tensor, " type"] | None = None,
    measure: Measure = "dispersion",
    scale: Scale = "log",
    min_count: int = 2,
    chosen: Bool[Tensor, " type"] | None = None,
    level: float = LEVEL,
    interval: Interval = "fisher",
    draws: int = DRAWS,
    seed: int = 0,
) -> FrequencyVariance:
    """Correlate the logarithm of frequency with a distance, over token types.

    Args:
        statistics: what :class:`~tl_tangent.geometry.frequency.token_moments.TokenMoments` gives.
        frequencies: of each type in any unit, positive where it counts; by default the counts.
            Where the same number was taken of each type, give those of the corpus.
        measure: ``"dispersion"``, the root of V_w; ``"naive"``, the same divided by n_w, which
            correlates with frequency by itself, for comparison with it; ``"leave_one_out"``, the
            root mean square distance to the centre of the others; or ``"centre_norm"``.
        scale: whether distances enter the correlation of Pearson as logarithms or as they are.
        min_count: fewest occurrences that a type counts from; 1 for ``"naive"`` and
            ``"centre_norm"`` at the least, 2 for the others.
        chosen: types to count, of those; for instance the complete ones of an equal sample.
        level, interval, draws, seed: of the confidence intervals, as
            :func:`~tl_tangent.geometry.frequency.correlation.pearson`; the bootstrap draws types.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.frequency.correlation.pearson`; if fewer
            than 4 types count; or if a frequency, ``measure``, ``scale`` or ``min_count`` is not
            accepted.
    """
    distance = _distance(statistics, measure, min_count)
    counted = statistics.counts >= min_count
    if chosen is not None:
        if chosen.shape != counted.shape or chosen.dtype != torch.bool:
            raise TangentValueError(
                f"chosen tells of each of {len(counted)} types whether it counts, got "
                f"{chosen.dtype} of shape {list(chosen.shape)}"
            )
        counted = counted & chosen.to(counted.device)
    spread = distance > 0
    without = 0
    if scale == "log":
        without = int((counted & ~spread).sum())
        counted = counted & spread
    elif scale != "plain":
        raise TangentValueError(f"scale is 'log' or 'plain', got {scale!r}")
    f = statistics.counts if frequencies is None else frequencies.to(counted.device)
    f = _counted_frequencies(f, counted, without)
    distance = distance[counted]
    slope = log_slope(f, distance.square())
    x, y = f.log(), distance.log() if scale == "log" else distance
    return FrequencyVariance(
        pearson=pearson(x, y, level=level, interval=interval, draws=draws, seed=seed),
        spearman=spearman(x, y, level=level, interval=interval, draws=draws, seed=seed),
        exponent=float(slope.slope),
        exponent_error=float(slope.error),
        n_types=int(counted.sum()),
        without_spread=without,
        measure=measure,
        scale=scale,
        min_count=min_count,
    )


def _distance(statistics: TypeStatistics, measure: str, min_count: int) -> Float[Tensor, " type"]:
    if measure not in MEASURES:
        raise TangentValueError(f"measure is one of {', '.join(MEASURES)}, got {measure!r}")
    least = 1 if measure in ("naive", "centre_norm") else 2
    if min_count < least:
        raise TangentValueError(
            f"{measure} takes types of {least} occurrences or more, got min_count={min_count}"
        )
    if measure == "centre_norm":
        return statistics.centre_norm
    squares = {
        "dispersion": statistics.dispersion,
        "naive": statistics.naive_dispersion,
        "leave_one_out": statistics.leave_one_out,
    }
    return squares[measure].sqrt()


def _counted_frequencies(f: Tensor, counted: Tensor, without: int) -> Float[Tensor, " counted"]:
    if f.shape != counted.shape:
        raise TangentValueError(
            f"{len(counted)} types take as many frequencies, got shape {list(f.shape)}"
        )
    n = int(counted.sum())
    if n < 4:
        left = f" and {without} have no spread" if without else ""
        raise TangentValueError(
            f"{n} types count{left}, and a correlation takes 4: read more tokens or lower min_count"
        )
    f = f[counted].double()
    bad = int((~(f > 0) | f.isinf()).sum())
    if bad:
        raise TangentValueError(
            f"{bad} of {n} types that count have a frequency that is not positive and finite"
        )
    return f
