"""Energy of a gradient in a subspace, beside that in matched random subspaces.

A weight gradient G [o, d] has the energy ``E(Q) = ||G Q||_F^2 = tr(Q^T G^T G Q)`` in the span of
orthonormal columns Q of its input space. Its output side is that of G^T. Energies are free of the
basis within the span and of rotations of the output; ratios are free of the scale of G too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.covariance import INDEFINITE
from tl_tangent.geometry.linalg import exact_math, full_dtype, orthonormal_columns
from tl_tangent.geometry.subspace import TangentSubspace

ROUNDING = 1e-12  # controls this close below the observed value count as reaching it
TOLERANCE = 1e-3  # how far an energy may exceed what it is a part of


def stack_bases(
    subspace: TangentSubspace,
    normals: Sequence[TangentSubspace] = (),
    *,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "d columns"]:
    """Return the columns of Q_T and then of every normal, side by side: ``(1 + B) * rank`` columns.

    They are orthonormal in float64 before they are cast, also where a basis is stored in float32.

    Raises:
        TangentValueError: if a subspace has a basis for each head, if the normals have another
            width or rank than Q_T, or if ``2 * rank > d`` leaves no room for normals.
    """
    for one in (subspace, *normals):
        if one.heads is not None:
            raise TangentValueError(f"{one!r} has a basis for each head: stack .head(i) of each")
        if (one.d, one.rank) != (subspace.d, subspace.rank):
            raise TangentValueError(
                f"controls must have the width {subspace.d} and rank {subspace.rank} of Q_T, got "
                f"width {one.d} and rank {one.rank}: draw them with random_normals"
            )
    if normals:
        check_room(subspace.d, subspace.rank)
    bases = [
        orthonormal_columns(one.basis).to(subspace.basis.device) for one in (subspace, *normals)
    ]
    return torch.cat(bases, dim=-1).to(dtype)


def energies(
    gradient: Float[Tensor, "o d"], stacked: Float[Tensor, "d columns"], rank: int
) -> Float[Tensor, " basis"]:
    """Return ``||G Q||_F^2`` of each stacked basis, in float64 and squared gradient units.

    One product, in the dtype of ``gradient`` (float32 at least); its squares are summed in float64.

    Raises:
        TangentValueError: if the columns do not fit the gradient or are no multiple of ``rank``.
    """
    check_stack(stacked, gradient.shape[1], rank)
    dtype = full_dtype(gradient.dtype)
    with exact_math(gradient.device):
        image = gradient.to(dtype) @ stacked.to(gradient.device, dtype)
        return _by_basis(image.double().square().sum(0), rank)


def total_energy(gradient: Float[Tensor, "o d"]) -> Float[Tensor, ""]:
    """Return ``||G||_F^2`` in float64."""
    return torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64).square()


def moment_energies(
    second_moment: Float[Tensor, "d d"], stacked: Float[Tensor, "d columns"], rank: int
) -> Float[Tensor, " basis"]:
    """Return ``tr(Q^T C Q)`` of each stacked basis, in float64.

    ``C = sum G^T G`` over any number of gradients gives the sums of their energies.

    Raises:
        TangentValueError: as :func:`energies`, or if an energy is negative, so that C is no second
            moment.
    """
    check_stack(stacked, second_moment.shape[1], rank)
    with exact_math(second_moment.device):
        moment, columns = second_moment.double(), stacked.to(second_moment.device).double()
        found = _by_basis((moment @ columns * columns).sum(0), rank)
        lowest = float(found.min())
        if lowest < -INDEFINITE * float(moment.diagonal().abs().sum()):
            raise TangentValueError(
                f"a subspace has the energy {lowest:.3g} in this matrix: a second moment G^T G is "
                "positive semi-definite"
            )
        return found.clamp(min=0)


@dataclass(frozen=True)
class EnergyRatio:
    """Energies of a gradient in Q_T and in B matched normals, and how they compare.

    Attributes:
        tangent: energy in Q_T.
        normals: energy in each normal; may be empty.
        total: energy of the whole gradient.
        d: width of the side that the subspaces lie in.
        rank: rank of each subspace.

    Raises:
        TangentValueError: if an energy is negative, not finite or above the total, if the total is
            zero, if ``rank`` is not between 1 and ``d - 1``, or if normals have no room.
    """

    tangent: float
    normals: tuple[float, ...]
    total: float
    d: int
    rank: int

    def __post_init__(self) -> None:
        if not 1 <= self.rank < self.d:
            raise TangentValueError(f"rank must be from 1 to d - 1 = {self.d - 1}, got {self.rank}")
        if self.normals:
            check_room(self.d, self.rank)
        parts = (self.tangent, *self.normals)
        wrong = [x for x in (*parts, self.total) if not 0 <= x < math.inf]
        if wrong:
            raise TangentValueError(f"energies are finite and not negative, got {wrong}")
        if self.total == 0:
            raise TangentValueError(
                "the gradient is zero and has no energy to compare: leave this weight or batch out"
            )
        if max(parts) > self.total * (1 + TOLERANCE):
            raise TangentValueError(
                f"a subspace has the energy {max(parts):.6g} of a total of {self.total:.6g}: take "
                "both from one gradient, and orthonormal columns"
            )

    @classmethod
    def of(
        cls,
        energies: Float[Tensor, " basis"],
        total: Float[Tensor, ""] | float,
        *,
        d: int,
        rank: int,
    ) -> EnergyRatio:
        """Take the energies of Q_T and then of its normals, as :func:`energies` returns them."""
        tangent, *normals = energies.tolist()
        return cls(tangent, tuple(normals), float(total), d, rank)

    @property
    def fraction(self) -> float:
        """``f_T = E_T / total``, in [0, 1]."""
        return min(self.tangent / self.total, 1.0)

    @property
    def ratio(self) -> float:
        """``E_T`` over the mean of ``E_N``; inf where only the normals hold exactly nothing."""
        if not self.normals:
            raise TangentValueError("no normals were measured: use exact_ratio, or draw some")
        mean = math.fsum(self.normals) / len(self.normals)
        return _quotient(self.tangent, mean, "no energy lies in Q_T nor in any of its normals")

    @property
    def exact_ratio(self) -> float:
        """``f_T / (1 - f_T) * (d - rank) / rank``, the limit of :attr:`ratio` in many normals.

        1 for an isotropic gradient, inf where Q_T holds all of it (to rounding: very large).
        """
        rest = max(self.total - self.tangent, 0.0)
        found = math.inf if rest == 0 else self.tangent / rest
        return found * (self.d - self.rank) / self.rank

    @property
    def concentration(self) -> float:
        """``f_T d / rank``: the fraction over that of a random subspace."""
        return self.fraction * self.d / self.rank

    @property
    def p_value(self) -> float:
        """``(1 + #{E_N >= E_T}) / (1 + B)``, one-sided (see :func:`upper_p_value`)."""
        return upper_p_value(self.tangent, self.normals, rounding=ROUNDING * self.tangent)

    @property
    def p_floor(self) -> float:
        """``1 / (1 + B)``, the smallest p-value that B normals can give."""
        return 1 / (1 + len(self.normals))

    def excess(self, other: EnergyRatio) -> float:
        """Return ``ratio / other.ratio``: how far Q_T stands out more than in a reference.

        Raises:
            TangentValueError: if both are zero or both infinite.
        """
        return _quotient(self.ratio, other.ratio, "both ratios are zero or both infinite")

    def exact_excess(self, other: EnergyRatio) -> float:
        """Return ``exact_ratio / other.exact_ratio``; raises as :meth:`excess`."""
        both = "both exact ratios are zero or both infinite"
        return _quotient(self.exact_ratio, other.exact_ratio, both)


def energy_ratio(
    gradient: Float[Tensor, "o d"], stacked: Float[Tensor, "d columns"], rank: int
) -> EnergyRatio:
    """Measure a gradient in Q_T and its normals, stacked by :func:`stack_bases`.

    Raises:
        TangentValueError: as :func:`energies` and :class:`EnergyRatio`.
    """
    found = energies(gradient, stacked, rank)
    return EnergyRatio.of(found, total_energy(gradient), d=gradient.shape[1], rank=rank)


def upper_p_value(observed: float, controls: Sequence[float], *, rounding: float = 0.0) -> float:
    """Return ``(1 + #{control >= observed}) / (1 + B)``, equal to rounding counted as reached.

    The normals of one Q_T share its complement, so that under a gradient without directions this is
    uniform only for ``d`` far above ``rank``: with B = 20, p = 1/21 comes 5 % of the time at d=768,
    rank 8, but 8 % at d=64, and 50 % at ``d = 2 * rank``, where all normals are one subspace.
    """
    reached = sum(control >= observed - rounding for control in controls)
    return (1 + reached) / (1 + len(controls))


def check_room(d: int, rank: int) -> None:
    """Refuse matched normals where they do not fit beside Q_T."""
    if 2 * rank > d:
        raise TangentValueError(
            f"matched normals of rank {rank} need 2 * rank <= d, but 2 * {rank} > {d}: truncate "
            f"Q_T to rank {d // 2} or less"
        )


def check_stack(stacked: Tensor, d: int, rank: int) -> None:
    """Refuse columns of another width, or that are no whole number of bases of this rank."""
    width, columns = stacked.shape
    if width != d:
        raise TangentValueError(
            f"the bases have width {width}, but this side has width {d}: take the subspace of the "
            "same site, and transpose the gradient for its output side"
        )
    if rank < 1 or columns == 0 or columns % rank:
        raise TangentValueError(f"{columns} columns are not a whole number of bases of rank {rank}")


def _by_basis(
    of_columns: Float[Tensor, "*rows columns"], rank: int
) -> Float[Tensor, "*rows basis"]:
    """Add up what was found for the columns of each basis."""
    return of_columns.unflatten(-1, (-1, rank)).sum(-1)


def _quotient(a: float, b: float, undefined: str) -> float:
    if a == b and a in (0, math.inf):
        raise TangentValueError(f"a ratio is not defined here: {undefined}")
    return a / b if b else math.inf
