"""A tiny model whose stream a user's hook replaces by points that are known."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from tests import families

WRITTEN, SITE = "blocks.0.hook_resid_post", "blocks.1.hook_resid_pre"  # nothing lies between
FIRST, POS, D = 50, 32, families.D_MODEL


def a_model(dtype: torch.dtype = torch.float64):
    if families.HAS_HOOKED_TRANSFORMER:
        return families.hooked_transformer("rotary_gqa", dtype)
    return families.bridge("llama", dtype=dtype)


def rows_of(counts: Mapping[int, int], seed: int = 0) -> Tensor:
    """Tokens in random order, each as often as is said; rows start with others, so as to differ."""
    ids = torch.tensor([token for token, n in counts.items() for _ in range(n)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    n = -(-len(ids) // (POS - 1))
    rows = (FIRST + torch.arange(n) % 14)[:, None].repeat(1, POS)
    for row, part in zip(rows, ids.split(POS - 1), strict=True):
        row[1 : 1 + len(part)] = part
    return rows


@contextmanager
def planted(model, tokens: Tensor, clouds: Mapping[int, Tensor]):
    """While open, the occurrences of each type stand at the points of its cloud, in order."""

    def replace(x, hook):
        x = x.clone()
        for token, points in clouds.items():
            x[:, 1:][tokens[:, 1:] == token] = points.to(x)
        return x

    with model.hooks(fwd_hooks=[(WRITTEN, replace)]):
        yield


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
