"""What a subspace of some rank can hold of a gradient's energy: at most, and by chance."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.covariance import (
    participation_ratio,
    participation_ratio_from_eigenvalues,
)
from tl_tangent.geometry.energy import TOLERANCE
from tl_tangent.geometry.linalg import one_thread


def efficiency(second_moment: Float[Tensor, "d d"], tangent_energy: float, rank: int) -> float:
    """Return ``E_T`` over the most that any subspace of this rank can hold, in [0, 1].

    The bound is the sum of the ``rank`` largest eigenvalues of ``C = G^T G``: of the squared
    singular values of G, whose leading vectors GaLore projects on (Zhao et al. 2024).

    Raises:
        TangentValueError: if C is zero, if ``rank`` is not between 1 and ``d``, or if the energy
            exceeds the bound, so that it is not one of C.
    """
    d = len(second_moment)
    if not 1 <= rank <= d:
        raise TangentValueError(f"rank must be from 1 to d = {d}, got {rank}")
    with one_thread():
        bound = float(torch.linalg.eigvalsh(second_moment.double())[-rank:].sum())
    if not 0 < bound < math.inf or not 0 <= tangent_energy <= bound * (1 + TOLERANCE):
        raise TangentValueError(
            f"the energy {tangent_energy:.6g} is not in [0, {bound:.6g}], what rank {rank} can "
            "hold of this matrix: take both from one gradient that is not zero"
        )
    return min(tangent_energy / bound, 1.0)


class FractionMoments(NamedTuple):
    """Mean and variance of a fraction of energy."""

    mean: float
    variance: float


def haar_fraction_moments(
    spectrum: Float[Tensor, "d d"] | Float[Tensor, " d"], rank: int
) -> FractionMoments:
    """Return mean and variance of ``tr(Q^T C Q) / tr C`` over uniformly random Q of this rank.

    ``rank / d`` and ``2 k (d - k) / (d^2 (d + 2)) * (d / PR - 1) / (d - 1)``, PR the participation
    ratio of C: second moments of a Haar projector (Collins & Sniady 2006).

    Args:
        spectrum: the second moment C, or its eigenvalues with zeros included.

    Raises:
        TangentValueError: if C is zero or not finite, or ``rank`` is not between 1 and ``d - 1``.
    """
    d = len(spectrum)
    if not 1 <= rank < d:
        raise TangentValueError(f"rank must be from 1 to d - 1 = {d - 1}, got {rank}")
    of = participation_ratio if spectrum.ndim == 2 else participation_ratio_from_eigenvalues
    uneven = (d / float(of(spectrum.double())) - 1) / (d - 1)
    return FractionMoments(rank / d, 2 * rank * (d - rank) / (d**2 * (d + 2)) * max(uneven, 0.0))
