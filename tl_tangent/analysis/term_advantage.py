"""What draws a query to one key: each term there, against its mean over the query's other keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError

if TYPE_CHECKING:
    import pandas as pd

    from tl_tangent.analysis.score_split import AttentionScoreSplit


def term_advantage(
    split: AttentionScoreSplit, keys: Int[Tensor, "batch query"]
) -> Float[Tensor, "term head"]:
    """Return how much more each term gives to a chosen key than to the other keys of its query.

    What is the same at every key cancels, so this is what the softmax sees; over the terms it adds
    up to the advantage of the score itself (before a soft cap).

    Args:
        split: the terms of a layer's scores.
        keys: the position of the chosen key of every query; -1 at queries that have none.

    Returns:
        Means over the queries that have one, in the order of ``split.terms``.

    Raises:
        TangentValueError: keys of another shape, out of range or masked, or no query with one.
    """
    asking = _asking(split, keys)
    chosen = torch.zeros_like(split.seen).scatter(-1, keys.clamp(min=0)[..., None], True)
    others = split.seen & ~chosen
    found = []
    for term in split.terms.values():
        at_key = term.gather(-1, _each_head(keys.clamp(min=0), term)[..., None])[..., 0]
        rest = (term * others[:, None]).sum(-1) / others.sum(-1).clamp(min=1)[:, None]
        more = (at_key - rest).double() * asking[:, None]
        found.append(more.sum(dim=(0, 2)) / asking.sum())
    return torch.stack(found)


def advantage_frame(split: AttentionScoreSplit, keys: Int[Tensor, "batch query"]) -> pd.DataFrame:
    """Return :func:`term_advantage` as one row a head and term, with its share of their sum."""
    import pandas as pd

    advantage = term_advantage(split, keys)
    share = advantage / advantage.sum(0)
    return pd.DataFrame(
        {
            "layer": split.layer,
            "head": head,
            "term": name,
            "advantage": float(advantage[i, head]),
            "share": float(share[i, head]),
        }
        for head in range(advantage.shape[1])
        for i, name in enumerate(split.terms)
    )


def _each_head(keys: Tensor, term: Tensor) -> Int[Tensor, "batch head query"]:
    return keys[:, None].expand(-1, term.shape[1], -1)


def _asking(split: AttentionScoreSplit, keys: Tensor) -> Bool[Tensor, "batch query"]:
    """Queries that have a chosen key and another one beside it."""
    batch, n_queries, n_keys = split.seen.shape
    if not isinstance(keys, Tensor) or keys.dtype not in (torch.int32, torch.int64):
        raise TangentValueError(
            f"keys is {type(keys).__name__} {getattr(keys, 'dtype', '')}; give positions as an "
            "integer tensor [batch, query], -1 where a query has no key."
        )
    keys = keys.long().to(split.seen.device)
    if tuple(keys.shape) != (batch, n_queries):
        raise TangentValueError(
            f"keys is {list(keys.shape)}; this split has [{batch}, {n_queries}] queries."
        )
    if bool((keys < -1).any() or (keys >= n_keys).any()):
        raise TangentValueError(
            f"keys goes from {int(keys.min())} to {int(keys.max())}; positions are 0 to "
            f"{n_keys - 1}, and -1 says that a query has none."
        )
    asking = keys >= 0
    seen = split.seen.gather(-1, keys.clamp(min=0)[..., None])[..., 0]
    if bool((asking & ~seen).any()):
        row, query = (int(i) for i in (asking & ~seen).nonzero()[0])
        raise TangentValueError(
            f"the key {int(keys[row, query])} chosen for query {query} of row {row} is masked."
        )
    asking &= split.seen.sum(-1) > 1
    if not bool(asking.any()):
        raise TangentValueError("no query has a chosen key and another one to compare it with.")
    return asking
