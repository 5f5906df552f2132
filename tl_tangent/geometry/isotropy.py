"""How evenly a cloud of activations or gradients spreads, by IsoScore and related measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_finite
from tl_tangent.geometry.covariance import (
    check_target,
    effective_rank_from_eigenvalues,
    participation_ratio_from_eigenvalues,
    rescaled,
)
from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.geometry.partition import partition_isotropy

RANKME_EPS = 1e-7


def isoscore(x: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Return the IsoScore of a cloud of ``n`` points, in [0, 1]; differentiable.

    The score of Rudman, Gillman, Rayne & Eickhoff 2022, Algorithm 1, as ``(PR - 1) / (d - 1)`` with
    the participation ratio ``PR`` of the covariance. With fewer points than dimensions it is
    computed from their inner products.

    Raises:
        TangentValueError: if ``d`` is 1, there are fewer than 2 points, they are all alike, or an
            entry is NaN or infinite.
    """
    _, trace, square = _spread(x)
    return rescaled(trace.square() / square, x.shape[-1]).to(full_dtype(x.dtype))


def isoscore_star(
    x: Float[Tensor, "n d"],
    c0: Float[Tensor, "d d"] | Literal["identity"] | None = None,
    zeta: int | float = 0.2,
    *,
    ddof: int = 1,
) -> Float[Tensor, ""]:
    """Return IsoScore*, the IsoScore of ``(1 - zeta) C + zeta C0``, in [0, 1]; differentiable.

    Rudman & Eickhoff 2024, Algorithm 1 and the released code (the running text of the paper swaps
    the two weights). ``zeta=0`` gives :func:`isoscore`.

    Args:
        x: the cloud, one point a row.
        c0: the shrinkage target. By default the identity with the trace of ``C``, which is free of
            scale; it maps scores monotonically at fixed ``d``, so it never changes a ranking.
            ``"identity"`` is the plain identity: small clouds, gradients above all, then all score
            near 1. A matrix, such as the covariance of a larger sample, adds information.
        zeta: weight of the target, in [0, 1].
        ddof: divisor ``n - ddof`` of the covariance; matters for ``zeta > 0`` only.

    Raises:
        TangentValueError: as :func:`isoscore`, if ``zeta`` is outside [0, 1], or if ``c0`` is not
            symmetric positive semi-definite of the right size.
    """
    if not 0 <= zeta <= 1:
        raise TangentValueError(f"zeta must be in [0, 1], got {zeta}")
    d = x.shape[-1]
    centered, trace, square = _spread(x)
    freedom = len(x) - ddof
    if freedom < 1:
        raise TangentValueError(f"{len(x)} points leave no freedom with ddof={ddof}")
    trace, square = trace / freedom, square / freedom**2
    own = 1 - zeta
    inner, target_trace, target_square = _target(centered / freedom**0.5, trace, c0)
    total = own * trace + zeta * target_trace
    norm = own**2 * square + 2 * own * zeta * inner + zeta**2 * target_square
    return rescaled(total.square() / norm, d).to(full_dtype(x.dtype))


def shrink_covariance(
    covariance: Float[Tensor, "d d"],
    c0: Float[Tensor, "d d"] | Literal["identity"] | None = None,
    zeta: int | float = 0.2,
) -> Float[Tensor, "d d"]:
    """Return ``(1 - zeta) C + zeta C0`` with the targets of :func:`isoscore_star`.

    Raises:
        TangentValueError: if ``zeta`` is outside [0, 1], or if ``c0`` is not symmetric positive
            semi-definite of the right size.
    """
    if not 0 <= zeta <= 1:
        raise TangentValueError(f"zeta must be in [0, 1], got {zeta}")
    covariance = covariance.to(full_dtype(covariance.dtype))
    if isinstance(c0, Tensor):
        check_target(c0, len(covariance))
        return (1 - zeta) * covariance + zeta * c0.to(covariance)
    level = covariance.diagonal().mean() if c0 is None else _plain(c0)
    return (1 - zeta) * covariance + zeta * level * torch.eye(len(covariance)).to(covariance)


def mean_cosine(x: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Return the mean cosine of all pairs of distinct rows, in [-1, 1] (Ethayarajh 2019).

    Raises:
        TangentValueError: if there are fewer than 2 rows, or rows are zero, NaN or infinite.
    """
    _check_cloud(x)
    x = x.to(full_dtype(x.dtype))
    norms = x.norm(dim=-1, keepdim=True)
    zero = int((norms == 0).sum())
    if zero:
        raise TangentValueError(f"{zero} of {len(x)} rows are zero and have no direction")
    n = len(x)
    return ((x / norms).sum(0).square().sum() - n) / (n * (n - 1))


def rankme(z: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Return RankMe, the exponential of the entropy of the singular values (Garrido et al. 2023).

    ``exp(-sum p log p)`` with ``p = s / sum s + 1e-7`` and s those of Z itself, not centred: not
    the effective rank of the covariance, whose shares are those of squares around the mean.

    Raises:
        TangentValueError: if the rows are all zero, NaN or infinite.
    """
    check_finite("z", z)
    values = torch.linalg.svdvals(z.double())
    total = values.sum()
    if float(total) == 0:
        raise TangentValueError(f"all {len(z)} rows are zero: they have no rank to measure")
    p = values / total + RANKME_EPS
    return (-(p * p.log()).sum()).exp().to(full_dtype(z.dtype))


@dataclass(frozen=True)
class IsotropyMeasures:
    """Measures of one cloud beside each other; larger is more even but for the mean cosine.

    Attributes:
        isoscore: of the covariance, in [0, 1].
        isoscore_star: of the shrunk covariance, in [0, 1].
        participation_ratio: of the covariance, in [1, d], like the next two.
        effective_rank: exponential of the entropy of its eigenvalues.
        stable_rank: its trace over its largest eigenvalue.
        rankme: see :func:`rankme`; not centred, like the next two.
        mean_cosine: of pairs of distinct rows, in [-1, 1]; near 0 where directions are even.
        partition: I(W) of Mu & Viswanath 2018, in (0, 1].
        zeta: weight of the shrinkage target of ``isoscore_star``.
    """

    isoscore: float
    isoscore_star: float
    participation_ratio: float
    effective_rank: float
    stable_rank: float
    rankme: float
    mean_cosine: float
    partition: float
    zeta: float


def isotropy_measures(
    x: Float[Tensor, "n d"],
    *,
    c0: Float[Tensor, "d d"] | Literal["identity"] | None = None,
    zeta: int | float = 0.2,
) -> IsotropyMeasures:
    """Return all measures of a cloud, one point a row.

    Args:
        x: the cloud.
        c0, zeta: shrinkage of IsoScore*, as :func:`isoscore_star`.

    Raises:
        TangentValueError: as :func:`isoscore_star` and :func:`mean_cosine`.
    """
    variances = torch.linalg.svdvals(x.double() - x.double().mean(0)).square()
    return IsotropyMeasures(
        isoscore=float(isoscore(x)),
        isoscore_star=float(isoscore_star(x, c0, zeta)),
        participation_ratio=float(participation_ratio_from_eigenvalues(variances)),
        effective_rank=float(effective_rank_from_eigenvalues(variances)),
        stable_rank=float(variances.sum() / variances[0]),
        rankme=float(rankme(x)),
        mean_cosine=float(mean_cosine(x)),
        partition=float(partition_isotropy(x)),
        zeta=float(zeta),
    )


def _spread(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the centred cloud, ``tr X^T X`` and ``||X^T X||_F^2``, by the smaller product."""
    _check_cloud(x)
    eps = torch.finfo(full_dtype(x.dtype)).eps
    x = x.double()  # products of products of small gradients leave the range of float32
    mean = x.mean(0)
    centered = x - mean
    trace = centered.square().sum()
    noise = len(x) * (eps * mean.norm()).square()
    if bool(trace <= noise):
        raise TangentValueError(f"the {len(x)} points are all alike: they have no spread")
    product = centered @ centered.mT if len(x) < x.shape[1] else centered.mT @ centered
    return centered, trace, product.square().sum()


def _target(
    centered: Tensor, trace: Tensor, c0: Tensor | str | None
) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    """Return ``<C, C0>``, ``tr C0`` and ``||C0||_F^2`` for ``C = centered^T centered``."""
    d = centered.shape[1]
    if isinstance(c0, Tensor):
        check_target(c0, d)
        target = c0.to(centered)
        return (centered @ target * centered).sum(), target.trace(), target.square().sum()
    level = trace / d if c0 is None else _plain(c0)
    return level * trace, level * d, level**2 * d


def _plain(c0: str) -> float:
    if c0 != "identity":
        raise TangentValueError(f"c0 is a matrix, 'identity' or None, got {c0!r}")
    return 1.0


def _check_cloud(x: Tensor) -> None:
    if x.ndim != 2 or len(x) < 2:
        raise TangentValueError(f"a cloud is [n, d] with 2 points or more, got {list(x.shape)}")
    bad = int((~x.isfinite()).any(-1).sum())
    if bad:
        raise TangentValueError(f"{bad} of {len(x)} rows hold NaN or infinite entries")
