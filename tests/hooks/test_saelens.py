"""Beside SAELens: an SAE and tangent hook points in one model, in either order."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers

sae_lens = pytest.importorskip(
    "sae_lens", reason="SAELens is not installed (needs TransformerLens 3)"
)

SITE, OTHER = "blocks.0.hook_resid_post", "blocks.1.hook_mlp_out"


@pytest.fixture
def model():
    return families.hooked_transformer("learned", model_class=sae_lens.HookedSAETransformer)


@pytest.fixture
def sae():
    cfg = sae_lens.StandardSAEConfig(
        d_in=families.D_MODEL, d_sae=64, metadata=sae_lens.saes.sae.SAEMetadata(hook_name=SITE)
    )
    torch.manual_seed(0)
    return sae_lens.StandardSAE(cfg)


def test_at_an_saes_site_attaching_names_the_sae(model, sae):
    tokens = families.tiny_tokens(model)
    subspaces = helpers.random_subspaces(model, tokens, [SITE])
    model.add_sae(sae)
    with pytest.raises(tt.TangentKeyError, match="StandardSAE"):
        tt.attach(model, subspaces)
    model.reset_saes()
    tt.attach(model, subspaces)
    tt.detach(model)


@pytest.mark.parametrize("first", ["sae", "tangents"])
def test_at_other_sites_both_work(model, sae, first):
    tokens = families.tiny_tokens(model)
    subspaces = helpers.random_subspaces(model, tokens, [OTHER])
    plain = model(tokens)
    if first == "sae":
        model.add_sae(sae)
        tt.attach(model, subspaces)
    else:
        tt.attach(model, subspaces)
        model.add_sae(sae)
    with_sae, cache = model.run_with_cache(tokens)
    assert not torch.allclose(with_sae, plain)
    assert f"{SITE}.hook_sae_acts_post" in cache and f"{OTHER}.hook_tangent" in cache
    with tt.ablating(model):
        ablated = model(tokens)
    assert not torch.allclose(ablated, with_sae)
    model.reset_saes()
    _, cache = model.run_with_cache(tokens)
    assert f"{OTHER}.hook_tangent" in cache
    tt.detach(model)
    assert torch.equal(model(tokens), plain)


def test_an_sae_put_over_an_ablated_site_is_noticed(model, sae):
    tokens = families.tiny_tokens(model)
    subspaces = helpers.random_subspaces(model, tokens, [SITE])
    with pytest.raises(tt.TangentRuntimeError, match="replaced in the model by a _SAEWrapper"):
        with tt.ablating(model, subspaces):
            model.add_sae(sae)
            model(tokens)


def test_the_mlp_input_that_saelens_makes_is_used(model):
    tokens = families.tiny_tokens(model)
    site = "blocks.0.mlp.hook_in"
    plain = model(tokens)
    tt.attach(model, helpers.random_subspaces(model, tokens, [site]))
    _, cache = model.run_with_cache(tokens)
    assert f"{site}.hook_tangent" in cache
    tt.detach(model)
    assert site in model.hook_dict  # not ours to remove
    assert torch.equal(model(tokens), plain)
