"""The weights of a TransformerBridge, by its own names for its parts."""

from __future__ import annotations

from typing import Any

from torch import nn

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks.gradients.assemble import Assembly, is_linear
from tl_tangent.hooks.gradients.weight import Weights

PARTS = {"attn": ("q", "k", "v", "o"), "mlp": ("gate", "in", "out")}


def bridge_weights(model: Any) -> Weights:
    """Return the weights of a TransformerBridge.

    Raises:
        TangentValueError: a bridge without one stack of blocks, or a block that lacks a part.
    """
    if not hasattr(model, "blocks"):
        raise TangentValueError(
            f"this bridge of {model.cfg.architecture} has no single stack of blocks. Accepted: an "
            "encoder or a decoder."
        )
    made = Assembly()
    made.embedding("embed", _inner(model.embed))
    if hasattr(model, "pos_embed") and isinstance(_inner(model.pos_embed), nn.Embedding):
        made.embedding("pos", _inner(model.pos_embed))
    for layer, block in enumerate(model.blocks):
        made.block(layer, block)
        for branch, kinds in PARTS.items():
            _branch(made, layer, getattr(block, branch, None), kinds)
    made.unembedding(_inner(model.unembed))
    return made.finished(model)


def _branch(made: Assembly, layer: int, branch: Any, kinds: tuple[str, ...]) -> None:
    needed = [kind for kind in kinds if kind != "gate"]
    found = {kind: _inner(getattr(branch, kind, None)) for kind in kinds}
    missing = [kind for kind in needed if not is_linear(found[kind])]
    if missing:
        raise TangentValueError(
            f"layer {layer} has a {type(branch).__name__} without linear {', '.join(missing)}: its "
            "weights would be left out. Accepted: dense attention and MLP blocks."
        )
    for kind in kinds:
        if is_linear(found[kind]):
            made.linear(kind, layer, found[kind])
    fused = _fused(branch)
    if is_linear(fused):
        made.replaced(fused)


def _fused(branch: Any) -> Any:
    """The layer that a bridge took apart: W_QKV, or the gate and the input weight in one."""
    attribute = getattr(branch, "fused_attr", None)
    return getattr(_inner(branch), attribute) if attribute else _inner(getattr(branch, "qkv", None))


def _inner(component: Any) -> Any:
    """The module that a bridge component stands for."""
    return getattr(component, "original_component", None)
