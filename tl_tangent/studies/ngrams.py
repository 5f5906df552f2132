"""What a model must beat: the loss of the unigrams and bigrams of its training text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError


@dataclass(frozen=True)
class NgramLosses:
    """Mean cross-entropies in nats a token, of the same predictions as the model's loss."""

    unigram: float
    bigram: float


def ngram_losses(
    train: Int[Tensor, "train pos"],
    validation: Int[Tensor, "validation pos"],
    vocabulary: int,
    *,
    prior: float = 100.0,
) -> NgramLosses:
    """Count the labels of ``train`` and the token before each, and predict those of ``validation``.

    The unigram is p(b) = (c(b) + 1) / (n + vocabulary). The bigram leans on it as under a Dirichlet
    prior, p(b | a) = (c(a, b) + prior p(b)) / (c(a) + prior) (MacKay and Peto 1995); on docstrings
    a ``prior`` near 100 is best.

    Args:
        train: rows ``[train, pos]`` to count; every token but the first of a row is a label.
        validation: rows ``[validation, pos]`` to predict.
        vocabulary: how many token ids there are.
        prior: how many tokens the unigram counts for after each token.

    Raises:
        TangentValueError: ``prior`` is not positive.
    """
    if not prior > 0:
        raise TangentValueError(
            f"prior={prior} must be positive: a pair that was never seen has probability 0 without"
        )
    before, label = train[:, :-1].flatten(), train[:, 1:].flatten()
    counts = torch.bincount(label, minlength=vocabulary).double()
    unigram = (counts + 1) / (counts.sum() + vocabulary)
    pairs = torch.bincount(before * vocabulary + label, minlength=vocabulary**2)
    followed = torch.bincount(before, minlength=vocabulary).double()
    a, b = validation[:, :-1].flatten(), validation[:, 1:].flatten()
    bigram = (pairs[a * vocabulary + b] + prior * unigram[b]) / (followed[a] + prior)
    return NgramLosses(_nats(unigram[b]), _nats(bigram))


def _nats(probability: Float[Tensor, " label"]) -> float:
    return -probability.log().mean().item()
