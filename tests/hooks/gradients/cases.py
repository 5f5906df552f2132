"""Every tiny model whose weights are found, and one backward pass of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import one_hot

from tests import families
from tests.hooks.adapters import builders
from tl_tangent.hooks.gradients.watch import watching_maps
from tl_tangent.hooks.gradients.weight import Weight, Weights

HF = [
    "gpt2",
    "gpt_neox",
    "gpt_neox_sequential",
    "llama",
    "bloom",
    "olmo2",
    "olmo_clipped",
    "bert",
    "roberta",
    "opt",
    "phi",
    "phi3",
    "gemma2",
    "gemma3",
    "qwen2",
    "qwen3",
    "gptj",
    "mpt",
    "glm",
    "cohere",
    "gpt_neo",
    "stablelm_qk_norm",
    *builders.OURS,
]
TAKEN_APART_BY_BRIDGES = ["falcon_alibi", "codegen"]
BRIDGES = [
    *(name for name in HF if name != "roberta" or families.HAS_ROBERTA),
    *TAKEN_APART_BY_BRIDGES,
]
ALL = (
    [("hf", name) for name in HF]
    + [("bridge", name) for name in BRIDGES]
    + [("hooked", name) for name in families.HOOKED_FAMILIES]
)
IDS = ["-".join(spec) for spec in ALL]
KINDS_OF_MODEL = [
    ("hf", "llama"),
    ("bridge", "gpt2"),
    *([("hooked", "rotary_gqa")] if families.HAS_HOOKED_TRANSFORMER else []),
]


def fresh(kind: str, family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A model that may be changed."""
    if kind == "hooked":
        return families.hooked_transformer(family, dtype, **settings)
    if family in builders.OURS:
        return builders.hf_model(family) if kind == "hf" else builders.pair(family).bridge
    if family == "phi3":
        return _phi3(dtype) if kind == "hf" else _bridged(_phi3(dtype))
    make = families.hf_model if kind == "hf" else families.bridge
    return make(family, dtype=dtype, **settings)


@functools.cache
def build(kind: str, family: str) -> Any:
    """One model for the whole run; gradients are set anew by every backward pass."""
    return fresh(kind, family)


def _phi3(dtype: torch.dtype) -> Any:
    """A model with fused QKV, fused gate, grouped queries and no biases."""
    shape = {
        "vocab_size": families.D_VOCAB,
        "hidden_size": families.D_MODEL,
        "intermediate_size": families.D_MLP,
        "num_hidden_layers": families.N_LAYERS,
        "num_attention_heads": families.N_HEADS,
        "num_key_value_heads": families.N_KV_HEADS,
        "max_position_embeddings": families.N_CTX,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**shape))
    model.set_attn_implementation("eager")
    families._randomise(model, seed=0)
    return model.to(dtype).eval()


def _bridged(hf: Any) -> Any:
    from tl_tangent.hooks.compat import bridge_from_hf

    return bridge_from_hf(hf, None).eval()


def tokens_for(model: Any, seed: int = 0) -> Tensor:
    return families.tiny_tokens(model, seed=seed)


def scalar(model: Any, tokens: Tensor) -> Tensor:
    """A number that depends on every logit, each in its own way."""
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape).cos()
    return (logits.log_softmax(-1) * weights.to(logits)).sum()


Pairs = dict[str, list[tuple[Tensor, Tensor]]]


def backward(model: Any, weights: Weights, *batches: Tensor) -> Pairs:
    """Run forward on each batch and one backward; return what was received for each weight."""
    found: Pairs = {}

    def receive(weight: Weight, x: Tensor, g: Tensor) -> None:
        found.setdefault(weight.name, []).append((x, g))

    model.zero_grad(set_to_none=True)
    with watching_maps(weights.weights, receive):
        sum(scalar(model, tokens) for tokens in batches).backward()
    return found


def product(weight: Weight, x: Tensor, g: Tensor) -> Tensor:
    """``sum_i g_i x_i^T`` with the compared side last, from the pairs of one pass."""
    if weight.kind == "embed":
        x = one_hot(x.flatten(), weight.parameter.shape[0])
    whole = g.mT @ x.to(g)
    return whole if weight.side == "input" else whole.mT


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest entry."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def hook_counts(model: torch.nn.Module) -> dict[str, int]:
    """How many hooks of any sort each module has."""
    return {
        name: sum(
            len(value) for key, value in vars(module).items() if key.endswith("_hooks") and value
        )
        for name, module in model.named_modules()
    }
