"""The order of the normal part in the tangent part: the slope of ``||n||`` in ``||v||``, log-log.

On a curved manifold ``||n|| = ||II(u, u)|| ||v||^2 / 2``: slope 2. A tilted tangent space gives 1,
parts that are independent 0. The line is that of least squares through the logarithms of single
points. Its interval is the percentile one of a bootstrap over points (Efron 1979), for which centre
and basis are given: they must not have been fitted to the same points.

The logarithm of a small size counts as much as that of a large one. An error of the centre is the
whole normal part near it, and flattens the slope there;
:func:`~tl_tangent.geometry.curvature.ratio_slope.ratio_slope` weighs by energies instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_points
from tl_tangent.geometry.curvature.local import local_parts
from tl_tangent.geometry.power_law import log_slope

FEWEST = 5  # points of a line
DRAWS = 1000


@dataclass(frozen=True)
class NormalSlope:
    """Slope of the size of the normal part in that of the tangent part.

    Attributes:
        slope: p of ``||n|| ~ ||v||^p``.
        low, high: its interval; NaN if no draws were made.
        level: confidence of the interval.
        n: number of points on the line.
        left_out: number of those with a part that is rounding.
    """

    slope: float
    low: float
    high: float
    level: float
    n: int
    left_out: int

    def __repr__(self) -> str:
        return (
            f"NormalSlope({self.slope:.3f}, {self.level:.0%} interval {self.low:.3f} to "
            f"{self.high:.3f}; {self.n} points)"
        )


def normal_slope(
    x: Float[Tensor, "n d"],
    centre: Float[Tensor, " d"],
    tangent: Float[Tensor, "d m"],
    *,
    level: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> NormalSlope:
    """Fit the order of the normal part in the tangent part.

    Args:
        x: points, one a row.
        centre: ``[d]``, a point of the manifold.
        tangent: ``[d, m]``, orthonormal.
        level: of the interval, in (0, 1).
        draws: of the bootstrap; 0 for no interval.
        seed: of the draws.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.curvature.local.local_parts`; if there are
            fewer than 5 points, a part of more than half of them is rounding, all tangent parts are
            alike, or ``level`` or ``draws`` is not accepted.
    """
    check_points(x, centre, FEWEST)
    parts = local_parts(x, centre, tangent)
    if not 0 < level < 1:
        raise TangentValueError(f"an interval needs a level in (0, 1), got {level}")
    if draws and draws < 100:
        raise TangentValueError(f"percentiles take 100 draws or more, got {draws}")
    v, n = parts.tangent.norm(dim=1), parts.normal.norm(dim=1)
    kept = (v > parts.rounding) & (n > parts.rounding)
    counted = int(kept.sum())
    if counted < max(FEWEST, len(x) / 2):
        raise TangentValueError(
            f"the normal or the tangent part is rounding in {len(x) - counted} of {len(x)} points, "
            f"at or below {parts.rounding:.1e}; a slope takes half of them, and {FEWEST} or more"
        )
    if float(v[kept].max() - v[kept].min()) <= parts.rounding:
        raise TangentValueError("all tangent parts are of one size: no slope fits")
    slope = float(log_slope(v[kept], n[kept]).slope)
    low, high = _interval(v[kept], n[kept], level, draws, seed) if draws else (torch.nan,) * 2
    return NormalSlope(slope, low, high, level, counted, len(x) - counted)


def _interval(v: Tensor, n: Tensor, level: float, draws: int, seed: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(v), (draws, len(v)), generator=generator).to(v.device)
    found = log_slope(v[chosen], n[chosen]).slope
    low, high = found.nanquantile(found.new_tensor([(1 - level) / 2, (1 + level) / 2])).tolist()
    return low, high
