"""Measures of how evenly a covariance spreads over its directions, by eigenvalues or entries."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_finite
from tl_tangent.geometry.linalg import full_dtype

SYMMETRY = 1e-4
INDEFINITE = 1e-5


def second_moment(
    x: Float[Tensor, "n d"], *, centred: bool = False, ddof: int = 0
) -> Float[Tensor, "d d"]:
    """Return ``X^T X / (n - ddof)`` in float64, of rows with their mean taken out or as they are.

    Raises:
        TangentValueError: if an entry is NaN or infinite, or ``ddof`` leaves no rows to divide by.
    """
    check_finite("x", x)
    freedom = len(x) - ddof
    if freedom < 1:
        raise TangentValueError(f"{len(x)} rows leave no freedom with ddof={ddof}")
    x = x.double()
    if centred:
        x = x - x.mean(0)
    return x.mT @ x / freedom


def participation_ratio(covariance: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Return ``(tr C)^2 / ||C||_F^2``, the number of directions in use, in [1, d].

    Differentiable, in float32 at least, and free of the scale of ``covariance``.

    Raises:
        TangentValueError: if the matrix is not square, finite and of positive trace.
    """
    return 1 / _unit_trace(covariance).square().sum((-2, -1))


def isoscore_from_covariance(covariance: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Return IsoScore, 0 for one direction and 1 for equal ones, as ``(PR - 1) / (d - 1)``.

    This is the score of Rudman, Gillman, Rayne & Eickhoff 2022, Algorithm 1, in closed form through
    the participation ratio ``PR``; no eigenvalues are needed.

    Raises:
        TangentValueError: as :func:`participation_ratio`, or if ``d`` is 1.
    """
    return rescaled(participation_ratio(covariance), covariance.shape[-1])


def effective_rank(covariance: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Return the exponential of the entropy of the spectrum's shares (Roy & Vetterli 2007).

    Raises:
        TangentValueError: as :func:`participation_ratio`.
    """
    return effective_rank_from_eigenvalues(torch.linalg.eigvalsh(_unit_trace(covariance)))


def stable_rank(covariance: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Return the trace over the largest eigenvalue, in [1, d].

    Raises:
        TangentValueError: as :func:`participation_ratio`.
    """
    return 1 / torch.linalg.eigvalsh(_unit_trace(covariance))[..., -1]


def participation_ratio_from_eigenvalues(
    values: Float[Tensor, "*batch n"],
) -> Float[Tensor, "*batch"]:
    """Return ``(sum v)^2 / sum v^2``.

    Raises:
        TangentValueError: if the values are not finite or do not have a positive sum.
    """
    return 1 / _shares(values).square().sum(-1)


def isoscore_from_eigenvalues(
    values: Float[Tensor, "*batch n"], d: int | None = None
) -> Float[Tensor, "*batch"]:
    """Return IsoScore from the eigenvalues of a covariance.

    Args:
        values: eigenvalues; those that are zero may be left out.
        d: number of dimensions, if there are more than values.

    Raises:
        TangentValueError: as :func:`participation_ratio_from_eigenvalues`, or if ``d`` is 1.
    """
    return rescaled(participation_ratio_from_eigenvalues(values), d or values.shape[-1])


def effective_rank_from_eigenvalues(values: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Return the exponential of the entropy of the shares ``v / sum v`` (Roy & Vetterli 2007).

    Raises:
        TangentValueError: if the values are not finite or do not have a positive sum.
    """
    shares = _shares(values).clamp(min=0)
    return torch.special.entr(shares).sum(-1).exp()


def remove_directions(
    covariance: Float[Tensor, "d d"], basis: Float[Tensor, "d rank"]
) -> Float[Tensor, "d d"]:
    """Return ``P C P`` with ``P = I - Q Q^T``, by products with the columns of Q, in float64."""
    covariance, basis = covariance.double(), basis.double()
    image = covariance @ basis
    image = image - basis @ (basis.mT @ image) / 2
    cross = image @ basis.mT
    return covariance - cross - cross.mT


def removed_covariance_participation(
    covariance: Float[Tensor, "d d"], basis: Float[Tensor, "d rank"]
) -> Float[Tensor, ""]:
    """Return the participation ratio of a covariance after the directions of a basis are removed.

    Divide what it exceeds 1 by ``d - 1`` for an IsoScore in the ambient space, by ``d - rank - 1``
    for one in the space that is left (see :func:`rescaled`).

    Raises:
        TangentValueError: as :func:`participation_ratio`, or if nothing is left.
    """
    left = remove_directions(covariance, basis)
    eps = torch.finfo(full_dtype(covariance.dtype)).eps
    floor = eps * len(left) * covariance.diagonal().sum()
    if bool(left.diagonal().sum() <= floor):
        raise TangentValueError(
            f"the {basis.shape[-1]} directions hold all of the variance: nothing is left to measure"
        )
    return participation_ratio(left).to(full_dtype(covariance.dtype))


def rescaled(ratio: Float[Tensor, "*batch"], d: int) -> Float[Tensor, "*batch"]:
    """Map a participation ratio from [1, d] to [0, 1].

    Raises:
        TangentValueError: if ``d`` is less than 2, where evenness has no meaning.
    """
    if d < 2:
        raise TangentValueError(f"IsoScore needs 2 or more dimensions, got d={d}")
    return (ratio - 1) / (d - 1)


def check_target(target: Float[Tensor, "d d"], d: int) -> None:
    """Refuse a shrinkage target that is not a symmetric positive semi-definite ``[d, d]``."""
    if target.shape != (d, d):
        raise TangentValueError(f"c0 must be [{d}, {d}] here, got {list(target.shape)}")
    target = target.detach().double()
    largest = float(target.abs().max())
    if not largest < float("inf") or largest == 0:
        raise TangentValueError("c0 must be finite and not all zero")
    if float((target - target.mT).abs().max()) > SYMMETRY * largest:
        raise TangentValueError("c0 is not symmetric: a covariance is")
    lowest = float(torch.linalg.eigvalsh((target + target.mT) / 2)[0])
    if lowest < -INDEFINITE * largest:
        raise TangentValueError(
            f"c0 is not positive semi-definite: its lowest eigenvalue is {lowest:.3g}"
        )


def _unit_trace(covariance: Tensor) -> Tensor:
    if covariance.ndim < 2 or covariance.shape[-1] != covariance.shape[-2]:
        raise TangentValueError(f"a covariance is [d, d], got {list(covariance.shape)}")
    covariance = covariance.to(full_dtype(covariance.dtype))
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    _check_total(trace, "trace of the covariance")
    return covariance / trace[..., None, None]


def _shares(values: Tensor) -> Tensor:
    values = values.to(full_dtype(values.dtype))
    total = values.sum(-1, keepdim=True)
    _check_total(total, "sum of the eigenvalues")
    return values / total


def _check_total(total: Tensor, name: str) -> None:
    if not bool((total.isfinite() & (total > 0)).all()):
        raise TangentValueError(
            f"the {name} must be positive and finite, got {total.detach().flatten().tolist()}: "
            "a constant cloud, NaN or infinite entries have no spread to measure"
        )
