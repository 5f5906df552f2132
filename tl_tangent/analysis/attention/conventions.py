"""How the numbers of an attention split came about, in words and JSON-able values."""

from __future__ import annotations

from typing import Any

from tl_tangent.analysis.attention.term_rows import MEANING
from tl_tangent.hooks.attention.choose import Chosen
from tl_tangent.hooks.positions import PositionMask

SPACES = {
    "input": "what W_Q and W_K read, after the norm",
    "residual": (
        "the residual stream in front of the norm, whose scale is frozen at each token's own; the "
        "mean part is divided by it too, and so differs from token to token"
    ),
}
SPLIT = (
    "input = mean + v + n; biases, and the norm's beta in residual space, go with the mean; the "
    "scales of norms are frozen; scale, rotation and mask are the model's; a soft cap acts on the "
    "sum of the terms, whose shares are of scores before it"
)


def attention_conventions(model: Any, chosen: Chosen, positions: PositionMask) -> dict[str, Any]:
    """Return what has to be known to read a split, JSON-able."""
    circuit, subspace = chosen.circuit, chosen.subspace
    invariant, why = softmax_invariance(model, chosen)
    return {
        "model": getattr(model.cfg, "model_name", None),
        "attention": circuit.kind,
        "layer": circuit.layer,
        "site": subspace.site,
        "space": chosen.space,
        "rank": subspace.rank,
        "method": subspace.method,
        "per_head": subspace.heads is not None,
        "positions": positions.description,
        "scale": circuit.scale,
        "soft_cap": circuit.cap,
        "softmax_cannot_see_key_constant_terms": invariant,
        "softmax_invariance": why,
        "meaning": {"split": SPLIT, "space": SPACES[chosen.space], **MEANING},
    }


def softmax_invariance(model: Any, chosen: Chosen) -> tuple[bool, str]:
    """Whether dropping mean_mean, tangent_mean and normal_mean leaves every pattern as it is.

    They do not depend on the key exactly where the key's mean part is the same at every position.
    """
    positions = getattr(model.cfg, "positional_embedding_type", None)
    rotary = positions == "rotary" or hasattr(model.blocks[chosen.layer].attn, "hook_cos")
    reasons = []
    if rotary:
        reasons.append("the rotation turns the key's mean part by its position")
    if chosen.space == "residual" and chosen.circuit.input_norm is not None:
        reasons.append("the norm divides the key's mean part by the scale of its token")
    if chosen.circuit.key.norm is not None:
        reasons.append("the norm of keys divides the key's mean part by the scale of its token")
    if chosen.circuit.cap is not None:
        reasons.append("the soft cap is not additive")
    terms = "mean_mean, tangent_mean and normal_mean (the key's side is the mean)"
    if reasons:
        return False, f"{terms} are not the same at every key: {'; '.join(reasons)}"
    return True, f"{terms} are the same at every key, so the softmax can't see them"
