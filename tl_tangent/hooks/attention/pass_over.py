"""Run a model over batches and receive the observed attention of some layers, with what counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_tangent.errors import TangentRuntimeError
from tl_tangent.hooks.attention.observe import Observed, observing
from tl_tangent.hooks.fit import batch_input
from tl_tangent.hooks.positions import PositionMask, Run, run_of_forward


@dataclass(frozen=True)
class Pass:
    """What one pass is about; tells which tokens and which cells of the scores count."""

    run: Run

    def taken(self, observed: Observed, positions: PositionMask) -> Bool[Tensor, "_ pos"]:
        """Tokens that are not padding and that ``positions`` takes."""
        batch, length = observed.attn_input.shape[:2]
        device = observed.scores.device
        rows = self.run.select(positions, batch, length, device)
        return torch.ones(1, length, dtype=torch.bool, device=device) if rows is None else rows

    def cells(self, observed: Observed, positions: PositionMask) -> Bool[Tensor, "_ query key"]:
        """Unmasked cells whose query and key both count."""
        taken = self.taken(observed, positions)
        seen = observed.seen
        if bool((seen == seen[:1]).all()):
            seen = seen[:1]
        return seen & taken[:, :, None] & taken[:, None, :]


@torch.no_grad()
def pass_over(
    model: Any,
    batch: Any,
    layers: Sequence[int],
    receive: Callable[[Observed, Pass], Tensor | None],
) -> None:
    """Run ``model`` on one batch, up to the last of ``layers``.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        batch: what the model takes, or a mapping of keyword arguments with an ``input``.
        layers: the layers to observe.
        receive: called with each layer's attention when its scores are made; what it returns, if
            anything, takes their place.
    """
    given, options = batch_input(batch)
    options = {"stop_at_layer": max(layers) + 1, **options}
    about = Pass(run_of_forward(model, (given,), options))
    ran: set[int] = set()

    def without_padding(observed: Observed) -> Tensor | None:
        ran.add(observed.layer)
        real = about.taken(observed, PositionMask("all"))
        observed.seen = observed.seen & real[:, :, None]
        return receive(observed, about)

    with observing(model, layers, without_padding):
        model(given, return_type=None, **options)
    missing = set(layers) - ran
    if missing:
        raise TangentRuntimeError(
            f"the attention of layer {min(missing)} never ran in this pass. Is there a "
            "stop_at_layer in the batch? It is set as needed."
        )


def with_mask(batch: Any, mask: Tensor | None) -> Any:
    """Put an attention mask beside an input."""
    if mask is None:
        return batch
    return {"input": batch, **(batch if isinstance(batch, Mapping) else {}), "attention_mask": mask}
