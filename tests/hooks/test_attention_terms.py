"""Dropping and scaling terms of the scores: what the model then computes, and what it leaves."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import IDS, MODELS, build, loss_of
from tl_tangent.geometry.score_terms import TERMS

EMBEDDINGS = ("embed.W_E", "wte", "embed_in", "embed_tokens", "word_embeddings")
SHOWS_PATTERN = ("bert", "roberta")
EDITABLE = [(spec, i) for spec, i in zip(MODELS, IDS, strict=True) if spec[1] not in SHOWS_PATTERN]
MODELS_EDITABLE = pytest.mark.parametrize(
    "spec", [spec for spec, _ in EDITABLE], ids=[i for _, i in EDITABLE]
)


def some_subspace(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(model.cfg.d_model, 3, generator=generator, dtype=torch.float64)
    mean = torch.randn(model.cfg.d_model, generator=generator, dtype=torch.float64)
    return tt.TangentSubspace(basis, mean, orthonormalize=True, positions="all")


def scores_of(model, tokens, layer):
    seen = {}
    name = f"blocks.{layer}.attn.hook_attn_scores"
    model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: seen.update(x=x.clone()))])
    return seen["x"]


@MODELS_EDITABLE
@pytest.mark.parametrize("space", ["input", "residual"])
def test_scores_without_terms_are_the_sum_of_the_others(spec, space):
    model, tokens = build(spec, torch.float64), families.tiny_tokens()
    subspace = some_subspace(model)
    split = tt.split_attention_scores(model, tokens, 1, subspace, space=space)
    dropped = ("tangent_tangent", "mean_normal")
    kept = split.sum_of(*(name for name in TERMS if name not in dropped))
    if split.cap is not None:
        kept = split.cap * torch.tanh(kept / split.cap)
    if "position" in split.terms:
        kept = kept + split.terms["position"]
    with tt.attention_terms(model, subspace, drop=dropped, layers=1, space=space):
        found = scores_of(model, tokens, 1)
    cells = split.seen[:, None].expand_as(found)
    tolerance = 1e-6 if spec[1] == "olmo2" else 1e-11  # HF norms queries in float32
    torch.testing.assert_close(found[cells], kept[cells], rtol=tolerance, atol=tolerance)
    assert torch.equal(found[~cells], split.scores[~cells])


@MODELS_EDITABLE
def test_the_edit_acts_and_leaves_no_trace(spec):
    model, tokens = build(spec, torch.float64), families.tiny_tokens()
    subspace = some_subspace(model)
    before = model(tokens)
    with tt.attention_terms(model, subspace, keep=TERMS, layers=[0, 1], space="input"):
        assert torch.equal(model(tokens), before)
    with tt.attention_terms(model, subspace, drop="tangent", layers=[0, 1], space="input"):
        assert float((model(tokens) - before).abs().max()) > 1e-4
    assert torch.equal(model(tokens), before)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)


@MODELS_EDITABLE
def test_gradients_flow_through_what_is_left(spec):
    """The directional derivative of the edited loss along a parameter is its gradient."""
    model, tokens = build(spec, torch.float64), families.tiny_tokens(pos=5)
    subspace = some_subspace(model)
    weight = next(p for n, p in model.named_parameters() if any(e in n for e in EMBEDDINGS))
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight)

    def loss():
        options = {"factors": {"cross": 0.5, "tangent": 2.0}, "layers": 0, "space": "residual"}
        with tt.attention_terms(model, subspace, **options):
            return loss_of(model, tokens)

    model.zero_grad()
    loss().backward()
    along = float((weight.grad * direction).sum())
    model.zero_grad()
    step, values = 1e-4, []  # HF's RMSNorm is float32: smaller steps drown in its rounding
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * step * direction
            values.append(float(loss()))
            weight -= sign * step * direction
    assert along == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-3)


def test_heads_restrict_the_edit():
    model, tokens = build(MODELS[0], torch.float64), families.tiny_tokens()
    subspace = some_subspace(model)
    plain = scores_of(model, tokens, 0)
    with tt.attention_terms(model, subspace, drop="tangent", layers=0, heads=2, space="input"):
        edited = scores_of(model, tokens, 0)
    changed = (plain != edited).any(dim=(0, 2, 3)) if plain.ndim == 4 else None
    assert changed is not None and changed.tolist() == [False, False, True, False]


def test_two_edits_add_up():
    model, tokens = build(MODELS[0], torch.float64), families.tiny_tokens()
    subspace = some_subspace(model)
    options = {"layers": 0, "space": "input"}
    with tt.attention_terms(model, subspace, drop="tangent", **options):
        with tt.attention_terms(model, subspace, drop="normal", **options):
            nested = scores_of(model, tokens, 0)
    with tt.attention_terms(model, subspace, drop=["tangent", "normal"], **options):
        together = scores_of(model, tokens, 0)
    torch.testing.assert_close(nested, together, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", SHOWS_PATTERN)
def test_a_host_that_only_shows_the_pattern_is_refused(family):
    model, tokens = families.bridge(family, dtype=torch.float64), families.tiny_tokens()
    with pytest.raises(tt.TangentRuntimeError, match="only shows the pattern"):
        with tt.attention_terms(model, some_subspace(model), drop="tangent", space="input"):
            model(tokens)
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, tt.TangentValueError, "exactly one of keep, drop and factors"),
        ({"drop": []}, tt.TangentValueError, "drop names no term"),
        ({"drop": 3}, tt.TangentValueError, "named by strings; got 3"),
        ({"factors": {}}, tt.TangentValueError, "give a mapping"),
        ({"factors": {"tangent": "0.5"}}, tt.TangentValueError, "must be a number"),
        (
            {"factors": {"linear": 0.0, "mean_tangent": 1.0}},
            tt.TangentValueError,
            "names 'mean_tangent' twice",
        ),
        ({"drop": "tangent", "heads": [1.5]}, tt.TangentValueError, "give a whole number"),
        ({"drop": "tangent", "layers": True}, tt.TangentValueError, "layers is True"),
        ({"keep": "tangent", "drop": "normal"}, tt.TangentValueError, "given: keep, drop"),
        ({"drop": "vv"}, tt.TangentKeyError, "'vv' is not a term"),
        ({"factors": {"tangent": float("nan")}}, tt.TangentValueError, "must be finite"),
        ({"drop": "tangent", "heads": 4}, tt.TangentKeyError, "head 4 does not exist"),
        ({"drop": "tangent", "heads": []}, tt.TangentValueError, "heads names none"),
        ({"drop": "tangent", "layers": 2}, tt.TangentValueError, "layer 2 does not exist"),
    ],
)
def test_what_can_not_be_is_refused(options, error, says):
    model = build(MODELS[0], torch.float64)
    with pytest.raises(error, match=says):
        with tt.attention_terms(model, some_subspace(model), **{"space": "input", **options}):
            pass


def test_a_block_in_which_nothing_ran_is_refused():
    model, tokens = build(MODELS[0], torch.float64), families.tiny_tokens()
    with pytest.raises(tt.TangentRuntimeError, match="layer 1 never ran"):
        with tt.attention_terms(
            model, some_subspace(model), drop="tangent", layers=1, space="input"
        ):
            model(tokens, stop_at_layer=1)


def test_a_cached_pass_is_refused():
    model, tokens = build(MODELS[0], torch.float64), families.tiny_tokens()
    with pytest.raises(tt.TangentRuntimeError, match="key-value cache"):
        with tt.attention_terms(
            model, some_subspace(model), drop="tangent", space="input", layers=0
        ):
            model.generate(
                tokens, max_new_tokens=3, do_sample=False, stop_at_eos=False, verbose=False
            )


def test_the_method_is_the_function():
    model = tt.TangentBridge.wrap(families.bridge("llama"))
    tokens, subspace = families.tiny_tokens(), some_subspace(model)
    options = {"drop": "cross", "layers": 1, "space": "residual"}
    with tt.attention_terms(model, subspace, **options):
        expected = model(tokens)
    with model.attention_terms(subspace, **options):
        assert torch.equal(model(tokens), expected)


def test_attached_subspaces_are_the_default():
    model, tokens = build(MODELS[0], torch.float64), families.tiny_tokens()
    subspaces = tt.fit_subspaces(model, tokens, "blocks.*.attn.hook_in", rank=2)
    with tt.attention_terms(model, subspaces, drop="tangent"):
        expected = model(tokens)
    with tt.tangents(model, subspaces), tt.attention_terms(model, drop="tangent"):
        assert torch.equal(model(tokens), expected)
    with pytest.raises(tt.TangentValueError, match="nothing is attached"):
        with tt.attention_terms(model, drop="tangent"):
            pass


def test_by_default_position_0_stays_as_it_is():
    model, tokens = build(MODELS[0], torch.float64), families.tiny_tokens()
    subspace = some_subspace(model).replace(positions="not_first")
    plain = scores_of(model, tokens, 0)
    with tt.attention_terms(model, subspace, drop="normal", layers=0, space="input"):
        edited = scores_of(model, tokens, 0)
    same = plain == edited
    assert same[:, :, :, 0].all() and same[:, :, 0].all()
    assert not same[:, :, 2, 1].any()


def test_padding_counts_positions_from_the_first_token():
    model, tokens = build(MODELS[0], torch.float64), families.tiny_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    subspace = some_subspace(model).replace(positions="not_first")
    seen = {}
    name = "blocks.0.attn.hook_attn_scores"

    def scores():
        model.run_with_hooks(
            tokens, attention_mask=mask, fwd_hooks=[(name, lambda x, hook: seen.update(x=x))]
        )
        return seen["x"].clone()

    plain = scores()
    with tt.attention_terms(model, subspace, drop="normal", layers=0, space="input"):
        same = plain == scores()
    assert same[0, :, :, 3].all() and not same[0, :, 6, 4].any()
    assert same[1, :, :, 0].all() and not same[1, :, 6, 3].any()


@MODELS_EDITABLE
def test_gradients_do_not_depend_on_what_ran_before(spec):
    model, tokens = build(spec, torch.float64), families.tiny_tokens(pos=5)
    subspace = some_subspace(model)

    def gradients(look_first):
        model.zero_grad()
        with tt.attention_terms(model, subspace, drop="tangent", layers=0, space="input"):
            if look_first:
                with torch.no_grad():
                    model(tokens)
            loss_of(model, tokens).backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    for first, second in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(first, second)


def test_weights_are_read_in_every_pass():
    model, tokens = families.bridge("llama", dtype=torch.float64), families.tiny_tokens()
    subspace, options = some_subspace(model), {"drop": "tangent", "layers": 0, "space": "input"}
    with tt.attention_terms(model, subspace, **options):
        model(tokens)
        with torch.no_grad():
            model.blocks[0].attn.q.weight.mul_(1.5)
        inside = scores_of(model, tokens, 0)
    with tt.attention_terms(model, subspace, **options):
        assert torch.equal(scores_of(model, tokens, 0), inside)


def test_blocks_behind_a_soft_cap_do_not_nest():
    model, tokens = families.bridge("gemma2", dtype=torch.float64), families.tiny_tokens()
    subspace, options = some_subspace(model), {"layers": 1, "space": "input"}
    with pytest.raises(tt.TangentRuntimeError, match="Name all terms in one"):
        with tt.attention_terms(model, subspace, drop="tangent", **options):
            with tt.attention_terms(model, subspace, drop="normal", **options):
                model(tokens)
    with tt.attention_terms(model, subspace, drop=["tangent", "normal"], **options):
        model(tokens)


@pytest.mark.parametrize("early", [True, False], ids=["added before", "added inside"])
@pytest.mark.parametrize("name", ["hook_q", "hook_k", "hook_rot_q", "hook_attn_scores"])
def test_edits_of_queries_keys_and_scores_are_refused(name, early):
    """Where they are seen: inside a block, hooks on the scores run behind it and stay."""
    if name == "hook_attn_scores" and not early:
        pytest.skip("acts on what the block lets through")
    model, tokens = families.bridge("llama", dtype=torch.float64), families.tiny_tokens()
    subspace = some_subspace(model)
    edit = (f"blocks.0.attn.{name}", lambda x, hook: torch.where(x > -1e30, x * 1.5, x))
    options = {"drop": "tangent", "layers": 0, "space": "input"}
    with pytest.raises(tt.TangentRuntimeError, match="edits queries"):
        if early:
            with model.hooks(fwd_hooks=[edit]), tt.attention_terms(model, subspace, **options):
                model(tokens)
        else:
            with tt.attention_terms(model, subspace, **options):
                model.run_with_hooks(tokens, fwd_hooks=[edit])


def test_heads_that_are_masked_differently_are_refused():
    model, tokens = build(MODELS[0], torch.float64), families.tiny_tokens()
    subspace = some_subspace(model)

    def knock_out(scores, hook):
        scores = scores.clone()
        scores[:, 0, 4:, 1] = -torch.inf
        return scores

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", knock_out)]):
        for run in (tt.split_attention_scores, tt.attention_term_shares):
            with pytest.raises(tt.TangentRuntimeError, match="some heads are masked"):
                run(model, tokens, *order(run, 0, subspace), space="input")


def order(run, layer, subspace):
    is_split = run is tt.split_attention_scores
    return (layer, subspace) if is_split else (subspace, layer)


def test_scores_that_are_not_finite_are_refused():
    model, tokens = families.bridge("llama", dtype=torch.float64), families.tiny_tokens()
    with torch.no_grad():
        model.blocks[0].attn.q.weight[0] = torch.nan
    with pytest.raises(tt.TangentRuntimeError, match="NaN"):
        with tt.attention_terms(model, some_subspace(model), drop="cross", layers=0, space="input"):
            model(tokens)


def test_a_position_term_that_is_not_there_is_refused():
    model, tokens = build(MODELS[0], torch.float64), families.tiny_tokens()
    with pytest.raises(tt.TangentValueError, match="adds no position term"):
        with tt.attention_terms(
            model, some_subspace(model), drop="position", space="input", layers=0
        ):
            model(tokens)


def test_a_training_encoder_still_only_shows_its_pattern():
    model, tokens = families.bridge("bert", dtype=torch.float64).train(), families.tiny_tokens()
    with pytest.raises(tt.TangentRuntimeError, match="only shows the pattern"):
        with tt.attention_terms(
            model, some_subspace(model), drop="normal", space="input", layers=0
        ):
            model(tokens)
