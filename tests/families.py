"""Tiny seeded models of every family, with biases and norm weights that are not trivial.

Freshly initialised models have zero biases and unit norm weights, and so hide every mistake in
them. Here all parameters are drawn anew: weights with standard deviation 1/sqrt(fan in), biases
with 0.2, norm gains around 1. All models are in evaluation mode, on the CPU, and need no network.

    hooked_transformer("rotary_gqa")       a HookedTransformer (TransformerLens 3.9 only)
    bridge("llama", compat=True)           a TransformerBridge around a tiny HuggingFace model
    hf_model("llama")                      that HuggingFace model itself
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_lens
import transformers
from jaxtyping import Int
from torch import Tensor, nn

D_MODEL, N_HEADS, N_KV_HEADS, D_HEAD, D_MLP = 32, 4, 2, 8, 64
N_LAYERS, N_CTX, D_VOCAB = 2, 32, 64
BIAS_STD, GAIN_STD = 0.2, 0.3


def _has(module: str) -> bool:
    """Whether this TransformerLens has ``module`` (asking 4.x for the attribute would raise)."""
    return importlib.util.find_spec(f"transformer_lens.{module}") is not None


HAS_HOOKED_TRANSFORMER = _has("HookedTransformer")
HAS_ROBERTA = _has("model_bridge.supported_architectures.roberta")

# HookedTransformer families: what differs from the common config ------------------------------

_RMS_GATED = {"normalization_type": "RMS", "final_rms": True, "gated_mlp": True, "act_fn": "silu"}
_ROTARY = {"positional_embedding_type": "rotary"}

_HOOKED: dict[str, dict[str, Any]] = {
    "learned": {"normalization_type": "LN", "act_fn": "gelu_new"},
    "rotary_parallel": {
        **_ROTARY,
        "normalization_type": "LN",
        "rotary_dim": D_HEAD // 2,
        "parallel_attn_mlp": True,
        "act_fn": "gelu",
    },
    "rotary_gqa": {
        **_ROTARY,
        **_RMS_GATED,
        "rotary_dim": D_HEAD,
        "n_key_value_heads": N_KV_HEADS,
    },
    "alibi": {
        "positional_embedding_type": "alibi",
        "normalization_type": "LN",
        "post_embedding_ln": True,
        "act_fn": "gelu_fast",
    },
    "softcap": {
        **_ROTARY,
        **_RMS_GATED,
        "act_fn": "gelu_pytorch_tanh",
        "rotary_dim": D_HEAD,
        "n_key_value_heads": N_KV_HEADS,
        "attn_scores_soft_cap": 2.0,
        "output_logits_soft_cap": 3.0,
        "use_normalization_before_and_after": True,
        "use_local_attn": True,
        "window_size": 4,
        "attn_types": ["local", "global"],
    },
    "postnorm": {
        **_ROTARY,
        **_RMS_GATED,
        "rotary_dim": D_HEAD,
        "original_architecture": "Olmo2ForCausalLM",
    },
}

HOOKED_FAMILIES: list[str] = list(_HOOKED) if HAS_HOOKED_TRANSFORMER else []


def hooked_transformer(
    family: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    tokenizer: Any = None,
    model_class: type | None = None,
    **cfg_overrides: Any,
) -> Any:
    """Return a tiny HookedTransformer (or ``model_class``); skips on TransformerLens 4."""
    if not HAS_HOOKED_TRANSFORMER:
        pytest.skip(f"HookedTransformer ({family}) needs transformer-lens<4")
    cfg = transformer_lens.HookedTransformerConfig(
        **{
            "n_layers": N_LAYERS,
            "d_model": D_MODEL,
            "n_heads": N_HEADS,
            "d_head": D_HEAD,
            "d_mlp": D_MLP,
            "n_ctx": N_CTX,
            "d_vocab": D_VOCAB,
            "device": "cpu",
            "dtype": dtype,
            "init_weights": False,
            **_HOOKED[family],
            **cfg_overrides,
        }
    )
    model = (model_class or transformer_lens.HookedTransformer)(cfg, tokenizer=tokenizer)
    _randomise(model, seed)
    return model.eval()


# HuggingFace families -------------------------------------------------------------------------

_COMMON: dict[str, Any] = {
    "vocab_size": D_VOCAB,
    "hidden_size": D_MODEL,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "intermediate_size": D_MLP,
    "max_position_embeddings": N_CTX,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": N_KV_HEADS, "head_dim": D_HEAD}

_HF: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": D_VOCAB,
            "n_embd": D_MODEL,
            "n_layer": N_LAYERS,
            "n_head": N_HEADS,
            "n_inner": D_MLP,
            "n_positions": N_CTX,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            **_COMMON,
            "use_parallel_residual": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_GROUPED,
            "query_pre_attn_scalar": 2 * D_HEAD,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 4,
        },
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {
            "vocab_size": D_VOCAB,
            "hidden_size": D_MODEL,
            "n_layer": N_LAYERS,
            "n_head": N_HEADS,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**_COMMON, "num_key_value_heads": N_HEADS}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_COMMON, "num_key_value_heads": N_KV_HEADS}),
    "bert": ("BertConfig", "BertForMaskedLM", _COMMON),
    "roberta": (
        "RobertaConfig",
        "RobertaForMaskedLM",
        # RoBERTa counts positions from pad_token_id + 1
        {**_COMMON, "max_position_embeddings": N_CTX + 2, "type_vocab_size": 1},
    ),
}

# Families whose attention is made in some other way; only the tests of attention scores use them.
_GPT_J = {
    "vocab_size": D_VOCAB,
    "n_positions": N_CTX,
    "n_embd": D_MODEL,
    "n_layer": N_LAYERS,
    "n_head": N_HEADS,
    "n_inner": D_MLP,
    "rotary_dim": D_HEAD // 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA = {
    **_COMMON,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": D_HEAD,
    "first_k_dense_replace": N_LAYERS,
}
_PARTIAL = {**_COMMON, "rope_parameters": _HF["gpt_neox"][2]["rope_parameters"]}

_HF |= {
    "gpt_neox_sequential": (
        *_HF["gpt_neox"][:2],
        {**_HF["gpt_neox"][2], "use_parallel_residual": False},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GROUPED),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_GROUPED,
            "query_pre_attn_scalar": 2 * D_HEAD,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "glm": ("GlmConfig", "GlmForCausalLM", {**_GROUPED, "attention_bias": True}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {**_COMMON, "num_key_value_heads": N_KV_HEADS}),
    "phi": ("PhiConfig", "PhiForCausalLM", _PARTIAL),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _GPT_J),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**_GPT_J, "n_ctx": N_CTX}),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": D_VOCAB,
            "max_position_embeddings": N_CTX,
            "hidden_size": D_MODEL,
            "num_layers": N_LAYERS,
            "num_heads": N_HEADS,
            "intermediate_size": D_MLP,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**_COMMON, "ffn_dim": D_MLP, "word_embed_proj_dim": D_MODEL},
    ),
    "falcon_alibi": (
        "FalconConfig",
        "FalconForCausalLM",
        {**_COMMON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
    ),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {
            "vocab_size": D_VOCAB,
            "d_model": D_MODEL,
            "n_heads": N_HEADS,
            "n_layers": N_LAYERS,
            "expansion_ratio": D_MLP // D_MODEL,
            "max_seq_len": N_CTX,
            "no_bias": False,
        },
    ),
    "olmo_clipped": ("OlmoConfig", "OlmoForCausalLM", {**_COMMON, "clip_qkv": 0.5}),
    "stablelm_qk_norm": (
        "StableLmConfig",
        "StableLmForCausalLM",
        {**_PARTIAL, "num_key_value_heads": N_KV_HEADS, "qk_layernorm": True},
    ),
    "deepseek": ("DeepseekV2Config", "DeepseekV2ForCausalLM", _MLA),
}

# BERT-like models are post-norm and bidirectional: their compatibility mode only renames.
NO_PROCESSING = frozenset({"bert", "roberta"})

BRIDGE_FAMILIES: list[tuple[str, bool]] = [
    (family, compat)
    for family in ("gpt2", "gpt_neox", "llama", "gemma2", "bloom", "olmo2", "bert", "roberta")
    if family != "roberta" or HAS_ROBERTA
    for compat in (False, True)
]


def hf_model(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config_overrides: Any
) -> Any:
    """Return the tiny HuggingFace model of ``family``, with eager attention."""
    config_name, model_name, kwargs = _HF[family]
    config = getattr(transformers, config_name)(**{**kwargs, **config_overrides})
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, model_name)(config)
    _randomise(model, seed)
    return model.to(dtype).eval()


def bridge(
    family: str,
    compat: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    tokenizer: Any = None,
    **config_overrides: Any,
) -> Any:
    """Return a tiny TransformerBridge of ``family``, in compatibility mode if ``compat``.

    BERT and RoBERTa are post-norm and refuse the folding of norms and biases: their compatibility
    mode is entered with ``no_processing=True``.
    """
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    if family == "roberta" and not HAS_ROBERTA:
        pytest.skip("the RoBERTa bridge needs transformer-lens>=4")
    hf = hf_model(family, dtype, seed, **config_overrides)
    model = build_bridge_from_module(
        hf, _HF[family][1], hf_config=hf.config, dtype=dtype, tokenizer=tokenizer, device="cpu"
    )
    if compat:
        model.enable_compatibility_mode(
            disable_warnings=True, no_processing=family in NO_PROCESSING
        )
    return model.eval()


# Parameters -----------------------------------------------------------------------------------


def _randomise(model: nn.Module, seed: int) -> None:
    """Draw every parameter of ``model`` anew, in float32 and in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    owners = {
        f"{prefix}.{name}".lstrip("."): module
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(noise, name.rpartition(".")[2], owners[name]))


def _scaled(noise: Tensor, name: str, owner: nn.Module) -> Tensor:
    """Turn unit noise into a bias, a norm gain or a weight, told by name, shape and owner."""
    if name == "bias" or name.startswith(("b_", "_b_")) or name == "b":
        return BIAS_STD * noise
    if noise.ndim == 1:
        # Gemma's norms multiply by 1 + weight
        center = 0.0 if type(owner).__name__.startswith("Gemma") else 1.0
        return center + GAIN_STD * noise
    return noise * _fan_in(noise.shape, name, owner) ** -0.5


def _fan_in(shape: torch.Size, name: str, owner: nn.Module) -> int:
    """Number of inputs that a unit of this weight sums over (d_model for an embedding)."""
    if name == "W_O":  # [head, d_head, d_model]
        return shape[0] * shape[1]
    if name in ("W_E", "W_pos"):  # [vocab, d_model]
        return shape[-1]
    if name.startswith(("W_", "_W_")) or type(owner).__name__ == "Conv1D":  # [..., in, out]
        return shape[-2]
    return shape[-1]  # [out, in]


# Inputs ---------------------------------------------------------------------------------------


def tiny_tokens(
    model: Any = None, batch: int = 2, pos: int = 9, seed: int = 0
) -> Int[Tensor, "batch pos"]:
    """Seeded token ids, special ones (0 to 3) left out; ``model`` bounds the vocabulary."""
    config = getattr(model, "cfg", None) or getattr(model, "config", None)
    d_vocab = getattr(config, "d_vocab", None) or getattr(config, "vocab_size", None) or D_VOCAB
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, d_vocab, (batch, pos), generator=generator)


WORDS = [f"w{i}" for i in range(4, D_VOCAB)]


def tiny_tokenizer(tmp_path: Path, padding_side: str = "right") -> Any:
    """A word-level tokenizer of ``D_VOCAB`` words, saved to a folder and loaded from there.

    Ids: <pad> 0, <bos> 1, <eos> 2, <unk> 3, then the words "w4", "w5", ... in order.
    TransformerLens reloads a tokenizer by the folder it came from, so the folder must stay.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = Path(tmp_path) / f"tokenizer-{padding_side}"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side=padding_side,
    ).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)
