"""A pass that is restarted at a layer is the full pass, bit for bit, and its loss is the loss."""

from __future__ import annotations

import pytest

import tl_tangent as tt
from tests import families
from tests.analysis.test_layer_ablation import a_model, rows
from tests.hooks import helpers
from tl_tangent.analysis.staged import StagedLoss


def full_loss(model, tokens) -> float:
    """What StagedLoss gives without ever having been told to restart."""
    return StagedLoss(model, tokens).loss()


@pytest.mark.parametrize("family", families.HOOKED_FAMILIES)
def test_a_restarted_pass_equals_the_full_one_bit_for_bit(family):
    model, tokens = families.hooked_transformer(family), rows(4)
    subspaces = helpers.random_subspaces(model, tokens, helpers.tangent_sites(model))
    staged = StagedLoss(model, tokens)
    for name, subspace in subspaces.items():
        staged.go_to(tt.hooks.sites.find_sites(model, name)[0].layer)
        for mode in ("zero", "keep", "random"):
            with tt.ablating(model, subspace, mode=mode, positions="not_first"):
                assert staged.loss() == full_loss(model, tokens), (name, mode)


@pytest.mark.skipif(not families.HOOKED_FAMILIES, reason="restarts need HookedTransformer")
def test_a_restarted_pass_does_not_run_what_lies_before():
    model, tokens = families.hooked_transformer("learned"), rows(4)
    staged, ran = StagedLoss(model, tokens), []
    staged.go_to(1)
    names = ["hook_embed", "blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"]
    with model.hooks(fwd_hooks=[(name, lambda x, hook: ran.append(hook.name)) for name in names]):
        staged.loss()
        assert ran == ["blocks.1.hook_resid_pre"]
        ran.clear()
        staged.go_to(None)
        staged.loss()
        assert ran == names


@pytest.mark.skipif(not families.HOOKED_FAMILIES, reason="restarts need HookedTransformer")
@pytest.mark.parametrize("side", ["left", "right"])
def test_restarting_keeps_what_a_tokenizer_says_about_padding(tmp_path, side):
    tokenizer = families.tiny_tokenizer(tmp_path, side)
    model, tokens = families.hooked_transformer("learned", tokenizer=tokenizer), rows(4)
    tokens[0, -1], tokens[1, 0] = tokenizer.pad_token_id, tokenizer.pad_token_id
    subspaces = helpers.random_subspaces(model, rows(4), ["blocks.1.hook_resid_post"])
    staged = StagedLoss(model, tokens)
    staged.go_to(1)
    with tt.ablating(model, subspaces, positions="not_first"):
        assert staged.loss() == full_loss(model, tokens)


def test_going_back_to_an_earlier_layer_is_exact():
    model, tokens = a_model(), rows(4)
    staged = StagedLoss(model, tokens)
    expected = staged.loss()
    for layer in (1, 0, 1, None, 0):
        staged.go_to(layer)
        assert staged.loss() == expected


def test_the_loss_is_the_next_token_cross_entropy_of_transformer_lens():
    model, tokens = a_model(), rows(4)
    expected = float(model(tokens, return_type="loss").detach())
    assert StagedLoss(model, tokens).loss() == pytest.approx(expected, rel=1e-6)


def test_long_rows_are_cut_into_batches_that_add_up(monkeypatch):
    model, tokens = a_model(), rows(5)
    expected = StagedLoss(model, tokens).loss()
    monkeypatch.setattr("tl_tangent.analysis.staged.BATCH_TOKENS", 24)
    assert StagedLoss(model, tokens).loss() == pytest.approx(expected, rel=1e-6)


def test_a_model_that_reads_ahead_is_refused():
    with pytest.raises(tt.TangentValueError, match="reads ahead"):
        StagedLoss(families.bridge("bert"), rows(4))


def test_rows_of_one_token_are_refused():
    with pytest.raises(tt.TangentValueError, match=r"\[4, 1\]"):
        StagedLoss(a_model(), rows(4, pos=1))
