"""What one cloud shows around a centre: the order of its normal part, its II, its directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.local.base_point import BasePoint
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import (
    DirectionTensor,
    NormalSlope,
    RatioSlope,
    SecondFormFit,
    direction_tensor,
    fit_second_form,
    local_parts,
    normal_slope,
    projected_directions,
    ratio_slope,
)
from tl_tangent.geometry.linalg import orthonormal_columns

Found = TypeVar("Found")
LINE_DRAWS = 1000  # of the bootstrap over occurrences


@dataclass(frozen=True, eq=False)
class Reading:
    """Measurements of a cloud around a centre that it did not choose itself.

    Attributes:
        slope: order in the chord of the normal over the tangent part; None where it is rounding or
            nothing fits.
        normal_slope: order of the normal part in the tangent part; likewise.
        tangent, normal: sizes of both parts of every point.
        form: the fitted second fundamental form.
        directions: the tensor of directions and its test; None in one dimension.
        note: why a slope is missing, or nothing.
    """

    slope: RatioSlope | None
    normal_slope: NormalSlope | None
    tangent: Float[Tensor, " n"]
    normal: Float[Tensor, " n"]
    form: SecondFormFit
    directions: DirectionTensor | None
    note: str = ""


class Drawn(NamedTuple):
    """The numbers of a reading that a control is kept for; it has no use for vectors.

    Attributes:
        slope, normal_slope: None where there is none.
        form_square: ``||II||^2`` as fitted.
        directions: the statistic of the directions; None in one dimension.
    """

    slope: float | None
    normal_slope: float | None
    form_square: float
    directions: float | None

    @classmethod
    def of(cls, reading: Reading) -> Drawn:
        """Take the numbers out of a reading."""
        slope, line, directions = reading.slope, reading.normal_slope, reading.directions
        return cls(
            slope=None if slope is None else slope.slope,
            normal_slope=None if line is None else line.slope,
            form_square=reading.form.raw_square,
            directions=None if directions is None else directions.statistic,
        )


def read_cloud(
    x: Float[Tensor, "n d"],
    base: BasePoint,
    *,
    bins: int,
    level: float,
    permutations: int = 0,
    draws: int = 0,
    seed: int = 0,
) -> Reading:
    """Measure a cloud around ``base``.

    Args:
        x: points, one a row; not those that the base was fitted to.
        base: centre and tangent basis.
        bins, level: of the slopes.
        permutations: of the fit of II.
        draws: of the bootstrap over points; 0 for no interval.
        seed: of both.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.curvature.fit_second_form`.
    """
    cloud = (x, base.point, base.tangent)
    form = fit_second_form(*cloud, permutations=permutations, seed=seed)
    slope, note = _or_why(partial(ratio_slope, *cloud, bins=bins, level=level))
    parts = local_parts(*cloud)
    line, why = _or_why(partial(normal_slope, *cloud, level=level, draws=draws, seed=seed))
    return Reading(
        slope=slope,
        normal_slope=line,
        tangent=parts.tangent.norm(dim=1),
        normal=parts.normal.norm(dim=1),
        form=form,
        directions=direction_tensor(projected_directions(*cloud)) if _wide(base) else None,
        note=note or why,
    )


def flipped_square(x: Float[Tensor, "n d"], base: BasePoint, generator: torch.Generator) -> float:
    """Return ``||II||^2`` as fitted after the normal parts around their mean got random signs.

    Signs leave the size of each normal part beside its tangent part, which permutations do not: the
    null holds for any cloud whose normal parts are as likely as their opposites.
    """
    w, normal, *_ = local_parts(x, base.point, base.tangent)
    mean = normal.mean(0)
    signs = torch.randint(2, (len(x), 1), generator=generator).to(normal) * 2 - 1
    flipped = base.point + w @ base.tangent.mT + mean + signs * (normal - mean)
    return fit_second_form(flipped, base.point, base.tangent).raw_square


def random_slopes(
    x: Float[Tensor, "n d"], base: BasePoint, count: int, generator: torch.Generator
) -> list[float | None]:
    """Return the order of the normal in the tangent part for matched random tangent spaces.

    They stand at the same point, have the same rank and are uniform in the complement of the fitted
    one. Where only the sizes of points differ, both parts are large together in all of these, so
    that they have the slope of the fitted one without curvature. Empty where the complement has no
    room for them.
    """
    (d, m), found = base.tangent.shape, []
    for _ in range(count if 2 * m <= d else 0):
        drawn = torch.randn(d, m, generator=generator, dtype=torch.float64).to(base.tangent)
        basis = orthonormal_columns(drawn - base.tangent @ (base.tangent.mT @ drawn))
        line, _ = _or_why(partial(normal_slope, x, base.point, basis, draws=0))
        found.append(None if line is None else line.slope)
    return found


def _or_why(measure: Callable[[], Found]) -> tuple[Found | None, str]:
    """A flat cloud has no order, and that is a finding: return None and the reason."""
    try:
        return measure(), ""
    except TangentValueError as error:
        return None, str(error)


def _wide(base: BasePoint) -> bool:
    return base.tangent.shape[1] > 1
