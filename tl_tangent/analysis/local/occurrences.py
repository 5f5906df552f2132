"""Which tokens a corpus has, and which occurrences of some types are looked at: no model is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_tangent.analysis.stream.followed import followed_rows
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency import EqualSample
from tl_tangent.hooks.fit import batch_input, check_ids, listed
from tl_tangent.hooks.positions import PositionMask, run_of_forward


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch, as the model takes it.

    Attributes:
        given, options: the model's input and its keyword arguments.
        ids: of its tokens.
        counted: those at the chosen positions, padding left out.
    """

    given: Any
    options: dict[str, Any]
    ids: Int[Tensor, "batch pos"]
    counted: Bool[Tensor, "batch pos"]


class Corpus:
    """Batches that are read several times; their numbers of a token do not depend on the cut.

    Attributes:
        counts: occurrences of each token id at the chosen positions.
    """

    counts: Int[Tensor, " type"]

    def __init__(self, model: Any, batches: Any, positions: PositionMask) -> None:
        """Count the tokens.

        Raises:
            TangentValueError: a batch of embeddings, or of text where there is no tokenizer; no
                token at the chosen positions.
        """
        self._model, self._positions = model, positions
        self._listed = list(listed(batches))
        self.counts = torch.zeros(0, dtype=torch.int64)
        for batch in self.batches():
            found = torch.bincount(batch.ids[batch.counted], minlength=len(self.counts))
            found[: len(self.counts)] += self.counts
            self.counts = found
        if not self.total:
            raise TangentValueError(
                "no token counts under these positions, or there was no batch. Give longer rows, "
                "or other positions."
            )

    @property
    def total(self) -> int:
        """Number of tokens at the chosen positions."""
        return int(self.counts.sum())

    def count(self, token: int) -> int:
        """Number of occurrences of a token id."""
        return int(self.counts[token]) if token < len(self.counts) else 0

    def batches(self) -> Iterator[Batch]:
        """Yield every batch with its ids."""
        for one in self._listed:
            given, options = batch_input(one)
            options.pop("group", None)
            ids = _ids(self._model, given, options)
            run = run_of_forward(self._model, (given,), options)
            counted = followed_rows(run, self._positions, ids)
            yield Batch(given, options, ids, counted)


@dataclass(eq=False)
class Chosen:
    """A uniform sample of the occurrences of each of some types.

    Attributes:
        tokens: ids of the types.
        sample: by their place in ``tokens``.
    """

    tokens: Sequence[int]
    sample: EqualSample
    _place: Tensor = field(repr=False)

    @classmethod
    def of(cls, corpus: Corpus, tokens: Sequence[int], size: int, seed: int) -> Chosen:
        """Offer all occurrences of the types to the sample."""
        place = torch.full((max(*tokens, len(corpus.counts)) + 1,), -1)
        place[list(tokens)] = torch.arange(len(tokens))
        chosen = cls(tokens, EqualSample(len(tokens), size, seed), place)
        for _, types, numbers, where in chosen.occurrences(corpus):
            chosen.sample.offer(types[where], numbers[where])
        return chosen

    def occurrences(self, corpus: Corpus) -> Iterator[tuple[Batch, Tensor, Tensor, Tensor]]:
        """Yield each batch with its types (-1 for others), the number of each of its counted tokens
        in the corpus, and where one of the types is."""
        before = 0
        for batch in corpus.batches():
            types = torch.full_like(batch.ids, -1)
            types[batch.counted] = self._place[batch.ids[batch.counted]]
            numbers = batch.counted.flatten().cumsum(0).reshape(types.shape) - 1 + before
            before += int(batch.counted.sum())
            yield batch, types, numbers, types >= 0

    def batches(self, corpus: Corpus) -> Iterator[tuple[Batch, Tensor]]:
        """Yield each batch with the types of its occurrences that are taken, -1 elsewhere."""
        for batch, types, numbers, where in self.occurrences(corpus):
            taken = torch.full_like(types, -1)
            own = types[where]
            taken[where] = torch.where(self.sample.taken(own, numbers[where]), own, -1)
            yield batch, taken


def _ids(model: Any, given: Any, options: dict[str, Any]) -> Int[Tensor, "batch pos"]:
    if isinstance(given, (str, list)):
        if getattr(model, "tokenizer", None) is None:
            raise TangentValueError(
                "the input is text and this model has no tokenizer. Give tokens [batch, pos], or "
                "load the model with its tokenizer."
            )
        names = ("prepend_bos", "padding_side")
        given = model.to_tokens(given, **{k: options[k] for k in names if k in options})
    if not isinstance(given, Tensor) or given.is_floating_point():
        raise TangentValueError(
            "a batch of embeddings has no token types: give tokens [batch, pos] or text"
        )
    if given.ndim not in (1, 2):
        raise TangentValueError(f"tokens are [batch, pos], got {list(given.shape)}")
    check_ids(model, given)
    return (given if given.ndim == 2 else given[None]).cpu().long()
