"""The attenuation curve: how curvature fades from the directions as a law draws together.

The non-uniformity of directions is the root mean square of ``p(u) |S| - 1`` along the profile b,
``l sd(b)``, with sd over even directions. It is predicted to be ``eta sd(b) / (1 + eta bbar)`` and
so to vanish with eta; the measured l is that of
:func:`~tl_tangent.geometry.curvature.directions.direction_response`, whose sign it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature.directions import (
    direction_response,
    predicted_response,
    projected_directions,
)
from tl_tangent.geometry.curvature.local import Direction, Estimate, check_choice
from tl_tangent.geometry.curvature.profile import profile_variance
from tl_tangent.geometry.manifolds.base import Manifold
from tl_tangent.geometry.manifolds.density import RadialDensity
from tl_tangent.geometry.manifolds.sample import ManifoldSample, sample


@dataclass(frozen=True)
class AttenuationCurve:
    """Non-uniformity of directions at each concentration.

    Attributes:
        eta: moment ratios.
        predicted: to first order in eta.
        measured: with standard errors.
        direction: which directions.
    """

    eta: tuple[float, ...]
    predicted: tuple[float, ...]
    measured: tuple[Estimate, ...]
    direction: Direction

    def __repr__(self) -> str:
        rows = zip(self.eta, self.predicted, self.measured, strict=True)
        lines = [f"  {eta:<10.4g} {wanted:<10.4g} {found}" for eta, wanted, found in rows]
        head = f"AttenuationCurve of {self.direction} directions\n  eta        predicted  measured"
        return "\n".join([head, *lines])


def attenuation_curve(
    directions: Sequence[Float[Tensor, "_ m"]],
    etas: Sequence[int | float],
    second_form: Float[Tensor, "m m c"],
    *,
    direction: Direction = "projected",
) -> AttenuationCurve:
    """Return predicted and measured non-uniformity of several clouds on one manifold.

    Args:
        directions: unit directions of each cloud, such as those of
            :func:`~tl_tangent.geometry.curvature.directions.projected_directions`.
        etas: the moment ratio of each, known or from
            :func:`~tl_tangent.geometry.curvature.moment_ratio.eta_of_points`.
        second_form: II at the centre, in the tangent basis of the directions.

    Raises:
        TangentValueError: if there are no clouds or as many ratios as clouds are missing; as
            :func:`~tl_tangent.geometry.curvature.directions.direction_response`.
    """
    if not directions or len(directions) != len(etas):
        raise TangentValueError(
            f"{len(directions)} clouds and {len(etas)} moment ratios: give one ratio a cloud, and "
            "at least one"
        )
    found = [direction_response(u, second_form, direction=direction) for u in directions]
    spread = math.sqrt(profile_variance(second_form, direction=direction))
    return AttenuationCurve(
        eta=tuple(map(float, etas)),
        predicted=tuple(predicted_response(second_form, eta) * spread for eta in etas),
        measured=tuple(Estimate(one.value * spread, one.error * spread) for one in found),
        direction=direction,
    )


def sampled_attenuation(
    manifold: Manifold,
    density: RadialDensity,
    factors: Sequence[int | float],
    n: int,
    *,
    direction: Direction = "projected",
    seed: int = 0,
) -> AttenuationCurve:
    """Return the curve of samples of a known manifold, at ``factors`` times the density's scale.

    Args:
        n: points at each concentration; they are drawn with the seeds ``seed``, ``seed + 1``, ...

    Raises:
        TangentValueError: as :func:`attenuation_curve` and
            :func:`~tl_tangent.geometry.manifolds.sample.sample`, or if geodesic directions are
            asked for and the manifold has no closed form for them.
    """
    check_choice(direction)
    laws = [density.scaled(factor) for factor in factors]
    clouds = [sample(manifold, law, n, seed=seed + i) for i, law in enumerate(laws)]
    return attenuation_curve(
        [_directions_of(cloud, direction) for cloud in clouds],
        [law.eta(manifold.dim) for law in laws],
        manifold.second_fundamental_form,
        direction=direction,
    )


def _directions_of(cloud: ManifoldSample, direction: Direction) -> Float[Tensor, "n m"]:
    if direction == "projected":
        return projected_directions(cloud.x, cloud.mu, cloud.tangent)
    if cloud.u is None:
        raise TangentValueError(
            f"{cloud.manifold} has no closed form for its geodesics: take direction='projected'"
        )
    return cloud.u
