"""What a HookedTransformerConfig needs to know of each HuggingFace family.

One function a family turns a HuggingFace configuration into HookedTransformerConfig fields. A
setting that HookedTransformer cannot represent is refused by name, never passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from tl_tangent.errors import TangentValueError

# HuggingFace activation -> TransformerLens activation (equal functions, checked by the tests)
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_fast",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
ROPE_TYPES = ("default", "linear", "llama3")
BLOOM_CONTEXT = 2048  # ALiBi has no length of its own; TransformerLens uses the same number


@dataclass(frozen=True)
class Family:
    """How one HuggingFace ``model_type`` becomes a HookedTransformer.

    ``architecture`` is the HuggingFace class, ``converter`` the function of
    ``transformer_lens.pretrained.weight_conversions`` that renames its weights, ``fields`` the
    function that reads its configuration. TransformerLens' converters leave out the optional
    attention biases of families with ``optional_attention_bias``.
    """

    architecture: str
    converter: str
    fields: Callable[[Any], dict[str, Any]]
    optional_attention_bias: bool = False


def gpt2_fields(config: Any) -> dict[str, Any]:
    """GPT-2: learned positions, LayerNorm, sequential blocks."""
    _require(config, "add_cross_attention", False)
    return {
        **_dimensions(config, d_mlp=config.n_inner or 4 * config.n_embd),
        "n_ctx": config.n_positions,
        "act_fn": _activation(config, config.activation_function),
        "normalization_type": "LN",
        "eps": config.layer_norm_epsilon,
        "use_attn_scale": config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
    }


def gpt_neox_fields(config: Any) -> dict[str, Any]:
    """GPT-NeoX: partly rotary, LayerNorm, attention and MLP in parallel or in sequence."""
    _require(config, "attention_bias", True)
    return {
        **_dimensions(config),
        **_rotary(config, partial=True),
        "n_ctx": config.max_position_embeddings,
        "act_fn": _activation(config, config.hidden_act),
        "normalization_type": "LN",
        "eps": config.layer_norm_eps,
        "parallel_attn_mlp": config.use_parallel_residual,
        "default_prepend_bos": False,
    }


def llama_fields(config: Any) -> dict[str, Any]:
    """Llama (and SmolLM2): rotary, RMSNorm, gated MLP, grouped queries."""
    _require(config, "mlp_bias", False)
    return {
        **_rms_gated(config),
        **_rotary(config),
        "act_fn": _activation(config, config.hidden_act),
        "n_key_value_heads": _grouped_heads(config),
        "final_rms": True,
    }


def qwen2_fields(config: Any) -> dict[str, Any]:
    """Qwen2: as Llama, with biases on q, k and v and sliding windows in some layers."""
    local = _local_attention(config)
    return {
        **_rms_gated(config),
        **_rotary(config, local=bool(local)),
        **local,
        "act_fn": _activation(config, config.hidden_act),
        # TransformerLens' converter writes grouped weights whether or not there are fewer of them
        "n_key_value_heads": config.num_key_value_heads,
        "final_rms": True,
        "default_prepend_bos": False,
    }


def gemma2_fields(config: Any) -> dict[str, Any]:
    """Gemma 2: as Llama, norms on both sides, soft caps, every other layer local."""
    from transformer_lens.utilities import SOFTCAP_DISABLED

    if getattr(config, "use_bidirectional_attention", None):
        _refuse(config, "use_bidirectional_attention", True, "False")
    local = _local_attention(config)
    return {
        **_rms_gated(config),
        **_rotary(config, local=bool(local)),
        **local,
        "act_fn": _activation(config, config.hidden_activation),
        "n_key_value_heads": config.num_key_value_heads,  # as for Qwen2
        "final_rms": True,
        "use_attn_scale": True,
        "attn_scale": config.query_pre_attn_scalar**0.5,
        "attn_scores_soft_cap": config.attn_logit_softcapping or SOFTCAP_DISABLED,
        "output_logits_soft_cap": config.final_logit_softcapping or SOFTCAP_DISABLED,
        "use_normalization_before_and_after": True,
    }


def bloom_fields(config: Any) -> dict[str, Any]:
    """BLOOM: ALiBi, LayerNorm, a norm after the embedding."""
    _require(config, "apply_residual_connection_post_layernorm", False)
    if config.slow_but_exact and config.pretraining_tp > 1:
        # HuggingFace leaves out the output biases there
        _refuse(config, "pretraining_tp", config.pretraining_tp, "1, or slow_but_exact=False")
    if config.n_head & (config.n_head - 1):
        # TransformerLens continues the geometric series where BLOOM interpolates a second one
        _refuse(config, "n_head", config.n_head, "a power of two")
    return {
        **_dimensions(config, d_mlp=4 * config.hidden_size),
        "n_ctx": getattr(config, "seq_length", None) or BLOOM_CONTEXT,
        "act_fn": "gelu_fast",
        "normalization_type": "LN",
        "eps": config.layer_norm_epsilon,
        "positional_embedding_type": "alibi",
        "post_embedding_ln": True,
        "default_prepend_bos": False,
    }


def olmo2_fields(config: Any) -> dict[str, Any]:
    """OLMo 2: as Llama, norms after attention and MLP only, normalised queries and keys."""
    if _d_head(config) * config.num_attention_heads != config.hidden_size:
        _refuse(config, "head_dim", config.head_dim, "hidden_size / num_attention_heads")
    return {
        **_rms_gated(config),
        **_rotary(config),
        "act_fn": _activation(config, config.hidden_act),
        "n_key_value_heads": _grouped_heads(config),
    }


FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2LMHeadModel", "convert_gpt2_weights", gpt2_fields),
    "gpt_neox": Family("GPTNeoXForCausalLM", "convert_neox_weights", gpt_neox_fields),
    "llama": Family("LlamaForCausalLM", "convert_llama_weights", llama_fields, True),
    "qwen2": Family("Qwen2ForCausalLM", "convert_qwen2_weights", qwen2_fields),
    "gemma2": Family("Gemma2ForCausalLM", "convert_gemma_weights", gemma2_fields, True),
    "bloom": Family("BloomForCausalLM", "convert_bloom_weights", bloom_fields),
    # the converter of OLMo 3 also knows grouped queries, which OLMo 2's does not
    "olmo2": Family("Olmo2ForCausalLM", "convert_olmo3_weights", olmo2_fields, True),
}


# Parts that families share --------------------------------------------------------------------


def _dimensions(config: Any, d_mlp: int | None = None) -> dict[str, Any]:
    return {
        "d_model": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "d_head": _d_head(config),
        "d_mlp": d_mlp or config.intermediate_size,
        "d_vocab": config.vocab_size,
    }


def _rms_gated(config: Any) -> dict[str, Any]:
    return {
        **_dimensions(config),
        "n_ctx": config.max_position_embeddings,
        "normalization_type": "RMS",
        "eps": config.rms_norm_eps,
        "gated_mlp": True,
    }


def _d_head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _grouped_heads(config: Any) -> int | None:
    """Key-value heads, or None where every query head has its own (HookedTransformer's sign)."""
    own = config.num_key_value_heads == config.num_attention_heads
    return None if own else config.num_key_value_heads


def _activation(config: Any, name: str) -> str:
    if name not in ACTIVATIONS:
        _refuse(config, "activation", name, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def _rotary(config: Any, partial: bool = False, local: bool = False) -> dict[str, Any]:
    """Fields of the rotary embedding: ``partial`` if it may turn only the first dimensions.

    HookedTransformer does not stretch the positions of ``local`` layers, HuggingFace does.
    """
    rope = config.rope_parameters or {}
    if "rope_theta" not in rope:
        _refuse(config, "rope_parameters", rope, "one set of parameters for all layers")
    kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor") or 1.0
    if kind not in ROPE_TYPES or (kind == "linear" and local):
        accepted = [k for k in ROPE_TYPES if not (k == "linear" and local)]
        _refuse(config, "rope_type", kind, ", ".join(accepted))
    rotary_dim = int(_d_head(config) * share)
    if rotary_dim % 2 or (share != 1.0 and not partial):
        _refuse(config, "partial_rotary_factor", share, "1.0 (GPT-NeoX: an even dimension)")
    return {
        "positional_embedding_type": "rotary",
        "rotary_adjacent_pairs": False,
        "rotary_dim": rotary_dim,
        "rotary_base": rope["rope_theta"],
        **_rope_scaling(kind, rope),
    }


def _rope_scaling(kind: str, rope: dict[str, Any]) -> dict[str, Any]:
    if kind == "linear":
        return {"rotary_scaling_factor": rope["factor"]}
    if kind == "llama3":
        return {
            "use_NTK_by_parts_rope": True,
            "NTK_original_ctx_len": rope["original_max_position_embeddings"],
            "NTK_by_parts_low_freq_factor": rope["low_freq_factor"],
            "NTK_by_parts_high_freq_factor": rope["high_freq_factor"],
            "NTK_by_parts_factor": rope["factor"],
        }
    return {}


def _local_attention(config: Any) -> dict[str, Any]:
    """Fields for layers that attend to the last ``sliding_window`` tokens only."""
    names = {"full_attention": "global", "sliding_attention": "local"}
    kinds = config.layer_types
    unknown = sorted(set(kinds) - set(names))
    if unknown:
        _refuse(config, "layer_types", unknown, ", ".join(names))
    if "sliding_attention" not in kinds:
        return {}
    return {
        "use_local_attn": True,
        "window_size": config.sliding_window,
        "attn_types": [names[kind] for kind in kinds],
    }


def _require(config: Any, name: str, value: Any) -> None:
    actual = getattr(config, name, value)
    if actual != value:
        _refuse(config, name, actual, repr(value))


def _refuse(config: Any, name: str, value: Any, accepted: str) -> NoReturn:
    raise TangentValueError(
        f"HookedTransformer cannot represent a {config.model_type} model with {name}={value!r} "
        f"(accepted: {accepted}). TangentBridge can load this model."
    )
