"""The loss of a model on fixed rows, with the pass restarted at the ablated layer where it can be.

Nothing in front of an ablated layer changes, so a HookedTransformer is restarted there from the
residual stream that was kept (``start_at_layer``), bit for bit as if it had run from the tokens. A
bridge has no such restart and runs in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks import compat

BATCH_TOKENS = 512


@dataclass
class Stage:
    """One batch of rows, and its residual stream in front of the layer that it has reached."""

    tokens: Int[Tensor, "batch pos"]
    residual: Float[Tensor, "batch pos d_model"] | None = None
    extras: dict[str, Any] | None = None


class StagedLoss:
    """Mean next-token cross-entropy of ``model`` on ``tokens``, in nats a token.

    Memory holds one residual stream a row, whatever the number of layers.

    Args:
        model: a HookedTransformer or a TransformerBridge of a causal language model.
        tokens: rows without padding, on any device.

    Raises:
        TangentValueError: rows of fewer than 2 tokens, or a model whose predictions see later
            tokens, for which a next-token loss means nothing.
    """

    def __init__(self, model: Any, tokens: Int[Tensor, "row pos"]) -> None:
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise TangentValueError(
                f"tokens are {list(tokens.shape)}; a next-token loss needs [row, pos] with 2 "
                "positions or more"
            )
        self.model = model
        self.n_predicted = tokens.shape[0] * (tokens.shape[1] - 1)
        rows = max(1, BATCH_TOKENS // tokens.shape[1])
        self._stages = [Stage(part) for part in tokens.to(_device(model)).split(rows)]
        self._restarts = compat.is_hooked_transformer(model)
        self._reached: int | None = None
        self._start: int | None = None
        check_causal(model, self._stages[0].tokens)

    @torch.no_grad()
    def go_to(self, layer: int | None) -> None:
        """Let the next passes start in front of ``layer``; at the tokens for None.

        To be called with the model as it is, outside of any ablation.
        """
        self._start = layer if self._restarts else None
        if self._start is None or self._start == self._reached:
            return
        for stage in self._stages:
            self._advance(stage, self._start)
        self._reached = self._start

    def _advance(self, stage: Stage, layer: int) -> None:
        if self._reached is None or self._reached > layer:
            residual, _, shortformer, mask = self.model.input_to_embed(stage.tokens)
            stage.residual = residual
            stage.extras = {"shortformer_pos_embed": shortformer, "attention_mask": mask}
            begin = 0
        else:
            begin = self._reached
        if begin < layer:
            stage.residual = self._resume(stage, begin, stop_at_layer=layer)

    def _resume(self, stage: Stage, layer: int, **options: Any) -> Tensor:
        return self.model(
            stage.residual,
            start_at_layer=layer,
            tokens=stage.tokens,
            **(stage.extras or {}),
            **options,
        )

    @torch.no_grad()
    def loss(self) -> float:
        """Run the model as it is now (ablated, say) and return its loss."""
        total = sum(self._summed_loss(stage) for stage in self._stages)
        return total / self.n_predicted

    def _summed_loss(self, stage: Stage) -> float:
        if self._start is None:
            logits = self.model(stage.tokens, return_type="logits")
        else:
            logits = self._resume(stage, self._start, return_type="logits")
        return sum(_row_loss(row, ids) for row, ids in zip(logits, stage.tokens, strict=True))


def _row_loss(logits: Float[Tensor, "pos vocab"], tokens: Int[Tensor, " pos"]) -> float:
    """Summed next-token cross-entropy of one row.

    Exponentials are summed in float64: in float32 the log-sum-exp over a vocabulary of 49152 is
    2e-5 nats off, always to one side.
    """
    scores = logits[:-1].to(torch.promote_types(logits.dtype, torch.float32))
    scores = scores - scores.amax(dim=-1, keepdim=True)
    partition = scores.exp().sum(dim=-1, dtype=torch.float64).log()
    target = scores.gather(-1, tokens[1:, None].to(logits.device))[:, 0]
    return float((partition - target).sum())


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def check_causal(model: Any, tokens: Int[Tensor, "batch pos"]) -> None:
    """Refuse a model that reads ahead: what it says at position 0 must not depend on position 1.

    Raises:
        TangentValueError: it does.
    """
    pair = tokens[:1, :2].repeat(2, 1)
    pair[1, 1] = pair[0, 0] if pair[0, 0] != pair[0, 1] else (pair[0, 1] + 1) % model.cfg.d_vocab
    first, other = model(pair, return_type="logits")[:, 0].float()
    if not torch.allclose(first, other, rtol=0, atol=1e-3 * float(first.abs().max())):
        raise TangentValueError(
            f"{getattr(model.cfg, 'model_name', 'this model')} reads ahead (its prediction at "
            "position 0 changes with the token at position 1), so a next-token loss means nothing; "
            "take a causal language model"
        )
