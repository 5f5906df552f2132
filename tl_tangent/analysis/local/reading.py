"""What one cloud shows around a centre: the order of its normal part, its II, its directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.local.base_point import BasePoint
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import (
    DirectionTensor,
    RatioSlope,
    SecondFormFit,
    direction_tensor,
    fit_second_form,
    local_parts,
    projected_directions,
    ratio_slope,
)


@dataclass(frozen=True, eq=False)
class Reading:
    """Measurements of a cloud around a centre that it did not choose itself.

    Attributes:
        slope: order of the normal part; None where it is rounding or nothing fits.
        form: the fitted second fundamental form.
        directions: the tensor of directions and its test; None in one dimension.
        note: why the slope is missing, or nothing.
    """

    slope: RatioSlope | None
    form: SecondFormFit
    directions: DirectionTensor | None
    note: str = ""


class Drawn(NamedTuple):
    """The numbers of a reading that a control is kept for; it has no use for vectors.

    Attributes:
        slope: None where there is none.
        form_square: ``||II||^2`` as fitted.
        directions: the statistic of the directions; None in one dimension.
    """

    slope: float | None
    form_square: float
    directions: float | None

    @classmethod
    def of(cls, reading: Reading) -> Drawn:
        """Take the numbers out of a reading."""
        slope, directions = reading.slope, reading.directions
        return cls(
            slope=None if slope is None else slope.slope,
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
    seed: int = 0,
) -> Reading:
    """Measure a cloud around ``base``.

    Args:
        x: points, one a row; not those that the base was fitted to.
        base: centre and tangent basis.
        bins, level: of the slope.
        permutations, seed: of the fit of II.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.curvature.fit_second_form`.
    """
    cloud = (x, base.point, base.tangent)
    form = fit_second_form(*cloud, permutations=permutations, seed=seed)
    slope, note = None, ""
    try:
        slope = ratio_slope(*cloud, bins=bins, level=level)
    except TangentValueError as error:  # a flat cloud has no order, and that is a finding
        note = str(error)
    return Reading(
        slope=slope,
        form=form,
        directions=direction_tensor(projected_directions(*cloud)) if _wide(base) else None,
        note=note,
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


def _wide(base: BasePoint) -> bool:
    return base.tangent.shape[1] > 1
