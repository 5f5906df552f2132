"""What removing a subspace does to IsoScore, beside removing matched random subspaces.

Shrink, then project, then measure: shrinking afterwards would refill the removed directions and
fake isotropy. With ``P = I - Q Q^T`` the participation ratio of ``P C P`` follows from products
with Q alone: ``tr P C P = tr C - tr(Q^T C Q)`` and
``||P C P||_F^2 = ||C||_F^2 - 2 ||C Q||_F^2 + ||Q^T C Q||_F^2``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import ORTHONORMAL_TOLERANCE, check_finite
from tl_tangent.geometry.covariance import (
    participation_ratio,
    remove_directions,
    rescaled,
    second_moment,
)
from tl_tangent.geometry.energy import check_room, check_stack, upper_p_value
from tl_tangent.geometry.isotropy import shrink_covariance
from tl_tangent.geometry.linalg import exact_math, full_dtype, orthonormality_error

Space = Literal["reduced", "ambient"]
ROUNDING = 1e-12  # of an IsoScore: controls this close below the observed one count as reaching it
CANCELLED = 1e-6  # share of ||C||_F^2 below which what is left is computed without differences


@dataclass(frozen=True)
class RemovalEffect:
    """IsoScores of a second moment, whole and without Q_T or one of its B normals.

    Attributes:
        isoscore: of the whole, divided by ``d - 1``.
        without_tangent: after Q_T is removed.
        without_normals: after each normal is removed; may be empty.
        d: width.
        rank: rank of each subspace.
        space: ``"reduced"`` divides scores after removal by the ``d - rank - 1`` of the space that
            is left, so that even spread stays 1; ``"ambient"`` by ``d - 1``, so that removed
            directions count as unused, as if coordinates were set to zero.
        zeta: weight of the shrinkage target.
        target: ``"trace-matched identity"``, ``"identity"`` or ``"given"``.
    """

    isoscore: float
    without_tangent: float
    without_normals: tuple[float, ...]
    d: int
    rank: int
    space: Space
    zeta: float
    target: str

    @property
    def delta_tangent(self) -> float:
        """Change of IsoScore when Q_T is removed: positive where Q_T carries anisotropy."""
        return self.without_tangent - self.isoscore

    @property
    def delta_normals(self) -> tuple[float, ...]:
        """Change of IsoScore when each normal is removed."""
        return tuple(score - self.isoscore for score in self.without_normals)

    @property
    def contrast(self) -> float:
        """``delta_tangent`` less the mean of ``delta_normals``."""
        if not self.without_normals:
            raise TangentValueError("no normals were removed: a contrast needs some, so draw them")
        return self.delta_tangent - math.fsum(self.delta_normals) / len(self.without_normals)

    @property
    def p_value(self) -> float:
        """``(1 + #{delta_N >= delta_T}) / (1 + B)``, by the one-sided rule of energies."""
        return upper_p_value(self.delta_tangent, self.delta_normals, rounding=ROUNDING)

    @property
    def p_floor(self) -> float:
        """``1 / (1 + B)``, the smallest p-value that B normals can give."""
        return 1 / (1 + len(self.without_normals))


def removal(
    moment: Float[Tensor, "d d"],
    stacked: Float[Tensor, "d columns"],
    rank: int,
    *,
    zeta: int | float = 0.0,
    c0: Float[Tensor, "d d"] | Literal["identity"] | None = None,
    space: Space = "reduced",
    empty: Literal["raise", "nan"] = "raise",
) -> RemovalEffect:
    """Measure IsoScore* of a second moment or covariance, whole and without each stacked basis.

    Args:
        moment: C, of gradients (``G^T G``), activations or a null; scores are free of its scale
            where the shrinkage target is.
        stacked: Q_T and its normals, from :func:`~tl_tangent.geometry.energy.stack_bases`.
        rank: number of columns of each basis.
        zeta, c0: shrinkage, as :func:`~tl_tangent.geometry.isotropy.isoscore_star`.
        space: see :class:`RemovalEffect`.
        empty: what becomes of a basis that holds all of C, beside which nothing is left to score.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.isotropy.isoscore_star`; if the bases do
            not fit, are not orthonormal, or hold all of C; or if ``space`` is neither.
    """
    d = len(moment)
    check_finite("second moment", moment)
    check_stack(stacked, d, rank)
    bases = stacked.to(moment.device).double().unflatten(1, (-1, rank)).movedim(1, 0)
    _check_bases(bases)
    dims = {"reduced": d - rank, "ambient": d}
    if space not in dims:
        raise TangentValueError(f"space is 'reduced' or 'ambient', got {space!r}")
    with exact_math(moment.device):
        shrunk = shrink_covariance(moment.double(), c0, zeta)
        noise = torch.finfo(full_dtype(moment.dtype)).eps * d
        before = rescaled(participation_ratio(shrunk), d)
        without = rescaled(_participation_without(shrunk, bases, noise), dims[space])
    if empty == "raise":
        _check_left(without, rank)
    tangent, *normals = without.tolist()
    names = {None: "trace-matched identity", "identity": "identity"}
    return RemovalEffect(
        isoscore=float(before),
        without_tangent=tangent,
        without_normals=tuple(normals),
        d=d,
        rank=rank,
        space=space,
        zeta=float(zeta),
        target="given" if isinstance(c0, Tensor) else names[c0],
    )


def cloud_removal(
    x: Float[Tensor, "n d"],
    stacked: Float[Tensor, "d columns"],
    rank: int,
    *,
    centred: bool,
    ddof: int = 1,
    zeta: int | float = 0.0,
    c0: Float[Tensor, "d d"] | Literal["identity"] | None = None,
    space: Space = "reduced",
) -> RemovalEffect:
    """Measure IsoScore* of a cloud, whole and without each stacked basis.

    Args:
        x: one point a row: activations, or the rows of gradients.
        stacked: Q_T and its normals side by side, ``stack_bases(subspace, normals)`` from
            :mod:`tl_tangent.geometry.energy`, with ``normals = subspace.random_normals(20, seed)``.
        rank: that of Q_T.
        centred: whether the mean of the rows is taken out: a covariance, as IsoScore has it, or the
            second moment that energies are measured by.
        ddof: divisor ``n - ddof``; matters beside a ``c0`` of its own scale only.

    Raises:
        TangentValueError: as :func:`removal` and
            :func:`~tl_tangent.geometry.covariance.second_moment`.
    """
    moment = second_moment(x, centred=centred, ddof=ddof)
    return removal(moment, stacked, rank, zeta=zeta, c0=c0, space=space)


def _participation_without(
    moment: Float[Tensor, "d d"], bases: Float[Tensor, "basis d rank"], noise: float
) -> Float[Tensor, " basis"]:
    """Return the participation ratio of ``P C P`` for each basis; float64, NaN of nothing."""
    rank = bases.shape[-1]
    images = (moment @ bases.movedim(0, 1).flatten(1)).unflatten(1, (-1, rank)).movedim(1, 0)
    inside = bases.mT @ images
    whole, whole_square = moment.diagonal().sum(), moment.square().sum()
    trace = whole - inside.diagonal(dim1=-2, dim2=-1).sum(-1)
    square = whole_square - 2 * images.square().sum((-2, -1)) + inside.square().sum((-2, -1))
    found, left = trace.square() / square, trace > whole * noise
    for one in (left & (square < CANCELLED * whole_square)).nonzero().flatten().tolist():
        found[one] = participation_ratio(remove_directions(moment, bases[one]))
    return found.where(left, torch.nan)


def _check_bases(bases: Float[Tensor, "basis d rank"]) -> None:
    error = orthonormality_error(bases)
    if error > ORTHONORMAL_TOLERANCE:
        raise TangentValueError(
            f"columns of a basis are not orthonormal: |Q^T Q - I| reaches {error:.2e}, accepted "
            f"is {ORTHONORMAL_TOLERANCE:.0e}; stack them with stack_bases"
        )
    if len(bases) > 1:
        check_room(*bases.shape[1:])


def _check_left(without: Float[Tensor, " basis"], rank: int) -> None:
    empty = int(without.isnan().sum())
    if empty:
        raise TangentValueError(
            f"{empty} of {len(without)} bases hold all of the variance in their {rank} directions: "
            "nothing is left to measure"
        )
