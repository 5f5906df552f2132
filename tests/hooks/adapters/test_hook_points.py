"""What the hook points of a bridged encoder hold, and what the product makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

import tl_tangent as tt
from tests.hooks import helpers
from tests.hooks.adapters import builders
from tests.hooks.adapters.builders import N_LAYERS, PRE_NORM, SETTINGS

FAMILIES = list(SETTINGS)
STREAM = ["hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post"]
PADDINGS = ["none", "right", "left"]


@pytest.fixture(scope="module")
def bridges():
    return {family: builders.pair(family).bridge for family in FAMILIES}


def assert_same(found: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def cached(bridge, padding: str = "right"):
    with torch.no_grad():
        return bridge.run_with_cache(**builders.padded(padding))[1]


# The hook points of the model -----------------------------------------------------------------


@pytest.mark.parametrize("family", PRE_NORM)
@pytest.mark.parametrize("padding", PADDINGS)
def test_a_block_adds_two_writes_to_its_stream(bridges, family, padding):
    cache = cached(bridges[family], padding)
    for layer in range(N_LAYERS):
        at = f"blocks.{layer}."
        pre, attn, mlp, post = (cache[at + name] for name in STREAM)
        assert_same(cache[at + "hook_resid_mid"], pre + attn)
        assert_same(post, pre + attn + mlp)
        if layer:
            assert torch.equal(pre, cache[f"blocks.{layer - 1}.hook_resid_post"])


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_read_attn_hook_in_and_write_what_they_gather(bridges, family):
    bridge = bridges[family]
    cache = cached(bridge)
    for layer, block in enumerate(bridge.blocks):
        at, attn = f"blocks.{layer}.attn.", block.attn
        read = cache[at + "hook_in"]
        for name in ("q", "k", "v"):
            weight = getattr(attn, f"W_{name.upper()}")
            made = torch.einsum("bpd,hde->bphe", read, weight) + getattr(attn, f"b_{name.upper()}")
            assert_same(cache[at + f"hook_{name}"], made)
        value, pattern = cache[at + "hook_v"], cache[at + "hook_pattern"]
        value = value.repeat_interleave(pattern.shape[1] // value.shape[2], 2)
        gathered = torch.einsum("bhqk,bkhe->bqhe", pattern, value)
        assert_same(cache[at + "hook_z"], gathered)
        written = torch.einsum("bphe,hed->bpd", gathered, attn.W_O) + attn.b_O
        assert_same(cache[at + "o.hook_out"], written)
        if family in PRE_NORM:
            assert_same(cache[f"blocks.{layer}.hook_attn_out"], written)


@pytest.mark.parametrize("family", PRE_NORM)
def test_scores_are_products_of_what_was_rotated(bridges, family):
    cache = cached(bridges[family], "none")
    for layer in range(N_LAYERS):
        at = f"blocks.{layer}.attn."
        query, key = cache[at + "hook_rot_q"], cache[at + "hook_rot_k"]
        key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
        made = torch.einsum("bqhe,bkhe->bhqk", query, key) * query.shape[-1] ** -0.5
        seen = cache[at + "hook_pattern"] > 0
        assert_same(cache[at + "hook_attn_scores"][seen], made[seen])
        assert not torch.equal(query, cache[at + "hook_q"])


def test_block_0_of_modernbert_reads_the_stream_itself(bridges):
    cache = cached(bridges["ModernBert"])
    assert torch.equal(cache["blocks.0.attn.hook_in"], cache["blocks.0.hook_resid_pre"])
    assert not torch.equal(cache["blocks.1.attn.hook_in"], cache["blocks.1.hook_resid_pre"])
    assert torch.equal(cache["hook_embed"], cache["blocks.0.hook_resid_pre"])  # normed already


@pytest.mark.parametrize(("family", "act"), [("EuroBert", silu), ("ModernBert", gelu)])
def test_the_mlp_gates_what_mlp_hook_in_gives(bridges, family, act):
    bridge = bridges[family]
    cache = cached(bridge)
    for layer, block in enumerate(bridge.blocks):
        at, mlp = f"blocks.{layer}.mlp.", block.mlp
        read = cache[at + "hook_in"]
        assert_same(cache[at + "hook_pre"], read @ mlp.W_gate + mlp.b_gate)
        assert_same(cache[at + "hook_pre_linear"], read @ mlp.W_in + mlp.b_in)
        post = act(cache[at + "hook_pre"]) * cache[at + "hook_pre_linear"]
        assert_same(cache[at + "hook_post"], post)
        assert_same(cache[f"blocks.{layer}.hook_mlp_out"], post @ mlp.W_out + mlp.b_out)


@pytest.mark.parametrize("family", PRE_NORM)
def test_an_edited_pattern_is_what_the_heads_gather_by(bridges, family):
    seen = {}

    def to_itself(pattern, hook):
        return torch.eye(pattern.shape[-1], dtype=pattern.dtype).expand_as(pattern)

    hooks = [("blocks.1.attn.hook_pattern", to_itself)]
    hooks += [
        (f"blocks.1.attn.hook_{name}", lambda x, hook, name=name: seen.update({name: x}))
        for name in ("v", "z")
    ]
    with torch.no_grad():
        bridges[family].run_with_hooks(builders.tokens(), fwd_hooks=hooks)
    repeats = seen["z"].shape[2] // seen["v"].shape[2]
    assert_same(seen["z"], seen["v"].repeat_interleave(repeats, 2))


# Tangent hook points --------------------------------------------------------------------------


def stream_sites(bridge) -> list[str]:
    """Every site that the model has, but the mid stream of post-norm blocks, which is refused."""
    sites = helpers.tangent_sites(bridge)
    mid = bridge.cfg.architecture.removesuffix("ForMaskedLM") in PRE_NORM
    return [site for site in sites if mid or not site.endswith("resid_mid")]


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_add_up_at_every_site_and_leave_the_model_alone(bridges, family):
    bridge, batch = bridges[family], builders.padded("left")
    sites = stream_sites(bridge)
    assert {f"blocks.*.{name}" for name in STREAM} <= set(sites)
    subspaces = tt.fit_subspaces(bridge, [batch], sites, rank=3)
    with torch.no_grad():
        plain = bridge(**batch)
        with tt.tangents(bridge, subspaces):
            logits, cache = bridge.run_with_cache(**batch)
    assert torch.equal(logits, plain)
    for site, subspace in subspaces.items():
        tangent, normal = cache[f"{site}.hook_tangent"], cache[f"{site}.hook_normal"]
        assert_same(subspace.mean + tangent + normal, cache[site])
        assert_same(tangent, subspace.tangent(cache[site]))
        assert tangent.abs().max() > 0.01


@pytest.mark.parametrize("family", PRE_NORM)
def test_an_ablation_of_the_mid_stream_reaches_both_branches(bridges, family):
    bridge, batch = bridges[family], builders.padded("right")
    site = "blocks.1.hook_resid_mid"
    subspaces = tt.fit_subspaces(bridge, [batch], site, rank=3, positions="all")
    with torch.no_grad(), tt.ablating(bridge, subspaces, part="tangent"):
        _, cache = bridge.run_with_cache(**batch)
    left = cache["blocks.1.hook_resid_post"] - cache["blocks.1.hook_mlp_out"]
    real = batch["attention_mask"].bool()
    assert_same(subspaces[site].tangent(left[real]), torch.zeros(int(real.sum()), 32).double())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_fit_ignores_padding(bridges, family, side):
    bridge, batch = bridges[family], builders.padded(side)
    real = batch["attention_mask"].bool()
    rows = [row[mask][None] for row, mask in zip(batch["input"], real, strict=True)]
    sites = [f"blocks.*.{name}" for name in STREAM]
    padded, alone = (tt.collect(bridge, given, sites) for given in ([batch], rows))
    assert padded.keys() == alone.keys() and len(padded) > 3 * N_LAYERS
    for site, fitter in padded.items():
        assert fitter.n_rows == int(real.sum()) - 2  # without the first token of each row
        # the angles of other positions are rounded otherwise, and to float32
        assert_same(fitter.mean, alone[site].mean, atol=1e-5)
        assert_same(fitter.covariance(), alone[site].covariance(), atol=1e-5)


@pytest.mark.parametrize("family", PRE_NORM)
@pytest.mark.parametrize("padding", PADDINGS)
def test_scores_split_into_terms_that_add_up(bridges, family, padding):
    bridge, batch = bridges[family], builders.padded(padding)
    given = batch.pop("input")
    for sites in ("blocks.*.attn.hook_in", "blocks.*.hook_resid_pre"):
        subspaces = tt.fit_subspaces(bridge, [{"input": given, **batch}], sites, rank=3)
        for layer in range(N_LAYERS):
            split = tt.split_attention_scores(bridge, given, layer, subspaces, **batch)
            assert split.error < 1e-6  # float32 in ModernBERT's rotations
