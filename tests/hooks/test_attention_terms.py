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
    return tt.TangentSubspace(basis, mean, orthonormalize=True)


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
        ({"keep": "tangent", "drop": "normal"}, tt.TangentValueError, "given: keep, drop"),
        ({"drop": "vv"}, tt.TangentKeyError, "'vv' is not a term"),
        ({"factors": {"tangent": float("nan")}}, tt.TangentValueError, "must be finite"),
        ({"drop": "tangent", "heads": 4}, tt.TangentKeyError, "head 4 does not exist"),
        ({"drop": "tangent", "heads": []}, tt.TangentKeyError, "no head is named"),
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
