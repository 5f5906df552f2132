"""The terms of a bilinear score whose two sides are each a mean, a tangent and a normal part.

With ``q = q_m + q_v + q_n`` and ``k = k_m + k_v + k_n`` (m the image of the mean with the bias, v
of the tangent part, n of the normal part) a score ``q . k`` is a sum of nine terms. The v^T M v of
the theory is ``tangent_tangent``: one term of the score, not the score.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentKeyError, nearest

PARTS = ("mean", "tangent", "normal")
TERMS: tuple[str, ...] = tuple(f"{query}_{key}" for query in PARTS for key in PARTS)
POSITION = "position"

GROUPS: dict[str, tuple[str, ...]] = {
    "constant": ("mean_mean",),
    "linear": ("mean_tangent", "tangent_mean", "mean_normal", "normal_mean"),
    "tangent": ("tangent_tangent",),
    "cross": ("tangent_normal", "normal_tangent"),
    "normal": ("normal_normal",),
}
# Terms whose key side is the mean: the same for every key where the mean part of a key is.
KEY_CONSTANT = ("mean_mean", "tangent_mean", "normal_mean")


class SideParts(NamedTuple):
    """What the parts of the input become on one side of the score (of W_Q, or of W_K).

    Each is ``[batch, head, pos, d_head]``; a mean part that is the same in every row may have a
    batch of 1. Keys have as many heads as there are key-value heads.
    """

    mean: Float[Tensor, "_ head pos d_head"]
    tangent: Float[Tensor, "batch head pos d_head"]
    normal: Float[Tensor, "batch head pos d_head"]

    @property
    def total(self) -> Float[Tensor, "batch head pos d_head"]:
        return self.mean + self.tangent + self.normal


def scores(
    query: Float[Tensor, "_ head query d_head"], key: Float[Tensor, "_ kv_head key d_head"]
) -> Float[Tensor, "_ head query key"]:
    """Return ``q . k`` for every head; each key head serves ``head / kv_head`` query heads."""
    batch, heads, n_queries, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, (heads // kv_heads) * n_queries, width)
    return (grouped @ key.mT).reshape(-1, heads, n_queries, key.shape[2])


def term_maps(query: SideParts, key: SideParts) -> dict[str, Float[Tensor, "batch head query key"]]:
    """Return the nine terms by name, in the order of :data:`TERMS`."""
    batch = query.tangent.shape[0]
    pairs = ((q, k) for q in query for k in key)
    maps = (scores(q, k) for q, k in pairs)
    return {
        name: found.expand(batch, *found.shape[1:]) for name, found in zip(TERMS, maps, strict=True)
    }


def summed(
    query: SideParts, key: SideParts, factors: dict[str, float]
) -> Float[Tensor, "batch head query key"] | None:
    """Return the sum of ``factor * term`` without a map a term; None where every factor is 0.

    The key parts that a query part meets with the same factor are added before the product, so that
    dropping one term costs one product.
    """
    total = None
    for name, part in zip(PARTS, query, strict=True):
        weights = [factors.get(f"{name}_{other}", 0.0) for other in PARTS]
        met = [w * k for w, k in zip(weights, key, strict=True) if w != 0.0]
        if met:
            found = scores(part, torch.stack(torch.broadcast_tensors(*met)).sum(0))
            total = found if total is None else total + found
    return total


def capped(
    scores: Float[Tensor, "*axes query key"], cap: float | None
) -> Float[Tensor, "*axes query key"]:
    """Apply a soft cap, ``cap * tanh(scores / cap)``; None leaves the scores as they are."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def term_names(given: str | tuple[str, ...] | list[str] | set[str]) -> tuple[str, ...]:
    """Return the terms that are named, groups such as ``"cross"`` written out, in their order.

    Raises:
        TangentKeyError: a name that is neither a term nor a group.
    """
    asked = [given] if isinstance(given, str) else list(given)
    found: set[str] = set()
    for name in asked:
        if name not in GROUPS and name not in (*TERMS, POSITION):
            known = [*TERMS, POSITION, *GROUPS]
            raise TangentKeyError(
                f"{name!r} is not a term of an attention score. Nearest: {nearest(name, known)}. "
                f"Terms: {', '.join([*TERMS, POSITION])}; groups of terms: {', '.join(GROUPS)}."
            )
        found.update(GROUPS.get(name, (name,)))
    return tuple(name for name in (*TERMS, POSITION) if name in found)
