"""Hooks, flags and earlier attachments after contexts, exceptions, resets and copies."""

from __future__ import annotations

import copy

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers

SITE = "blocks.0.hook_resid_post"
EVERY = pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)


def setup(spec=None, sites=(SITE,), **options):
    model = helpers.build(spec or helpers.MODELS[0])
    tokens = families.tiny_tokens(model)
    return model, tokens, helpers.random_subspaces(model, tokens, list(sites), **options)


def hook_counts(model):
    return {name: len(p.fwd_hooks) + len(p.bwd_hooks) for name, p in model.hook_dict.items()}


def trace(model):
    """Everything that a context has to put back."""
    classes = {name: type(module) for name, module in model.named_modules()}
    flags = {flag: getattr(model.cfg, flag) for flag in ("use_attn_result", "use_hook_mlp_in")}
    return hook_counts(model), classes, flags, set(model.__dict__)


@EVERY
def test_an_exception_at_any_site_leaves_nothing(spec):
    sites = helpers.tangent_sites(helpers.build(spec))[:6]
    if "bert" in spec[1]:  # post-norm: there is no resid_mid to speak of
        sites = [site for site in sites if not site.endswith("resid_mid")]
    model, tokens, subspaces = setup(spec, sites)
    before, plain = trace(model), model(tokens)

    def fail(x, hook):
        raise RuntimeError("mid-forward")

    for site in subspaces:
        with pytest.raises(RuntimeError, match="mid-forward"):
            with tt.tangents(model, subspaces):
                model.run_with_hooks(tokens, fwd_hooks=[(f"{site}.hook_tangent", fail)])
        with pytest.raises(RuntimeError, match="mid-forward"):
            with tt.ablating(model, subspaces):
                model.run_with_hooks(tokens, fwd_hooks=[(site, fail)])
        assert trace(model) == before, site
    assert torch.equal(model(tokens), plain)


def test_user_hooks_survive_inside_and_after():
    model, tokens, subspaces = setup()
    fired = []
    model.add_hook(SITE, lambda x, hook: fired.append(x.clone()))
    with tt.ablating(model, subspaces):
        model(tokens)
        with tt.tangents(model, subspaces):
            model(tokens)
    model(tokens)
    assert len(fired) == 3
    assert not torch.equal(fired[0], fired[2])  # inside, it saw what the ablation left
    model.reset_hooks()


def test_run_with_cache_inside_an_ablation_caches_what_was_ablated():
    model, tokens, subspaces = setup()
    _, plain = model.run_with_cache(tokens)
    with tt.ablating(model, subspaces):
        _, cache = model.run_with_cache(tokens)
    assert subspaces[SITE].coordinates(cache[SITE])[:, 1:].abs().max() < 1e-5
    later = "blocks.1.hook_resid_post"
    assert not torch.allclose(cache[later], plain[later])


def test_a_context_restores_what_was_attached_before():
    model, tokens, subspaces = setup(sites=[SITE, "blocks.1.hook_resid_post"])
    other = helpers.random_subspaces(model, tokens, [SITE], rank=2, seed=9)
    tt.attach(model, subspaces)
    seen = []
    model.add_hook(f"{SITE}.hook_coords", lambda a, hook: seen.append(a.shape[-1]))
    with tt.tangents(model, other):
        assert tt.attached(model)[SITE] is other[SITE]
        _, cache = model.run_with_cache(tokens)
        assert cache[f"{SITE}.hook_coords"].shape[-1] == 2
    assert tt.attached(model)[SITE] is subspaces[SITE]
    _, cache = model.run_with_cache(tokens)
    assert cache[f"{SITE}.hook_coords"].shape[-1] == 3
    assert seen == [3, 3]  # the outer attachment's hook acted on the outer subspace, both times
    tt.detach(model)
    assert tt.attached(model) == {}


def test_the_inner_attachment_sees_what_the_outer_lets_through():
    model, tokens, subspaces = setup()
    tt.attach(model, subspaces)
    model.add_hook(f"{SITE}.hook_tangent", lambda v, hook: v * 0)
    with tt.tangents(model, subspaces):
        _, cache = model.run_with_cache(tokens)
    assert cache[f"{SITE}.hook_coords"].abs().max() < 1e-5
    tt.detach(model)


def test_what_is_attached_inside_a_context_goes_with_it():
    model, _, subspaces = setup()
    with tt.tangents(model, subspaces):
        tt.attach(model, subspaces)
        tt.detach(model)
        assert tt.attached(model) == {}
    assert tt.attached(model) == {}


def test_detach_names_what_is_attached():
    model, _, subspaces = setup()
    tt.attach(model, subspaces)
    with pytest.raises(tt.TangentKeyError, match=SITE):
        tt.detach(model, "blocks.1.hook_resid_post")
    assert tt.attached(model)
    tt.detach(model, SITE)
    assert not tt.attached(model)


@pytest.mark.parametrize("permanent", [False, True])
def test_reset_hooks_clears_the_parts_hooks_and_keeps_the_splice(permanent):
    model, tokens, subspaces = setup()
    plain = model(tokens)
    tt.attach(model, subspaces)
    part = f"{SITE}.hook_tangent"
    model.hook_dict[part].add_hook(lambda v, hook: v * 0, is_permanent=permanent)
    assert not torch.equal(model(tokens), plain)
    model.reset_hooks(including_permanent=permanent)
    assert torch.equal(model(tokens), plain)
    _, cache = model.run_with_cache(tokens)
    assert part in cache
    tt.detach(model)


@pytest.mark.parametrize("spec", [helpers.MODELS[0], helpers.MODELS[-1]], ids=str)
@torch.no_grad()  # a bridge keeps its last attention pattern, and graph tensors don't deepcopy
def test_deepcopy_carries_a_splice_of_its_own(spec):
    sites = [SITE, "blocks.1.attn.hook_in"]
    model, tokens, subspaces = setup(spec, sites)
    plain = model(tokens)
    tt.attach(model, subspaces)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens), plain)
    for site in sites:
        twin.hook_dict[f"{site}.hook_tangent"].add_hook(lambda v, hook: v * 0)
        assert not torch.equal(twin(tokens), plain), site
        twin.reset_hooks()
    with tt.ablating(twin):
        assert not torch.equal(twin(tokens), plain)
        assert torch.equal(model(tokens), plain)
    tt.detach(twin)
    assert tt.attached(model) and not tt.attached(twin)
    tt.detach(model)
    assert torch.equal(twin(tokens), plain)


@torch.no_grad()
def test_deepcopy_inside_an_ablation_is_ablated_too():
    model, tokens, subspaces = setup()
    with tt.ablating(model, subspaces):
        expected = model(tokens)
        twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens), expected)
    assert not torch.equal(model(tokens), expected)


@torch.no_grad()
def test_to_moves_the_model_and_the_splice_follows():
    model, tokens, subspaces = setup()
    model = copy.deepcopy(model)
    tt.attach(model, subspaces)
    model.to(torch.float64)
    _, cache = model.run_with_cache(tokens)
    assert cache[f"{SITE}.hook_coords"].dtype == torch.float64


@pytest.mark.parametrize(
    "leaf",
    ["attn.hook_result", "hook_mlp_in", "hook_q_input", "hook_k_input", "hook_attn_in"],
)
@EVERY
def test_gated_sites_switch_their_flag_on_and_off(spec, leaf):
    site = f"blocks.0.{leaf}"
    model = helpers.build(spec)
    if not helpers.has_site(model, site):
        pytest.skip("no such hook point")
    flag = tt.hooks.compat.GATED_HOOKS[leaf.rpartition(".")[2]]
    tokens = families.tiny_tokens(model)
    setter = getattr(model, f"set_{flag}")
    try:
        setter(True)
        reference = model(tokens)
        setter(False)
    except (NotImplementedError, AssertionError):
        with pytest.raises(tt.TangentValueError, match=f"needs {flag}"):
            helpers.random_subspaces(model, tokens, [site])
        return
    if not _reached(model, tokens, site, setter):
        with pytest.raises(tt.TangentRuntimeError, match="never fired"):
            tt.fit_subspaces(model, tokens, site, 2)
        return
    before = trace(model)
    subspaces = helpers.random_subspaces(model, tokens, [site])
    assert trace(model) == before
    tt.attach(model, subspaces)
    assert getattr(model.cfg, flag)
    assert torch.equal(model(tokens), reference)
    _, cache = model.run_with_cache(tokens, names_filter=lambda n: n.startswith(site))
    assert f"{site}.hook_tangent" in cache
    with tt.ablating(model, positions="all"):
        assert not torch.equal(model(tokens), reference)
    tt.detach(model)
    assert trace(model) == before


def _reached(model, tokens, site, setter):
    """Whether the host fires this hook point with its flag on (some bridges list it in vain)."""
    seen = []
    setter(True)
    model.run_with_hooks(tokens, fwd_hooks=[(site, lambda x, hook: seen.append(1))])
    setter(False)
    return bool(seen)


def test_a_flag_goes_back_to_what_the_user_last_set():
    model, _, subspaces = setup(sites=["blocks.0.attn.hook_result"])
    for wish in (True, False):
        tt.attach(model, subspaces)
        model.set_use_attn_result(wish)
        assert model.cfg.use_attn_result  # still needed
        tt.detach(model)
        assert model.cfg.use_attn_result is wish
    assert "set_use_attn_result" not in model.__dict__


def test_ten_nested_contexts_unwind():
    model, tokens, subspaces = setup()
    before, plain = trace(model), model(tokens)
    from contextlib import ExitStack

    with ExitStack() as stack:
        for i in range(10):
            options = {"part": ("tangent", "normal")[i % 2], "mode": "scale", "factor": 0.9}
            stack.enter_context(tt.ablating(model, subspaces, **options))
            stack.enter_context(tt.tangents(model, subspaces))
        assert not torch.allclose(model(tokens), plain)
    assert trace(model) == before


def test_repr_lists_what_is_attached():
    _, _, subspaces = setup()
    model = families.bridge("gpt2") if not families.HOOKED_FAMILIES else None
    model = model or families.hooked_transformer("learned")
    if not hasattr(model, "attach"):
        model.__class__ = (
            tt.TangentHookedTransformer if families.HOOKED_FAMILIES else tt.TangentBridge
        )
    assert SITE not in model.extra_repr()
    model.attach(subspaces)
    assert SITE in model.extra_repr()
    model.detach()


@pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
def test_parts_have_every_name_of_their_site(spec):
    model, tokens, subspaces = setup(spec)
    tt.attach(model, subspaces)
    aliases = [n for n, p in model.hook_dict.items() if p is model.hook_dict[SITE]]
    for alias in aliases:
        for part in ("hook_coords", "hook_tangent", "hook_normal"):
            assert model.hook_dict[f"{alias}.{part}"] is model.hook_dict[f"{SITE}.{part}"]
            plain = model(tokens)
            edited = model.run_with_hooks(
                tokens, fwd_hooks=[(f"{alias}.{part}", lambda x, hook: x * 0)]
            )
            assert not torch.equal(plain, edited), (alias, part)
    tt.detach(model)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "gemma2", "bloom"])
def test_names_survive_a_late_compatibility_mode(name):
    model = families.bridge(name)
    tokens = families.tiny_tokens(model)
    sites = [SITE, "blocks.1.attn.hook_q"]
    tt.attach(model, helpers.random_subspaces(model, tokens, sites))
    model.enable_compatibility_mode(disable_warnings=True)
    processed = model(tokens)
    for site in sites:
        for part in ("hook_coords", "hook_tangent", "hook_normal"):
            _, cache = model.run_with_cache(tokens, names_filter=[f"{site}.{part}"])
            assert f"{site}.{part}" in cache
        edit = [(f"{site}.hook_tangent", lambda v, hook: v * 0)]
        assert not torch.equal(model.run_with_hooks(tokens, fwd_hooks=edit), processed)
    tt.detach(model)
    assert not [n for n in model.hook_dict if n.endswith("hook_tangent")]
    assert torch.equal(model(tokens), processed)


def test_two_names_of_one_point_are_one_attachment():
    model = helpers.build(("bridge", "gpt2", False))
    tokens = families.tiny_tokens(model)
    subspace = helpers.random_subspaces(model, tokens, [SITE])[SITE]
    with pytest.raises(tt.TangentValueError, match="two names of one hook point"):
        tt.attach(model, {SITE: subspace, "blocks.0.hook_out": subspace})
    assert len(tt.fit_subspaces(model, tokens, [SITE, "blocks.0.hook_out"], 2)) == 1


@pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
def test_pos_slice_takes_positions_of_every_part(spec):
    sites = [SITE, "blocks.0.attn.hook_q", "blocks.0.attn.hook_z"]
    model, tokens, subspaces = setup(spec, sites)
    tt.attach(model, subspaces)
    names = [f"{site}.{part}" for site in sites for part in ("hook_coords", "hook_tangent")]
    _, whole = model.run_with_cache(tokens, names_filter=names)
    _, sliced = model.run_with_cache(tokens, names_filter=names, pos_slice=(2, 5))
    for name in names:
        assert torch.equal(sliced[name], whole[name][:, 2:5]), name
    tt.detach(model)


def test_stop_at_layer_still_works():
    model, tokens, subspaces = setup()
    tt.attach(model, subspaces)
    with torch.no_grad():
        out, cache = model.run_with_cache(
            tokens, names_filter=f"{SITE}.hook_normal", stop_at_layer=1
        )
    assert out.shape == (*tokens.shape, 32) and f"{SITE}.hook_normal" in cache
    tt.detach(model)


def test_a_hook_point_replaced_behind_our_back_is_noticed():
    if not families.HOOKED_FAMILIES:
        pytest.skip("replacing a module is how SAELens works on HookedTransformer")
    _, tokens, subspaces = setup()
    model = families.hooked_transformer("learned")
    with pytest.raises(tt.TangentRuntimeError, match="replaced"):
        with tt.tangents(model, subspaces):
            model.blocks[0].hook_resid_post = torch.nn.Identity()
            model.setup()
            model(tokens)


def test_contexts_closed_out_of_order_leave_nothing():
    model, tokens, subspaces = setup()
    before, plain = trace(model), model(tokens)
    outer, inner = tt.ablating(model, subspaces), tt.ablating(model, subspaces, part="normal")
    outer.__enter__()
    inner.__enter__()
    model(tokens)
    outer.__exit__(None, None, None)
    assert not torch.equal(model(tokens), plain)  # the inner one is still open
    inner.__exit__(None, None, None)
    assert trace(model) == before and torch.equal(model(tokens), plain)


def test_detaching_inside_a_hook_is_safe():
    model, tokens, subspaces = setup()
    plain = model(tokens)
    tt.attach(model, subspaces)
    hooks = [(f"{SITE}.hook_tangent", lambda v, hook: tt.detach(model) and None)]
    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=hooks), plain)
    assert torch.equal(model(tokens), plain)


def test_a_context_that_fails_to_open_leaves_nothing():
    model, _, subspaces = setup(sites=["blocks.0.mlp.hook_in"], rank=20)
    before = trace(model)
    with pytest.raises(tt.TangentValueError), tt.ablating(model, subspaces, mode="random"):
        pass
    assert trace(model) == before


def test_the_run_with_twins_attach_for_one_call():
    model = tt.TangentBridge.wrap(families.bridge("gpt2"))
    tokens = families.tiny_tokens(model)
    subspaces = helpers.random_subspaces(model, tokens, [SITE])
    plain, part = model(tokens), f"{SITE}.hook_tangent"
    assert torch.equal(model.run_with_tangents(tokens, subspaces), plain)
    _, cache = model.run_with_cache_with_tangents(tokens, subspaces, names_filter=part)
    assert part in cache
    edit = [(part, lambda v, hook: v * 0)]
    edited = model.run_with_hooks_with_tangents(tokens, subspaces, fwd_hooks=edit)
    assert not torch.equal(edited, plain)
    assert tt.attached(model) == {} and torch.equal(model(tokens), plain)
