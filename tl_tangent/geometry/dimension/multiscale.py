"""Tangent, curvature and noise directions told apart by how they grow with the size of a ball.

The root mean square spread of the points within t of a base point grows as t along the tangent
space, as ``t^2`` along the directions in which the manifold bends, and does not grow along
directions of noise (Little, Maggioni & Rosasco 2017). A spectrum at one scale cannot tell them.

The i-th largest spread is followed over scales, whatever its direction. Where a spread that bends
lies under the noise at small t and above it at large t, the i-th is first one and then the other:
its exponent is between both, with a small error, and may be near 1. The two halves of the radii
tell that the line is none. Look at ``sizes`` then, and choose radii above those at which the bend
leaves the noise and below those at which it reaches the tangent's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_points
from tl_tangent.geometry.dimension.local_pca import local_pca
from tl_tangent.geometry.linalg import exact_math, one_thread
from tl_tangent.geometry.power_law import log_slope

GROUPS = 20
TOLERANCE = 0.35
KINDS = ("noise", "tangent", "curvature", "higher")
EMPTY, UNCLEAR = "empty", "unclear"


@dataclass(frozen=True, eq=False)
class MultiscalePca:
    """Spreads in balls of several radii around one point, and how they grow.

    Attributes:
        radii: t, ascending.
        counts: number of points in each ball.
        sizes: square roots of the variances, descending; 0 where it is rounding.
        exponents: slope of ``log size`` over ``log t``; NaN where a size is 0.
        errors: their standard errors, by a jackknife over groups of points. Balls lie within each
            other and share points, so that the residuals of the line tell about half of it.
        bends: exponent over the upper half of the radii minus that over the lower half.
        basis: directions in the largest ball, in the order of its sizes.
    """

    radii: Float[Tensor, " scale"]
    counts: Int[Tensor, " scale"]
    sizes: Float[Tensor, "scale direction"]
    exponents: Float[Tensor, " direction"]
    errors: Float[Tensor, " direction"]
    bends: Float[Tensor, " direction"]
    basis: Float[Tensor, "d direction"]

    def kinds(self, tolerance: float = TOLERANCE) -> tuple[str, ...]:
        """Name each direction by its exponent.

        ``noise`` (0), ``tangent`` (1), ``curvature`` (2) or ``higher`` (3 and more) within
        ``tolerance``; ``unclear`` elsewhere, and where the two halves of the radii differ by more
        than twice that; ``empty`` where the points do not spread at all.
        """
        found = zip(self.exponents.tolist(), self.bends.tolist(), strict=True)
        return tuple(_kind(exponent, bend, tolerance) for exponent, bend in found)

    def directions(self, kind: str, tolerance: float = TOLERANCE) -> Float[Tensor, "d chosen"]:
        """Return the columns of ``basis`` of one kind; their number estimates its dimension."""
        return self.basis[:, [one == kind for one in self.kinds(tolerance)]]

    def __str__(self) -> str:
        lines = [
            f"{i + 1:>3}  {kind:<10} t^{exponent:.2f} ± {error:.2f}"
            for i, (kind, exponent, error) in enumerate(
                zip(self.kinds(), self.exponents.tolist(), self.errors.tolist(), strict=True)
            )
        ]
        radii, counts = self.radii.tolist(), self.counts.tolist()
        return "\n".join(
            [
                f"t from {radii[0]:.3g} ({counts[0]} points) to {radii[-1]:.3g} ({counts[-1]})",
                *lines,
            ]
        )


def multiscale_pca(
    x: Float[Tensor, "n d"],
    base: Float[Tensor, " d"],
    radii: Float[Tensor, " scale"],
    *,
    groups: int = GROUPS,
    seed: int = 0,
) -> MultiscalePca:
    """Follow the principal spreads around ``base`` over balls of growing radius.

    As many directions are followed as the smallest ball has points to tell. It should have many
    more points than directions: sorted variances of few points spread where the true ones are
    equal, the more the fewer points, which pretends exponents.

    Args:
        x: the cloud, one point a row.
        base: centre of the balls; best a point of the manifold itself.
        radii: 3 or more, ascending; :func:`ball_radii` proposes them.
        groups: number of groups of the jackknife; each costs one more decomposition of each ball.
        seed: of the random groups.

    Raises:
        TangentValueError: if the radii are fewer than 3 or do not ascend, ``groups`` is below 2,
            the smallest ball holds too few points, or an entry is NaN or infinite.
    """
    _check(radii, groups)
    largest = local_pca(x, base, float(radii[-1]))
    with exact_math(x.device), one_thread():
        offsets = x.double() - base.double()
        offsets = offsets[offsets.norm(dim=1) <= radii[-1]]
        distances = offsets.norm(dim=1)
        generator = torch.Generator().manual_seed(seed)
        own = (torch.randperm(len(offsets), generator=generator) % groups).to(x.device)
        width = _width(distances[None, :] <= radii.to(distances)[:, None], own, groups, x.shape[1])
        sizes = _sizes(offsets, distances, radii, width)
        without = [
            _exponents(_sizes(offsets[own != one], distances[own != one], radii, width), radii)
            for one in range(groups)
        ]
        spread = torch.stack(without).var(0, correction=0) * (groups - 1)
    half = len(radii) // 2
    return MultiscalePca(
        radii=radii.double(),
        counts=(distances[None, :] <= radii.to(distances)[:, None]).sum(1),
        sizes=sizes,
        exponents=_exponents(sizes, radii),
        bends=_exponents(sizes[half:], radii[half:]) - _exponents(sizes[:-half], radii[:-half]),
        errors=spread.sqrt(),
        basis=largest.basis[:, :width],
    )


def ball_radii(
    x: Float[Tensor, "n d"], base: Float[Tensor, " d"], fewest: int, most: int, scales: int = 8
) -> Float[Tensor, " scale"]:
    """Return radii in equal ratios, from a ball of ``fewest`` points to one of ``most``.

    Raises:
        TangentValueError: unless ``2 <= fewest < most <= n`` and the two balls differ; as
            :func:`~tl_tangent.geometry.dimension.local_pca.local_pca`.
    """
    check_points(x, base, name="base")
    if not 2 <= fewest < most <= len(x):
        raise TangentValueError(
            f"balls hold from 2 to {len(x)} points, the largest more than the smallest; got "
            f"fewest={fewest} and most={most}"
        )
    distances = (x.double() - base.double()).norm(dim=1).sort().values
    low, high = distances[[fewest - 1, most - 1]].log().tolist()
    if not -torch.inf < low < high:
        raise TangentValueError(
            f"the ball of {fewest} points is as large as that of {most}, or has no size: drop "
            "copies with distinct_rows, or ask for more points"
        )
    radii = torch.linspace(low, high, scales, dtype=torch.float64).exp()
    radii[-1] = distances[most - 1]  # rounding must not lose the last point
    return radii


def _check(radii: Tensor, groups: int) -> None:
    if len(radii) < 3 or not bool((radii.diff() > 0).all()) or float(radii[0]) <= 0:
        raise TangentValueError(
            f"an exponent takes 3 or more ascending positive radii, got {radii.tolist()}"
        )
    if groups < 2:
        raise TangentValueError(f"a jackknife takes 2 groups or more, got {groups}")


def _width(inside: Tensor, own: Tensor, groups: int, d: int) -> int:
    """Return the number of directions that every ball tells without any group of its points."""
    left = [int(inside[0, own != one].sum()) for one in range(groups)]
    if min(left) < 2:
        raise TangentValueError(
            f"the smallest ball holds {int(inside[0].sum())} points, too few to leave one of "
            f"{groups} groups out: use larger radii"
        )
    return min(d, min(left) - 1)


def _sizes(
    offsets: Tensor, distances: Tensor, radii: Tensor, width: int
) -> Float[Tensor, "scale direction"]:
    return torch.stack([_spreads(offsets[distances <= t], width) for t in radii])


def _spreads(ball: Tensor, width: int) -> Float[Tensor, " direction"]:
    values = torch.linalg.svdvals(ball - ball.mean(0))
    rounding = values[0] * max(ball.shape) * torch.finfo(values.dtype).eps
    values = torch.where(values > rounding, values, 0.0)
    return values[:width] / (len(ball) - 1) ** 0.5


def _exponents(sizes: Tensor, radii: Tensor) -> Float[Tensor, " direction"]:
    return log_slope(radii.to(sizes), sizes.mT).slope


def _kind(exponent: float, bend: float, tolerance: float) -> str:
    if exponent != exponent:
        return EMPTY
    if abs(bend) > 2 * tolerance:
        return UNCLEAR
    nearest = min(max(round(exponent), 0), len(KINDS) - 1)
    higher = nearest == len(KINDS) - 1 and exponent > nearest
    return KINDS[nearest] if higher or abs(exponent - nearest) <= tolerance else UNCLEAR
