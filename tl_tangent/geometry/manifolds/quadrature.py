"""Integrals over a radius of a density that is given by its logarithm, in units of its scale.

Cells grow geometrically, so that they suit a Gaussian and a heavy tail alike; each is integrated by
Gauss-Legendre. Cells are halved until the result stays, which a jump inside of one prevents.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tl_tangent.errors import TangentValueError

LogProfile = Callable[[Tensor], Tensor]
SMALLEST, LARGEST = 1e-6, 1e14  # radii between which cells grow
CELLS = (500, 1000, 2000, 4000)
ACCURACY = 1e-9
TAIL = 1e-12  # share of an integral that the last thousandth of its cells may hold
NODES, WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(8))


def moment_ratio(log_profile: LogProfile, dim: int, reach: float) -> float:
    """Return ``int g t^{m+1} / int g t^{m-1}`` up to ``reach``.

    Raises:
        TangentValueError: if an integral diverges or does not settle.
    """

    def ratio(cells: int) -> float:
        upper, lower = (_log_moment(log_profile, dim + k, 0.0, reach, cells) for k in (1, -1))
        return math.exp(upper - lower)

    return _settled(ratio)


def share_beyond(log_profile: LogProfile, dim: int, reach: float, start: float) -> float:
    """Return the share of ``int g t^{m-1}`` that comes from beyond ``start``.

    Raises:
        TangentValueError: if the integral diverges.
    """
    if start >= reach:
        return 0.0
    inner = _log_moment(log_profile, dim - 1, 0.0, start, CELLS[1])
    outer = _log_moment(log_profile, dim - 1, start, reach, CELLS[1])
    return 1 / (1 + math.exp(min(inner - outer, 700.0)))


def _settled(integral: Callable[[int], float]) -> float:
    found = integral(CELLS[0])
    for cells in CELLS[1:]:
        before, found = found, integral(cells)
        if abs(found - before) <= ACCURACY * abs(found):
            return found
    raise TangentValueError(
        f"the moment ratio of the density does not settle: {before:.8g}, then {found:.8g} with "
        "twice the cells. A jump does that: name the support if that is where it lies"
    )


def _log_moment(
    log_profile: LogProfile, power: int, start: float, stop: float, cells: int
) -> float:
    """Return ``log int_start^stop g t^power dt``."""
    last = min(stop, max(LARGEST, 10 * start))
    first = max(start, min(SMALLEST, last / 2))
    grid = torch.logspace(math.log(first), math.log(last), cells + 1, math.e, dtype=torch.float64)
    edges = torch.cat(
        [torch.tensor([start], dtype=torch.float64), grid[1:-1], grid.new_tensor([last])]
    )
    half = edges.diff()[:, None] / 2
    t = edges[:-1, None] + half * (1 + NODES)
    logs = log_profile(t) + power * t.log() + (half * WEIGHTS).log()
    whole = float(logs.flatten().logsumexp(0))
    tail = float(logs[-max(cells // 1000, 1) :].flatten().logsumexp(0))
    if whole == -math.inf:
        return whole
    if last < stop and tail - whole > math.log(TAIL):
        raise TangentValueError(
            f"the integral of g(t) t^{power} does not converge: {math.exp(tail - whole):.2g} of it "
            f"still comes from about t = {last:.0e} times the scale. Take a lighter tail"
        )
    return whole
