"""A uniform sample of rows from a stream, in bounded memory."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.geometry.subspace_io import Record


class RowSample:
    """The ``size`` rows with the lowest random priorities, which are a uniform sample.

    Row ``i`` of the stream has the ``i``-th number drawn from the seed, so the sample does not
    depend on how the stream was cut; shards with one seed favour the same row numbers.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)
        self._priorities = torch.empty(0, dtype=torch.float64)
        self._rows: Tensor | None = None
        self._groups: list[Hashable] = []

    def update(self, rows: Float[Tensor, "row *head d"], group: Hashable = None) -> None:
        """Offer ``rows`` of ``group`` to the sample."""
        drawn = torch.rand(len(rows), generator=self._generator, dtype=torch.float64)
        if len(self._priorities) == self._size:
            promising = (drawn < self._priorities[-1]).nonzero().flatten()
            rows, drawn = rows[promising.to(rows.device)], drawn[promising]
        self._offer(rows, drawn, [group] * len(drawn))

    def merge(self, other: RowSample) -> None:
        """Offer the sampled rows of ``other`` with the priorities that they have."""
        if other._rows is not None:
            self._offer(other._rows, other._priorities, other._groups)

    def _offer(self, rows: Tensor, priorities: Tensor, groups: list[Hashable]) -> None:
        if not len(rows):
            return
        if self._rows is not None:
            rows = torch.cat([self._rows, rows.to(self._rows)])
        priorities = torch.cat([self._priorities, priorities])
        groups = self._groups + groups
        lowest = priorities.argsort(stable=True)[: self._size]
        self._rows = rows[lowest.to(rows.device)]
        self._priorities = priorities[lowest]
        self._groups = [groups[i] for i in lowest.tolist()]

    def rows(self) -> tuple[Float[Tensor, "row *head d"], list[Hashable]]:
        """Return the sampled rows and the group of each."""
        assert self._rows is not None
        return self._rows, self._groups

    def to_record(self) -> Record:
        """Return the sampled rows, and where the random numbers stand, as a file holds them."""
        tensors = {"priorities": self._priorities, "generator": self._generator.get_state()}
        if self._rows is not None:
            tensors["rows"] = self._rows
        return Record(tensors, {"groups": self._groups})

    def restore(self, record: Record) -> None:
        """Take over what :meth:`to_record` returned, in place of the rows that came here."""
        rows = record.tensors.get("rows")
        self._rows = None if rows is None else rows.clone()
        self._priorities = record.tensors["priorities"].clone()
        self._groups = list(record.fields["groups"])
        self._generator.set_state(record.tensors["generator"])
