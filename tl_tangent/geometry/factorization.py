"""Semi-nonnegative matrix factorisation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

TINY = 1e-12


def semi_nmf(
    rows: Float[Tensor, "row d"],
    rank: int,
    *,
    seed: int,
    max_iter: int = 500,
    tol: int | float = 1e-4,
) -> tuple[Float[Tensor, "row rank"], Float[Tensor, "rank d"]]:
    """Factorise ``rows ~ Z D`` with ``Z >= 0`` and ``D`` free.

    The multiplicative updates of Ding, Li & Jordan 2010, "Convex and semi-nonnegative matrix
    factorizations", until the squared error falls by less than ``tol`` of itself in one step.

    Returns:
        The nonnegative weights ``Z`` and the dictionary ``D``.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(len(rows), rank, generator=generator, dtype=rows.dtype).abs()
    weights = weights.to(rows.device) * (rows.abs().mean() / rank).sqrt()
    energy, error = float(rows.square().sum()), float("inf")
    for _ in range(max_iter):
        dictionary = _best_dictionary(rows, weights)
        weights = _updated_weights(rows, weights, dictionary)
        previous, error = error, _squared_error(rows, weights, dictionary, energy)
        if previous - error < tol * max(error, TINY * energy):
            break
    return weights, _best_dictionary(rows, weights)


def _best_dictionary(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.linalg.pinv(weights.mT @ weights, hermitian=True) @ (weights.mT @ rows)


def _updated_weights(rows: Tensor, weights: Tensor, dictionary: Tensor) -> Tensor:
    cross, gram = rows @ dictionary.mT, dictionary @ dictionary.mT
    gain = cross.clamp(min=0) + weights @ (-gram).clamp(min=0)
    loss = (-cross).clamp(min=0) + weights @ gram.clamp(min=0)
    return weights * (gain / loss.clamp(min=TINY)).sqrt()


def _squared_error(rows: Tensor, weights: Tensor, dictionary: Tensor, energy: float) -> float:
    """Return ``||rows - Z D||^2`` without forming ``Z D``."""
    fit = (weights.mT @ rows * dictionary).sum()
    size = (weights.mT @ weights * (dictionary @ dictionary.mT)).sum()
    return energy - 2 * float(fit) + float(size)
