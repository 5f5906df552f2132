"""Tiny seeded masked language models, each as Hugging Face has it and as a bridge.

Biases are not zero and norm gains not one; models are in evaluation mode and in float64. In float64
too, Hugging Face computes EuroBERT's norms, ModernBERT's rotations, and the softmax of both in
float32, and so must a bridge: hence differences of 1e-12 and not of 1e-7.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.families import tiny_tokens
from tl_tangent import TangentBridge

N_LAYERS, N_POS, N_PADS, PAD, MASK = 3, 12, 4, 1, 3
WINDOW = 4  # of ModernBERT's local layers, to either side: as far as the padding reaches
_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "bos_token_id": 0,
    "pad_token_id": PAD,
    "eos_token_id": 2,
}
_BIASED = dict.fromkeys(("attention_bias", "mlp_bias"), True)
SETTINGS: dict[str, dict[str, Any]] = {
    "EuroBert": {**_BIASED, "num_key_value_heads": 2},
    "ModernBert": {
        **_BIASED,
        "norm_bias": True,
        "classifier_bias": True,
        "local_attention": 2 * WINDOW,
        "cls_token_id": 0,
        "sep_token_id": 2,
    },
    "Camembert": {},
    "Roberta": {},
    "XLMRoberta": {},
    "Bert": {},
}
PRE_NORM = ["EuroBert", "ModernBert"]
OURS = [name for name in SETTINGS if name not in ("Roberta", "Bert")]  # on every TransformerLens


@dataclass(frozen=True)
class Pair:
    """A plain Hugging Face model and a bridge around a copy of it.

    Attributes:
        hf: the plain model.
        bridge: the bridge.
        bridged: the parameters of the copy by their names in ``hf``.
    """

    hf: Any
    bridge: Any
    bridged: dict[str, torch.nn.Parameter]


def hf_model(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Return the plain model of a family."""
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**{**_COMMON, **SETTINGS[family], **settings})
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, f"{family}ForMaskedLM")(config)
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if noise.ndim > 1:
            drawn = noise * noise.shape[-1] ** -0.5
        else:
            drawn = 0.2 * noise if name.endswith("bias") else 1 + 0.3 * noise
        parameter.data.copy_(drawn)
    return model.to(dtype).eval()


def pair(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Pair:
    """Return the plain model of a family and its bridge."""
    hf = hf_model(family, dtype, **settings)
    copied = copy.deepcopy(hf)
    parameters = dict(copied.named_parameters())
    return Pair(hf, TangentBridge.from_hf(copied).eval(), parameters)


def tokens(seed: int = 0) -> Tensor:
    """Two rows of ordinary tokens."""
    return tiny_tokens(pos=N_POS, seed=seed)


def mask_of(kind: str) -> Tensor | None:
    """Return no attention mask, one of ones, or one with padding in row 1."""
    if kind == "none":
        return None
    mask = torch.ones(2, N_POS, dtype=torch.long)
    if kind != "ones":
        mask[1, -N_PADS:] = 0
    return mask.flip(1) if kind == "left" else mask


def padded(kind: str) -> dict[str, Any]:
    """Return tokens with that padding, and their mask, as a bridge takes them."""
    mask = mask_of(kind)
    given = tokens() if mask is None else tokens().masked_fill(mask == 0, PAD)
    return {"input": given} if mask is None else {"input": given, "attention_mask": mask}


def as_hf(family: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the same batch for the plain model.

    Under left padding TransformerLens counts BERT's positions from the first real token, Hugging
    Face from the first pad unless told otherwise.
    """
    mask = batch.get("attention_mask")
    given = {"input_ids": batch["input"], "attention_mask": mask}
    if family == "Bert" and mask is not None and not mask[:, 0].all():
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return given
