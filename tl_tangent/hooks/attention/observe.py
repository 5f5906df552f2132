"""What the attention of a layer reads and computes in a pass, handed over when its scores are made.

The observers are ordinary hooks behind all that are there already, so what they see is what the
model uses: after ablations and after the user's own edits. They go when the block is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.hooks import compat
from tl_tangent.hooks.attention import rotary


@dataclass
class Observed:
    """One layer's attention in one pass.

    Attributes:
        layer: its number.
        attn_input: what W_Q and W_K read.
        resid_pre: the residual stream in front of the block.
        query, key: ``hook_q`` and ``hook_k``: projected with their biases, not yet normed or
            rotated; keys have as many heads as there are key-value heads.
        scores: ``hook_attn_scores`` as the model has it: scaled, capped, with positions, masked.
            Where the host only shows the pattern there, the pattern.
        rotate: the rotation by position, None without one.
        position: the additive position term, None without one.
        masked_at: what the host fills in at masked cells, or -inf, is below half of this.
        scores_are_pattern: whether the host computes its attention elsewhere and shows the pattern
            in the place of the scores.
    """

    layer: int
    attn_input: Float[Tensor, "batch pos d_model"]
    resid_pre: Float[Tensor, "batch pos d_model"]
    query: Float[Tensor, "batch pos head d_head"]
    key: Float[Tensor, "batch pos kv_head d_head"]
    scores: Float[Tensor, "batch head query key"]
    rotate: rotary.Rotate | None
    position: Float[Tensor, "_ head query key"] | None
    masked_at: float
    scores_are_pattern: bool

    @cached_property
    def seen(self) -> Bool[Tensor, "batch query key"]:
        """Cells that are not masked; where only the pattern is known, not zero in every head."""
        if self.scores_are_pattern:
            return (self.scores > 0).any(1)
        return self.scores[:, 0] > self.masked_at / 2


_NEEDED = ("resid_pre", "attn_input", "query", "key")
Receive = Callable[[Observed], Tensor | None]


@contextmanager
def observing(model: Any, layers: Sequence[int], receive: Receive) -> Iterator[None]:
    """Call ``receive`` with each layer's :class:`Observed` in every pass, when its scores are made.

    What ``receive`` returns, if anything, takes the place of ``hook_attn_scores``.

    Raises:
        TangentValueError: a flag is on that gives every head an input of its own.
    """
    _check_one_input(model)
    with ExitStack() as stack:
        hooks = []
        for layer in layers:
            watch = _Watch(model, layer, receive)
            handle = watch.attn.register_forward_pre_hook(watch.note_arguments, with_kwargs=True)
            stack.callback(handle.remove)
            hooks += watch.hooks()
        stack.enter_context(model.hooks(fwd_hooks=hooks))
        yield


def _check_one_input(model: Any) -> None:
    for flag in ("use_split_qkv_input", "use_attn_in"):
        if getattr(model.cfg, flag, False):
            raise TangentValueError(
                f"{flag} is on, so W_Q and W_K read a copy of the stream for every head. Scores "
                f"are split from one input: call model.set_{flag}(False) first."
            )


@dataclass(repr=False)  # a host names every hook by its repr, which would be the model's
class _Watch:
    """Gathers what one layer's attention reads on the way to its scores."""

    model: Any
    layer: int
    receive: Receive
    noted: dict[str, Any] = field(default_factory=dict)

    @property
    def attn(self) -> Any:
        return self.model.blocks[self.layer].attn

    def hooks(self) -> list[tuple[str, Callable]]:
        """The hooks of this layer, by the name of their hook point.

        Raises:
            TangentValueError: something has taken the place of one of the hook points.
        """
        known = self.model.hook_dict
        for name, _ in (found := self._hooks()):
            if name not in known:
                raise TangentValueError(
                    f"{name} is no hook point of this model (an SAE may sit in its place), and the "
                    "scores can't be split without it. Take off what is there first."
                )
        return found

    def _hooks(self) -> list[tuple[str, Callable]]:
        block = f"blocks.{self.layer}"
        found = [
            (f"{block}.hook_resid_pre", self._noting("resid_pre")),
            (f"{block}.attn.hook_q", self._noting("query")),
            (f"{block}.attn.hook_k", self._noting("key")),
        ]
        if compat.is_bridge(self.model):
            found.append((f"{block}.attn.hook_in", self._noting("attn_input")))
            if hasattr(self.attn, "hook_cos"):
                found += [(f"{block}.attn.hook_{x}", self._noting(x)) for x in ("cos", "sin")]
        return [*found, (f"{block}.attn.hook_attn_scores", self._hand_over)]

    def note_arguments(self, attn: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.noted["arguments"] = kwargs
        if not compat.is_bridge(self.model):
            self.noted["attn_input"] = kwargs["query_input"]

    def _noting(self, name: str) -> Callable:
        def note(value: Tensor, hook: Any) -> None:
            self.noted[name] = value

        return note

    def _hand_over(self, scores: Tensor, hook: Any) -> Tensor | None:
        noted, self.noted = self.noted, {}
        missing = [name for name in _NEEDED if name not in noted]
        if missing:
            raise TangentRuntimeError(
                f"layer {self.layer}: {missing[0]} never fired before hook_attn_scores, so the "
                "scores can't be split. Run the model from its tokens or from this layer's input."
            )
        length = noted["attn_input"].shape[1]
        if scores.shape[-1] != length:
            raise TangentRuntimeError(
                f"the pass has {length} positions and its scores {scores.shape[-1]} keys: it runs "
                "on a key-value cache, whose keys were split by nobody. Run without a cache."
            )
        observed = Observed(
            layer=self.layer,
            attn_input=noted["attn_input"],
            resid_pre=noted["resid_pre"],
            query=noted["query"],
            key=noted["key"],
            scores=scores,
            rotate=self._rotation(noted, length),
            position=self._position(noted, scores),
            masked_at=_masked_at(self.attn, noted["attn_input"], scores),
            scores_are_pattern=type(self.attn).__name__ == "AttentionBridge",
        )
        return self.receive(observed)

    def _rotation(self, noted: dict[str, Any], length: int) -> rotary.Rotate | None:
        arguments = noted.get("arguments", {})
        if not compat.is_bridge(self.model):
            return rotary.of_hooked(self.attn, length, arguments.get("attention_mask"))
        if "cos" in noted:
            return rotary.of_bridge(self.attn, noted["cos"], noted["sin"])
        return rotary.of_tables(self.attn, length, arguments.get("position_ids"))

    def _position(self, noted: dict[str, Any], scores: Tensor) -> Tensor | None:
        if not compat.is_bridge(self.model):
            bias, (n_queries, n_keys) = getattr(self.attn, "alibi", None), scores.shape[-2:]
            return None if bias is None else bias[None, :, -n_queries:, :n_keys]  # as the host cuts
        return _bridge_bias(self.attn, noted.get("arguments", {}), scores)


def _masked_at(attn: Any, attn_input: Tensor, scores: Tensor) -> float:
    """The lowest number of the scores' dtype or of the model's, divided where the host divides."""
    lowest = max(torch.finfo(x.dtype).min for x in (scores, attn_input))
    by_codegen = type(attn).__name__ == "CodeGenAttentionBridge"  # scales behind the mask
    return lowest / float(attn.original_component.scale_attn) if by_codegen else lowest


def _bridge_bias(attn: Any, arguments: dict[str, Any], scores: Tensor) -> Tensor | None:
    """The bias that BLOOM, Falcon and MPT add to their scores, as they get it from the model."""
    batch, heads, _, n_keys = scores.shape
    alibi, bias = arguments.get("alibi"), arguments.get("position_bias")
    if alibi is not None:
        alibi = alibi.reshape(batch, heads, -1, alibi.shape[-1])[..., :n_keys]
        if type(attn).__name__ != "ALiBiJointQKVAttentionBridge":
            return alibi.expand_as(scores)
        return _falcon_bias(alibi * attn.W_Q.shape[-1] ** -0.5, arguments.get("attention_mask"))
    if bias is not None:
        return bias[None, ..., -n_keys:].expand_as(scores)
    return None


def _falcon_bias(alibi: Tensor, mask: Tensor | None) -> Tensor:
    """Hugging Face's Falcon puts the bias into the mask too, and the bridge adds both."""
    if mask is None:
        return alibi
    lowest = torch.finfo(mask.dtype).min / 2
    return alibi + mask.masked_fill(mask < lowest, 0.0)[..., : alibi.shape[-1]]
