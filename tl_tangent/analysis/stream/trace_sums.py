"""Gathers the ledger of the residual stream over batches: energies and inner products, by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_tangent.analysis.stream.followed import in_float64
from tl_tangent.analysis.stream.frames import Reference
from tl_tangent.geometry.ledger import Entry, Frame, Position
from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.hooks.stream.writes import LayerWrites, Write, head_writes

QUANTITIES = ("energy", "carried", "stream", "copied")
_AT_ONCE = 2**22  # numbers of the writes that are multiplied at a time


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
        control_energy, control_carried, control_stream, control_copied: the same with an axis of
            controls before that of the tokens.
        pairs: mean inner products between all writes, by part; None with a subspace a depth, and
            for a selection of tokens.
        closing_error: largest norm of what is missing over that of the stream.
        position, ids: of the tokens.
    """

    writers: tuple[str, ...]
    layers: tuple[int | None, ...]
    energy: Float[Tensor, "write part token"]
    carried: Float[Tensor, "write part token"]
    stream: Float[Tensor, "depth part token"]
    copied: Float[Tensor, "layer part token"]
    control_energy: Float[Tensor, "write part control token"]
    control_carried: Float[Tensor, "write part control token"]
    control_stream: Float[Tensor, "depth part control token"]
    control_copied: Float[Tensor, "layer part control token"]
    pairs: Mapping[str, Float[Tensor, "write write"]] | None
    closing_error: float
    position: Int[Tensor, " token"]
    ids: Int[Tensor, " token"]

    @property
    def n_tokens(self) -> int:
        return len(self.position)

    def select(self, tokens: Bool[Tensor, " token"]) -> Ledger:
        """Return the ledger of some of the tokens."""
        names = [name for one in QUANTITIES for name in (one, f"control_{one}")]
        chosen = {name: getattr(self, name)[..., tokens] for name in (*names, "position", "ids")}
        return replace(self, pairs=None, **chosen)


@dataclass
class _Column:
    """One quantity by token, of the subspace and then of its controls."""

    values: dict[Any, list[Tensor]] = field(default_factory=dict)

    def add(self, key: Any, value: Float[Tensor, "part basis row"]) -> None:
        self.values.setdefault(key, []).append(value.cpu())

    def stacked(self) -> Float[Tensor, "key part basis token"]:
        return torch.stack([torch.cat(found, dim=-1) for found in self.values.values()])


class TraceSums:
    """Follows batches through depth; memory is a few numbers a token, write and basis.

    All is computed in float64: beside a massive activation float32 has no digits left for the rest.
    """

    def __init__(self, reference: Reference, *, heads: bool, pairs: bool) -> None:
        self.frames = reference.frames
        self.heads = heads
        self.keep_pairs = pairs
        self.energy, self.carried, self.stream, self.copied = (_Column() for _ in range(4))
        self.pairs: Tensor | None = None
        self.closing_error = 0.0
        self.tokens: list[Tokens] = []
        self._vectors: list[Tensor] = []
        self._taken = torch.empty(0)  # indices of the followed tokens, in this batch
        self._dtype = torch.float32  # of what is kept by token
        self._at: Position | None = None

    @property
    def n_tokens(self) -> int:
        return sum(len(tokens.position) for tokens in self.tokens)

    def begin(self, tokens: Tokens) -> None:
        self.tokens.append(tokens)
        self._taken = tokens.rows.flatten().nonzero().squeeze(-1)

    def add(self, model: Any, found: LayerWrites) -> None:
        """Enter one layer's writes, or those of the embeddings."""
        depth = found.layer + 1
        self._dtype = full_dtype(found.after.dtype)
        after = in_float64(self._rows(found.after))
        frame = self._frame(depth, after)
        if self._at is None:
            at = self._start(frame, after)
        else:
            at = self._turn(self._at, frame, found.layer)
        before = self._at
        for write in self._writes(model, found):
            vectors = self._rows(write.value)
            entry, at = at.add(in_float64(vectors))
            self._enter(write.writer, write.layer, entry, vectors)
        self._close(at, after)
        self.stream.add(depth, at.energy().to(self._dtype))
        if before is not None:
            self.copied.add(found.layer, before.with_part(at).to(self._dtype))
        self._at = at

    def _rows(self, x: Float[Tensor, "#batch pos d"]) -> Float[Tensor, "row d"]:
        tokens = x.expand(*self.tokens[-1].rows.shape, -1).flatten(0, 1)
        return tokens.index_select(0, self._taken.to(x.device))

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
        self.energy.add((writer, layer), entry.energy.to(self._dtype))
        self.carried.add((writer, layer), entry.with_carried.to(self._dtype))
        if self.keep_pairs and vectors is not None:
            self._vectors.append(vectors)

    def _close(self, at: Position, after: Float[Tensor, "row d"]) -> None:
        """Compare the stream with the sum of all writes so far."""
        if len(after) == 0:
            return
        missing = (after - at.frame.mean - at.centred).norm(dim=-1)
        error = missing / after.norm(dim=-1).clamp(min=torch.finfo(after.dtype).tiny)
        self.closing_error = max(self.closing_error, float(error.max()))

    def end(self) -> None:
        """Finish a batch."""
        if self.keep_pairs and self._vectors and self._at is not None:
            self._add_pairs(self._vectors, self._at.frame)
        self._vectors, self._at = [], None

    def _add_pairs(self, vectors: list[Float[Tensor, "row d"]], frame: Frame) -> None:
        n_writes, d = len(vectors), vectors[0].shape[-1]
        if self.pairs is None:
            self.pairs = torch.zeros(2, n_writes, n_writes, dtype=torch.float64)
        tokens = max(1, _AT_ONCE // (n_writes * d))
        for some in zip(*(one.split(tokens) for one in vectors), strict=True):
            stacked = torch.stack([in_float64(one) for one in some])
            flat, along = stacked.flatten(1), (stacked @ frame.bases[0]).flatten(1)
            tangent = along @ along.T
            self.pairs += torch.stack([tangent, flat @ flat.T - tangent]).cpu()

    def result(self) -> Ledger:
        n = self.n_tokens
        keys = list(self.energy.values)
        names = tuple(name if layer is None else f"{layer}.{name}" for name, layer in keys)
        pairs = None
        if self.pairs is not None:
            pairs = dict(zip(("tangent", "normal"), self.pairs / n, strict=True))
        found: dict[str, Tensor] = {}
        for name in QUANTITIES:
            values = getattr(self, name).stacked()
            found |= {name: values[:, :, 0], f"control_{name}": values[:, :, 1:]}
        return Ledger(
            writers=names,
            layers=tuple(layer for _, layer in keys),
            **found,
            pairs=pairs,
            closing_error=self.closing_error,
            position=torch.cat([tokens.position for tokens in self.tokens]),
            ids=torch.cat([tokens.ids for tokens in self.tokens]),
        )
