"""A splice that nobody edits leaves the model bit-identical: forward, backward and parameters."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers

PARTS = ("hook_coords", "hook_tangent", "hook_normal")
# Where Q, K, V (or gate and up) read the residual stream itself, a hook point between them and the
# skip path regroups the sum of their gradients, and autograd's sums are not associative.
REGROUPS = {
    "bridge-olmo2": "attn.hook_in",
    "bridge-olmo2-compat": "attn.hook_in",
    "hooked-postnorm": "mlp.hook_in",
}


def is_part(name: str) -> bool:
    return name.endswith(PARTS)


def spliceable(model, tokens, spec_id):
    sites = helpers.tangent_sites(model)
    if "bert" in spec_id:  # post-norm: there is no resid_mid to speak of
        sites = [site for site in sites if not site.endswith("resid_mid")]
    return helpers.random_subspaces(model, tokens, sites)


@pytest.fixture(params=helpers.MODELS, ids=helpers.IDS)
def case(request):
    model = helpers.build(request.param)
    tokens = families.tiny_tokens(model)
    spec_id = request.node.callspec.id
    return model, tokens, spliceable(model, tokens, spec_id), spec_id


def test_inactive_splice_is_bit_identical(case):
    model, tokens, subspaces, _ = case
    logits, gradients = model(tokens), helpers.parameter_gradients(model, tokens)
    tt.attach(model, subspaces)
    assert torch.equal(model(tokens), logits)
    spliced = helpers.parameter_gradients(model, tokens)
    assert all(torch.equal(spliced[name], gradients[name]) for name in gradients)


def test_reading_every_part_is_bit_identical(case):
    model, tokens, subspaces, _ = case
    logits, gradients = model(tokens), helpers.parameter_gradients(model, tokens)
    tt.attach(model, subspaces)
    read, cache = model.run_with_cache(tokens, names_filter=is_part)
    assert torch.equal(read, logits)
    parts = {name for name in model.hook_dict if is_part(name)}
    assert parts <= set(cache.keys())
    with model.hooks(fwd_hooks=[(is_part, lambda x, hook: None)]):
        spliced = helpers.parameter_gradients(model, tokens)
    assert all(torch.equal(spliced[name], gradients[name]) for name in gradients)


def test_reading_every_gradient_is_bit_identical(case):
    model, tokens, subspaces, spec_id = case
    regrouped = REGROUPS.get(spec_id)
    if regrouped:
        subspaces = {k: v for k, v in subspaces.items() if not k.endswith(regrouped)}
    gradients = helpers.parameter_gradients(model, tokens)
    tt.attach(model, subspaces)
    seen = set()
    read = [(is_part, lambda x, hook: None)]
    back = [(is_part, lambda grad, hook: seen.add(hook.name))]
    with model.hooks(fwd_hooks=read, bwd_hooks=back):
        spliced = helpers.parameter_gradients(model, tokens)
    assert len(seen) == 3 * len(subspaces)  # every part of every site got its gradient
    assert all(torch.equal(spliced[name], gradients[name]) for name in gradients)


def test_regrouping_is_the_hosts_own(case):
    """At the exceptions, the gradients equal those of the same model with S itself hooked."""
    model, tokens, subspaces, spec_id = case
    if spec_id not in REGROUPS:
        pytest.skip("nothing reads the residual stream through this hook point")
    sites = [name for name in subspaces if name.endswith(REGROUPS[spec_id])]
    tt.attach(model, subspaces, sites)
    with model.hooks(bwd_hooks=[(name, lambda grad, hook: None) for name in sites]):
        hooked = helpers.parameter_gradients(model, tokens)
    with model.hooks(bwd_hooks=[(is_part, lambda grad, hook: None)]):
        spliced = helpers.parameter_gradients(model, tokens)
    assert all(torch.equal(spliced[name], hooked[name]) for name in hooked)


def test_incl_bwd_equals_the_same_call_on_the_unspliced_model():
    model = families.bridge("gpt2") if not families.HOOKED_FAMILIES else None
    model = model or families.hooked_transformer("learned")
    tokens = families.tiny_tokens(model)
    whole = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_mid"]
    options = {"incl_bwd": True, "return_type": "loss"}
    loss, plain = model.run_with_cache(tokens, names_filter=whole, **options)
    subspaces = helpers.random_subspaces(model, tokens, whole)
    names = whole + [f"{site}.{part}" for site in whole for part in PARTS]
    with tt.tangents(model, subspaces):
        spliced_loss, spliced = model.run_with_cache(tokens, names_filter=names, **options)
    assert torch.equal(spliced_loss, loss)
    for name in [*whole, *(f"{site}_grad" for site in whole)]:
        assert torch.equal(spliced[name], plain[name])


def test_detach_leaves_no_trace(case):
    model, tokens, subspaces, _ = case
    names, state, keys = set(model.hook_dict), set(model.state_dict()), set(model.__dict__)
    classes = {name: type(module) for name, module in model.named_modules()}
    tt.attach(model, subspaces)
    assert set(model.state_dict()) == state
    model(tokens)
    tt.detach(model)
    assert set(model.hook_dict) == names
    assert set(model.__dict__) == keys
    assert {name: type(module) for name, module in model.named_modules()} == classes
