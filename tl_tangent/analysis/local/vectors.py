"""The activations of chosen occurrences, at all sites in one forward pass a batch."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_tangent.analysis.local.occurrences import Chosen, Corpus
from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.hooks import attachment
from tl_tangent.hooks.attachment import Placed
from tl_tangent.hooks.fit import shown
from tl_tangent.hooks.positions import Run
from tl_tangent.hooks.sites import Site


class Taker:
    """A layer that copies chosen rows of an activation to the CPU and lets it flow on."""

    needs_run = False
    listening = True

    def __init__(self, site: str) -> None:
        self.site = site
        self.chosen: Bool[Tensor, "batch pos"] = torch.zeros(0, 0, dtype=torch.bool)
        self.taken: list[Float[Tensor, "row d"]] = []

    def apply(self, flow: Tensor, carried: Tensor | None, run: Run | None) -> Tensor:
        x = (flow if carried is None else flow + carried).detach()
        if x.ndim != 3 or x.shape[:2] != self.chosen.shape:
            raise TangentValueError(
                f"{self.site} holds {list(x.shape)} for {list(self.chosen.shape)} tokens, not one "
                "vector a token: take a site of the residual stream, or what an attention or MLP "
                "writes to it"
            )
        self.taken.append(x[self.chosen.to(x.device)].cpu())
        return flow


def collect_vectors(
    model: Any, corpus: Corpus, chosen: Chosen, sites: list[Site], *, progress: bool = False
) -> dict[str, list[Float[Tensor, "n d"]]]:
    """Return the vectors of the sampled occurrences: by site, one tensor for each of the types.

    In memory lie ``sites * types * sample size * d`` numbers at most, however long the corpus is.

    Raises:
        TangentRuntimeError: a site that never fired.
        TangentValueError: a site without one vector a token.
    """
    found = [attachment.realised(model, site) for site in sites]
    takers = [Taker(site.name) for site in found]
    placed = [Placed(site, taker) for site, taker in zip(found, takers, strict=True)]
    stop = _behind_last(model, [site.layer for site in found])
    types: list[Int[Tensor, " row"]] = []
    with attachment.temporarily(model, placed), torch.no_grad():
        for batch, taken in shown(chosen.batches(corpus), progress, "collecting"):
            for taker in takers:
                taker.chosen = taken >= 0
            types.append(taken[taken >= 0])
            model(batch.given, return_type=None, **{**stop, **batch.options})
    own = torch.cat(types)
    return {taker.site: _by_type(taker, own, len(chosen.tokens)) for taker in takers}


def _by_type(taker: Taker, own: Tensor, n_types: int) -> list[Tensor]:
    rows = torch.cat(taker.taken) if taker.taken else own[:0]
    if len(rows) != len(own):
        raise TangentRuntimeError(
            f"{taker.site} fired for {len(rows)} of {len(own)} tokens: does this architecture skip "
            "the site?"
        )
    return [rows[own == one] for one in range(n_types)]


def _behind_last(model: Any, layers: list[int | None]) -> dict[str, int]:
    """Stop behind the last site, so that what lies beyond is not computed."""
    known = [layer for layer in layers if layer is not None]
    if not hasattr(model.cfg, "n_layers") or len(known) < len(layers):
        return {}
    return {"stop_at_layer": max(known) + 1}
