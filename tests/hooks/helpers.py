"""What the hook tests share: every model of the suite, and subspaces at any of its sites."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import tl_tangent as tt
from tests import families

MODELS = [("hooked", name, False) for name in families.HOOKED_FAMILIES] + [
    ("bridge", name, compat) for name, compat in families.BRIDGE_FAMILIES
]
IDS = [f"{kind}-{name}{'-compat' if compat else ''}" for kind, name, compat in MODELS]


@functools.cache
def build(spec: tuple[str, str, bool], dtype: torch.dtype = torch.float32) -> Any:
    """One model a family and dtype for the whole run: every test has to leave it as it was."""
    kind, name, compat = spec
    if kind == "hooked":
        return families.hooked_transformer(name, dtype=dtype)
    return families.bridge(name, compat=compat, dtype=dtype)


def random_subspaces(
    model: Any,
    tokens: Tensor,
    sites: list[str],
    rank: int = 3,
    per_head: bool = False,
    seed: int = 0,
) -> tt.SubspaceSet:
    """Seeded random subspaces with non-zero means, of each site's width."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    made = {}
    for name, fitter in tt.collect(
        model, tokens, sites, positions="all", per_head=per_head
    ).items():
        shape = tuple(fitter.mean.shape)
        basis = torch.randn(*shape, rank, generator=generator, dtype=dtype)
        mean = torch.randn(*shape, generator=generator, dtype=dtype)
        made[name] = tt.TangentSubspace(
            basis, mean, site=name, orthonormalize=True, positions="all"
        )
    return tt.SubspaceSet(made)


def projector(subspace: tt.TangentSubspace) -> Tensor:
    """The dense d x d projector on a shared basis: the hand-written thing to compare with."""
    return subspace.basis @ subspace.basis.T


def tangent_sites(model: Any) -> list[str]:
    """Every kind of site that this model has, over all layers."""
    leaves = [
        "hook_embed",
        "blocks.*.hook_resid_pre",
        "blocks.*.hook_resid_mid",
        "blocks.*.hook_resid_post",
        "blocks.*.hook_attn_out",
        "blocks.*.hook_mlp_out",
        "blocks.*.attn.hook_in",
        "blocks.*.mlp.hook_in",
        "blocks.*.attn.hook_q",
        "blocks.*.attn.hook_k",
        "blocks.*.attn.hook_v",
        "blocks.*.attn.hook_z",
        "blocks.*.mlp.hook_pre",
        "blocks.*.mlp.hook_post",
    ]
    return [leaf for leaf in leaves if has_site(model, leaf)]


def has_site(model: Any, pattern: str) -> bool:
    from tl_tangent.hooks.sites import find_sites

    try:
        find_sites(model, pattern)
    except tt.TangentKeyError:
        return False
    return True


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """A scalar that depends on every logit, also for models without a causal loss."""
    logits = model(tokens, return_type="logits")
    weights = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape).to(logits.dtype)
    return (logits * weights).sum()


def parameter_gradients(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, tokens).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients
