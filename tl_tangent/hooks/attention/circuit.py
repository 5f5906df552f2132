"""The query-key circuit of a layer: what turns the attention's input into its scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.hooks import compat
from tl_tangent.hooks.attention.norms import FrozenNorm, read_norm


@dataclass(frozen=True)
class Projection:
    """W_Q or W_K with its bias and, where the model has one, the norm of queries or keys.

    Attributes:
        weight: ``[head, d_model, d_head]``; of keys, one a key-value head.
        bias: ``[head, d_head]`` or None.
        norm: of what was projected, its scale to be frozen.
        norm_over_heads: whether the norm takes all heads as one vector (OLMo 2).
    """

    weight: Float[Tensor, "head d_model d_head"]
    bias: Float[Tensor, "head d_head"] | None
    norm: FrozenNorm | None = None
    norm_over_heads: bool = False

    @property
    def heads(self) -> int:
        return self.weight.shape[0]

    def project(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes head d_head"]:
        """Return ``x W`` for every head, without the bias."""
        return (x @ self._flat).unflatten(-1, (self.heads, -1))

    @cached_property
    def _flat(self) -> Float[Tensor, "d_model columns"]:
        return self.weight.permute(1, 0, 2).flatten(1).contiguous()

    def repeated(self, times: int) -> Projection:
        """Return the projection with each of its heads ``times`` times in a row."""
        if times == 1:
            return self
        if self.norm is not None and (self.norm_over_heads or (_ndim(self.norm.gain) > 1)):
            raise TangentValueError(
                "a subspace a query head needs keys split once a query head, and this model norms "
                "its grouped keys over all heads at once. Give one subspace for all heads."
            )
        bias = None if self.bias is None else self.bias.repeat_interleave(times, 0)
        weight = self.weight.repeat_interleave(times, 0)
        return Projection(weight, bias, self.norm, self.norm_over_heads)


@dataclass(frozen=True)
class QKCircuit:
    """Everything about a layer's attention scores that does not depend on the input.

    Attributes:
        layer: its number.
        kind: class of the attention module.
        query, key: the projections.
        scale: what ``q . k`` is multiplied by.
        cap: c where scores are ``c tanh(s / c)``, else None.
        input_norm: the norm in front of the attention; None without one.
        clips: whether the model clips queries and keys, which no sum of terms can follow.
    """

    layer: int
    kind: str
    query: Projection
    key: Projection
    scale: float
    cap: float | None
    input_norm: FrozenNorm | None
    clips: bool

    @property
    def n_heads(self) -> int:
        return self.query.heads

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.query.heads // self.key.heads

    @property
    def d_model(self) -> int:
        return self.query.weight.shape[1]


def read_circuit(model: Any, layer: int) -> QKCircuit:
    """Read the query-key circuit of a layer of a HookedTransformer or a TransformerBridge.

    Raises:
        TangentValueError: an architecture whose scores are no bilinear form of one input (latent
            attention, state-space layers, T5), or whose projections can't be read.
    """
    attn = getattr(model.blocks[layer], "attn", None)
    if attn is None:
        raise TangentValueError(
            f"layer {layer} is a {type(model.blocks[layer]).__name__} without attention, so there "
            "are no scores to split. Choose another layer."
        )
    read = _of_bridge if compat.is_bridge(model) else _of_hooked
    return read(model, layer, attn)


def _of_hooked(model: Any, layer: int, attn: Any) -> QKCircuit:
    cfg, kind = attn.cfg, type(attn).__name__
    if kind not in ("Attention", "GroupedQueryAttention"):
        raise TangentValueError(_UNREADABLE.format(layer=layer, kind=kind))
    if cfg.load_in_4bit:
        raise TangentValueError("the weights are quantized to 4 bits. Load the model without that.")
    grouped = hasattr(attn, "_W_K") and not cfg.ungroup_grouped_query_attention
    over_heads = attn.q_norm is not None and attn.q_norm.w.numel() != cfg.d_head
    weight, bias = (attn._W_K, attn._b_K) if grouped else (attn.W_K, attn.b_K)
    cap = cfg.attn_scores_soft_cap
    return QKCircuit(
        layer=layer,
        kind=kind,
        query=_projection(model, attn.W_Q, attn.b_Q, attn.q_norm, over_heads),
        key=_projection(model, weight, bias, attn.k_norm, over_heads),
        scale=1.0 / float(attn.attn_scale),
        cap=float(cap) if cap is not None and cap > 0 else None,
        input_norm=_input_norm(model, model.blocks[layer]),
        clips=bool(cfg.clip_qkv),
    )


def _of_bridge(model: Any, layer: int, attn: Any) -> QKCircuit:
    kind, inner = type(attn).__name__, attn.original_component
    weights = _bridge_weights(attn)
    if weights is None:
        raise TangentValueError(_UNREADABLE.format(layer=layer, kind=kind))
    for flag, what in _NOT_SPLIT.items():
        if getattr(attn.config, flag, False):
            raise TangentValueError(
                f"layer {layer} {what}, which is not split here. Choose another model."
            )
    norms = [getattr(attn, name, None) for name in ("q_norm", "k_norm")]
    over_heads = getattr(attn, "_qk_norm_phase", None) == "pre_reshape"
    multiplier = float(getattr(inner, "key_multiplier", None) or 1.0)
    cap = getattr(inner, "attn_logit_softcapping", None)
    return QKCircuit(
        layer=layer,
        kind=kind,
        query=_projection(model, attn.W_Q, attn.b_Q, norms[0], over_heads),
        key=_projection(model, attn.W_K, attn.b_K, norms[1], over_heads, multiplier),
        scale=_bridge_scale(attn, layer),
        cap=float(cap) if cap is not None else None,
        input_norm=_input_norm(model, model.blocks[layer]),
        clips=_bridge_clips(inner),
    )


def _input_norm(model: Any, block: Any) -> FrozenNorm | None:
    """The norm in front of the attention; what is called ln1 is behind it in post-norm blocks."""
    norm = getattr(block, "ln1", None)
    if compat.is_bridge(model):
        name = getattr(norm, "name", None) or ""
        behind = "post_attention" in name or "attention.output" in name
    else:
        behind = model.cfg.original_architecture in ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
    return None if behind else read_norm(model, norm)


def _bridge_weights(attn: Any) -> tuple[Tensor, Tensor] | None:
    """W_Q and W_K as ``[head, d_model, d_head]``; None where the attention has no such pair."""
    if "MLA" in type(attn).__name__ or not {"q", "k"} <= set(attn._modules):
        return None
    try:
        weights = attn.W_Q, attn.W_K
    except (AttributeError, TypeError, ValueError):
        return None
    return weights if all(isinstance(w, Tensor) and w.ndim == 3 for w in weights) else None


def _bridge_scale(attn: Any, layer: int) -> float:
    inner, width = attn.original_component, attn.W_Q.shape[-1]
    by_root = width**-0.5
    if hasattr(inner, "scale_attn"):  # GPT-J, CodeGen: divided by it
        return 1.0 / float(inner.scale_attn)
    if type(inner).__name__ == "GPTNeoSelfAttention":
        return 1.0
    if hasattr(attn, "split_qkv_matrix"):  # fused projections: the bridge computes the scores
        scale = getattr(attn, "_softmax_scale", None) or by_root
        by_layer = getattr(attn.config, "scale_attn_by_inverse_layer_idx", False)
        return scale / (layer + 1) if by_layer else scale
    return float(getattr(inner, "scaling", by_root))


def _bridge_clips(inner: Any) -> bool:
    config = getattr(inner, "config", None)
    return bool(getattr(inner, "clip_qkv", None) or getattr(config, "clip_qkv", None))


def _projection(
    model: Any,
    weight: Tensor,
    bias: Tensor | None,
    norm: Any,
    norm_over_heads: bool,
    multiplier: float = 1.0,
) -> Projection:
    dtype = full_dtype(weight.dtype)
    return Projection(
        weight=weight.to(dtype) * multiplier if multiplier != 1.0 else weight.to(dtype),
        bias=None if bias is None else bias.to(dtype) * multiplier,
        norm=None if norm is None else read_norm(model, norm),
        norm_over_heads=norm_over_heads,
    )


def _ndim(x: Tensor | None) -> int:
    return 0 if x is None else x.ndim


_NOT_SPLIT = {
    "qk_norm_after_rope": "norms its queries and keys after their rotation",
    "gated_q_proj": "projects its queries together with a gate",
}
_UNREADABLE = (
    "the scores of layer {layer} come from a {kind}, and are not a bilinear form x W_Q (x W_K)^T "
    "of the attention's input: latent attention compresses keys first, state-space layers have no "
    "keys, T5 splits its bias over layers. Choose another model."
)
