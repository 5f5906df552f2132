"""One site's geometry: its covariance, its entropy in Q_T, and its intrinsic dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.local.cloud_dimension import CloudDimension, cloud_dimension
from tl_tangent.analysis.local.twins import gaussian_twins
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import TangentSubspace
from tl_tangent.geometry.covariance import (
    effective_rank,
    isoscore_from_covariance,
    participation_ratio,
)
from tl_tangent.geometry.dimension import (
    Entropy,
    distinct_rows,
    gaussian_entropy_of,
    neighbour_entropy,
)


@dataclass(frozen=True, eq=False)
class SiteGeometry:
    """What the activations at one site look like.

    Attributes:
        d, rank: widths of the site and of Q_T.
        rows: tokens in the covariance.
        isoscore, participation_ratio, effective_rank, total_variance: of that covariance.
        tangent_share: share of its trace in Q_T.
        gaussian, neighbour: entropies of the sampled coordinates in Q_T, in nats in the model's own
            unit.
        neighbour_controls: of Gaussian clouds of the same covariance, by neighbours.
        dimension: of the sample, with that of its Gaussian clouds.
        copies: sampled rows left out as exact copies.
    """

    d: int
    rank: int
    rows: int
    isoscore: float
    participation_ratio: float
    effective_rank: float
    total_variance: float
    tangent_share: float
    gaussian: Entropy
    neighbour: Entropy
    neighbour_controls: tuple[float, ...]
    dimension: CloudDimension
    copies: int

    @property
    def unit_shift(self) -> float:
        """What to add to an entropy in Q_T where the site has a total variance of 1."""
        return -self.rank / 2 * math.log(self.total_variance)

    @property
    def negentropy(self) -> float:
        """How far from Gaussian the coordinates are: 0 for Gaussian ones, but for the bias."""
        return self.gaussian.nats - self.neighbour.nats


def site_geometry(
    covariance: Float[Tensor, "d d"],
    rows: int,
    sampled: Float[Tensor, "n d"],
    subspace: TangentSubspace,
    site: str,
    *,
    k: int,
    n_controls: int,
    seed: int,
) -> SiteGeometry:
    """Measure one site.

    Args:
        covariance: of all tokens.
        rows: how many these are.
        sampled: some of them.
        subspace: Q_T.
        site: its name.
        k: neighbours, of entropy and dimension.
        n_controls: Gaussian clouds beside the sample.
        seed: of those.

    Raises:
        TangentValueError: too few distinct vectors for k or Q_T; as the estimates do.
    """
    x, d = distinct_rows(sampled).double(), len(covariance)
    basis = subspace.basis.to(x.device).double()
    if len(x) <= max(k, subspace.rank):
        raise TangentValueError(
            f"{len(x)} distinct of {len(sampled)} sampled vectors at {site} are too few "
            f"for k={k} neighbours and {subspace.rank} directions: give more text"
        )
    coordinates = (x - x.mean(0)) @ basis
    twins = gaussian_twins(coordinates, n_controls, seed)
    total = float(covariance.diagonal().sum())
    inside = basis.to(covariance.device)
    return SiteGeometry(
        d=d,
        rank=subspace.rank,
        rows=rows,
        isoscore=float(isoscore_from_covariance(covariance)),
        participation_ratio=float(participation_ratio(covariance)),
        effective_rank=float(effective_rank(covariance)),
        total_variance=total,
        tangent_share=float(torch.trace(inside.mT @ covariance @ inside)) / total,
        gaussian=gaussian_entropy_of(coordinates),
        neighbour=neighbour_entropy(coordinates, k),
        neighbour_controls=tuple(neighbour_entropy(twin, k).nats for twin in twins),
        dimension=cloud_dimension(x, k, n_controls, seed, local=True),
        copies=len(sampled) - len(x),
    )
