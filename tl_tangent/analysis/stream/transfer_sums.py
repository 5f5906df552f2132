"""Sums up what a change in one part becomes in both, and makes gains of the sums."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.stream.followed import Followed, in_float64, with_controls
from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.analysis.stream.transfer_directions import Cut, Directions
from tl_tangent.hooks.stream.jvp import Direct, Mode, Stretch, Through, push_forward

_NOTHING = 1e-5  # a copy below that is rounding of the subspaces
MADE, ALIGNED, COPIED, GIVEN = range(4)  # |P_out J u|^2, <u, P_out J u>, |P_out u|^2, |u|^2


@dataclass(frozen=True)
class Input:
    """One batch: the model's input and keyword arguments, and how and where it is changed."""

    given: Any
    options: dict[str, Any]
    directions: Directions
    mode: Mode


class TransferSums:
    """Gathers what becomes of directions, over batches and passes.

    Attributes:
        found: by stretch, basis, source and target part, and then by number of the direction: the
            four sums over tokens and batches.
    """

    def __init__(self, followed: Followed, n_bases: int, through: Through) -> None:
        self.followed = followed
        self.n_bases = n_bases
        self.through = through
        self.found: dict[Any, dict[int, Tensor]] = defaultdict(dict)

    def add(self, model: Any, batch: Input, stretches: list[Stretch]) -> None:
        """Run a batch once for every direction of both parts, of Q_T and of each control."""
        for basis in range(self.n_bases):
            for source in range(len(PARTS)):
                cut = Cut(self.followed, basis, source)
                for number, direct in batch.directions.of(cut, stretches):
                    watch = _Watch(self, cut, number, direct, batch.directions.rows)
                    push_forward(
                        model,
                        batch.given,
                        batch.options,
                        stretches,
                        watch.direct,
                        watch.receive,
                        mode=batch.mode,
                        through=self.through,
                    )

    def enter(self, key: Any, number: int, sums: Float[Tensor, " four"]) -> None:
        samples = self.found[key]
        samples[number] = samples.get(number, torch.zeros_like(sums)) + sums

    def ratio(self, key: Any, quantity: int) -> tuple[float, float]:
        """A sum over that of ``|u|^2``, and its standard error over directions (NaN for one)."""
        found = torch.stack(list(self.found[key].values()))
        made, given, n = found[:, quantity], found[:, GIVEN], len(found)
        value = made.sum() / given.sum()
        if n == 1:
            return float(value), math.nan
        off = (made - value * given).square().sum() / (n * (n - 1))
        return float(value), float(off.sqrt() / given.mean())


@dataclass
class _Watch:
    """One pass: remembers the directions that were given, and enters what they became."""

    sums: TransferSums
    cut: Cut
    number: int
    choose: Direct
    rows: Tensor
    given: dict[Stretch, Tensor] = field(default_factory=dict)

    def direct(self, stretch: Stretch, x: Float[Tensor, "batch pos d"]) -> Tensor:
        direction = self.choose(stretch, x)
        # in full, since what the model's own precision moves into the other part is no copy
        self.given[stretch] = self._rows(direction)
        return direction

    def receive(self, stretch: Stretch, change: Float[Tensor, "batch pos d"]) -> None:
        before, after = self.given.pop(stretch), self._rows(change)
        for target in range(len(PARTS)):
            out = Cut(self.cut.followed, self.cut.basis, target)
            made, copied = (out.project(stretch.stop, x) for x in (after, before))
            pairs = [(made, made), (before, made), (copied, copied), (before, before)]
            sums = torch.stack([(x * y).sum(dtype=torch.float64).cpu() for x, y in pairs])
            key = (stretch, self.cut.basis, self.cut.part, target)
            self.sums.enter(key, self.number, sums)

    def _rows(self, x: Tensor) -> Float[Tensor, "row d"]:
        return in_float64(x[self.rows.to(x.device)])


def gain_rows(
    sums: TransferSums, stretches: list[Stretch], *, exact: bool
) -> Iterator[dict[str, Any]]:
    """One row a stretch and pair of parts; ``exact`` where all directions were tried."""
    for stretch in stretches:
        for source, target in product(range(len(PARTS)), repeat=2):
            keys = [(stretch, basis, source, target) for basis in range(sums.n_bases)]
            names = {"source": PARTS[source], "target": PARTS[target]}
            yield {"start": stretch.start, "stop": stretch.stop, **names} | _row(sums, keys, exact)


def _row(sums: TransferSums, keys: list[Any], exact: bool) -> dict[str, float]:
    squared = [sums.ratio(key, MADE) for key in keys]
    aligned = [sums.ratio(key, ALIGNED) for key in keys]
    gains = [math.sqrt(value) for value, _ in squared]
    error = squared[0][1] / (2 * gains[0]) if gains[0] else squared[0][1]
    copy = math.sqrt(sums.ratio(keys[0], COPIED)[0])
    if copy < _NOTHING:  # then P_in P_out is 0, and nothing can be aligned
        copy, aligned = 0.0, [(0.0, 0.0)] * len(aligned)
    row = {
        "gain": gains[0],
        "gain_se": 0.0 if exact else error,
        "copy": copy,
        "excess": gains[0] / copy if copy else math.nan,
        "aligned": aligned[0][0],
        "aligned_se": 0.0 if exact else aligned[0][1],
    }
    row |= with_controls("gain", gains)
    return row | with_controls("aligned", [value for value, _ in aligned])
