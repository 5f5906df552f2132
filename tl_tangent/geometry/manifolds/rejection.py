"""Exact draws from a density on a manifold, by rejection in the manifold's chart.

In polar coordinates ``w = rho u`` the law to draw from has the density
``g(t(w)) volume(w) rho^{m-1}``. On a cell of radii [low, high] it is at most

    g_bound(chord_ratio(high) low) exp(log_volume_bound(high)) high^{m-1},

because g_bound never increases. Proposals are uniform in u and in rho on a cell that is drawn by
these bounds, and accepted in the ratio of density and bound. No grid enters the result.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.manifolds.base import Manifold
from tl_tangent.geometry.manifolds.density import RadialDensity

Measure = Literal["volume", "chart"]
CELLS = 10_000
SMALLEST, LARGEST = 1e-4, 1e16  # radii of the cells, in units of the scale
TAIL = 1e-15  # mass that the last cell may hold: less than a float64 uniform number resolves
MOST_PROPOSALS = 2**16  # at once
LOWEST_RATE, TRIED = 1e-4, 10**6
ROUNDING = 1e-9
BEYOND = 0.05  # share of the flat law that may lie where a manifold has come round again


class Draws(NamedTuple):
    """Coordinates in the chart, and the share of proposals that were accepted."""

    w: Float[Tensor, "n m"]
    acceptance: float


class _Envelope(NamedTuple):
    edges: Float[Tensor, " edge"]
    log_bound: Float[Tensor, " cell"]
    cumulative: Float[Tensor, " cell"]


def draw(
    manifold: Manifold,
    density: RadialDensity,
    n: int,
    *,
    generator: torch.Generator,
    measure: Measure = "volume",
) -> Draws:
    """Draw ``n`` points of the chart.

    Args:
        measure: ``"volume"`` has the density g(t) with respect to the Riemannian volume;
            ``"chart"`` has g(|w|) with respect to dw, such as Gaussian w on a graph.

    Raises:
        TangentValueError: if the density is too wide for a closed manifold, exceeds its bound, does
            not decay, or fewer than one proposal in 10,000 is accepted.
    """
    _check_width(manifold, density)
    envelope = _envelope(manifold, density, measure)
    kept, proposed, accepted = [], 0, 0
    while accepted < n:
        rate = max(accepted, 1) / max(proposed, 1)
        if proposed > TRIED and rate < LOWEST_RATE:
            raise TangentValueError(
                f"{accepted} of {proposed} proposals for {density} on {manifold} were accepted: "
                "take a smaller scale, or a closer bound of the density"
            )
        size = min(MOST_PROPOSALS, math.ceil(1.1 * (n - accepted) / rate) + 64)
        found = _accepted(manifold, density, measure, envelope, size, generator)
        kept.append(found)
        proposed, accepted = proposed + size, accepted + len(found)
    return Draws(torch.cat(kept)[:n], accepted / proposed)


def _check_width(manifold: Manifold, density: RadialDensity) -> None:
    if manifold.chord_limit == math.inf:
        return
    beyond = density.share_beyond(manifold.chord_limit, manifold.dim)
    if beyond > BEYOND:
        raise TangentValueError(
            f"{density} is too wide for {manifold}: {beyond:.0%} of its law in a flat space lies "
            f"beyond the chord {manifold.chord_limit:.4g} at which the manifold comes round again, "
            f"accepted is {BEYOND:.0%}; take a smaller scale"
        )


def _envelope(manifold: Manifold, density: RadialDensity, measure: Measure) -> _Envelope:
    top = min(LARGEST * density.scale, manifold.chart_radius)
    first = min(SMALLEST * density.scale, top / 2)
    grid = torch.logspace(math.log(first), math.log(top), CELLS, math.e, dtype=torch.float64)
    edges = torch.cat([grid.new_zeros(1), grid[:-1], grid.new_tensor([top])])
    low, high = edges[:-1], edges[1:]
    nearest = low * manifold.chord_ratio(high) if measure == "volume" else low
    _check_decreasing(density, edges, manifold.dim)
    log_bound = density.log_profile_bound(nearest / density.scale, manifold.dim)
    log_bound = log_bound + (manifold.dim - 1) * high.log()
    if measure == "volume":
        log_bound = log_bound + manifold.log_volume_bound(high)
    shares = (log_bound + (high - low).log()).softmax(0)
    if top < manifold.chart_radius and not float(shares[-1]) < TAIL:
        raise TangentValueError(
            f"{density} does not decay fast enough to be drawn on {manifold}: the bound of its law "
            f"has {float(shares[-1]):.1e} of its mass at {LARGEST:.0e} times the scale. Take a "
            "lighter tail or one of finite reach"
        )
    return _Envelope(edges, log_bound, shares.cumsum(0))


def _check_decreasing(density: RadialDensity, t: Float[Tensor, " edge"], dim: int) -> None:
    if bool((density.log_profile_bound(t / density.scale, dim).diff() > ROUNDING).any()):
        raise TangentValueError(
            f"{density} increases somewhere: give a non-increasing function that it never exceeds "
            "as its bound"
        )


def _accepted(
    manifold: Manifold,
    density: RadialDensity,
    measure: Measure,
    envelope: _Envelope,
    size: int,
    generator: torch.Generator,
) -> Float[Tensor, "accepted m"]:
    """Propose ``size`` points and return those that are accepted."""
    where, within, accept = torch.rand(3, size, generator=generator, dtype=torch.float64)
    cell = torch.searchsorted(envelope.cumulative, where * envelope.cumulative[-1], right=True)
    cell = cell.clamp(max=len(envelope.log_bound) - 1)
    rho = envelope.edges[cell] + within * envelope.edges.diff()[cell]
    u = torch.randn(size, manifold.dim, generator=generator, dtype=torch.float64)
    w = rho[:, None] * u / u.norm(dim=1, keepdim=True)
    inside = manifold.inside(w)
    w, rho, log_bound = w[inside], rho[inside], envelope.log_bound[cell[inside]]
    t = manifold.point(w).norm(dim=1) if measure == "volume" else rho
    excess = density.log_density(t, manifold.dim) + (manifold.dim - 1) * rho.log() - log_bound
    if measure == "volume":
        excess = excess + manifold.log_volume(w)
    if bool((excess > ROUNDING).any()):
        raise TangentValueError(
            f"{density} exceeds its bound by a factor of {float(excess.max().exp()):.4g}: give a "
            "non-increasing function that it never exceeds as its bound"
        )
    return w[accept[inside].log() < excess]
