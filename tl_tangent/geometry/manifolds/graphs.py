"""Graphs over their tangent space: ``x = (w, h(w))`` with quadratic and cubic forms h.

The volume of a unit of dw is ``sqrt(det(I + Dh^T Dh))``. Dh has rank q = min(m, codim) at most, so
that a bound s of its Frobenius norm bounds the determinant by ``(1 + s^2 / q)^q``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.manifolds.base import Defaults
from tl_tangent.geometry.manifolds.checks import check_forms, check_numbers


class _Graph(Defaults):
    """``h_a(w) = w^T A_a w / 2 + C_a(w, w, w) / 6`` for each normal direction a."""

    @property
    def _quadratic(self) -> Float[Tensor, "codim m m"]:
        raise NotImplementedError

    @property
    def _cubic(self) -> Float[Tensor, "codim m m m"] | None:
        return None

    @property
    def dim(self) -> int:
        """Number of variables of the forms."""
        return self._quadratic.shape[-1]

    @property
    def ambient(self) -> int:
        """One more than m for each form."""
        return self.dim + len(self._quadratic)

    @property
    def second_fundamental_form(self) -> Float[Tensor, "m m codim"]:
        """The matrices A_a."""
        return self._quadratic.permute(1, 2, 0).contiguous()

    def point(self, w: Float[Tensor, "n m"]) -> Float[Tensor, "n D"]:
        """Return ``(w, h(w))``."""
        height = torch.einsum("aij,ni,nj->na", self._quadratic, w, w) / 2
        if self._cubic is not None:
            height = height + torch.einsum("aijk,ni,nj,nk->na", self._cubic, w, w, w) / 6
        return torch.cat([w, height], dim=1)

    def log_volume(self, w: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """``log det(I + Dh^T Dh) / 2``, by the smaller of the two Gram matrices."""
        slope = torch.einsum("aij,nj->nai", self._quadratic, w)
        if self._cubic is not None:
            slope = slope + torch.einsum("aijk,nj,nk->nai", self._cubic, w, w) / 2
        gram = slope @ slope.mT if slope.shape[1] < slope.shape[2] else slope.mT @ slope
        return torch.linalg.slogdet(gram + torch.eye(gram.shape[-1]).to(gram))[1] / 2

    def chord_ratio(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """1: a graph only adds to |w|."""
        return torch.ones_like(rho)

    def log_volume_bound(self, rho: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """``q / 2 log(1 + s^2 / q)`` with ``s = |sum A_a^2|^{1/2} rho + |C| rho^2 / 2``."""
        squares = (self._quadratic @ self._quadratic).sum(0)
        steepest = torch.linalg.eigvalsh(squares)[-1].clamp(min=0).sqrt() * rho
        if self._cubic is not None:
            steepest = steepest + self._cubic.norm() * rho.square() / 2
        rank = min(self.dim, len(self._quadratic))
        return rank / 2 * (steepest.square() / rank).log1p()


@dataclass(frozen=True, eq=False)
class QuadraticGraph(_Graph):
    """``x = (w, w^T A_a w / 2)`` with any symmetric matrices A_a, one for each normal direction.

    Attributes:
        forms: the matrices.
    """

    forms: Float[Tensor, "codim m m"]

    def __post_init__(self) -> None:
        check_forms("forms", self.forms, 2)

    def __repr__(self) -> str:
        return f"QuadraticGraph(codim={len(self.forms)}, dim={self.dim})"

    @property
    def _quadratic(self) -> Float[Tensor, "codim m m"]:
        return self.forms.double()


@dataclass(frozen=True, eq=False)
class CubicGraph(_Graph):
    """``x = (w, w^T A_a w / 2 + C_a(w, w, w) / 6)``: not symmetric about its base point.

    Attributes:
        forms: the matrices A_a.
        cubics: the forms C_a, symmetric in their last three axes.
    """

    forms: Float[Tensor, "codim m m"]
    cubics: Float[Tensor, "codim m m m"]

    def __post_init__(self) -> None:
        check_forms("forms", self.forms, 2)
        check_forms("cubics", self.cubics, 3)
        if self.cubics.shape[:2] != self.forms.shape[:2]:
            raise TangentValueError(
                f"forms are {list(self.forms.shape)} and cubics {list(self.cubics.shape)}: both "
                "need the same number of normal directions and of variables"
            )

    def __repr__(self) -> str:
        return f"CubicGraph(codim={len(self.forms)}, dim={self.dim})"

    @property
    def _quadratic(self) -> Float[Tensor, "codim m m"]:
        return self.forms.double()

    @property
    def _cubic(self) -> Float[Tensor, "codim m m m"]:
        return self.cubics.double()


@dataclass(frozen=True)
class Paraboloid(_Graph):
    """``x = (w, sum k_i w_i^2 / 2)``, elliptic or hyperbolic by the signs.

    Attributes:
        curvatures: k_i, the principal curvatures at the base point.
    """

    curvatures: tuple[int | float, ...]

    def __post_init__(self) -> None:
        check_numbers("curvatures", self.curvatures)

    @property
    def _quadratic(self) -> Float[Tensor, "codim m m"]:
        return torch.tensor(self.curvatures, dtype=torch.float64).diag()[None]
