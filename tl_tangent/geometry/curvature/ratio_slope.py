"""The order of the normal part: the slope of ``||n|| / ||v||`` in the chord t, on log-log axes.

On a curved manifold the ratio is ``||II(u, u)|| t / 2 + O(t^2)``: slope 1. Thin noise around a flat
cloud has slope -1, a cloud that is isotropic in all of R^d slope 0. The slope p is that of the
energies,

    E[||n||^2 | t] = c t^{2p} E[||v||^2 | t],

so that points without a normal part count (they have no logarithm of their own), and no bins bend
the line. It solves ``sum_i a_i log t_i / sum a_i = sum_i b_i log t_i / sum b_i`` with
``a_i = ||n_i||^2 t_i^{-2p-2}`` and ``b_i = ||v_i||^2 t_i^{-2}``: weighting by the expected energies
makes all sizes count alike. The left side falls in p, so there is one root. Its standard error is
the sandwich of estimating equations (Huber 1967), and the interval a normal one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature.local import LocalParts, local_parts
from tl_tangent.geometry.power_law import different_bins, quantile_edges

FEWEST = 5  # points of a bin
STEEPEST = 50.0
HALVINGS = 60


@dataclass(frozen=True, eq=False)
class RatioSlope:
    """Slope of the ratio of the normal to the tangent part in the chord t.

    Attributes:
        slope: p.
        error: its standard error.
        low, high: its interval, ``slope -+ z error`` with the normal quantile z.
        level: confidence of the interval.
        t, ratio, counts: root mean square chord, root of the ratio of energies and number of points
            in bins of t, to be looked at; the slope does not come from them.
    """

    slope: float
    error: float
    low: float
    high: float
    level: float
    t: Float[Tensor, " bin"]
    ratio: Float[Tensor, " bin"]
    counts: Int[Tensor, " bin"]

    def __repr__(self) -> str:
        return (
            f"RatioSlope({self.slope:.3f}, {self.level:.0%} interval {self.low:.3f} to "
            f"{self.high:.3f}; {int(self.counts.sum())} points, t from {float(self.t[0]):.3g} to "
            f"{float(self.t[-1]):.3g} in {len(self.t)} bins)"
        )


def ratio_slope(
    x: Float[Tensor, "n d"],
    centre: Float[Tensor, " d"],
    tangent: Float[Tensor, "d m"],
    *,
    bins: int = 8,
    level: float = 0.95,
) -> RatioSlope:
    """Fit the order in t of the normal part over the tangent part.

    Args:
        x: points, one a row.
        centre: ``[d]``, a point of the manifold. The mean of a cloud is not one: it is off by about
            ``s^2 H / 2``, as far as a typical normal part, and flattens the slope.
        tangent: ``[d, m]``, orthonormal.
        bins: of equally many points.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.curvature.local.local_parts`; if there are
            fewer than 3 bins or 5 points a bin, the level is not in (0, 1), chords do not differ,
            the normal or tangent part of a bin is rounding, or no slope fits.
    """
    parts = local_parts(x, centre, tangent)
    _check_options(len(x), bins, level)
    t, ratio, counts = _binned(parts, bins)
    slope, error = _fit(parts)
    width = error * float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
    return RatioSlope(
        slope=slope,
        error=error,
        low=slope - width,
        high=slope + width,
        level=level,
        t=t,
        ratio=ratio,
        counts=counts,
    )


def _fit(parts: LocalParts) -> tuple[float, float]:
    """Return the root p of the estimating equation by bisection, and its standard error."""
    apart = parts.chord > 0
    log_t = parts.chord[apart].log()
    log_t = log_t - log_t.mean()
    log_a = parts.normal[apart].square().sum(1).log() - 2 * log_t
    tangent = parts.tangent[apart].square().sum(1) * (-2 * log_t).exp()
    b = tangent / tangent.sum()
    wanted = float(b @ log_t)

    def weights(p: float) -> Tensor:
        return (log_a - 2 * p * log_t).softmax(0)

    low, high = -STEEPEST, STEEPEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = float(weights(middle) @ log_t) > wanted
        low, high = (middle, high) if above else (low, middle)
    if STEEPEST - abs(low) < 1e-6:
        raise TangentValueError(
            f"no slope between {-STEEPEST:g} and {STEEPEST:g} fits: do the points with a normal "
            "part have the chords of the others?"
        )
    a, centred = weights(low), log_t - wanted
    return low, float(((a - b) * centred).norm() / (2 * (a @ centred.square())))


def _binned(parts: LocalParts, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return root mean square chords, ratios and counts of bins with equally many points."""
    found = different_bins(parts.chord[None], bins)
    if found < bins:
        raise TangentValueError(
            f"the chords fill only {found} different bins of {bins}: a slope needs clouds of "
            "several sizes; take fewer bins"
        )
    where = torch.searchsorted(quantile_edges(parts.chord[None], bins)[0], parts.chord)
    counts = torch.bincount(where, minlength=bins)
    chord, normal, tangent = (
        torch.bincount(where, one, minlength=bins) / counts
        for one in (
            parts.chord.square(),
            parts.normal.square().sum(1),
            parts.tangent.square().sum(1),
        )
    )
    for name, square in (("normal", normal), ("tangent", tangent)):
        flat = int((square.sqrt() <= parts.rounding).sum())
        if flat:
            raise TangentValueError(
                f"the {name} part is rounding in {flat} of {bins} bins, at or below "
                f"{parts.rounding:.1e}: its order in t is undefined"
            )
    return chord.sqrt(), (normal / tangent).sqrt(), counts


def _check_options(n: int, bins: int, level: float) -> None:
    if bins < 3 or n < FEWEST * bins:
        raise TangentValueError(
            f"{n} points in {bins} bins: a slope needs 3 bins or more of {FEWEST} points or more"
        )
    if not 0 < level < 1:
        raise TangentValueError(f"an interval needs a level in (0, 1), got {level}")
