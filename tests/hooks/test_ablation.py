"""Ablations against hand-written projection hooks, mode by mode and family by family."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers

EVERY = pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
SITE = "blocks.0.hook_resid_post"


def setup(spec, sites=(SITE,), dtype=torch.float64, **options):
    model = helpers.build(spec, dtype=dtype)
    tokens = families.tiny_tokens(model)
    return model, tokens, helpers.random_subspaces(model, tokens, list(sites), **options)


def one(**options):
    return setup(helpers.MODELS[0], **options)


def hooked(model, tokens, site, fn):
    with torch.no_grad(), model.hooks(fwd_hooks=[(site, fn)]):
        return model(tokens)


def ablated(model, tokens, subspaces, **options):
    with torch.no_grad(), model_ablating(model, subspaces, **options):
        return model(tokens)


def model_ablating(model, subspaces, **options):
    return tt.ablating(model, subspaces, **options)


@EVERY
def test_zeroing_the_tangent_equals_a_projection_hook_at_every_kind_of_site(spec):
    model = helpers.build(spec, dtype=torch.float64)
    tokens = families.tiny_tokens(model)
    sites = [s.replace("*", "0") for s in helpers.tangent_sites(model) if "resid_mid" not in s]
    sites = [s for s in sites if s in model.hook_dict]
    subspaces = helpers.random_subspaces(model, tokens, sites)
    plain = model(tokens).detach()
    for site, subspace in subspaces.items():
        projector = helpers.projector(subspace)

        def project(x, hook, subspace=subspace, projector=projector):
            return x - (x - subspace.mean) @ projector

        expected = hooked(model, tokens, site, project)
        found = ablated(model, tokens, subspaces, sites=[site], positions="all")
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
        assert not torch.allclose(found, plain), site


@EVERY
def test_zeroing_at_resid_mid_reaches_the_skip_path(spec):
    """Expected from the blocks themselves: resid_mid is what W_mlp and the skip path both read."""
    model = helpers.build(spec, dtype=torch.float64)
    site = "blocks.0.hook_resid_mid"
    if site not in model.hook_dict or "bert" in spec[1]:
        pytest.skip("no resid_mid: parallel or post-norm blocks")
    tokens = families.tiny_tokens(model)
    subspaces = helpers.random_subspaces(model, tokens, [site])
    subspace, projector = subspaces[site], helpers.projector(subspaces[site])
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        mid = cache["blocks.0.hook_resid_pre"] + cache["blocks.0.hook_attn_out"]
        target = mid - (mid - subspace.mean) @ projector
        with tt.ablating(model, subspaces, positions="all"):
            _, edited = model.run_with_cache(tokens)
    torch.testing.assert_close(edited[site], target, atol=1e-9, rtol=0)
    stream = edited["blocks.0.hook_resid_post"] - edited["blocks.0.hook_mlp_out"]
    torch.testing.assert_close(stream, target, atol=1e-9, rtol=0)
    assert not torch.allclose(mid, target)


def test_resid_mid_of_a_post_norm_bridge_is_refused():
    model = helpers.build(("bridge", "bert", False))
    tokens = families.tiny_tokens(model)
    subspace = tt.TangentSubspace(torch.eye(32)[:, :2], site="blocks.0.hook_resid_mid")
    with pytest.raises(tt.TangentRuntimeError, match="resid_pre"), tt.ablating(model, subspace):
        model(tokens)


@EVERY
def test_part_hooks_and_ablation_agree_at_resid_mid_and_at_the_branch_inputs(spec):
    model = helpers.build(spec, dtype=torch.float64)
    wanted = ["blocks.1.hook_resid_mid", "blocks.1.attn.hook_in", "blocks.1.mlp.hook_in"]
    if "bert" in spec[1]:
        wanted = wanted[1:]
    sites = [s for s in wanted if helpers.has_site(model, s)]
    tokens = families.tiny_tokens(model)
    subspaces = helpers.random_subspaces(model, tokens, sites)
    for site in sites:
        found = ablated(model, tokens, subspaces, sites=[site], positions="all")
        zero = [(f"{site}.hook_coords", lambda a, hook: a * 0)]
        with torch.no_grad(), tt.tangents(model, subspaces), model.hooks(fwd_hooks=zero):
            expected = model(tokens)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
        assert not torch.allclose(found, model(tokens))


def test_modes_are_their_formulas():
    model, tokens, subspaces = one()
    subspace = subspaces[SITE]
    source = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def split(x):
        return subspace.split(x)

    def rebuilt(v, n):
        return subspace.mean + v + n

    def mean_v(x):
        v, n = split(x)
        return rebuilt(v.flatten(0, 1).mean(0).expand_as(v), n)

    def mean_n(x):
        v, n = split(x)
        return rebuilt(v, n.flatten(0, 1).mean(0).expand_as(n))

    random = subspaces.random_normals(1, 5)[0][SITE]
    cases = [
        ({}, lambda x: rebuilt(0, split(x)[1])),
        ({"part": "normal"}, lambda x: rebuilt(split(x)[0], 0)),
        ({"mode": "scale", "factor": 3.0}, lambda x: rebuilt(3 * split(x)[0], split(x)[1])),
        (
            {"mode": "scale", "factor": 0.5, "part": "normal"},
            lambda x: rebuilt(split(x)[0], 0.5 * split(x)[1]),
        ),
        ({"mode": "keep"}, lambda x: rebuilt(split(x)[0], 0)),
        ({"mode": "keep", "part": "normal"}, lambda x: rebuilt(0, split(x)[1])),
        ({"mode": "mean"}, mean_v),
        ({"mode": "mean", "part": "normal"}, mean_n),
        (
            {"mode": "swap", "source": {SITE: source}},
            lambda x: rebuilt(split(source)[0], split(x)[1]),
        ),
        (
            {"mode": "swap", "source": source, "part": "normal"},
            lambda x: rebuilt(split(x)[0], split(source)[1]),
        ),
        ({"mode": "random", "seed": 5}, lambda x: x - random.tangent(x)),
    ]
    plain = model(tokens).detach()
    for options, formula in cases:
        found = ablated(model, tokens, subspaces, positions="all", **options)
        expected = hooked(model, tokens, SITE, lambda x, hook, f=formula: f(x))
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9, msg=str(options))
        assert not torch.allclose(found, plain), options


@pytest.mark.parametrize("part", ["tangent", "normal"])
def test_resample_takes_parts_of_other_positions_and_is_seeded(part):
    model, tokens, subspaces = one()
    options = {"mode": "resample", "part": part, "positions": "not_first"}
    with torch.no_grad():
        _, plain = model.run_with_cache(tokens)
        with tt.ablating(model, subspaces, seed=1, **options):
            logits, cache = model.run_with_cache(tokens)
        with tt.ablating(model, subspaces, seed=1, **options):
            again = model(tokens)
        with tt.ablating(model, subspaces, seed=2, **options):
            other = model(tokens)
    assert torch.equal(logits, again) and not torch.allclose(logits, other)
    before, after = (subspaces[SITE].split(c[SITE])[part == "normal"] for c in (plain, cache))
    assert torch.equal(before[:, 0], after[:, 0])
    pool, drawn = before[:, 1:].flatten(0, 1), after[:, 1:].flatten(0, 1)
    distance = torch.cdist(drawn, pool)
    assert distance.min(dim=1).values.max() < 1e-6
    partner = distance.argmin(dim=1)
    assert (partner != torch.arange(len(pool))).all()  # never its own
    assert len(partner.unique()) == len(pool)  # a permutation


def test_positions_and_heads_restrict_the_edit():
    site = "blocks.1.attn.hook_z"
    model, tokens, subspaces = setup(helpers.MODELS[0], [site], per_head=True)
    with torch.no_grad():
        _, plain = model.run_with_cache(tokens, names_filter=site)
        with tt.ablating(model, subspaces, heads=[2], positions=[1, -1]):
            _, cache = model.run_with_cache(tokens, names_filter=site)
    changed = (cache[site] != plain[site]).any(dim=-1)
    expected = torch.zeros_like(changed)
    expected[:, [1, 8], 2] = True
    assert torch.equal(changed, expected)


def test_a_basis_a_head_is_each_heads_own_projection():
    site = "blocks.1.attn.hook_q"
    model, tokens, subspaces = setup(helpers.MODELS[0], [site], per_head=True)
    subspace = subspaces[site]
    projectors = subspace.basis @ subspace.basis.mT

    def by_hand(x, hook):
        return x - torch.einsum("bphd,hde->bphe", x - subspace.mean, projectors)

    expected = hooked(model, tokens, site, by_hand)
    found = ablated(model, tokens, subspaces, positions="all")
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    "spec",
    [s for s in helpers.MODELS if s[1] in ("rotary_gqa", "llama")],
    ids=[
        i
        for s, i in zip(helpers.MODELS, helpers.IDS, strict=True)
        if s[1] in ("rotary_gqa", "llama")
    ],
)
def test_grouped_key_value_heads_go_by_their_own_index(spec):
    model, tokens, subspaces = setup(spec, ["blocks.0.attn.hook_k"], per_head=True)
    assert subspaces["blocks.0.attn.hook_k"].heads == families.N_KV_HEADS
    assert not torch.allclose(ablated(model, tokens, subspaces, heads=1), model(tokens))
    with pytest.raises(tt.TangentKeyError, match=r"heads 0 to 1"):
        ablated(model, tokens, subspaces, heads=2)


def test_layers_restrict_and_wrong_ones_are_named():
    sites = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    model, tokens, subspaces = one(sites=sites)
    last = ablated(model, tokens, subspaces, layers=[-1])
    assert torch.equal(last, ablated(model, tokens, subspaces, sites=sites[1]))
    with pytest.raises(tt.TangentValueError, match="layers 0 to 1"):
        ablated(model, tokens, subspaces, layers=[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "zap"}, "not one of"),
        ({"part": "both"}, "not one of"),
        ({"mode": "scale"}, "needs a factor"),
        ({"factor": 2.0}, "needs a factor"),
        ({"mode": "swap"}, "needs a source"),
        ({"mode": "zero", "source": torch.zeros(1)}, "takes no source"),
        ({"mode": "random", "part": "normal"}, "part='tangent'"),
        ({"positions": "most"}, "not understood"),
        ({"positions": []}, "empty"),
        ({"positions": [0.5]}, "not understood"),
        ({"positions": torch.zeros(9)}, "boolean"),
        ({"positions": [99]}, "outside a sequence of 9"),
        ({"positions": torch.ones(4, dtype=torch.bool)}, "at least as long"),
        ({"mode": "swap", "source": torch.zeros(2, 3, 32)}, "same positions"),
    ],
)
def test_what_cannot_be_is_said(options, message):
    model, tokens, subspaces = one()
    with pytest.raises(tt.TangentValueError, match=message):
        ablated(model, tokens, subspaces, **options)
    assert tt.attached(model) == {} and "_tangent_attachments" not in model.__dict__


def test_mean_of_a_single_position_is_refused_not_a_silent_no_op():
    model, tokens, subspaces = one()
    with pytest.raises(tt.TangentRuntimeError, match="would change nothing"):
        ablated(model, tokens[:1], subspaces, mode="mean", positions=[3])


def test_an_ablation_that_never_fires_raises():
    model, tokens, subspaces = one(sites=["blocks.1.hook_resid_post"])
    with pytest.raises(tt.TangentRuntimeError, match="never fired"):
        with tt.ablating(model, subspaces):
            pass
    with pytest.raises(tt.TangentRuntimeError, match="never fired"):
        with tt.ablating(model, subspaces):
            model(tokens, stop_at_layer=1)


def test_a_subspace_brings_its_own_positions():
    model, tokens, _ = one()
    remembered = tt.fit_subspaces(model, tokens, SITE, 3, positions="not_first")
    assert torch.equal(
        ablated(model, tokens, remembered),
        ablated(model, tokens, remembered, positions="not_first"),
    )
    assert not torch.equal(
        ablated(model, tokens, remembered), ablated(model, tokens, remembered, positions="all")
    )
    mask = torch.ones(9, dtype=torch.bool)
    custom = tt.fit_subspaces(model, tokens, SITE, 3, positions=mask)
    with pytest.raises(tt.TangentValueError, match="mask of its own batch"):
        ablated(model, tokens, custom)


def test_bf16_keeps_its_dtype_and_loses_the_tangent_energy():
    model, tokens, subspaces = one(dtype=torch.bfloat16)
    with torch.no_grad():
        _, before = model.run_with_cache(tokens, names_filter=SITE)
        with tt.ablating(model, subspaces, positions="all"):
            _, after = model.run_with_cache(tokens, names_filter=SITE)
    energy = [subspaces[SITE].coordinates(c[SITE].float()).square().sum() for c in (before, after)]
    assert after[SITE].dtype == torch.bfloat16
    assert energy[1] < 1e-3 * energy[0]


def test_ablation_differentiates_like_the_projection():
    model, tokens, subspaces = one()
    subspace, projector = subspaces[SITE], helpers.projector(subspaces[SITE])
    hook = (SITE, lambda x, hook: x - (x - subspace.mean) @ projector)
    with model.hooks(fwd_hooks=[hook]):
        expected = helpers.parameter_gradients(model, tokens)
    with tt.ablating(model, subspaces, positions="all"):
        found = helpers.parameter_gradients(model, tokens)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-10, rtol=1e-10)


def test_batched_equals_one_by_one():
    model, tokens, subspaces = one()
    batched = ablated(model, tokens, subspaces, positions=[0, 2])
    single = torch.cat([ablated(model, row[None], subspaces, positions=[0, 2]) for row in tokens])
    torch.testing.assert_close(batched, single, atol=1e-10, rtol=1e-10)


def test_random_controls_differ_from_site_to_site():
    sites = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    model, tokens, subspaces = one(sites=sites)
    with torch.no_grad():
        _, plain = model.run_with_cache(tokens)
        removed = {}
        for site in sites:
            with tt.ablating(model, subspaces, sites=site, mode="random", positions="all"):
                _, cache = model.run_with_cache(tokens)
            removed[site] = (plain[site] - cache[site]).flatten(0, 1)
    spans = [torch.linalg.svd(removed[site])[2][:3].T for site in sites]
    assert (spans[0].T @ spans[1]).square().sum() / 3 < 0.5


@pytest.mark.parametrize(
    "options",
    [{"sites": []}, {"heads": []}, {"positions": slice(100, 200)}, {"layers": []}],
    ids=["sites", "heads", "positions", "layers"],
)
def test_an_ablation_of_nothing_is_an_error(options):
    model, tokens, subspaces = one()
    with pytest.raises(tt.TangentError):
        ablated(model, tokens, subspaces, **options)


def test_what_is_not_finite_stays_where_it_is():
    model, tokens, subspaces = one()

    def poison(x, hook):
        x = x.clone()
        x[:, 0, 0] = float("inf")
        return x

    hooks = [("blocks.0.hook_mlp_out", poison)]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        _, plain = model.run_with_cache(tokens)
        with tt.ablating(model, subspaces, positions="not_first"):
            _, cache = model.run_with_cache(tokens)
        with tt.tangents(model, subspaces):
            _, read = model.run_with_cache(tokens)
    finite = [c[SITE][:, 0].isfinite().sum() for c in (plain, cache, read)]
    assert finite[0] == finite[1] == finite[2] > 0


def test_a_mask_passed_by_position_counts():
    model, tokens, subspaces = one()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with torch.no_grad(), tt.ablating(model, subspaces, positions=[0]):
        named = model(tokens, attention_mask=mask)
    import inspect

    order = list(inspect.signature(type(model).forward).parameters)[2:]
    defaults = inspect.signature(type(model).forward).parameters
    given = [defaults[name].default for name in order[: order.index("attention_mask")]]
    with torch.no_grad(), tt.ablating(model, subspaces, positions=[0]):
        placed = model(tokens, *given, mask)
    assert torch.equal(named, placed)
