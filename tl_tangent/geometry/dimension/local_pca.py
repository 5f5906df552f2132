"""Tangent spaces and dimensions of a cloud by PCA of the points around one of them.

Evenly filled balls of radius t on a manifold of dimension m have m variances ``t^2 / (m + 2)`` and
others of ``O(t^4)``. The leading directions miss the tangent space by an angle of which

- the bias is ``O(t^2)`` inside the manifold, from a change of curvature or of density along it: on
  ``y = c x^3`` it is ``(3 / 5) c t^2``, on ``y = a x^2 / 2`` with the density ``1 + g x`` it is
  ``(2 / 15) a g t^2``. Where both sides of the point are alike, as on a sphere that is evenly
  filled, it is 0. At a border it is ``O(t)``, at the end of ``y = a x^2 / 2`` half of ``a t``.
- the sampling error is ``O(t / sqrt(N))`` with N points in the ball: on the sphere S^2 of radius R
  it has the root mean square ``t / (R sqrt(6 N))``.
- noise of standard deviation s adds ``s sqrt((m + 2) / N) / t`` for each pair of a tangent and a
  normal direction, which asks for a large t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_points
from tl_tangent.geometry.dimension.neighbours import CHUNK_BYTES, nearest_neighbours
from tl_tangent.geometry.linalg import canonical_signs, exact_math, one_thread

Rule = Literal["share", "ratio"]
THRESHOLDS: dict[str, float] = {"share": 0.95, "ratio": 0.05}
BLOCK = 256


@dataclass(frozen=True, eq=False)
class LocalPca:
    """Principal directions of the points in one ball.

    Attributes:
        mean: of the points; off the manifold by ``O(t^2)``, towards the mean curvature.
        basis: orthonormal columns, the first m of which estimate the tangent space.
        variances: along them, descending, divisor ``n - 1``.
        radius: t.
        n: number of points in the ball.
    """

    mean: Float[Tensor, " d"]
    basis: Float[Tensor, "d direction"]
    variances: Float[Tensor, " direction"]
    radius: float
    n: int


def local_pca(x: Float[Tensor, "n d"], base: Float[Tensor, " d"], radius: int | float) -> LocalPca:
    """Decompose the points within ``radius`` of ``base`` around their own mean, in float64.

    Args:
        x: the cloud, one point a row.
        base: the point whose tangent space is asked for; need not be a row of ``x``.
        radius: t, in the unit of ``x``.

    Raises:
        TangentValueError: if fewer than 2 points are within, an entry is NaN or infinite, or the
            shapes do not fit.
    """
    check_points(x, base, name="base")
    with exact_math(x.device), one_thread():
        offsets = x.double() - base.double()
        inside = offsets[offsets.norm(dim=1) <= radius]
        if len(inside) < 2:
            raise TangentValueError(
                f"{len(inside)} of {len(x)} points are within {radius} of the base point, and a "
                "variance takes 2: use a larger radius"
            )
        mean = inside.mean(0)
        _, values, directions = torch.linalg.svd(inside - mean, full_matrices=False)
    return LocalPca(
        mean=mean + base,
        basis=canonical_signs(directions.mT),
        variances=values.square() / (len(inside) - 1),
        radius=float(radius),
        n=len(inside),
    )


def local_dimension(
    variances: Float[Tensor, "*batch direction"],
    rule: Rule = "share",
    threshold: float | None = None,
) -> Int[Tensor, "*batch"]:
    """Return how many of the descending variances count as tangent.

    Args:
        variances: of each ball; not all 0.
        rule: ``"share"``, the fewest that hold a share of the whole variance; ``"ratio"``, those
            above a share of the largest (Fukunaga & Olsen 1971). Both ask for a ball in which
            curvature and noise are small: a border between ``t^2`` and ``t^4`` at one t.
        threshold: the share, in (0, 1); 0.95 for ``"share"`` and 0.05 for ``"ratio"`` if not given.

    Raises:
        TangentValueError: if ``rule`` is neither, or ``threshold`` is out of range.
    """
    if rule not in THRESHOLDS:
        raise TangentValueError(f"rule is 'share' or 'ratio', got {rule!r}")
    level = THRESHOLDS[rule] if threshold is None else threshold
    if not 0 < level < 1:
        raise TangentValueError(f"a threshold is a share in (0, 1), got {threshold}")
    if rule == "ratio":
        return (variances > level * variances[..., :1]).sum(-1)
    before = variances.cumsum(-1) - variances
    return (before < level * variances.sum(-1, keepdim=True)).sum(-1)


def local_pca_dimension(
    x: Float[Tensor, "n d"],
    k: int,
    rule: Rule = "share",
    threshold: float | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Int[Tensor, " n"]:
    """Return the dimension by PCA of each point and its k nearest others; average it as you like.

    k points tell at most k dimensions.

    Args:
        x: the cloud, one point a row.
        k: number of neighbours.
        rule, threshold: as :func:`local_dimension`.
        chunk_bytes: as :func:`~tl_tangent.geometry.dimension.neighbours.nearest_neighbours`.

    Raises:
        TangentValueError: as :func:`local_dimension` and
            :func:`~tl_tangent.geometry.dimension.neighbours.nearest_neighbours`, or if a point
            has k exact copies.
    """
    near = nearest_neighbours(x, k, chunk_bytes=chunk_bytes)
    atoms = int((near.distances[:, -1] == 0).sum())
    if atoms:
        raise TangentValueError(
            f"{atoms} of {len(x)} rows have {k} or more exact copies: drop them with distinct_rows"
        )
    with exact_math(x.device), one_thread():
        x = x.double()
        found = [
            local_dimension(_variances(x, own, rows), rule, threshold)
            for own, rows in zip(x.split(BLOCK), near.rows.split(BLOCK), strict=True)
        ]
    return torch.cat(found)


def _variances(x: Tensor, own: Tensor, rows: Tensor) -> Float[Tensor, "block direction"]:
    offsets = torch.cat([torch.zeros_like(own)[:, None], x[rows] - own[:, None]], dim=1)
    centred = offsets - offsets.mean(1, keepdim=True)
    wide = centred.shape[1] <= centred.shape[2]
    gram = centred @ centred.mT if wide else centred.mT @ centred
    return torch.linalg.eigvalsh(gram).flip(-1).clamp(min=0)
