"""The nine terms of a bilinear score: their names, their maps and their weighted sums."""

from __future__ import annotations

import pytest
import torch

from tl_tangent import TangentKeyError
from tl_tangent.geometry.score_terms import (
    GROUPS,
    KEY_CONSTANT,
    PARTS,
    POSITION,
    TERMS,
    SideParts,
    scores,
    summed,
    term_maps,
    term_names,
)

BATCH, LENGTH, WIDTH = 2, 5, 3


def side(heads: int, seed: int, mean_batch: int = 1) -> SideParts:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, LENGTH, WIDTH) for batch in (mean_batch, BATCH, BATCH)]
    return SideParts(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes))


def test_there_are_nine_terms_and_the_groups_hold_each_once():
    assert len(TERMS) == len(set(TERMS)) == 9
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(TERMS)
    assert all(name.endswith("_mean") for name in KEY_CONSTANT) and len(KEY_CONSTANT) == 3


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
def test_a_key_head_serves_its_own_query_heads(heads, kv_heads):
    query, key = side(heads, 0).normal, side(kv_heads, 1).normal
    found = scores(query, key)
    for head in range(heads):
        own = query[:, head] @ key[:, head * kv_heads // heads].mT
        torch.testing.assert_close(found[:, head], own, atol=1e-14, rtol=0)


@pytest.mark.parametrize("mean_batch", [1, BATCH])
def test_each_term_is_one_part_against_one_part(mean_batch):
    query, key = side(4, 0, mean_batch), side(2, 1, mean_batch)
    maps = term_maps(query, key)
    assert list(maps) == list(TERMS)
    for name, found in maps.items():
        asking, asked = (getattr(s, p) for s, p in zip((query, key), name.split("_"), strict=True))
        assert found.shape == (BATCH, 4, LENGTH, LENGTH)
        for b in range(BATCH):
            for h in range(4):
                own = asking[b % len(asking), h] @ asked[b % len(asked), h // 2].T
                torch.testing.assert_close(found[b, h], own, atol=1e-14, rtol=0)


def test_the_terms_add_up_to_the_score_of_the_sums():
    query, key = side(4, 0), side(2, 1)
    total = torch.stack(list(term_maps(query, key).values())).sum(0)
    torch.testing.assert_close(total, scores(query.total, key.total), atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    "factors",
    [
        dict.fromkeys(TERMS, 1.0),
        {"tangent_tangent": 1.0},
        {name: 1.0 for name in TERMS if name != "tangent_normal"},
        {name: 0.3 * i - 1.0 for i, name in enumerate(TERMS)},
        {"mean_mean": 2.0, "normal_mean": -1.0, "tangent_normal": 0.0},
    ],
    ids=["all", "one", "all-but-one", "each-its-own", "some"],
)
def test_summed_is_the_weighted_sum_of_the_maps(factors):
    query, key = side(4, 0), side(2, 1)
    maps = term_maps(query, key)
    expected = sum(weight * maps[name] for name, weight in factors.items())
    found = summed(query, key, factors)
    torch.testing.assert_close(found.expand_as(expected), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("factors", [{}, dict.fromkeys(TERMS, 0.0)])
def test_nothing_is_summed_where_every_factor_is_zero(factors):
    assert summed(side(4, 0), side(2, 1), factors) is None


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_written_out(group):
    expected = tuple(name for name in TERMS if name in GROUPS[group])
    assert term_names(group) == expected


@pytest.mark.parametrize(
    "given, expected",
    [
        ("tangent_normal", ("tangent_normal",)),
        (["normal_normal", "mean_mean"], ("mean_mean", "normal_normal")),
        ({"cross", "tangent_normal"}, ("tangent_normal", "normal_tangent")),
        (("position", "tangent"), ("tangent_tangent", POSITION)),
        ((), ()),
    ],
    ids=["one", "in-order", "once", "position", "none"],
)
def test_names_come_once_and_in_order(given, expected):
    assert term_names(given) == expected


@pytest.mark.parametrize("name", ["tangent_tangnt", "v_v", "all"])
def test_an_unknown_name_is_refused_with_what_there_is(name):
    with pytest.raises(TangentKeyError) as raised:
        term_names(["mean_mean", name])
    message = str(raised.value)
    assert repr(name) in message
    assert all(known in message for known in (*TERMS, POSITION, *GROUPS))


def test_the_nearest_name_is_told():
    with pytest.raises(TangentKeyError, match="Nearest: .*tangent_tangent"):
        term_names("tangent_tangnt")


def test_parts_are_the_axes_of_the_names():
    assert [name.split("_") for name in TERMS] == [[q, k] for q in PARTS for k in PARTS]
