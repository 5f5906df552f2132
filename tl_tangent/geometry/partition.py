"""The partition function's evenness over directions, a test of isotropy for word vectors."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_finite
from tl_tangent.geometry.linalg import exact_math


def partition_isotropy(w: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Return ``I(W) = min_c Z(c) / max_c Z(c)``, ``Z(c) = sum_i exp(c . w_i)``, in (0, 1].

    Mu & Viswanath 2018: c runs over the unit eigenvectors of ``W^T W``, here with both signs, since
    neither is an eigenvector's own. The rows are not centred, and their scale matters: long ones
    spread Z apart. Where eigenvalues coincide the eigenvectors, and so the value, are one choice of
    many. Computed in float64, with Z in logarithms.

    Raises:
        TangentValueError: if there are no rows, or entries are NaN or infinite.
    """
    check_finite("w", w)
    if not w.numel():
        raise TangentValueError(f"word vectors are [n, d] with n, d >= 1, got {list(w.shape)}")
    with exact_math(w.device):
        rows = w.double()
        directions = torch.linalg.eigh(rows.mT @ rows)[1]
        scores = rows @ directions
        log_z = torch.cat([torch.logsumexp(scores, 0), torch.logsumexp(-scores, 0)])
        return (log_z.min() - log_z.max()).exp()
