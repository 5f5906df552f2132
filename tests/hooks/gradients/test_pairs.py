"""What maps read and the gradients at what they write make the gradients of their weights."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.hooks.gradients.cases import (
    ALL,
    IDS,
    KINDS_OF_MODEL,
    backward,
    build,
    error,
    fresh,
    hook_counts,
    product,
    scalar,
    tokens_for,
)
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.watch import watching_activations, watching_maps

EXACT = 1e-12  # in float64: sums of 18 products in another order
KIND_IDS = [kind for kind, _ in KINDS_OF_MODEL]


def worst(weights, pairs) -> float:
    """The largest error over all weights with pairs, each of which must have come once."""
    errors = []
    for weight in weights.weights:
        if weight.reads is not None:
            ((x, g),) = pairs[weight.name]
            errors.append(error(product(weight, x, g), weight.gradient()))
    return max(errors)


@pytest.mark.parametrize(("kind", "family"), ALL, ids=IDS)
def test_pairs_make_the_gradient_of_every_weight(kind, family):
    model = build(kind, family)
    weights = find_weights(model)
    pairs = backward(model, weights, tokens_for(model))
    assert worst(weights, pairs) < EXACT
    without = {weight.kind for weight in weights.weights if weight.reads is None}
    normed = {"embed"} if (kind, family) == ("hooked", "alibi") else set()
    assert without <= {"pos", "tied"} | normed
    assert all(weight.gradient().shape[1] == weight.d for weight in weights.weights)


@pytest.mark.parametrize(("kind", "family"), KINDS_OF_MODEL, ids=KIND_IDS)
def test_two_passes_give_two_pairs_that_belong_together(kind, family):
    model = build(kind, family)
    weights = find_weights(model)
    pairs = backward(model, weights, tokens_for(model), tokens_for(model, seed=1))
    for weight in weights.weights:
        if weight.reads is not None:
            assert len(pairs[weight.name]) == 2
            found = sum(product(weight, x, g) for x, g in pairs[weight.name])
            assert error(found, weight.gradient()) < EXACT


@pytest.mark.parametrize("without_graph", [True, False])
@pytest.mark.parametrize(("kind", "family"), KINDS_OF_MODEL, ids=KIND_IDS)
def test_passes_outside_of_the_loss_do_not_count(kind, family, without_graph):
    model = build(kind, family)
    weights, pairs = find_weights(model), {}

    def receive(weight, x, g):
        pairs.setdefault(weight.name, []).append((x, g))

    def other(seed):
        with torch.set_grad_enabled(not without_graph):
            return scalar(model, tokens_for(model, seed=seed))

    model.zero_grad(set_to_none=True)
    with watching_maps(weights.weights, receive):
        other(1)
        loss = scalar(model, tokens_for(model))
        other(2)
        loss.backward()
    assert worst(weights, pairs) < EXACT


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant):
    model = fresh("hf", "llama")
    weights = find_weights(model)
    plain = backward(model, weights, tokens_for(model))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()  # the blocks are run again in training mode alone; Llama has no dropout
    pairs = backward(model, weights, tokens_for(model))
    assert worst(weights, pairs) < EXACT
    for name, ((x, g),) in pairs.items():
        ((x_plain, g_plain),) = plain[name]
        assert torch.equal(x, x_plain)
        assert error(g, g_plain) < EXACT


def test_under_autocast_pairs_are_right_to_bfloat16():
    model = fresh("hf", "llama", torch.float32)
    weights = find_weights(model)
    with torch.autocast("cpu", torch.bfloat16):
        pairs = backward(model, weights, tokens_for(model))
    assert pairs["blocks.0.mlp.W_in"][0][1].dtype == torch.bfloat16  # else nothing was tested
    assert worst(weights, pairs) < 0.02  # 2^-8 for each rounding


def test_padding_tokens_of_an_embedding_are_the_only_ones_without_a_gradient():
    model = build("hf", "llama")
    weights = find_weights(model).choose(("embed",))
    tokens = tokens_for(model)
    tokens[0, 3] = model.config.pad_token_id
    (((x, g),),) = backward(model, weights, tokens).values()
    found, expected = product(weights.weights[0], x, g), weights.weights[0].gradient()
    rows = torch.arange(len(found)) != model.config.pad_token_id
    assert error(found[rows], expected[rows]) < EXACT
    assert found[~rows].abs().max() > 0
    assert expected[~rows].abs().max() == 0


def test_an_embedding_that_scales_has_a_gradient_and_no_pairs():
    weights = find_weights(fresh("hf", "gemma3", tie_word_embeddings=False))
    assert {weight.kind for weight in weights.weights if weight.reads is None} == {"embed"}


# Nothing stays behind -------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "family"), KINDS_OF_MODEL, ids=KIND_IDS)
def test_hooks_leave_no_trace(kind, family):
    model = build(kind, family)
    weights, before = find_weights(model), hook_counts(model)
    with watching_maps(weights.weights, lambda *_: None):
        assert sum(hook_counts(model).values()) > sum(before.values())
    assert hook_counts(model) == before
    backward(model, weights, tokens_for(model))
    assert hook_counts(model) == before
    with watching_activations(weights.sites, lambda *_: None):
        assert sum(hook_counts(model).values()) > sum(before.values())
        model(tokens_for(model))
    assert hook_counts(model) == before


@pytest.mark.parametrize(("kind", "family"), KINDS_OF_MODEL, ids=KIND_IDS)
@pytest.mark.parametrize("where", ["forward", "backward", "body"])
def test_hooks_leave_no_trace_on_error(kind, family, where):
    model = build(kind, family)
    weights, before = find_weights(model), hook_counts(model)

    def receive(*_):
        if where == "backward":
            raise RuntimeError("on purpose")

    tokens = tokens_for(model)
    with pytest.raises((RuntimeError, IndexError)):
        with watching_maps(weights.weights, receive):
            if where == "body":
                raise RuntimeError("on purpose")
            scalar(model, tokens + (10_000 if where == "forward" else 0)).backward()
    assert hook_counts(model) == before
    with pytest.raises(RuntimeError), watching_activations(weights.sites, receive):
        raise RuntimeError("on purpose")
    assert hook_counts(model) == before


@pytest.mark.parametrize(("kind", "family"), KINDS_OF_MODEL, ids=KIND_IDS)
def test_watching_does_not_change_a_gradient(kind, family):
    model = build(kind, family)
    weights, tokens = find_weights(model), tokens_for(model)
    backward(model, weights, tokens)
    watched = [copy.deepcopy(parameter.grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    scalar(model, tokens).backward()
    for parameter, grad in zip(model.parameters(), watched, strict=True):
        assert (grad is None) == (parameter.grad is None)
        assert grad is None or torch.equal(grad, parameter.grad)


@pytest.mark.parametrize(("kind", "family"), KINDS_OF_MODEL, ids=KIND_IDS)
def test_gradients_arrive_detached(kind, family):
    model = build(kind, family)
    for ((x, g),) in backward(model, find_weights(model), tokens_for(model)).values():
        assert not x.requires_grad
        assert not g.requires_grad
