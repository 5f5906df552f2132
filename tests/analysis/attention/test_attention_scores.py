"""The split of a layer's scores as a value: what it holds, what it says, what it leaves behind."""

from __future__ import annotations

import json

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.attention import cases
from tl_tangent.analysis.attention.scores import split_attention_layers, split_attention_scores
from tl_tangent.geometry.score_terms import GROUPS, POSITION, TERMS


@pytest.fixture(params=["input", "residual"])
def space(request) -> str:
    return request.param


def a_split(family: str | None = None, space: str = "input", layer: int = 1, **options):
    model = cases.model_of(family or cases.any_family())
    subspace = cases.subspace(model, layer, space)
    return split_attention_scores(model, families.tiny_tokens(model), layer, subspace, **options)


def capped_family() -> str:
    return "softcap" if families.HAS_HOOKED_TRANSFORMER else "gemma2"


# What it holds ------------------------------------------------------------------------------------


def test_groups_are_sums_of_terms(space):
    split = a_split(space=space)
    assert torch.equal(split.tangent, split.terms["tangent_tangent"])
    assert torch.equal(split.normal, split.terms["normal_normal"])
    assert torch.equal(split.constant, split.terms["mean_mean"])
    for name in ("cross", "linear"):
        expected = torch.stack([split.terms[term] for term in GROUPS[name]]).sum(0)
        assert torch.equal(getattr(split, name), expected)
    groups = split.tangent + split.cross + split.normal + split.linear + split.constant
    torch.testing.assert_close(groups, split.total, atol=1e-12, rtol=0)
    assert torch.equal(split.sum_of("mean_mean"), split.constant)


def test_a_cap_acts_on_the_sum():
    split = a_split(capped_family())
    inside = split.seen[:, None].expand_as(split.scores)
    expected = 2.0 * torch.tanh(split.sum_of(*TERMS) / 2.0)
    assert split.cap == 2.0
    torch.testing.assert_close(split.total, expected, atol=1e-14, rtol=0)
    assert float((split.total - split.sum_of(*TERMS)).abs().max()) > 0.1
    torch.testing.assert_close(split.total[inside], split.scores[inside], atol=1e-12, rtol=0)


def test_positions_are_a_tenth_term():
    split = a_split("bloom")
    without = split.sum_of(*TERMS)
    torch.testing.assert_close(split.total - without, split.terms[POSITION], atol=1e-12, rtol=0)
    assert split.to_dataframe()["term"].nunique() == 10


def test_seen_is_the_mask_of_the_model():
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.equal(a_split().seen, causal.expand(2, -1, -1))
    window = causal & causal.T.tril(3).T  # a window of 4
    assert torch.equal(a_split(capped_family(), layer=0).seen, window.expand(2, -1, -1))
    assert a_split("bert").seen.all()


def test_the_error_is_the_largest_difference_over_the_largest_score():
    split = a_split()
    inside = split.seen[:, None].expand_as(split.scores)
    difference = (split.total - split.scores).masked_fill(~inside, 0).abs().amax((0, 2, 3))
    largest = split.scores.masked_fill(~inside, 0).abs().amax((0, 2, 3))
    torch.testing.assert_close(split.error_by_head, difference / largest, atol=1e-15, rtol=0.5)
    assert split.error == float(split.error_by_head.max())


@pytest.mark.parametrize("positions", [None, "all", "not_first", [2, 5, 6], slice(3, 8)])
def test_positions_choose_cells_of_the_sums_and_no_terms(positions):
    """A cell counts where both its query and its key do; subspaces here were fitted on all."""
    split, whole = a_split(positions=positions), a_split(positions="all")
    assert all(torch.equal(split.terms[name], whole.terms[name]) for name in TERMS)
    taken = torch.zeros(9, dtype=torch.bool)
    rule = {"all": slice(None), "not_first": slice(1, None)}
    index = slice(None) if positions is None else positions
    taken[rule.get(index, index) if isinstance(index, str) else index] = True
    cells = split.seen & taken[:, None] & taken
    assert split.moments.cells == int(cells.sum())
    squares = [(split.terms[name].square() * cells[:, None]).sum((0, 2, 3)) for name in TERMS]
    torch.testing.assert_close(split.moments.squares, torch.stack(squares), rtol=1e-11, atol=0)


def test_positions_default_to_those_of_the_fit():
    model = cases.model_of(cases.any_family())
    for fitted, first in (("not_first", 36), ("all", 45), (None, 36), ("custom", 36)):
        subspace = cases.subspace(model, 1, "input", positions=fitted)
        split = split_attention_scores(model, families.tiny_tokens(model), 1, subspace)
        assert split.moments.cells == 2 * first
        expected = "not_first" if fitted in (None, "custom") else fitted
        assert split.conventions["positions"] == expected


def test_several_layers_in_one_pass_are_the_layers_one_by_one(space):
    model = cases.model_of(cases.any_family())
    tokens, subspaces = families.tiny_tokens(model), cases.subspaces(model, space)
    together = split_attention_layers(model, tokens, subspaces, [1, 0])
    assert list(together) == [0, 1]
    for layer, split in together.items():
        alone = split_attention_scores(model, tokens, layer, subspaces)
        assert split.layer == alone.layer == layer
        assert all(torch.equal(split.terms[name], alone.terms[name]) for name in TERMS)


# What it says -------------------------------------------------------------------------------------


def test_one_row_a_head_and_term():
    split = a_split()
    frame = split.to_dataframe()
    assert len(frame) == 9 * families.N_HEADS and set(frame["layer"]) == {1}
    assert not frame.duplicated(["head", "term"]).any()
    for share in ("square_share", "variance_share", "score_share"):
        sums = frame.groupby("head")[share].sum()
        assert sums.to_numpy() == pytest.approx(1.0, abs=1e-12)
    tangent = frame[frame["term"] == "tangent_tangent"].sort_values("head")
    inside = split.seen[:, None]
    expected = (split.tangent.square() * inside).sum((0, 2, 3)) / split.moments.cells
    assert tangent["mean_square"].to_list() == pytest.approx(expected.tolist())


def test_the_conventions_are_json_and_tell_site_space_and_scale(space):
    split = a_split(space=space)
    made = json.loads(json.dumps(split.conventions))
    assert made["space"] == space and made["layer"] == 1 and made["rank"] == 3
    assert made["site"] == cases.SITES[space].format(1)
    assert made["scale"] == pytest.approx(families.D_HEAD**-0.5)
    assert made["soft_cap"] is None and made["per_head"] is False
    assert a_split(capped_family()).conventions["soft_cap"] == 2.0


def test_its_text_tells_shares_and_error():
    split = a_split()
    assert "AttentionScoreSplit(layer 1, [2, 4, 9, 9])" in repr(split)
    assert f"{split.error:.1e}" in repr(split) and "tangent_tangent" in split.headline()
    html = split._repr_html_()
    assert all(name in html for name in TERMS) and "The terms add up to the model" in html
    assert "the model's pattern" in a_split("bert").headline()


# What it leaves behind ----------------------------------------------------------------------------


def test_the_model_is_as_it_was(space):
    model = cases.model_of(cases.any_family())
    tokens = families.tiny_tokens(model)
    before, hooks = model(tokens), cases.hooks_left(model)
    split_attention_layers(model, tokens, cases.subspaces(model, space))
    assert torch.equal(model(tokens), before)
    assert cases.hooks_left(model) == hooks


def test_no_hook_is_left_after_a_refusal():
    model = cases.model_of(cases.any_family())
    tokens, subspaces = families.tiny_tokens(model), cases.subspaces(model, "input")
    hooks = cases.hooks_left(model)
    edit = ("blocks.0.attn.hook_attn_scores", lambda x, hook: x + 1)
    with model.hooks(fwd_hooks=[edit]):
        with pytest.raises(tt.TangentRuntimeError):
            split_attention_layers(model, tokens, subspaces)
    assert cases.hooks_left(model) == hooks


def test_hooks_of_the_user_stay():
    model = cases.model_of(cases.any_family())
    tokens, called = families.tiny_tokens(model), []
    watch = ("blocks.1.attn.hook_q", lambda x, hook: called.append(1))
    with model.hooks(fwd_hooks=[watch]):
        split_attention_layers(model, tokens, cases.subspaces(model, "input"))
        model(tokens)
    assert len(called) == 2


def test_inference_mode_and_training_mode(space):
    model = cases.model_of(cases.any_family())
    tokens, subspaces = families.tiny_tokens(model), cases.subspaces(model, space)
    expected = split_attention_layers(model, tokens, subspaces)
    with torch.inference_mode():
        inferred = split_attention_layers(model, tokens, subspaces)
    model.train()
    try:
        trained = split_attention_layers(model, tokens, subspaces)
        assert model.training
    finally:
        model.eval()
    for layer, split in expected.items():
        for other in (inferred[layer], trained[layer]):
            assert all(torch.equal(split.terms[name], other.terms[name]) for name in TERMS)
    assert not any(term.requires_grad for term in expected[1].terms.values())
