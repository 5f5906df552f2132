"""What draws a query to one key: each term there, against its mean over the query's other keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError

if TYPE_CHECKING:
    import pandas as pd


def term_advantage(
    terms: Mapping[str, Float[Tensor, "batch head query key"]],
    seen: Bool[Tensor, "batch query key"],
    keys: Int[Tensor, "batch query"],
) -> Float[Tensor, "term head"]:
    """Return how much more each term gives to a chosen key than to the other keys of its query.

    What is the same at every key cancels, so this is what the softmax sees; over the terms it adds
    up to the advantage of the score itself (before a soft cap).

    Args:
        terms: of a layer's scores, by name.
        seen: True at unmasked cells.
        keys: the position of the chosen key of every query; -1 at queries that have none.

    Returns:
        Means over the queries that have one, in the order of ``terms``.

    Raises:
        TangentValueError: keys of another shape, out of range or masked, or no query with one.
    """
    keys = _checked(keys, seen)
    asking = _asking(keys, seen)
    chosen = torch.zeros_like(seen).scatter(-1, keys.clamp(min=0)[..., None], True)
    others = seen & ~chosen
    found = []
    for term in terms.values():
        at_key = term.gather(-1, _each_head(keys.clamp(min=0), term)[..., None])[..., 0]
        rest = (term * others[:, None]).sum(-1) / others.sum(-1).clamp(min=1)[:, None]
        more = (at_key - rest).double() * asking[:, None]
        found.append(more.sum(dim=(0, 2)) / asking.sum())
    return torch.stack(found)


def advantage_frame(layer: int, names: tuple[str, ...], advantage: Tensor) -> pd.DataFrame:
    """Return :func:`term_advantage` as one row a head and term, with its share of their sum."""
    import pandas as pd

    share = advantage / advantage.sum(0)
    return pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            "term": name,
            "advantage": float(advantage[i, head]),
            "share": float(share[i, head]),
        }
        for head in range(advantage.shape[1])
        for i, name in enumerate(names)
    )


def _each_head(keys: Tensor, term: Tensor) -> Int[Tensor, "batch head query"]:
    return keys[:, None].expand(-1, term.shape[1], -1)


def _checked(keys: Tensor, seen: Tensor) -> Int[Tensor, "batch query"]:
    batch, n_queries, n_keys = seen.shape
    if not isinstance(keys, Tensor) or keys.dtype not in (torch.int32, torch.int64):
        raise TangentValueError(
            f"keys is {type(keys).__name__} {getattr(keys, 'dtype', '')}; give positions as an "
            "integer tensor [batch, query], -1 where a query has no key."
        )
    if tuple(keys.shape) != (batch, n_queries):
        raise TangentValueError(
            f"keys is {list(keys.shape)}; this split has [{batch}, {n_queries}] queries."
        )
    if bool((keys < -1).any() or (keys >= n_keys).any()):
        raise TangentValueError(
            f"keys goes from {int(keys.min())} to {int(keys.max())}; positions are 0 to "
            f"{n_keys - 1}, and -1 says that a query has none."
        )
    return keys.long().to(seen.device)


def _asking(keys: Tensor, seen: Tensor) -> Bool[Tensor, "batch query"]:
    """Queries that have a chosen key and another one beside it."""
    asking = keys >= 0
    masked = asking & ~seen.gather(-1, keys.clamp(min=0)[..., None])[..., 0]
    if bool(masked.any()):
        row, query = (int(i) for i in masked.nonzero()[0])
        raise TangentValueError(
            f"the key {int(keys[row, query])} chosen for query {query} of row {row} is masked."
        )
    asking &= seen.sum(-1) > 1
    if not bool(asking.any()):
        raise TangentValueError("no query has a chosen key and another one to compare it with.")
    return asking
