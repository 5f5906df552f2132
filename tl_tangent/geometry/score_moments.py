"""Sums over the cells of score terms, without maps of the scores.

Where a block of queries sees a set of keys as a whole, the squared scores sum to a product of
second moments: ``sum_ij (q_i . k_j)^2 = <sum_i q_i q_i^T, sum_j k_j k_j^T>``. Under a causal mask
only the blocks on the diagonal are computed cell by cell, so that time and memory grow with the
number of tokens and not with its square. Other masks are taken a block of queries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.geometry.score_terms import POSITION, TERMS, SideParts

BLOCK = 64


@dataclass(frozen=True)
class TermMoments:
    """Sums over the unmasked cells of each head, in float64; those of two batches add up.

    Attributes:
        names: the terms, in the order of the rows.
        cells: number of cells that were summed over, the same in every head.
        squares: sum of the squared terms.
        spread: sum of the squared deviations from each query's mean over its keys.
        along: sum of the term's deviation times that of the score (the sum of all terms), so that
            the rows add up to the score's own ``spread``; None unless asked for.
    """

    names: tuple[str, ...]
    cells: int
    squares: Float[Tensor, "term head"]
    spread: Float[Tensor, "term head"]
    along: Float[Tensor, "term head"] | None = None

    def __add__(self, other: TermMoments) -> TermMoments:
        return TermMoments(
            names=self.names,
            cells=self.cells + other.cells,
            squares=self.squares + other.squares,
            spread=self.spread + other.spread,
            along=None if self.along is None or other.along is None else self.along + other.along,
        )


def term_moments(
    query: SideParts,
    key: SideParts,
    mask: Bool[Tensor, "_ pos pos"],
    position: Float[Tensor, "_ head pos pos"] | None = None,
    *,
    along: bool = True,
    block: int = BLOCK,
) -> TermMoments:
    """Sum the terms of a score, their squares, and their products with the score, over its cells.

    Args:
        query, key: the parts of both sides; keys may have fewer heads.
        mask: True at the cells that count; all heads share it.
        position: an additive position term, which makes every cell be computed on its own.
        along: whether to sum the products with the score, half as much work again.
        block: how many queries are taken together.
    """
    if position is None and _is_causal(mask):
        sums = _causal_sums(query, key, mask, along, block)
    else:
        sums = _cell_sums(query, key, mask, position, along, block)
    return _moments(sums, mask)


def _is_causal(mask: Tensor) -> bool:
    """Whether each query that counts sees every key that counts up to its own position."""
    used = mask.any(-1, keepdim=True) & mask.any(-2, keepdim=True)
    return bool((mask == used.tril()).all())


@dataclass(frozen=True)
class _Sums:
    """Sums over cells of scores whose keys are taken around their mean.

    Such a shift is the same at every key of a query, so deviations lose nothing by it, and float32
    does not have to find them as differences of large numbers.

    Attributes:
        first: each term, summed over the keys of a query.
        second: its square, over all cells.
        with_total: its product with the sum of all terms, over all cells, or None.
        at_mean: each term at the mean key.
    """

    first: Float[Tensor, "term batch kv_head group query"]
    second: Float[Tensor, "term kv_head group"]
    with_total: Float[Tensor, "term kv_head group"] | None
    at_mean: Float[Tensor, "nine batch kv_head group query"]


def _causal_sums(query: SideParts, key: SideParts, mask: Tensor, along: bool, block: int) -> _Sums:
    """Sum the blocks on the diagonal cell by cell, and all keys before them by their moments."""
    n = mask.shape[-1]
    queries, keys, mean = _blocked(query, key, mask, block)
    diagonal = _in_blocks(_in_blocks(mask, 2, block), 1, block).diagonal(dim1=1, dim2=3)
    near = _sums_of_cells(queries, keys, diagonal.movedim(-1, 1), None, along)
    before = _at(queries, _before(keys.sum(-2, keepdim=True)))
    with_total = near.with_total
    if with_total is not None:
        total, key_total = (_total(x).expand_as(x) for x in (queries, keys))
        with_total = with_total + _inner(queries.mT @ total, keys.mT @ key_total)
    return _Sums(
        first=(near.first + before)[..., :n],
        second=near.second + _inner(queries.mT @ queries, keys.mT @ keys),
        with_total=with_total,
        at_mean=_at(queries, mean)[..., :n],
    )


def _cell_sums(
    query: SideParts,
    key: SideParts,
    mask: Tensor,
    position: Tensor | None,
    along: bool,
    block: int,
) -> _Sums:
    """Sum cell by cell, a block of queries at a time."""
    n = mask.shape[-1]
    queries, keys, mean = _blocked(query, key, mask, n)
    found = []
    for rows in (slice(start, start + block) for start in range(0, n, block)):
        bias = None if position is None else position[..., rows, :]
        some = queries[..., rows, :]
        found.append(_sums_of_cells(some, keys, mask[:, None, rows], bias, along))
    return _Sums(
        first=torch.cat([one.first for one in found], dim=-1),
        second=torch.stack([one.second for one in found]).sum(0),
        with_total=_added([one.with_total for one in found]),
        at_mean=_at(queries, mean),
    )


def _added(found: list[Tensor | None]) -> Tensor | None:
    known = [x for x in found if x is not None]
    return torch.stack(known).sum(0) if known else None


def _blocked(
    query: SideParts, key: SideParts, mask: Tensor, size: int
) -> tuple[
    Float[Tensor, "batch kv_head block a group query d_head"],
    Float[Tensor, "batch kv_head block c key d_head"],
    Float[Tensor, "batch kv_head 1 c 1 d_head"],
]:
    """Stack the parts in blocks of positions: queries; keys around their mean; the mean key.

    Axes a and c are the parts of the query and of the key. Positions that no cell counts are zero.
    """
    kv_heads = key.tangent.shape[1]
    grouped = [part.unflatten(1, (kv_heads, -1)) for part in torch.broadcast_tensors(*query)]
    queries = torch.stack([_in_blocks(x, 3, size).movedim(2, 3) for x in grouped], dim=3)
    keys = torch.stack([_in_blocks(x, 2, size) for x in torch.broadcast_tensors(*key)], dim=3)
    asking, asked = (_in_blocks(mask.any(axis), 1, size).to(keys) for axis in (-1, -2))
    queries *= asking[:, None, :, None, None, :, None]
    weight = asked[:, None, :, None, :, None]
    keys *= weight
    mean = keys.sum((2, 4), keepdim=True) / weight.sum((2, 4), keepdim=True).clamp(min=1)
    keys -= mean
    keys *= weight
    return queries, keys, mean


def _in_blocks(x: Tensor, axis: int, size: int) -> Tensor:
    """Cut an axis into blocks of ``size``, filled up with zeros: ``[..., block, pos, ...]``."""
    short = -x.shape[axis] % size
    if short:
        filler = x.new_zeros((*x.shape[:axis], short, *x.shape[axis + 1 :]))
        x = torch.cat([x, filler], dim=axis)
    return x.unflatten(axis, (-1, size))


def _maps(
    queries: Float[Tensor, "batch kv_head block a group query d_head"],
    keys: Float[Tensor, "batch kv_head _ c key d_head"],
) -> Float[Tensor, "batch kv_head block a group query c key"]:
    """Return the maps of all terms in each block, as one product a head and block."""
    found = queries.flatten(3, 5) @ keys.flatten(3, 4).mT
    found = found.unflatten(-1, keys.shape[3:5])
    return found.unflatten(3, queries.shape[3:6])


def _at(queries: Tensor, points: Float[Tensor, "batch kv_head _ c 1 d_head"]) -> Tensor:
    """Return each term at one point a block, as ``[term, batch, kv_head, group, pos]``."""
    return _by_term(_maps(queries, points)[..., 0])


def _by_term(
    x: Float[Tensor, "batch kv_head block a group query c"],
) -> Float[Tensor, "nine batch kv_head group pos"]:
    return x.permute(3, 6, 0, 1, 4, 2, 5).flatten(5).flatten(0, 1)


def _before(x: Float[Tensor, "batch kv_head block *axes"]) -> Tensor:
    """Sum what lies in earlier blocks."""
    n = x.shape[2]
    earlier = torch.ones(n, n, dtype=x.dtype, device=x.device).tril(-1)
    return (earlier @ x.flatten(3)).unflatten(-1, x.shape[3:])


def _inner(
    queries: Float[Tensor, "batch kv_head block a group d_head d_head"],
    keys: Float[Tensor, "batch kv_head block c d_head d_head"],
) -> Float[Tensor, "nine kv_head group"]:
    """Sum over blocks the inner products of a block's query moments with those of earlier keys."""
    found = queries.flatten(3, 4).flatten(4) @ _before(keys).flatten(4).mT
    found = found.sum((0, 2)).unflatten(1, queries.shape[3:5])  # [kv_head, a, group, c]
    return found.permute(1, 3, 0, 2).flatten(0, 1)


def _total(x: Float[Tensor, "batch kv_head block part *axes"]) -> Tensor:
    """Add up the parts, one by one: a reduction over an axis this short is slow."""
    return sum(x.unbind(3)).unsqueeze(3)  # type: ignore[union-attr]


def _sums_of_cells(
    queries: Float[Tensor, "batch kv_head block a group query d_head"],
    keys: Float[Tensor, "batch kv_head _ c key d_head"],
    mask: Bool[Tensor, "_ block query key"],
    position: Float[Tensor, "_ head query key"] | None,
    along: bool,
) -> _Sums:
    """Sum over cells one by one; a position term becomes a tenth term. ``at_mean`` stays empty."""
    inside = mask[:, None, :, None, None, :, None, :]
    terms = [_maps(queries, keys).mul_(inside)]
    if position is not None:
        split = position.to(queries.dtype).unflatten(1, (keys.shape[1], -1))[
            :, :, None, None, :, :, None
        ]
        shape = (*queries.shape[:3], 1, *queries.shape[4:6], 1, keys.shape[4])
        terms.append((split * inside).expand(shape))
    first = torch.cat([_by_term(x.sum(-1)) for x in terms])
    norms = [torch.linalg.vector_norm(x, dim=-1) for x in terms]
    second = torch.cat([_by_term(x.square()) for x in norms])
    with_total = None
    if along:
        total = _maps(_total(queries), _total(keys)).mul_(inside) + sum(terms[1:])
        with_total = torch.cat([_by_term((x * total).sum(-1)) for x in terms]).sum((1, -1))
    return _Sums(first, second.sum((1, -1)), with_total, first[:0])


def _moments(sums: _Sums, mask: Tensor) -> TermMoments:
    """Put the mean key back, and take each query's mean over its keys out of the deviations."""
    first = sums.first
    n = mask.sum(-1)[:, None, None].to(first)
    shift = torch.zeros_like(first)
    shift[: len(TERMS)] = sums.at_mean
    mean = first / n.clamp(min=1)

    def over_rows(x: Tensor) -> Tensor:
        return x.double().sum(dim=(-4, -1)).flatten(-2)

    second = sums.second.double().flatten(-2)
    along = None
    if sums.with_total is not None:
        along = sums.with_total.double().flatten(-2) - over_rows(mean * first.sum(0))
    return TermMoments(
        names=TERMS if len(first) == len(TERMS) else (*TERMS, POSITION),
        cells=int(mask.sum()) * (first.shape[1] // mask.shape[0]),
        squares=second + over_rows(shift * (2 * first + n * shift)),
        spread=(second - over_rows(mean * first)).clamp(min=0),
        along=along,
    )
