"""Sums over cells without maps, against maps that are summed cell by cell."""

from __future__ import annotations

import pytest
import torch

from tl_tangent.geometry.score_moments import TermMoments, term_moments
from tl_tangent.geometry.score_terms import POSITION, TERMS, SideParts, term_maps

BATCH, HEADS, KV_HEADS, WIDTH = 3, 4, 2, 3
LENGTHS = (1, 2, 7, 13)
BLOCKS = (1, 4, 5, 64)


def side(heads: int, length: int, seed: int, mean_batch: int = 1, batch: int = BATCH) -> SideParts:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, heads, length, WIDTH) for n in (mean_batch, batch, batch)]
    return SideParts(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes))


def sides(length: int, mean_batch: int = 1) -> tuple[SideParts, SideParts]:
    return side(HEADS, length, 0, mean_batch), side(KV_HEADS, length, 1, mean_batch)


def real(length: int, padding: str) -> torch.Tensor:
    """Real tokens of each row: all of them, then fewer and fewer, down to none."""
    index = torch.arange(length)
    counts = torch.tensor([length, length // 2, 0])[:, None]
    return index < counts if padding == "right" else index >= length - counts


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def mask_of(name: str, length: int) -> torch.Tensor:
    whole = causal(length)[None]
    if name == "causal":
        return whole
    if name == "not_first":
        taken = torch.arange(length) > 0
        return whole & taken[:, None] & taken
    if name == "window":
        return whole.triu(-2)  # a query sees itself and the two keys before it
    if name == "bidirectional":
        return torch.ones(1, length, length, dtype=torch.bool)
    taken = real(length, name.removesuffix("_bidirectional"))
    both = taken[:, :, None] & taken[:, None, :]
    return both if name.endswith("bidirectional") else both & whole


MASKS = (
    "causal",
    "not_first",
    "right",
    "left",
    "window",
    "bidirectional",
    "left_bidirectional",
)


def brute(query: SideParts, key: SideParts, mask, position=None) -> TermMoments:
    """Every sum as its definition says, one map a term."""
    maps = list(term_maps(query, key).values())
    if position is not None:
        maps.append(position.expand_as(maps[0]))
    terms = torch.stack(maps)
    inside = mask[:, None].expand_as(terms[0]).to(terms)
    keys = inside.sum(-1, keepdim=True).clamp(min=1)

    def deviation(x):
        return (x - (x * inside).sum(-1, keepdim=True) / keys) * inside

    apart, total = deviation(terms), deviation(terms.sum(0))
    return TermMoments(
        names=TERMS if position is None else (*TERMS, POSITION),
        cells=int(inside[:, 0].sum()),
        squares=(terms.square() * inside).sum((1, 3, 4)),
        spread=apart.square().sum((1, 3, 4)),
        along=(apart * total).sum((1, 3, 4)),
    )


def assert_same(found: TermMoments, expected: TermMoments, rtol: float = 1e-11) -> None:
    assert found.names == expected.names and found.cells == expected.cells
    for name in ("squares", "spread", "along"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None)
        if a is not None:
            scale = float(b.abs().max()) if b.numel() else 0.0
            torch.testing.assert_close(a, b, rtol=0, atol=rtol * max(scale, 1.0))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_length_and_block(mask, length, block):
    query, key = sides(length)
    cells = mask_of(mask, length)
    found = term_moments(query, key, cells, block=block)
    assert found.squares.shape == (9, HEADS) and found.squares.dtype == torch.float64
    assert_same(found, brute(query, key, cells))


@pytest.mark.parametrize("mask", MASKS)
def test_with_a_position_term(mask):
    query, key = sides(7)
    generator = torch.Generator().manual_seed(2)
    cells = mask_of(mask, 7)
    for batch in (1, BATCH):
        position = torch.randn(batch, HEADS, 7, 7, generator=generator, dtype=torch.float64)
        found = term_moments(query, key, cells, position, block=3)
        assert_same(found, brute(query, key, cells, position))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_position_term_of_low_precision_is_summed_in_full(dtype):
    """Hosts keep ALiBi in the dtype of their weights, or in float32 whatever that is."""
    query, key = sides(32)
    distance = -torch.arange(32.0).expand(32, 32)
    position = (0.3 * distance).expand(1, HEADS, -1, -1).to(dtype)
    cells = mask_of("causal", 32)
    found = term_moments(query, key, cells, position, block=8)
    assert_same(found, brute(query, key, cells, position.double()))


@pytest.mark.parametrize("mask", ["causal", "left", "window"])
def test_a_mean_part_of_its_own_in_every_row(mask):
    query, key = sides(7, mean_batch=BATCH)
    cells = mask_of(mask, 7)
    assert_same(term_moments(query, key, cells, block=3), brute(query, key, cells))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(kv_heads):
    query, key = side(HEADS, 7, 0), side(kv_heads, 7, 1)
    cells = mask_of("causal", 7)
    assert_same(term_moments(query, key, cells, block=3), brute(query, key, cells))


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_products_with_the_score_only_where_asked_for(mask):
    query, key = sides(7)
    cells = mask_of(mask, 7)
    without, with_them = (
        term_moments(query, key, cells, along=along, block=3) for along in (False, True)
    )
    assert without.along is None and with_them.along is not None
    torch.testing.assert_close(without.squares, with_them.squares, rtol=1e-14, atol=0)
    torch.testing.assert_close(without.spread, with_them.spread, rtol=1e-14, atol=0)


@pytest.mark.parametrize("mask", MASKS)
def test_two_batches_add_up_to_one_of_both(mask):
    query, key = sides(7)
    cells = mask_of(mask, 7).expand(BATCH, -1, -1)
    halves = []
    for rows in (slice(0, 1), slice(1, None)):
        parts = [SideParts(x.mean, x.tangent[rows], x.normal[rows]) for x in (query, key)]
        halves.append(term_moments(*parts, cells[rows], block=3))
    assert_same(halves[0] + halves[1], term_moments(query, key, cells, block=3), 1e-12)


def test_a_sum_knows_products_with_the_score_only_where_both_do():
    query, key = sides(7)
    cells = mask_of("causal", 7)
    with_them, without = (term_moments(query, key, cells, along=along) for along in (True, False))
    assert (with_them + without).along is None
    assert torch.equal((with_them + with_them).along, 2 * with_them.along)


@pytest.mark.parametrize("mask", ["causal", "right", "window", "bidirectional"])
def test_products_with_the_score_add_up_to_its_spread(mask):
    query, key = sides(13)
    cells = mask_of(mask, 13)
    as_one = (SideParts(0 * x.mean, x.total, 0 * x.normal) for x in (query, key))
    score = term_moments(*as_one, cells, block=4)
    found = term_moments(query, key, cells, block=4).along.sum(0)
    spread = score.spread[TERMS.index("tangent_tangent")]
    torch.testing.assert_close(found, spread, rtol=1e-11, atol=0)


def test_no_cell_gives_zeros():
    query, key = sides(7)
    found = term_moments(query, key, torch.zeros(1, 7, 7, dtype=torch.bool))
    assert found.cells == 0
    assert not found.squares.any() and not found.spread.any() and not found.along.any()


@pytest.mark.parametrize("mask", ["right", "left", "window"])
def test_what_no_cell_counts_has_no_say(mask):
    query, key = sides(7)
    cells = mask_of(mask, 7)
    expected = term_moments(query, key, cells, block=3)
    unused_query, unused_key = ~cells.any(-1), ~cells.any(-2)
    for part, unused in ((query.normal, unused_query), (key.tangent, unused_key)):
        part.masked_fill_(unused[:, None, :, None], 1e3)
    assert_same(term_moments(query, key, cells, block=3), expected, 1e-13)


def constant_over_keys(size: float) -> tuple[SideParts, SideParts]:
    """Sides whose tangent keys are large and almost the same: a large, nearly constant term."""
    query, key = sides(48)
    direction = key.tangent[:1, :, :1]
    return query, SideParts(key.mean, size * direction + 1e-2 * key.tangent, key.normal)


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_float32_keeps_the_spread_of_a_large_constant_term(mask):
    query, key = constant_over_keys(100.0)
    cells = mask_of(mask, 48)
    low = [SideParts(*(part.float() for part in x)) for x in (query, key)]
    rounded = [SideParts(*(part.double() for part in x)) for x in low]
    found = term_moments(*low, cells, block=16)
    expected = brute(*rounded, cells)
    assert float(expected.spread.min() / expected.squares.max()) < 1e-6
    torch.testing.assert_close(found.spread, expected.spread, rtol=2e-3, atol=0)
    torch.testing.assert_close(found.squares, expected.squares, rtol=1e-4, atol=0)
