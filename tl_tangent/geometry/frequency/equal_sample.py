"""Equally many occurrences of each token type, chosen before any vector is computed.

Frequent types are compared with rare ones over one number of occurrences. Vectors are too large to
keep, and moments cannot be thinned afterwards, so two passes are made: the first over token ids
alone, without a model, finds which occurrences to take; the second adds their vectors to
:class:`~tl_tangent.geometry.frequency.token_moments.TokenMoments`.

Every occurrence, named by a number of its own such as its place in the corpus, has a priority: a
fixed scrambling of that number and the seed. Those with the ``size`` lowest priorities of a type
are taken (a bottom-k sample). The law: of a type with ``size`` occurrences or more, exactly
``size`` are taken, and as far as the scrambling is like random numbers every set of that many is
equally likely, sets of different types independent. Neither order nor cut of the stream matters,
and pieces of a corpus seen apart merge to what all of it would give.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency.token_moments import check_types

LAST = torch.iinfo(torch.int64).max  # priority of a place that no occurrence has taken


class EqualSample:
    """The lowest priorities of each type, in ``8 * size * n_types`` bytes.

    For 64 occurrences of 50 000 types that is 26 MB, whatever the number of tokens.

    Attributes:
        size: number of occurrences to take of each type.
        seed: another seed takes other occurrences.
        lowest: ascending for each type; the largest int64 where there are fewer occurrences.
    """

    lowest: Int[Tensor, "type place"]

    def __init__(self, n_types: int, size: int, seed: int = 0) -> None:
        """Start with no occurrences.

        Raises:
            TangentValueError: if there are no types or fewer than 2 occurrences are to be taken.
        """
        if n_types < 1 or size < 2:
            raise TangentValueError(
                f"a dispersion takes 2 occurrences of 1 type or more, got size={size} and "
                f"n_types={n_types}"
            )
        self.size = size
        self.seed = seed
        with torch.inference_mode(False):
            self.lowest = torch.full((n_types, size), LAST)

    def offer(self, types: Int[Tensor, " n"], occurrences: Int[Tensor, " n"]) -> None:
        """Offer occurrences of the first pass. One that is offered twice counts once.

        Args:
            types: the type of each.
            occurrences: a number of its own for each in the whole corpus.

        Raises:
            TangentValueError: if the two differ in length, or a type is out of range.
        """
        types, drawn = self._priorities(types, occurrences)
        promising = drawn < self.lowest[types, -1]
        self._keep_lowest(types[promising], drawn[promising])

    def merge(self, other: EqualSample) -> None:
        """Offer all that ``other`` was offered; ``other`` stays as it is.

        Raises:
            TangentValueError: if the two differ in size, seed or number of types.
        """
        mine, theirs = ((*one.lowest.shape, one.seed) for one in (self, other))
        if mine != theirs:
            raise TangentValueError(
                f"a sample of (types, size, seed) {theirs} does not merge into {mine}: give all "
                "pieces one seed and size"
            )
        held = other.lowest < LAST
        self._keep_lowest(held.nonzero()[:, 0], other.lowest[held])

    def taken(self, types: Int[Tensor, " n"], occurrences: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Return which of these occurrences to add in the second pass.

        All are taken of types that have no more than ``size``; those that have fewer have no equal
        share, and :attr:`complete` tells them.

        Raises:
            TangentValueError: as :meth:`offer`.
        """
        own, drawn = self._priorities(types, occurrences)
        return (drawn <= self.lowest[own, -1]).to(types.device)

    @property
    def complete(self) -> Bool[Tensor, " type"]:
        """Which types have ``size`` occurrences or more."""
        return self.lowest[:, -1] < LAST

    def _priorities(self, types: Tensor, occurrences: Tensor) -> tuple[Tensor, Tensor]:
        check_types(types, len(self.lowest))
        if types.shape != occurrences.shape or occurrences.is_floating_point():
            raise TangentValueError(
                f"{len(types)} types take as many whole numbers, got {occurrences.dtype} of shape "
                f"{list(occurrences.shape)}: number the tokens of the corpus"
            )
        return types.cpu().long(), scrambled(occurrences, self.seed)

    def _keep_lowest(self, types: Tensor, drawn: Tensor) -> None:
        """Keep the lowest of what is here and what comes, each priority once."""
        present = types.unique()
        held = self.lowest[present]
        types = torch.cat([present.repeat_interleave(self.size), types])
        drawn = torch.cat([held.flatten(), drawn])
        types, drawn = _sorted(types, drawn)
        again = torch.zeros_like(types, dtype=torch.bool)
        again[1:] = (types[1:] == types[:-1]) & (drawn[1:] == drawn[:-1])
        types, drawn = types[~again], drawn[~again]
        place = torch.arange(len(types)) - torch.searchsorted(types, types)
        kept = place < self.size
        self.lowest[present] = LAST
        self.lowest[types[kept], place[kept]] = drawn[kept]


def scrambled(numbers: Int[Tensor, " n"], seed: int) -> Int[Tensor, " n"]:
    """Return 64 bits for each number by the mixing of splitmix64 (Steele et al. 2014), on the CPU.

    Different numbers have different ones, under any seed.
    """
    start = _mix(np.array([seed % 2**64], dtype=np.uint64))
    z = _mix(numbers.cpu().to(torch.int64).numpy().view(np.uint64) ^ start)
    return torch.from_numpy(z.view(np.int64))


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _sorted(types: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Sort by type, then by priority."""
    order = drawn.argsort()
    order = order[types[order].argsort(stable=True)]
    return types[order], drawn[order]
