"""Names, patterns, predicates, and what is said of a site that is not there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tl_tangent as tt
from tests import families
from tests.hooks import helpers
from tl_tangent.hooks.sites import find_sites, in_layers

ANY = helpers.MODELS[0]


def names(model, sites):
    return [site.name for site in find_sites(model, sites)]


def test_a_pattern_gives_layers_by_number():
    """A bridge sorts its names as text, 10 in front of 2."""
    known = {f"blocks.{i}.hook_x": None for i in (0, 10, 2)}
    known = {"hook_embed": None, **known, "ln_final.hook_normalized": None}
    found = [site.name for site in find_sites(nn.Module(), "**", known)]
    layers = [f"blocks.{i}.hook_x" for i in (0, 2, 10)]
    assert found == ["hook_embed", *layers, "ln_final.hook_normalized"]


def test_patterns_match_whole_names():
    model = helpers.build(ANY)
    layers = [f"blocks.{layer}.hook_resid_post" for layer in range(families.N_LAYERS)]
    assert names(model, "blocks.*.hook_resid_post") == layers
    assert names(model, [layers[1], "blocks.*.hook_resid_post"]) == [layers[1], layers[0]]
    assert names(model, lambda name: name == layers[0]) == [layers[0]]
    assert set(names(model, "**.hook_resid_post")) == set(layers)
    with pytest.raises(tt.TangentKeyError):
        names(model, "blocks.*.hook_resid")


def test_a_part_is_not_a_site_and_hook_normalized_is_not_a_part():
    model = helpers.build(ANY)
    tokens = families.tiny_tokens(model)
    site = "blocks.0.ln1.hook_normalized"
    tt.attach(model, helpers.random_subspaces(model, tokens, [site]))
    assert names(model, "**.hook_normalized")
    assert not [n for n in names(model, "**") if n.endswith((".hook_normal", ".hook_tangent"))]
    with pytest.raises(tt.TangentKeyError, match="is a part"):
        names(model, f"{site}.hook_normal")
    tt.detach(model)


@pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
def test_every_class_has_what_attention_and_the_mlp_read(spec):
    """attn.hook_in is the norm's output after the affine part: what W_Q itself multiplies."""
    model = helpers.build(spec)
    tokens = families.tiny_tokens(model)
    site = "blocks.1.attn.hook_in"
    seen = {}
    subspaces = helpers.random_subspaces(model, tokens, [site])
    with tt.tangents(model, subspaces):
        hooks = [(site, lambda x, hook: seen.update(x=x.detach().clone()))]
        _, cache = model.run_with_cache(tokens)
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    weight, bias = _query_map(model)
    expected = torch.einsum("bpd,hde->bphe", seen["x"], weight) + bias
    query = cache["blocks.1.attn.hook_q"]
    if query.shape == expected.shape and _plain_query(spec):
        torch.testing.assert_close(query, expected, atol=2e-5, rtol=2e-5)
    assert cache[f"{site}.hook_tangent"].shape == seen["x"].shape


def _query_map(model):
    attn = model.blocks[1].attn
    weight, bias = attn.W_Q.detach(), getattr(attn, "b_Q", None)
    weight = weight.reshape(families.N_HEADS, -1, families.D_HEAD)
    bias = torch.zeros(families.N_HEADS, families.D_HEAD) if bias is None else bias.detach()
    return weight, bias.reshape(families.N_HEADS, families.D_HEAD)


def _plain_query(spec):
    return spec[0] == "hooked" and spec[1] != "postnorm"  # OLMo 2 normalises q after the product


def test_a_missing_site_names_the_nearest():
    model = helpers.build(ANY)
    with pytest.raises(tt.TangentKeyError, match=r"blocks\.0\.hook_resid_post"):
        find_sites(model, "blocks.0.hook_resid_psot")
    with pytest.raises(KeyError):
        find_sites(model, "blocks.7.hook_resid_post")
    with pytest.raises(tt.TangentKeyError, match="matches no hook point"):
        find_sites(model, lambda name: False)
    with pytest.raises(tt.TangentKeyError, match="activation vectors"):
        find_sites(model, "blocks.0.attn.hook_pattern")


@pytest.mark.parametrize(
    "spec", [s for s in helpers.MODELS if s[1] in ("rotary_parallel", "gpt_neox")], ids=str
)
def test_parallel_blocks_say_why_they_have_no_resid_mid(spec):
    with pytest.raises(tt.TangentKeyError, match="parallel"):
        find_sites(helpers.build(spec), "blocks.0.hook_resid_mid")


def test_a_module_without_hook_points_is_refused():
    with pytest.raises(tt.TangentValueError, match="no TransformerLens hook points"):
        tt.attach(torch.nn.Linear(2, 2), tt.TangentSubspace(torch.eye(2)[:, :1], site="x"))


def test_layers_select_and_refuse():
    model = helpers.build(ANY)
    sites = find_sites(model, ["hook_embed", "blocks.*.hook_resid_post"])
    assert [s.name for s in in_layers(sites, -1, 2)] == ["blocks.1.hook_resid_post"]
    with pytest.raises(tt.TangentValueError, match="none of the sites"):
        in_layers(sites[:1], 0, 2)


def test_a_subspace_of_another_width_or_model_is_refused():
    model = helpers.build(ANY)
    site = "blocks.0.hook_resid_post"
    narrow = tt.TangentSubspace(torch.eye(8)[:, :2], site=site)
    with pytest.raises(tt.TangentValueError, match="8 wide and the site of this model 32"):
        tt.attach(model, narrow)
    foreign = tt.TangentSubspace(torch.eye(32)[:, :2], site=site, model="another")
    name, model.cfg.model_name = model.cfg.model_name, "this one"
    try:
        with pytest.raises(tt.TangentValueError, match="'another'"):
            tt.attach(model, foreign)
        tt.attach(model, foreign, any_model=True)
        tt.detach(model)
    finally:
        model.cfg.model_name = name
    heads = tt.TangentSubspace(
        torch.eye(8)[None, :, :2].repeat(3, 1, 1), site="blocks.0.attn.hook_z"
    )
    with pytest.raises(tt.TangentValueError, match="3 heads and the site 4"):
        tt.attach(model, heads)


def test_a_failed_attach_changes_nothing():
    model = helpers.build(ANY)
    before = set(model.__dict__), {n: type(m) for n, m in model.named_modules()}
    good = tt.TangentSubspace(torch.eye(32)[:, :2], site="blocks.0.attn.hook_in")
    bad = tt.TangentSubspace(torch.eye(32)[:, :2], site="blocks.0.nowhere")
    with pytest.raises(tt.TangentKeyError):
        tt.attach(model, [good, bad])
    assert before == (set(model.__dict__), {n: type(m) for n, m in model.named_modules()})
