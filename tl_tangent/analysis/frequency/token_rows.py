"""Which activations of a batch count, of which token types, in which of the statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency import EqualSample
from tl_tangent.hooks.fit import batch_input, check_ids
from tl_tangent.hooks.numbers import MOST_SEED
from tl_tangent.hooks.positions import PositionMask, Run, run_of_forward


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of ``[batch * pos]`` that are added, and their types in three ways.

    Attributes:
        at: their indices.
        types: the row of each one's type in the statistics.
        shuffled: the same types permuted among them, or None.
        equal: which of them an equal sample takes, or None.
    """

    at: Int[Tensor, " row"]
    types: Int[Tensor, " row"]
    shuffled: Int[Tensor, " row"] | None
    equal: Bool[Tensor, " row"] | None


class TokenRows:
    """The rows of every batch, in order.

    Args:
        ids: the token id of each row of the statistics.
        vocabulary: number of token ids.
        mask: which positions count.
        shuffled: also permute types within each batch.
        equal: an equal sample that all batches were offered to, or None.
        seed: of the permutations.
    """

    def __init__(
        self,
        ids: Int[Tensor, " type"],
        vocabulary: int,
        mask: PositionMask,
        *,
        shuffled: bool,
        equal: EqualSample | None,
        seed: int,
    ) -> None:
        self.place = torch.full((vocabulary,), -1)
        self.place[ids] = torch.arange(len(ids))
        self._mask, self._shuffled, self._equal, self._seed = mask, shuffled, equal, seed
        self._seen = self._batches = 0

    def next(self, tokens: Int[Tensor, "batch pos"], real: Tensor | None) -> Rows:
        """Return the rows of the next batch."""
        at = chosen_rows(self._mask, tokens, real)
        flat = tokens.flatten()
        at = at[self.place[flat[at]] >= 0]
        types, equal = self.place[flat[at]], None
        if self._equal is not None:
            equal = self._equal.taken(types, self._seen + at)
        shuffled = None
        if self._shuffled:
            generator = torch.Generator().manual_seed(
                (self._seed * 1_000_003 + self._batches) % (MOST_SEED + 1)
            )
            shuffled = types[torch.randperm(len(types), generator=generator)]
        self._seen += tokens.numel()
        self._batches += 1
        return Rows(at, types, shuffled, equal)


def chosen_rows(
    mask: PositionMask, tokens: Int[Tensor, "batch pos"], real: Tensor | None
) -> Int[Tensor, " row"]:
    """Return the indices in ``[batch * pos]`` of the tokens that a rule of positions takes."""
    run = Run(length=tokens.shape[1], real=real)
    chosen = run.select(mask, tokens.shape[0], tokens.shape[1], torch.device("cpu"))
    if chosen is None:
        return torch.arange(tokens.numel())
    return chosen.expand(tokens.shape).flatten().nonzero().flatten()


def token_batches(
    batches: Iterable[Any], model: Any = None
) -> Iterator[tuple[Any, Tensor, Tensor | None]]:
    """Yield each batch as it came, its token ids and which of them are real; on the CPU.

    Without an attention mask, the pad token of the tokenizer of ``model`` tells what is padding.

    Raises:
        TangentValueError: a batch that is no tensor of ids, nor a mapping with one; ids that
            ``model`` does not have; an attention mask of another shape.
    """
    for batch in batches:
        given, options = batch_input(batch)
        options.pop("group", None)
        if not isinstance(given, Tensor) or given.ndim != 2 or given.is_floating_point():
            what = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise TangentValueError(
                f"a batch is a tensor of token ids [batch, pos], or a mapping with one under "
                f"'input'; got {what}. Tokenize first: types are told apart by their ids"
            )
        if model is not None:
            check_ids(model, given)
        mask = options.get("attention_mask")
        if mask is None and model is not None:
            mask = run_of_forward(model, (given,), options).real
        if mask is not None and mask.shape != given.shape:
            raise TangentValueError(
                f"an attention_mask of {list(mask.shape)} does not fit tokens {list(given.shape)}"
            )
        real = None if mask is None or bool(mask.bool().all()) else mask.bool().cpu()
        yield batch, given.cpu().long(), real
