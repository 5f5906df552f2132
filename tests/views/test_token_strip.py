"""The strip of tokens: each label on its own value, on fair scales, with what is left out said."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import build
from tl_tangent.views import token_strip
from tl_tangent.views.token_strip import show_token_changes, show_tokens
from tl_tangent.views.widgets import page

LAYERS, F64, PADDED = families.N_LAYERS, torch.float64, 3


@functools.cache
def traced():
    """Two rows, the second padded, position 0 not followed."""
    model = build(("bridge", "gpt2", False), F64)
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(families.D_MODEL, 3, generator=generator, dtype=F64)
    subspace = tt.TangentSubspace(basis, torch.ones(families.D_MODEL).double(), orthonormalize=True)
    tokens = families.tiny_tokens(model)
    mask = torch.ones_like(tokens)
    mask[1, -PADDED:] = 0
    batch = {"input": tokens, "attention_mask": mask}
    return tt.trace_residual(model, batch, subspace), tokens


def word(i: int) -> str:
    return f"<w{i}>"


def followed(tokens) -> list[int]:
    return [*tokens[0, 1:].tolist(), *tokens[1, 1:-PADDED].tolist()]


def share(trace, depth: int) -> torch.Tensor:
    tangent, normal = trace.ledger.stream[depth]
    return normal / (tangent + normal)


def same(values, expected) -> None:
    assert values == pytest.approx(expected.tolist(), rel=0.51e-3)


@pytest.mark.parametrize("depth", range(LAYERS + 1))
def test_each_followed_token_has_its_label_and_its_share(depth):
    trace, tokens = traced()
    widget = show_tokens(trace, word, depth)
    assert widget.element == "ColoredTokens"
    assert widget.props["tokens"] == [word(i) for i in followed(tokens)]
    same(widget.props["values"], share(trace, depth))


def test_labels_are_asked_with_the_ids_that_were_traced_once_each():
    trace, tokens = traced()
    asked: list[int] = []
    show_tokens(trace, lambda i: asked.append(i) or word(i), 0)
    assert asked == list(dict.fromkeys(followed(tokens)))


@pytest.mark.parametrize("depth, later", [(0, LAYERS), (LAYERS, 0), (1, 2)])
def test_a_change_is_the_later_share_minus_the_earlier(depth, later):
    trace, tokens = traced()
    widget = show_token_changes(trace, word, depth, later)
    assert widget.props["tokens"] == [word(i) for i in followed(tokens)]
    same(widget.props["values"], share(trace, later) - share(trace, depth))


def test_scales_come_from_what_is_shown_and_are_centred_on_zero():
    trace, _ = traced()
    some = slice(2, 6)
    change = share(trace, 2) - share(trace, 0)
    for widget, values in (
        (show_tokens(trace, word, 1, tokens=some), share(trace, 1)[some]),
        (show_token_changes(trace, word, 0, 2, tokens=some), change[some]),
    ):
        same([widget.props["maxValue"]], values.abs().max()[None])
        assert widget.props["minValue"] == -widget.props["maxValue"]
        assert widget.props["negativeColor"] != widget.props["positiveColor"]
        assert f"{float(values.abs().max()):.4g}" in widget.heading


def test_no_change_at_all_still_has_a_scale():
    widget = show_token_changes(traced()[0], word, 1, 1)
    assert set(widget.props["values"]) == {0} and widget.props["maxValue"] == 1


def test_a_token_at_the_mean_has_no_normal_share_and_no_number_is_made_up():
    trace, _ = traced()
    stream = trace.ledger.stream.clone()
    stream[0, :, 3] = 0.0
    edited = replace(trace, ledger=replace(trace.ledger, stream=stream))
    assert show_tokens(edited, word, 0).props["values"][3] == 0
    stream[0, 1, 3] = float("nan")
    with pytest.raises(tt.TangentValueError, match="values has a value nan"):
        show_tokens(edited, word, 0)


def test_words_name_place_and_reading():
    trace, _ = traced()
    assert "external, rank 3, in front of layer 1" in show_tokens(trace, word, 1).heading
    assert f"behind layer {LAYERS - 1}" in show_tokens(trace, word, LAYERS).heading
    heading = show_token_changes(trace, word, 0, LAYERS).heading
    assert f"in front of layer 0 to behind layer {LAYERS - 1}: change" in heading
    for widget in (show_tokens(trace, word, 1), show_token_changes(trace, word, 0, 1)):
        assert "padding" in widget.caption and widget.note == ""


def test_labels_are_escaped_and_an_empty_one_is_seen():
    trace, _ = traced()
    widget = show_tokens(trace, lambda i: "<img src=x onerror=alert(1)>", 0)
    assert "<img" not in page([widget], "t").split("CircuitsVis.ColoredTokens")[1]
    assert set(show_tokens(trace, lambda i: "", 0).props["tokens"]) == {"''"}


def test_what_does_not_fit_is_left_out_and_said(monkeypatch):
    trace, tokens = traced()
    monkeypatch.setattr(token_strip, "MAX_CELLS", 5)
    widget = show_tokens(trace, word, 1, tokens=slice(2, None))
    assert widget.props["tokens"] == [word(i) for i in followed(tokens)[2:7]]
    n = trace.ledger.n_tokens
    assert f"Only tokens 2 to 6 of 2 to {n - 1} are shown" in widget.note
    assert f"tokens=slice(7, {n})" in widget.note
    rest = show_token_changes(trace, word, 0, 1, tokens=slice(7, n))
    assert rest.props["tokens"] == [word(i) for i in followed(tokens)[7:12]]


@pytest.mark.parametrize("depth", [-1, LAYERS + 1, "1", 1.0])
def test_depths_that_are_not_there_are_refused(depth):
    trace, _ = traced()
    for name, show in (
        ("depth", show_tokens),
        ("later", lambda t, w, d: show_token_changes(t, w, 0, d)),
    ):
        message = f"{name} is {depth!r}; it must be a whole number from 0 to {LAYERS}"
        with pytest.raises(tt.TangentValueError, match=message):
            show(trace, word, depth)


@pytest.mark.parametrize("depth", [np.int64(1), torch.tensor(1)])
def test_depths_are_whole_numbers_of_any_kind(depth):
    trace, _ = traced()
    assert show_tokens(trace, word, depth).heading == show_tokens(trace, word, 1).heading
    assert (
        show_token_changes(trace, word, 0, depth).props["values"]
        == (show_token_changes(trace, word, 0, 1).props["values"])
    )


@pytest.mark.parametrize("tokens", [slice(3, 3), slice(0, 9, 2), slice(40, 50), slice(5, 2)])
def test_stretches_without_tokens_are_refused(tokens):
    with pytest.raises(tt.TangentValueError, match="no stretch of the 13 tokens.*slice\\(0, 13\\)"):
        show_tokens(traced()[0], word, 0, tokens=tokens)


def test_labels_that_could_land_on_another_token_are_refused():
    trace, _ = traced()
    with pytest.raises(tt.TangentValueError, match="label is a list.*model.tokenizer.decode"):
        show_tokens(trace, ["a"] * trace.ledger.n_tokens, 0)
    with pytest.raises(tt.TangentValueError, match=r"label\(\d+\) is a int, not a string"):
        show_tokens(trace, lambda i: i, 0)
    without = replace(trace.ledger, ids=torch.full_like(trace.ledger.ids, -1))
    with pytest.raises(tt.TangentValueError, match="no token ids.*Trace tokens"):
        show_tokens(replace(trace, ledger=without), word, 0)
