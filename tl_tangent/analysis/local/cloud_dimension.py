"""Intrinsic dimensions of a cloud, beside those of Gaussian clouds of the same covariance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.local.twins import gaussian_twins
from tl_tangent.geometry.dimension import (
    LevinaBickel,
    TwoNN,
    levina_bickel,
    local_pca_dimension,
    two_nn,
)

PCA_NEIGHBOURS = 3  # times k: k points tell at most k dimensions


@dataclass(frozen=True, eq=False)
class CloudDimension:
    """Three estimates of one dimension, and the same of Gaussian clouds.

    Attributes:
        two_nn, levina_bickel: with their standard errors.
        local_pca: mean over points, from more neighbours; None where it was not asked for.
        controls: the estimates of each Gaussian cloud, by name.
        n: number of points.
    """

    two_nn: TwoNN
    levina_bickel: LevinaBickel
    local_pca: float | None
    controls: Mapping[str, tuple[float, ...]]
    n: int

    @property
    def values(self) -> dict[str, float]:
        """The estimates by the names of the controls."""
        found = {"two_nn": self.two_nn.mle, "levina_bickel": self.levina_bickel.inverse_mean}
        return found if self.local_pca is None else {**found, "local_pca": self.local_pca}


def cloud_dimension(
    x: Float[Tensor, "n d"], k: int, n_controls: int, seed: int, *, local: bool = False
) -> CloudDimension:
    """Estimate the dimension of a cloud and of its Gaussian twins.

    Args:
        x: distinct points, one a row.
        k: neighbours of Levina & Bickel's estimate.
        n_controls: number of Gaussian clouds.
        seed: of those.
        local: also by local PCA, which takes the longest.

    Raises:
        TangentValueError: as the estimates do.
    """
    own = _estimates(x, k, local)
    twins = [_estimates(twin, k, local).values for twin in gaussian_twins(x, n_controls, seed)]
    controls = {name: tuple(twin[name] for twin in twins) for name in own.values}
    return CloudDimension(own.two_nn, own.levina_bickel, own.local_pca, controls, len(x))


def _estimates(x: Tensor, k: int, local: bool) -> CloudDimension:
    by_pca = None
    if local:
        near = min(PCA_NEIGHBOURS * k, len(x) - 1)
        by_pca = float(local_pca_dimension(x, near).double().mean())
    return CloudDimension(two_nn(x), levina_bickel(x, k), by_pca, {}, len(x))
