"""Rotary position embeddings: a rotation of each query and key by its position, so a linear map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.hooks import compat

Rotate: TypeAlias = Callable[[Float[Tensor, "batch head pos d_head"]], Tensor]


@dataclass(frozen=True)
class Rotation:
    """Turns the first ``cos.shape[-1]`` entries of a head by the angles of each position.

    Attributes:
        cos, sin: of the angle of every entry, in the layout of the entries.
        adjacent: whether entries (0, 1), (2, 3), ... are pairs; otherwise i and i + half.
    """

    cos: Float[Tensor, "batch 1 pos rotary"]
    sin: Float[Tensor, "batch 1 pos rotary"]
    adjacent: bool

    def __call__(self, x: Float[Tensor, "batch head pos d_head"]) -> Tensor:
        width = self.cos.shape[-1]
        turned, passed = x[..., :width], x[..., width:]
        turned = turned * self.cos + self._quarter(turned) * self.sin
        if passed.shape[-1] == 0:
            return turned
        passed = passed.expand(*turned.shape[:-1], -1)  # angles may differ by row where x does not
        return torch.cat([turned, passed], dim=-1)

    def _quarter(self, x: Tensor) -> Tensor:
        """Turn every pair by a right angle: (a, b) -> (-b, a)."""
        if self.adjacent:
            return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)


def of_hooked(attn: Any, n_positions: int, attention_mask: Tensor | None) -> Rotation | None:
    """The rotation of a HookedTransformer's attention for a pass that starts at position 0."""
    if attn.cfg.positional_embedding_type != "rotary":
        return None
    if attention_mask is None:
        cos, sin = (x[None, :n_positions] for x in (attn.rotary_cos, attn.rotary_sin))
    else:
        at = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        cos, sin = (x[at] for x in (attn.rotary_cos, attn.rotary_sin))
    return Rotation(cos[:, None], sin[:, None], bool(attn.cfg.rotary_adjacent_pairs))


def of_bridge(attn: Any, cos: Tensor, sin: Tensor) -> Rotation:
    """The rotation of a bridge's attention from what its ``hook_cos`` and ``hook_sin`` saw."""
    config = attn.config
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    if getattr(config, "rotary_interleaved_cos_sin", False):
        return Rotation(cos, sin, adjacent=True)
    if getattr(config, "rotary_adjacent_pairs", False) and not hasattr(attn, "split_qkv_matrix"):
        half = cos.shape[-1] // 2
        cos, sin = (x[..., :half].repeat_interleave(2, -1) for x in (cos, sin))
        return Rotation(cos, sin, adjacent=True)
    if cos.shape[-1] * 2 == config.d_head and compat.rotated_share(config) == 1.0:
        cos, sin = (torch.cat([x, x], dim=-1) for x in (cos, sin))  # half of it stands for both
    return Rotation(cos, sin, adjacent=False)


def of_tables(attn: Any, n_positions: int, position_ids: Tensor | None) -> Rotation | None:
    """The rotation of a bridge whose attention module keeps tables of its own; pairs are adjacent.

    GPT-J and CodeGen keep [position, sines | cosines], TransformerLens' native model both apart.
    """
    inner = attn.original_component
    table: Any = getattr(inner, "embed_positions", None)
    native: Any = getattr(inner, "rotary", None)
    if isinstance(table, Tensor) and position_ids is not None:
        sin, cos = table.to(position_ids.device)[position_ids].chunk(2, dim=-1)
        sin, cos = sin.repeat_interleave(2, -1), cos.repeat_interleave(2, -1)
    elif hasattr(native, "cos_cached"):
        at = torch.arange(n_positions)[None] if position_ids is None else position_ids
        sin, cos = native.sin_cached[at], native.cos_cached[at]
    else:
        return None
    return Rotation(cos[:, None], sin[:, None], adjacent=True)
