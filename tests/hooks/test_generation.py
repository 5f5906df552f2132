"""Absolute positions: cached generation, left padding, and runs that start in the middle."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers

SITE = "blocks.0.hook_resid_post"
CASES = [("hooked", name) for name in families.HOOKED_FAMILIES if name != "postnorm"]
CASES += [("bridge", name) for name in ("gpt2", "llama", "gpt_neox")]
POSITIONS = ["not_first", "all", slice(2, 6), torch.arange(20) % 3 == 1]


def build(case, tokenizer):
    kind, name = case
    if kind == "hooked":
        return families.hooked_transformer(name, tokenizer=tokenizer)
    return families.bridge(name, tokenizer=tokenizer)


@pytest.fixture(params=CASES, ids=["-".join(case) for case in CASES])
def model(request, tmp_path):
    return build(request.param, families.tiny_tokenizer(tmp_path, padding_side="left"))


def generate(model, prompt, cached, **options):
    return model.generate(
        prompt,
        max_new_tokens=6,
        do_sample=False,
        use_past_kv_cache=cached,
        verbose=False,
        stop_at_eos=False,
        **options,
    )


@pytest.mark.parametrize("positions", POSITIONS, ids=["not_first", "all", "slice", "mask"])
def test_cached_generation_equals_uncached(model, positions):
    tokens = families.tiny_tokens(model, batch=1, pos=5)
    subspaces = helpers.random_subspaces(model, tokens, [SITE], rank=8)
    plain = generate(model, tokens, True)
    assert torch.equal(plain, generate(model, tokens, False)), "the host's own cache is broken"
    with tt.ablating(model, subspaces, mode="scale", factor=-2.0, positions=positions):
        uncached = generate(model, tokens, False)
        cached = generate(model, tokens, True)
    assert torch.equal(cached, uncached)
    assert not torch.equal(cached, plain)


def test_left_padded_generation_equals_single_prompts(model):
    prompts = ["w5 w9 w11 w20 w33", "w7 w8 w40"]
    tokens = families.tiny_tokens(model, batch=1, pos=5)
    subspaces = helpers.random_subspaces(model, tokens, [SITE], rank=8)
    options = {"return_type": "tokens"}
    with tt.ablating(model, subspaces, mode="scale", factor=-2.0, positions=slice(1, 5)):
        single = [generate(model, [prompt], True, **options) for prompt in prompts]
        both = {cached: generate(model, prompts, cached, **options) for cached in (True, False)}
    for cached, batch in both.items():
        for row, alone in zip(batch, single, strict=True):
            assert torch.equal(row[-6:], alone[0, -6:]), cached


def _is_bridge(model):
    return tt.hooks.compat.is_bridge(model)


def test_a_left_padded_batch_is_ablated_like_its_rows(model):
    tokens = families.tiny_tokens(model, batch=1, pos=5)
    subspaces = helpers.random_subspaces(model, tokens, [SITE], rank=8)
    padded = torch.cat([torch.zeros(1, 3, dtype=tokens.dtype), tokens], dim=1)
    mask = (torch.arange(8) >= 3)[None].long()
    for positions in ([0], [1, 3], -1, "not_first", slice(1, 3)):
        with torch.no_grad(), tt.ablating(model, subspaces, positions=positions):
            alone = model(tokens)
            batch = model(padded, attention_mask=mask)
        torch.testing.assert_close(batch[:, 3:], alone, atol=2e-4, rtol=2e-4)


def test_start_at_layer_keeps_the_positions(model):
    if _is_bridge(model):
        pytest.skip("a bridge has no start_at_layer")
    tokens = families.tiny_tokens(model, batch=2, pos=6)
    site = "blocks.1.hook_resid_post"
    subspaces = helpers.random_subspaces(model, tokens, [site])
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        with tt.ablating(model, subspaces, positions=[0, 2]):
            whole = model(tokens)
            tail = model(cache["blocks.1.hook_resid_pre"], start_at_layer=1)
    torch.testing.assert_close(tail, whole, atol=1e-5, rtol=1e-5)


def test_a_run_past_the_model_is_refused_not_guessed():
    """Hugging Face's own forward does not say where its tokens stand."""
    model = families.bridge("gpt2")
    tokens = families.tiny_tokens(model)
    subspaces = helpers.random_subspaces(model, tokens, [SITE])
    with pytest.raises(tt.TangentRuntimeError, match="positions='all'"):
        with tt.ablating(model, subspaces, positions="not_first"):
            model.original_model(tokens)
    with torch.no_grad(), tt.ablating(model, subspaces, positions="all"):
        ablated = model.original_model(tokens).logits
        assert torch.equal(ablated, model(tokens))
