"""Gathers the ledger of the residual stream over batches: energies and inner products, by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_tangent.analysis.stream.frames import Reference
from tl_tangent.geometry.ledger import Entry, Frame, Position
from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.hooks.stream.writes import LayerWrites, Write, head_writes


@dataclass(frozen=True)
class Tokens:
    """Which tokens of a batch are followed, and what they are.

    Attributes:
        rows: ``[batch, pos]``.
        position: absolute, of each that is followed.
        ids: -1 where the input was no tokens.
    """

    rows: Bool[Tensor, "batch pos"]
    position: Int[Tensor, " row"]
    ids: Int[Tensor, " row"]


@dataclass(frozen=True)
class Ledger:
    """What happened to both parts of the stream; part 0 is tangent, 1 normal.

    Attributes:
        writers: names of the writes in order; ``layers`` the layer of each, None in front.
        energy, carried: of each write: its squared norm, and its inner product with the stream
            before it, ``[write, part, token]``.
        stream, copied: squared norm at each depth ``[depth, part, token]``, and inner product with
            the same part one depth later ``[layer, part, token]``.
        control_energy, control_carried, control_stream, control_copied: means over tokens, with an
            axis of controls last.
        pairs: mean inner products between all writes, by part; None with a subspace a depth.
        closing_error: largest norm of what is missing over that of the stream.
        position, ids: of the tokens.
    """

    writers: tuple[str, ...]
    layers: tuple[int | None, ...]
    energy: Float[Tensor, "write part token"]
    carried: Float[Tensor, "write part token"]
    stream: Float[Tensor, "depth part token"]
    copied: Float[Tensor, "layer part token"]
    control_energy: Float[Tensor, "write part control"]
    control_carried: Float[Tensor, "write part control"]
    control_stream: Float[Tensor, "depth part control"]
    control_copied: Float[Tensor, "layer part control"]
    pairs: Mapping[str, Float[Tensor, "write write"]] | None
    closing_error: float
    position: Int[Tensor, " token"]
    ids: Int[Tensor, " token"]

    @property
    def n_tokens(self) -> int:
        return len(self.position)


@dataclass
class _Column:
    """One quantity: by token for the subspace, summed over tokens for its controls."""

    values: dict[Any, list[Tensor]] = field(default_factory=dict)
    controls: dict[Any, Tensor] = field(default_factory=dict)

    def add(self, key: Any, value: Float[Tensor, "part basis row"]) -> None:
        self.values.setdefault(key, []).append(value[:, 0].cpu())
        summed = value[:, 1:].double().sum(-1).cpu()
        self.controls[key] = self.controls.get(key, torch.zeros_like(summed)) + summed

    def stacked(self) -> Float[Tensor, "key part token"]:
        return torch.stack([torch.cat(found, dim=-1) for found in self.values.values()])

    def means(self, n: int) -> Float[Tensor, "key part control"]:
        return torch.stack(list(self.controls.values())) / n


class TraceSums:
    """Follows batches through depth; memory is a few numbers a token and write."""

    def __init__(self, reference: Reference, *, heads: bool, pairs: bool) -> None:
        self.frames = reference.frames
        self.heads = heads
        self.keep_pairs = pairs
        self.energy, self.carried, self.stream, self.copied = (_Column() for _ in range(4))
        self.pairs: Tensor | None = None
        self.closing_error = 0.0
        self.tokens: list[Tokens] = []
        self._vectors: list[Tensor] = []
        self._at: Position | None = None

    @property
    def n_tokens(self) -> int:
        return sum(len(tokens.position) for tokens in self.tokens)

    def begin(self, tokens: Tokens) -> None:
        self.tokens.append(tokens)

    def add(self, model: Any, found: LayerWrites) -> None:
        """Enter one layer's writes, or those of the embeddings."""
        depth = found.layer + 1
        rows = self.tokens[-1].rows
        after = self._rows(found.after, rows)
        frame = self._frame(depth, after)
        if self._at is None:
            at = self._start(frame, after)
        else:
            at = self._turn(self._at, frame, found.layer)
        before = self._at
        for write in self._writes(model, found):
            vectors = self._rows(write.value, rows)
            entry, at = at.add(vectors)
            self._enter(write.writer, write.layer, entry, vectors)
        self._close(at, after)
        self.stream.add(depth, at.energy())
        if before is not None:
            self.copied.add(found.layer, before.with_part(at))
        self._at = at

    def _rows(self, x: Tensor, rows: Tensor) -> Float[Tensor, "row d"]:
        x = x.expand(*rows.shape, -1)[rows]
        return x.to(full_dtype(x.dtype))

    def _frame(self, depth: int, like: Tensor) -> Frame:
        if self._at is not None and self.frames[depth] is self.frames[depth - 1]:
            return self._at.frame
        frame = self.frames[depth]
        return Frame(frame.bases.to(like), frame.mean.to(like))

    def _start(self, frame: Frame, like: Tensor) -> Position:
        """An empty stream around the mean is minus the mean: that is the first write."""
        empty = Position(frame, torch.zeros_like(like), torch.zeros_like(frame.coordinates(like)))
        mean = (-frame.mean).expand_as(like)
        entry, at = empty.add(mean)
        self._enter("mean", None, entry, mean)
        return at

    def _turn(self, at: Position, frame: Frame, layer: int) -> Position:
        if at.frame is frame:
            return at
        entries, turned = at.move(frame)
        for name, entry in entries.items():
            self._enter(name, layer, entry, None)
        return turned

    def _writes(self, model: Any, found: LayerWrites) -> tuple[Write, ...]:
        if not self.heads or found.layer < 0:
            return found.writes
        return (*head_writes(model, found), *found.writes[1:])

    def _enter(self, writer: str, layer: int | None, entry: Entry, vectors: Tensor | None) -> None:
        self.energy.add((writer, layer), entry.energy)
        self.carried.add((writer, layer), entry.with_carried)
        if self.keep_pairs and vectors is not None:
            self._vectors.append(vectors)

    def _close(self, at: Position, after: Float[Tensor, "row d"]) -> None:
        """Compare the stream with the sum of all writes so far, part by part."""
        missing = after - at.frame.mean - at.centred
        tangent = at.frame.coordinates(missing)[0] + self._drift(at)
        normal = missing - tangent @ at.frame.bases[0].T
        size = after.norm(dim=-1).clamp(min=torch.finfo(after.dtype).tiny)
        for part in (tangent, normal):
            if len(part):
                self.closing_error = max(
                    self.closing_error, float((part.norm(dim=-1) / size).max())
                )

    def _drift(self, at: Position) -> Float[Tensor, "row rank"]:
        """Tangent coordinates of the summed vectors minus the summed tangent coordinates."""
        return at.frame.coordinates(at.centred)[0] - at.coordinates[0]

    def end(self) -> None:
        """Finish a batch."""
        if self.keep_pairs and self._vectors and self._at is not None:
            self._add_pairs(torch.stack(self._vectors), self._at.frame)
        self._vectors, self._at = [], None

    def _add_pairs(self, vectors: Float[Tensor, "write row d"], frame: Frame) -> None:
        flat = vectors.flatten(1)
        along = (vectors @ frame.bases[0]).flatten(1)
        tangent = along @ along.T
        found = torch.stack([tangent, flat @ flat.T - tangent]).double().cpu()
        self.pairs = found if self.pairs is None else self.pairs + found

    def result(self) -> Ledger:
        n = self.n_tokens
        keys = list(self.energy.values)
        names = tuple(name if layer is None else f"{layer}.{name}" for name, layer in keys)
        pairs = None
        if self.pairs is not None:
            pairs = dict(zip(("tangent", "normal"), self.pairs / n, strict=True))
        return Ledger(
            writers=names,
            layers=tuple(layer for _, layer in keys),
            energy=self.energy.stacked(),
            carried=self.carried.stacked(),
            stream=self.stream.stacked(),
            copied=self.copied.stacked(),
            control_energy=self.energy.means(n),
            control_carried=self.carried.means(n),
            control_stream=self.stream.means(n),
            control_copied=self.copied.means(n),
            pairs=pairs,
            closing_error=self.closing_error,
            position=torch.cat([tokens.position for tokens in self.tokens]),
            ids=torch.cat([tokens.ids for tokens in self.tokens]),
        )
