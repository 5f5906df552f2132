"""What the tests of attention scores share: models, subspaces at a layer's attention, errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tl_tangent as tt
from tests import families
from tests.hooks import helpers

SPACES = ("input", "residual")
SITES = {"input": "blocks.{}.attn.hook_in", "residual": "blocks.{}.hook_resid_pre"}
EXACT = 1e-12
# These hosts do part of their scores in float32 whatever the dtype of the model: the RMSNorm of
# queries and keys (OLMo 2, Qwen 3, Gemma 3), the softmax of the pattern that is shown in the place
# of the scores (GPT-J, GPT-Neo, OPT), products (CodeGen) or the rotation (GLM; Cohere from 4.x on).
SINGLE = 2e-6
SINGLE_HOSTS = ("olmo2", "qwen3", "gemma3", "gptj", "gpt_neo", "opt", "codegen", "glm", "cohere")


def tolerance(family: str) -> float:
    return SINGLE if family in SINGLE_HOSTS else EXACT


def subspace(
    model: Any, layer: int, space: str, *, rank: int = 3, per_head: bool = False, **fields: Any
) -> tt.TangentSubspace:
    """A seeded random subspace with a mean that is not small, at a layer's attention."""
    generator = torch.Generator().manual_seed(10 * layer + len(space))
    shape = (model.cfg.n_heads,) if per_head else ()
    shape = (*shape, model.cfg.d_model)
    return tt.TangentSubspace(
        torch.randn(*shape, rank, generator=generator, dtype=torch.float64),
        torch.randn(*shape, generator=generator, dtype=torch.float64),
        orthonormalize=True,
        **{"site": SITES[space].format(layer), "positions": "all", **fields},
    )


def subspaces(model: Any, space: str, **options: Any) -> dict[str, tt.TangentSubspace]:
    """One subspace for each layer."""
    made = [subspace(model, layer, space, **options) for layer in range(model.cfg.n_layers)]
    return {one.site: one for one in made}


def model_of(family: str, dtype: torch.dtype = torch.float64, compat: bool = False) -> Any:
    """A shared model: of a HookedTransformer where the family is one, else a bridge."""
    kind = "hooked" if family in families._HOOKED else "bridge"
    return helpers.build((kind, family, compat), dtype)


def any_family() -> str:
    """A family with grouped queries and rotation that every TransformerLens has."""
    return "rotary_gqa" if families.HAS_HOOKED_TRANSFORMER else "llama"


def difference(split: Any) -> float:
    """The largest difference of ``total`` and the model's scores or pattern at unmasked cells."""
    inside = split.seen[:, None].expand_as(split.scores)
    total = split.total
    if split.scores_are_pattern:
        total = total.masked_fill(~inside, -torch.inf).softmax(-1)
    return float((total - split.scores)[inside].abs().max())


def captured(model: Any, tokens: Tensor, names: list[str], **options: Any) -> dict[str, Tensor]:
    """What fires at some hook points."""
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: name in names, **options)
    return {name: cache[name] for name in names}


def hooks_left(model: Any) -> int:
    """Number of hooks on hook points and modules, ours or the host's."""
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )
