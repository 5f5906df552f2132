"""The vectors of one token type at one site: fitted on one half, measured on the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.local.base_point import BasePoint, Centre, base_point
from tl_tangent.analysis.local.cloud_dimension import CloudDimension, cloud_dimension
from tl_tangent.analysis.local.reading import (
    LINE_DRAWS,
    Drawn,
    Reading,
    flipped_square,
    random_slopes,
    read_cloud,
)
from tl_tangent.analysis.local.twins import gaussian_twins, seed_of
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import Estimate, eta_of_points, visibility_index
from tl_tangent.geometry.energy import upper_p_value

PER_BIN = 5  # points of a bin of the slope


class Options(NamedTuple):
    """What a cloud is measured with, see :func:`~tl_tangent.token_geometry`."""

    rank: int
    centre: Centre
    n_controls: int
    bins: int
    level: float
    k: int
    dimension_points: int
    slow_controls: int
    equal_n: bool
    seed: int

    @property
    def fewest(self) -> int:
        """Points that are needed: two halves, each with more than the coefficients of II."""
        columns = 1 + self.rank + self.rank * (self.rank + 1) // 2
        return 2 * max(PER_BIN * self.bins, columns + 1)


@dataclass(frozen=True, eq=False)
class TokenCloud:
    """What the occurrences of a token type show at a site.

    Attributes:
        n: distinct vectors that are measured.
        distinct: how many there are; more than n where other types have fewer.
        copies: vectors left out as exact copies of another.
        eta: mean squared distance to the mean of the type, unbiased, with its standard error.
        centre_norm: of that mean.
        base: centre and tangent basis, fitted on one half of the vectors; None where these are too
            few, as all that follows.
        tangent_share: share of the other half's variance that the principal directions of the first
            hold.
        reading: of the other half around the base.
        controls: of Gaussian clouds with that half's mean and covariance, around the same base.
        random: order of the normal in the tangent part for random tangent spaces in the complement.
        flipped: ``||II||^2`` as fitted where the normal parts of that half got random signs.
        visibility: ``eta (max b' - min b')`` of that half's II.
        visibility_controls: of some of the Gaussian clouds.
        dimension: of some of the vectors, without any split.
        note: what could not be measured and why, or nothing.
    """

    n: int
    distinct: int
    copies: int
    eta: Estimate
    centre_norm: float
    base: BasePoint | None = None
    tangent_share: float = math.nan
    reading: Reading | None = None
    controls: tuple[Drawn, ...] = ()
    random: tuple[float | None, ...] = ()
    flipped: tuple[float, ...] = ()
    visibility: float = math.nan
    visibility_controls: tuple[float, ...] = ()
    dimension: CloudDimension | None = None
    note: str = ""

    @property
    def slope_p(self) -> float | None:
        """How often a Gaussian cloud has a slope as high; None without slope or controls."""
        if not self.controls or self.reading is None or self.reading.slope is None:
            return None
        slopes = [math.inf if one.slope is None else one.slope for one in self.controls]
        return upper_p_value(self.reading.slope.slope, slopes)

    @property
    def normal_slope_p(self) -> dict[str, float]:
        """How often each null has a normal part that grows as fast: Gaussian, random tangent."""
        if not self.controls or self.reading is None or self.reading.normal_slope is None:
            return {}
        own = self.reading.normal_slope.slope
        nulls = {"gaussian": [one.normal_slope for one in self.controls], "random": self.random}
        return {
            name: upper_p_value(own, [math.inf if one is None else one for one in drawn])
            for name, drawn in nulls.items()
            if drawn
        }

    @property
    def form_p(self) -> dict[str, float]:
        """How often each null has as large a ``||II||^2``: Gaussian, permuted, flipped."""
        if not self.controls or self.reading is None:
            return {}
        form = self.reading.form
        gaussian = [one.form_square for one in self.controls]
        return {
            "gaussian": upper_p_value(form.raw_square, gaussian),
            "permuted": float(form.p_value or 1.0),
            "flipped": upper_p_value(form.raw_square, self.flipped),
        }

    @property
    def directions_p(self) -> float | None:
        """How often a Gaussian cloud has directions as uneven; None in one dimension."""
        if not self.controls or self.reading is None or self.reading.directions is None:
            return None
        drawn = [one.directions for one in self.controls if one.directions is not None]
        return upper_p_value(self.reading.directions.statistic, drawn)

    def visible(self, alpha: float) -> bool | None:
        """Whether slope and II are both beyond every null at ``alpha``; None if not measured."""
        if not self.controls or self.reading is None:
            return None
        found = [self.slope_p, *self.form_p.values()]
        return all(p is not None and p <= alpha for p in found)


def measure_cloud(
    distinct: Float[Tensor, "n d"], copies: int, most: int, options: Options, name: str
) -> TokenCloud:
    """Measure the vectors of one type.

    Args:
        distinct: them, each once.
        copies: how many were left out for that.
        most: how many of them to take, at random.
        options: how.
        name: gives the type random numbers of its own.
    """
    seed = seed_of(options.seed, name)
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed))
    x = distinct[order[:most]]
    n, mean = len(x), x.double().mean(0)
    eta = eta_of_points(x, mean) if n > 1 else Estimate(math.nan, math.nan)
    unbiased = Estimate(*(value * n / max(n - 1, 1) for value in eta))
    cloud = TokenCloud(n, len(distinct), copies, unbiased, float(mean.norm()))
    if n < options.fewest:
        missing = f"{n} distinct of {n + copies} vectors, and the fit needs {options.fewest}"
        return replace(cloud, note=missing)
    try:
        return _fitted_and_tested(cloud, x, options, seed)
    except TangentValueError as error:  # one degenerate cloud does not undo the others
        return replace(cloud, note=str(error))


def _fitted_and_tested(
    cloud: TokenCloud, x: Float[Tensor, "n d"], options: Options, seed: int
) -> TokenCloud:
    fit, test = x[: len(x) // 2], x[len(x) // 2 :]
    base = base_point(fit, options.rank, options.centre)
    read = partial(read_cloud, base=base, bins=options.bins, level=options.level)
    reading = read(test, permutations=options.n_controls, draws=LINE_DRAWS, seed=seed)
    visible = partial(visibility_index, eta=cloud.eta.value, seed=seed)
    controls, drawn = [], []
    for i, twin in enumerate(gaussian_twins(test, options.n_controls, seed)):
        control = read(twin)
        controls.append(Drawn.of(control))
        if i < options.slow_controls:
            drawn.append(visible(control.form.second_form))
    signs, bases = (torch.Generator().manual_seed(seed + i) for i in range(2))
    return replace(
        cloud,
        base=base,
        tangent_share=_share(test, base.principal),
        reading=reading,
        controls=tuple(controls),
        random=tuple(random_slopes(test, base, options.n_controls, bases)),
        flipped=tuple(flipped_square(test, base, signs) for _ in range(options.n_controls)),
        visibility=visible(reading.form.second_form),
        visibility_controls=tuple(drawn),
        dimension=_dimension(x, options, seed),
        note=reading.note,
    )


def _dimension(x: Tensor, options: Options, seed: int) -> CloudDimension | None:
    if not options.dimension_points:
        return None
    some = x[: options.dimension_points]
    return cloud_dimension(some, options.k, options.slow_controls, seed)


def _share(x: Tensor, basis: Tensor) -> float:
    centred = x.double() - x.double().mean(0)
    return float((centred @ basis).square().sum() / centred.square().sum())
