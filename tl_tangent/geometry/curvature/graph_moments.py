"""Exact moments of a Gaussian on a quadratic graph: what a known curvature does to a cloud.

Points are ``x = (w, n)`` with w ~ N(0, s^2 I_m) and ``n_a = w^T A_a w / 2``. With
``Gamma_ab = <A_a, A_b>``,

    E n = s^2 H / 2      Cov(w, n) = 0      Cov n = s^4 Gamma / 2
    E ||n||^2 = s^4 (||H||^2 + 2 ||II||^2) / 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.covariance import isoscore_from_eigenvalues
from tl_tangent.geometry.curvature.second_form import checked, mean_curvature, square_norm


@dataclass(frozen=True, eq=False)
class GraphMoments:
    """Population moments, in the graph's tangent and normal coordinates.

    Attributes:
        shift: ``E n``, how far the mean of the cloud lies off its base point, along H.
        normal_covariance: ``Cov n``; tangent coordinates have ``s^2 I`` and no covariance with n.
        normal_square: ``E ||n||^2`` about the base point.
        isoscore: of the covariance, in all d dimensions.
        flat_isoscore: its limit as s goes to 0, ``(m - 1) / (d - 1)``.
        threshold: the s below which the m leading principal directions are the tangent ones,
            ``sqrt(2 / max eigenvalue of Gamma)``; a normal direction outranks them above it.
        scale: s.
        d: width.
    """

    shift: Float[Tensor, " c"]
    normal_covariance: Float[Tensor, "c c"]
    normal_square: float
    isoscore: float
    flat_isoscore: float
    threshold: float
    scale: float
    d: int

    def __repr__(self) -> str:
        return (
            f"GraphMoments(s={self.scale:.4g} in R^{self.d}: mean off by "
            f"{float(self.shift.norm()):.4g}, IsoScore {self.isoscore:.4g} (flat "
            f"{self.flat_isoscore:.4g}), tangent directions lead below s={self.threshold:.4g})"
        )


def graph_moments(
    second_form: Float[Tensor, "m m c"], scale: int | float, *, d: int | None = None
) -> GraphMoments:
    """Return the moments of a Gaussian of standard deviation ``scale`` on a quadratic graph.

    Args:
        second_form: II, the matrices A_a in its last axis.
        d: width of the space, ``m + c`` by default; further directions have no variance.

    Raises:
        TangentValueError: if II is not ``[m, m, c]``, finite and symmetric, ``scale`` is not
            positive, or d is less than ``m + c`` or than 2.
    """
    form = checked(second_form)
    m, c = form.shape[1:]
    width = m + c if d is None else d
    if width < max(m + c, 2):
        raise TangentValueError(f"the graph lies in R^{m + c}; d must be that or more, got {width}")
    if not 0 < scale < math.inf:
        raise TangentValueError(f"scale must be positive and finite, got {scale}")
    gamma = torch.einsum("ija,ijb->ab", form, form)
    normal = scale**4 / 2 * gamma
    eigenvalues = torch.linalg.eigvalsh(gamma)
    flat = torch.full((m,), scale**2, dtype=torch.float64)
    spectrum = torch.cat([flat, scale**4 / 2 * eigenvalues])
    mean = mean_curvature(form)
    largest = float(eigenvalues[-1]) if c else 0.0
    return GraphMoments(
        shift=scale**2 / 2 * mean,
        normal_covariance=normal,
        normal_square=scale**4 / 4 * (float(mean.square().sum()) + 2 * square_norm(form)),
        isoscore=float(isoscore_from_eigenvalues(spectrum, width)),
        flat_isoscore=(m - 1) / (width - 1),
        threshold=math.sqrt(2 / largest) if largest > 0 else math.inf,
        scale=float(scale),
        d=width,
    )
