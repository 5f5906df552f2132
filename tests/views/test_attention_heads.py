"""Maps of score terms: values, one scale, masks, labels, and what is cut off with a note."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import build, random_subspaces
from tl_tangent.views import attention_heads
from tl_tangent.views.attention_heads import show_terms
from tl_tangent.views.widgets import MAX_CELLS

LAYER, BATCH, POS, HEADS = 1, 2, 9, families.N_HEADS
NAMES = ("tangent", "cross", "normal")


@functools.cache
def a_split(family: str = "llama", padded: bool = False, pos: int = POS):
    model = build(("bridge", family, False), torch.float64)
    tokens = families.tiny_tokens(model, batch=BATCH, pos=pos)
    subspaces = random_subspaces(model, tokens, [f"blocks.{LAYER}.attn.hook_in"])
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, -3:] = 0
    return tt.split_attention_scores(model, tokens, LAYER, subspaces, attention_mask=mask)


def shown(widget) -> torch.Tensor:
    return torch.tensor(widget.props["attention"], dtype=torch.float64)


def expected(split, heads, batch=0, at=slice(None)) -> torch.Tensor:
    seen = split.seen[batch, at, at]
    maps = [
        torch.where(seen, getattr(split, name)[batch, head, at, at], 0.0)
        for head in heads
        for name in NAMES
    ]
    return torch.stack(maps)


def same(found: torch.Tensor, maps: torch.Tensor) -> bool:
    return found.shape == maps.shape and torch.allclose(found, maps, rtol=0.51e-3, atol=0)


# Values and scale -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bert", "gemma2", "bloom"])
@pytest.mark.parametrize("batch", range(BATCH))
def test_maps_are_the_terms_of_the_chosen_heads_in_order(family, batch):
    split = a_split(family)
    widget = show_terms(split, None, heads=[2, 0], batch=batch)
    assert widget.element == "AttentionHeads"
    assert same(shown(widget), expected(split, [2, 0], batch))
    assert widget.props["attentionHeadNames"] == [
        f"L{LAYER}H{head} {name}" for head in (2, 0) for name in NAMES
    ]


def test_all_heads_by_default_and_one_by_its_number():
    split = a_split()
    assert same(shown(show_terms(split, None)), expected(split, range(HEADS)))
    assert same(shown(show_terms(split, None, heads=3)), expected(split, [3]))


@pytest.mark.parametrize("heads", [[0], [1, 3], None])
def test_one_scale_from_the_largest_cell_that_is_shown(heads):
    split = a_split()
    widget = show_terms(split, None, heads=heads)
    largest = float(expected(split, range(HEADS) if heads is None else heads).abs().max())
    assert widget.props["maxValue"] == pytest.approx(largest, rel=0.51e-3)
    assert widget.props["minValue"] == -widget.props["maxValue"]


def test_masked_cells_are_zero_and_not_part_of_the_scale():
    split = a_split()
    spoilt = replace(
        split,
        terms={
            name: torch.where(split.seen[:, None], term, bad)
            for (name, term), bad in zip(
                split.terms.items(), [1e6, float("nan"), float("inf")] * 3, strict=True
            )
        },
    )
    assert show_terms(spoilt, None).props == show_terms(split, None).props
    assert not shown(show_terms(spoilt, None))[:, ~split.seen[0]].any()


def test_a_seen_cell_that_is_not_finite_is_refused():
    split = a_split()
    terms = dict(split.terms)
    terms["tangent_normal"] = torch.full_like(split.scores, float("nan"))
    with pytest.raises(tt.TangentValueError, match="nan"):
        show_terms(replace(split, terms=terms), None)


def test_maps_of_zeros_have_a_scale_too():
    split = a_split()
    zeros = replace(split, terms={name: torch.zeros_like(x) for name, x in split.terms.items()})
    widget = show_terms(zeros, None)
    assert (widget.props["minValue"], widget.props["maxValue"]) == (-1, 1)
    assert "from -1 to 1" in widget.heading


def test_the_upper_triangle_is_greyed_where_it_is_masked_only():
    assert show_terms(a_split("llama"), None).props["maskUpperTri"] is True
    assert show_terms(a_split("llama", padded=True), None, batch=1).props["maskUpperTri"] is True
    bert = show_terms(a_split("bert"), None)
    assert bert.props["maskUpperTri"] is False
    assert shown(bert).triu(1).any()


def test_padding_is_masked():
    split = a_split(padded=True)
    maps = shown(show_terms(split, None, batch=1))
    assert not maps[:, :, -3:].any()
    assert same(maps, expected(split, range(HEADS), batch=1))


# Words ------------------------------------------------------------------------------------------


def test_the_words_say_what_is_shown():
    split = a_split()
    widget = show_terms(split, None, batch=1)
    largest = float(expected(split, range(HEADS), 1).abs().max())
    for part in (
        f"layer {LAYER}",
        "rank 3",
        "input space",
        f"from {-largest:.4g} to {largest:.4g}",
        f"{split.error:.1e}",
    ):
        assert part in widget.heading
    assert "Row 1" in widget.caption
    assert "cap" not in widget.caption
    assert "soft cap at 2" in show_terms(a_split("gemma2"), None).caption


def test_labels_are_the_tokens_duplicates_and_all():
    tokens = ["<bos>", " the", "the", "the", "</script>", "\\", "日本", "", "\n"]
    labels = show_terms(a_split(), tokens).props["tokens"]
    assert labels[:7] == tokens[:7]
    assert labels[7:] == ["''", r"'\n'"]  # the widget would show nothing
    assert show_terms(a_split(), None).props["tokens"] == [str(i) for i in range(POS)]
    assert a_split().show(tokens, heads=[1], batch=1).props == (
        show_terms(a_split(), tokens, [1], 1).props
    )


@pytest.mark.parametrize("n", [POS - 1, POS + 1, 0])
def test_a_wrong_number_of_labels_is_refused(n):
    with pytest.raises(tt.TangentValueError, match=f"{n} tokens.*{POS} positions"):
        show_terms(a_split(), ["x"] * n)


@pytest.mark.parametrize("tokens", ["a" * POS, list(range(POS)), torch.arange(POS)])
def test_labels_that_are_no_list_of_strings_are_refused(tokens):
    with pytest.raises(tt.TangentValueError, match="to_str_tokens"):
        show_terms(a_split(), tokens)


@pytest.mark.parametrize("heads", [HEADS, -1, [0, HEADS]])
def test_a_head_that_does_not_exist(heads):
    with pytest.raises(tt.TangentKeyError, match=rf"head (4|-1) of layer {LAYER}.*0 to 3"):
        show_terms(a_split(), None, heads=heads)


def test_nothing_to_show_is_refused():
    with pytest.raises(tt.TangentValueError, match="no head"):
        show_terms(a_split(), None, heads=[])
    for batch in (BATCH, -1):
        with pytest.raises(tt.TangentValueError, match=f"batch={batch}.*0 to {BATCH - 1}"):
            show_terms(a_split(), None, batch=batch)
    for positions in (slice(3, 3), slice(POS, None), slice(0, 4, 2)):
        with pytest.raises(tt.TangentValueError, match="slice"):
            show_terms(a_split(), None, positions=positions)


# What is cut off --------------------------------------------------------------------------------


def test_a_view_that_fits_has_no_note(monkeypatch):
    monkeypatch.setattr(attention_heads, "MAX_CELLS", 3 * HEADS * POS**2)
    widget = show_terms(a_split(), None)
    assert widget.note == ""
    assert len(shown(widget)) == 3 * HEADS


def test_heads_that_do_not_fit_are_told_and_can_be_asked_for(monkeypatch):
    split = a_split()
    monkeypatch.setattr(attention_heads, "MAX_CELLS", 3 * HEADS * POS**2 - 1)
    widget = show_terms(split, None, heads=[3, 1, 0, 2])
    assert same(shown(widget), expected(split, [3, 1, 0]))
    assert "Only 3 of 4 heads are shown" in widget.note
    assert "heads=[2]" in widget.note
    assert "heads=[2]" in widget._repr_html_()


def test_positions_that_do_not_fit_are_told_and_can_be_asked_for(monkeypatch):
    split, tokens = a_split(), [f"w{i}" for i in range(POS)]
    monkeypatch.setattr(attention_heads, "MAX_CELLS", 3 * 5**2 + 1)
    widget = show_terms(split, tokens, heads=[1, 2])
    assert same(shown(widget), expected(split, [1], at=slice(0, 5)))
    assert widget.props["tokens"] == tokens[:5]
    assert "1 of 2 heads and positions 0 to 4 of 0 to 8" in widget.note
    assert "heads=[2] or positions=slice(5, 9)" in widget.note
    rest = show_terms(split, tokens, heads=[1], positions=slice(5, 9))
    assert same(shown(rest), expected(split, [1], at=slice(5, 9)))
    assert rest.props["tokens"] == tokens[5:]
    assert rest.note == ""
    assert rest.props["maxValue"] == pytest.approx(
        float(expected(split, [1], at=slice(5, 9)).abs().max()), rel=0.51e-3
    )


@pytest.mark.parametrize("length", [1, 2, 60, 182, 183, 500, 4096])
@pytest.mark.parametrize("n_heads", [1, 9, 64])
def test_what_is_shown_fills_a_view_and_fits_into_it(length, n_heads):
    heads, at = attention_heads._fitting(list(range(n_heads)), slice(7, 7 + length))
    cells = 3 * (at.stop - at.start) ** 2
    assert len(heads) * cells <= MAX_CELLS
    assert len(heads) == n_heads or (len(heads) + 1) * cells > MAX_CELLS
    assert at.stop == 7 + length or 3 * (at.stop - at.start + 1) ** 2 > MAX_CELLS
