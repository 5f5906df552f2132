"""First and second moments of rows that arrive in batches, shards and groups."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.gram import Gram
from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.geometry.subspace_io import Record

Centering = Literal["global", "group", "none"]
BUFFER_ROWS = 1024


@dataclass
class GroupMean:
    """Mean of ``n`` rows as a shift near it and a float64 total of what the shift leaves."""

    shift: Float[Tensor, "*head d"]
    total: Float[Tensor, "*head d"]
    n: int

    def offset(self) -> Float[Tensor, "*head d"]:
        """Return the mean minus the shift."""
        return self.total / self.n

    def mean(self) -> Float[Tensor, "*head d"]:
        """Return the mean in float64."""
        return self.shift.double() + self.offset()


class Moments:
    """Group means, and the scatter of rows around them, in memory that does not grow with rows.

    Rows are gathered in a buffer of fixed length, shifted by the mean of their group's first
    buffer (so that a large mean costs no precision), multiplied in float32 (in float64 if the
    first rows are) and summed in float64. Where one buffer ends and the next begins, hence every
    sum, does not depend on how one group was cut into batches.
    """

    def __init__(
        self, gram: Gram, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ):
        """Start empty statistics of rows of ``shape``, in the full precision of ``dtype``."""
        self.precision = full_dtype(dtype)
        self.device = device
        self._gram = gram
        self._shape = shape
        self._groups: dict[Hashable, GroupMean] = {}
        self._buffer: Tensor | None = None
        self._filled = 0
        self._group: Hashable = None

    @property
    def n(self) -> int:
        """Number of rows so far."""
        return self._filled + sum(group.n for group in self._groups.values())

    def update(self, rows: Float[Tensor, "row *head d"], group: Hashable = None) -> None:
        """Add ``rows`` to ``group``.

        Raises:
            TangentValueError: if rows hold NaN or infinite entries; nothing is added then.
        """
        _check_finite(rows)
        if group != self._group:
            self.flush()
            self._group = group
        while len(rows):
            taken = self._fill(rows)
            rows = rows[taken:]
            if self._filled == BUFFER_ROWS:
                self._sum_buffer()

    def _fill(self, rows: Tensor) -> int:
        """Copy as many rows into the buffer as fit, shifted where the shift is known."""
        if self._buffer is None:
            size = (*self._shape[:-1], BUFFER_ROWS, self._shape[-1])
            self._buffer = torch.empty(size, dtype=self.precision, device=self.device)
        taken = min(len(rows), BUFFER_ROWS - self._filled)
        free = self._buffer[..., self._filled : self._filled + taken, :].movedim(-2, 0)
        known = self._groups.get(self._group)
        if known is None:
            free.copy_(rows[:taken])
        else:
            torch.sub(rows[:taken], known.shift, out=free)
        self._filled += taken
        return taken

    def flush(self) -> None:
        """Sum what the buffer holds and give its memory back."""
        if self._filled:
            self._sum_buffer()
        self._buffer = None

    def _sum_buffer(self) -> None:
        assert self._buffer is not None
        rows = self._buffer[..., : self._filled, :]
        if self._group not in self._groups:
            shift = rows.mean(-2)
            rows.sub_(shift.unsqueeze(-2))
            self._groups[self._group] = GroupMean(shift, torch.zeros_like(shift).double(), n=0)
        group = self._groups[self._group]
        group.total += rows.sum(-2)
        group.n += self._filled
        self._gram.add(rows)
        self._filled = 0

    def merge(self, other: Moments) -> None:
        """Add the rows of ``other`` as if they had come here (its values stay what they are)."""
        self._settle()
        other._settle()
        self._gram.absorb(other._gram)
        gaps = []
        for key, theirs in other._groups.items():
            empty = torch.zeros_like(theirs.total, device=self.device)
            added = GroupMean(theirs.mean().to(self.device), empty, theirs.n)
            own = self._groups.get(key)
            if own is not None:
                share = added.n / (own.n + added.n)
                gap = added.mean() - own.mean()
                gaps.append(gap * (share * own.n) ** 0.5)
                added = GroupMean(own.mean() + share * gap, empty, own.n + added.n)
            self._groups[key] = added
        if gaps:
            self._gram.add(torch.stack(gaps, -2))

    def mean(self) -> Float[Tensor, "*head d"]:
        """Return the mean of all rows, in float64."""
        self.flush()
        n = self.n
        return torch.stack([g.mean() * (g.n / n) for g in self._groups.values()]).sum(0)

    def group_mean(self, group: Hashable) -> Float[Tensor, "*head d"]:
        """Return the mean of one group, in float64."""
        self.flush()
        return self._groups[group].mean()

    def scatter(self, centering: Centering) -> tuple[Gram, int]:
        """Return the sum of ``x x^T`` around the chosen centre, and its degrees of freedom."""
        self._settle()
        if centering == "group":
            return self._gram, self.n - len(self._groups)
        means = torch.stack([g.mean() for g in self._groups.values()], -2)
        weights = torch.tensor([g.n for g in self._groups.values()], device=self.device).double()
        if centering == "global":
            means = means - self.mean().unsqueeze(-2)
        gram = self._gram.clone()
        gram.add(means * weights.sqrt()[:, None])
        return gram, self.n - (1 if centering == "global" else 0)

    def to_record(self) -> Record:
        """Return the sums, and the rows that wait in the buffer, as a file holds them."""
        tensors = {f"sum.{i}": sum_ for i, sum_ in enumerate(self._gram.sums)}
        for i, group in enumerate(self._groups.values()):
            tensors |= {f"shift.{i}": group.shift, f"total.{i}": group.total}
        if self._buffer is not None and self._filled:
            tensors["buffer"] = self._buffer[..., : self._filled, :]
        fields = {
            "groups": [[key, group.n] for key, group in self._groups.items()],
            "group": self._group,
        }
        return Record(tensors, fields)

    def restore(self, record: Record) -> None:
        """Take over what :meth:`to_record` returned, in place of the rows that came here."""
        tensors, fields = record.tensors, record.fields
        for i, sum_ in enumerate(self._gram.sums):
            sum_.copy_(tensors[f"sum.{i}"])
        self._groups = {
            key: GroupMean(tensors[f"shift.{i}"].clone(), tensors[f"total.{i}"].clone(), n)
            for i, (key, n) in enumerate(fields["groups"])
        }
        self._group, self._buffer, self._filled = fields["group"], None, 0
        if "buffer" in tensors:
            rows = tensors["buffer"]
            self._buffer = rows.new_empty(*rows.shape[:-2], BUFFER_ROWS, rows.shape[-1])
            self._filled = rows.shape[-2]
            self._buffer[..., : self._filled, :] = rows

    def _settle(self) -> None:
        """Flush, and move every shift to the mean of its group."""
        self.flush()
        groups = [group for group in self._groups.values() if group.n]
        if groups:
            offsets = torch.stack([g.offset() * g.n**0.5 for g in groups], -2)
            self._gram.add(offsets, sign=-1)
        for group in groups:
            group.shift, group.total = group.mean(), torch.zeros_like(group.total)


def _check_finite(rows: Tensor) -> None:
    """Refuse NaN and infinite rows; their sum tells cheaply that there are none."""
    if bool(rows.sum(dtype=full_dtype(rows.dtype)).isfinite()):
        return
    bad = int((~rows.isfinite()).flatten(1).any(1).sum())
    if bad:
        raise TangentValueError(
            f"{bad} of {len(rows)} rows hold NaN or infinite activations: find the layer that "
            "makes them, or leave these positions out of the fit"
        )
