"""Stream activations into the moments of their token types, at all sites in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tl_tangent.analysis.frequency.token_rows import Rows, TokenRows, token_batches
from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.geometry.frequency import TokenMoments
from tl_tangent.hooks import attachment
from tl_tangent.hooks.attachment import Placed
from tl_tangent.hooks.fit import batch_input
from tl_tangent.hooks.positions import Run
from tl_tangent.hooks.sites import Sites, find_sites


@dataclass
class Moments:
    """At one site: of all rows, of the same with shuffled types, and of equally many a type."""

    every: TokenMoments
    shuffled: TokenMoments | None
    equal: TokenMoments | None


class TypeCollector:
    """A layer that adds the chosen rows of an activation to the moments of their types."""

    needs_run = True
    listening = True

    def __init__(self, site: str, n_types: int, dtype: torch.dtype) -> None:
        self.site, self.n_types, self.dtype = site, n_types, dtype
        self.rows: Rows | None = None
        self.found: Moments | None = None

    def apply(self, flow: Tensor, carried: Tensor | None, run: Run | None) -> Tensor:
        x = (flow if carried is None else flow + carried).detach()
        if x.ndim != 3:
            raise TangentValueError(
                f"{self.site} holds {list(x.shape)}: types are measured where there is one vector "
                "[batch, pos, d] a token"
            )
        assert self.rows is not None
        rows = self.rows
        if self.found is None:
            self.found = self._moments(x.shape[-1], rows)
        vectors = x.flatten(0, 1)[rows.at.to(x.device)]
        self.found.every.update(vectors, rows.types)
        if self.found.shuffled is not None and rows.shuffled is not None:
            self.found.shuffled.update(vectors, rows.shuffled)
        if self.found.equal is not None and rows.equal is not None:
            self.found.equal.update(vectors[rows.equal.to(x.device)], rows.types[rows.equal])
        return flow

    def _moments(self, d: int, rows: Rows) -> Moments:
        def new() -> TokenMoments:
            return TokenMoments(d, self.n_types, dtype=self.dtype)

        return Moments(
            new(),
            None if rows.shuffled is None else new(),
            None if rows.equal is None else new(),
        )


def collect_types(
    model: Any,
    batches: Iterable[Any],
    sites: Sites,
    rows: TokenRows,
    n_types: int,
    dtype: torch.dtype,
) -> dict[str, Moments]:
    """Run every batch once, without gradients, and return the moments at every site.

    Raises:
        TangentKeyError: a site that the model does not have.
        TangentRuntimeError: no batch, or a site that never fired.
        TangentValueError: a site without one vector a token.
    """
    found = [attachment.realised(model, site) for site in find_sites(model, sites)]
    collectors = [TypeCollector(site.name, n_types, dtype) for site in found]
    placed = [Placed(site, one) for site, one in zip(found, collectors, strict=True)]
    with attachment.temporarily(model, placed), torch.no_grad():
        for batch, tokens, real in token_batches(batches, model):
            chosen = rows.next(tokens, real)
            for collector in collectors:
                collector.rows = chosen
            given, options = batch_input(batch)
            options.pop("group", None)
            model(given, return_type=None, **options)
    silent = [one.site for one in collectors if one.found is None]
    if silent:
        raise TangentRuntimeError(
            f"{silent[0]} never fired, so nothing could be measured there. Was the list of batches "
            "empty, or does this architecture skip the site?"
        )
    return {one.site: one.found for one in collectors if one.found is not None}
