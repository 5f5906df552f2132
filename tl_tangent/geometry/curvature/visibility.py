"""The largest and the smallest value of a direction profile, and how visible curvature is."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.geometry.curvature.local import Direction
from tl_tangent.geometry.curvature.profile import check_eta, coefficients, direction_profile
from tl_tangent.geometry.curvature.second_form import checked, square_norm
from tl_tangent.geometry.linalg import one_thread

STARTS, STEPS = 64, 1000
STILL = 1e-13  # of the sizes of a and B: a step that raises no start by more is the last


def profile_range(
    second_form: Float[Tensor, "m m c"], *, direction: Direction = "projected", seed: int = 0
) -> tuple[float, float]:
    """Return the minimum and the maximum of b over unit directions.

    By ascent on the sphere from 64 random starts and the axes, ``u <- grad b(u) + s u`` normalised,
    with a shift s that makes every step an ascent (Kolda & Mayo 2011). In many dimensions a start
    may be missing from the right basin: the range is then an underestimate.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.curvature.profile.direction_profile`.
    """
    second_form, found = second_form.cpu(), []
    for sign in (-1.0, 1.0):
        u = _ascend(second_form, direction, sign, seed)
        found.append(direction_profile(second_form, u, direction=direction))
    return float(found[0].min()), float(found[1].max())


def visibility_index(
    second_form: Float[Tensor, "m m c"],
    eta: int | float,
    *,
    direction: Direction = "projected",
    seed: int = 0,
) -> float:
    """Return ``eta (max b - min b)``, how far curvature spreads the density of directions.

    It is 0 for round spheres and linear spaces at any eta, and for any manifold as eta goes to 0.

    Raises:
        TangentValueError: as :func:`profile_range`, or if ``eta`` is negative or not finite.
    """
    lowest, highest = profile_range(second_form, direction=direction, seed=seed)
    return check_eta(eta) * (highest - lowest)


def _ascend(
    second_form: Tensor, direction: Direction, sign: float, seed: int
) -> Float[Tensor, "start m"]:
    a, matrix = coefficients(second_form, direction)
    form, a, matrix = _narrow(checked(second_form)), sign * a, sign * matrix
    m = len(form)
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(STARTS, m, generator=generator, dtype=torch.float64)
    u = torch.cat([u, torch.linalg.eigh(matrix)[1].mT, torch.eye(m, dtype=torch.float64)])
    u = u / u.norm(dim=1, keepdim=True)
    size = abs(a) * square_norm(form) + float(matrix.norm())
    shift = 12 * abs(a) * square_norm(form) + 2 * float(matrix.norm())  # bounds the Hessian
    if size == 0:
        return u
    before = torch.full((len(u),), -torch.inf, dtype=torch.float64)
    for _ in range(STEPS):
        sides = torch.einsum("ijc,nj->nic", form, u)
        bent = torch.einsum("nic,ni->nc", sides, u)
        pull = u @ matrix
        value = a * bent.square().sum(1) + (pull * u).sum(1)
        if bool((value - before <= STILL * size).all()):
            break
        before = value
        u = 4 * a * torch.einsum("nic,nc->ni", sides, bent) + 2 * pull + shift * u
        u = u / u.norm(dim=1, keepdim=True)
    return u


def _narrow(form: Float[Tensor, "m m c"]) -> Float[Tensor, "m m narrow"]:
    """Turn the normal coordinates so that all but m^2 of them are 0, and leave those out."""
    m, _, c = form.shape
    if c <= m * m:
        return form
    with one_thread():
        return torch.linalg.qr(form.reshape(m * m, c).mT, mode="r")[1].mT.reshape(m, m, -1)
