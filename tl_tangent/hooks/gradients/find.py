"""Find the weights of a Hugging Face model, a TransformerBridge or a HookedTransformer."""

from __future__ import annotations

from typing import Any

from torch import nn

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks import compat
from tl_tangent.hooks.attention.norms import norms_folded
from tl_tangent.hooks.gradients.in_bridge import bridge_weights
from tl_tangent.hooks.gradients.in_hf import hf_weights
from tl_tangent.hooks.gradients.in_hooked import hooked_weights
from tl_tangent.hooks.gradients.weight import Weights

SPLIT = ("use_split_qkv_input", "use_attn_in", "ungroup_grouped_query_attention")


def find_weights(model: Any) -> Weights:
    """Return every weight whose gradient can be compared with a subspace.

    Input side: W_Q, W_K, W_V, the gate and the input weight of the MLP, the unembedding. Output
    side: W_O, the MLP's output weight, token and position embeddings. Fused weights are taken
    apart.

    Raises:
        TangentValueError: a model of another kind, an architecture with weights that are not known
            here, or folded norms, whose weights have other gradients than in training.
    """
    if not isinstance(model, nn.Module):
        raise TangentValueError(
            f"a {type(model).__name__} has no gradients here. Accepted: a Hugging Face model, a "
            "TransformerBridge or a HookedTransformer."
        )
    found = _taken_apart(model)
    _check_one_each(found)
    return found


def _taken_apart(model: nn.Module) -> Weights:
    if not compat.is_hooked(model):
        return hf_weights(model)
    if _folded(model):
        raise TangentValueError(
            "the norms of this model are folded into its weights, whose gradients are then not "
            "those of training: dL/dW = diag(gain) dL/dW' + bias (dL/db')^T, and the gain is gone. "
            "Load it unprocessed (fold_ln=False, or a bridge without compatibility mode)."
        )
    _check_flags(model)
    return bridge_weights(model) if compat.is_bridge(model) else hooked_weights(model)


def _folded(model: Any) -> bool:
    """Whether weights were processed; a bridge that was processed in any way is refused."""
    if compat.is_bridge(model):
        return bool(getattr(model, "_weights_processed", False))
    return bool(norms_folded(model))


def _check_flags(model: Any) -> None:
    """Refuse what makes a map read or write one copy a head."""
    flags = SPLIT + (("use_attn_result",) if compat.is_bridge(model) else ())
    on = [flag for flag in flags if getattr(model.cfg, flag, False)]
    if on:
        raise TangentValueError(
            f"{', '.join(on)} is on: the model computes with one copy of a tensor for each head, "
            f"and not with the map itself. Call model.set_{on[0]}(False)."
        )


def _check_one_each(found: Weights) -> None:
    """Refuse a name for two matrices, and a matrix that stands in two layers."""
    names = [weight.name for weight in found.weights]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TangentValueError(
            f"{twice[0]} would name {names.count(twice[0])} matrices: cross-attention and mixtures "
            "of experts are not known here. Accepted: blocks with one attention and one MLP."
        )
    layers: dict[int, set[int | None]] = {}
    for weight in found.weights:
        layers.setdefault(id(weight.parameter), set()).add(weight.layer)
        if len(layers[id(weight.parameter)]) > 1:
            raise TangentValueError(
                f"{weight.name} is the same parameter as in another layer: its gradient is that of "
                "both. Accepted: layers with weights of their own."
            )
