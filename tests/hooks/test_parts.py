"""What the parts are: values, chains, edits and gradients."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers

EVERY = pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
SITES = ["blocks.0.hook_resid_post", "blocks.1.hook_attn_out", "blocks.1.attn.hook_in"]


def setup(spec, sites=SITES, dtype=torch.float64, **options):
    model = helpers.build(spec, dtype=dtype)
    tokens = families.tiny_tokens(model)
    return model, tokens, helpers.random_subspaces(model, tokens, sites, **options)


@EVERY
def test_parts_add_to_the_activation_and_are_projections(spec):
    model, tokens, subspaces = setup(spec)
    with tt.tangents(model, subspaces):
        _, cache = model.run_with_cache(tokens)
    for site, subspace in subspaces.items():
        x = cache[site]
        v, n = cache[f"{site}.hook_tangent"], cache[f"{site}.hook_normal"]
        torch.testing.assert_close(subspace.mean + v + n, x, atol=1e-12, rtol=0)
        torch.testing.assert_close(v @ helpers.projector(subspace), v, atol=1e-12, rtol=0)
        assert (n @ subspace.basis).abs().max() < 1e-12
        expected = (x - subspace.mean) @ subspace.basis
        torch.testing.assert_close(cache[f"{site}.hook_coords"], expected, atol=1e-12, rtol=0)


@EVERY
def test_gradient_parts_are_projections_of_the_gradient_at_the_site(spec):
    model, tokens, subspaces = setup(spec)
    grads = {}

    def keep(grad, hook):
        grads[hook.name] = grad.clone()

    with tt.tangents(model, subspaces):
        names = {model.hook_dict[site].name: site for site in subspaces}
        wanted = set(names) | {n for n in model.hook_dict if ".hook_resid_post.hook_" in n}
        wanted |= {n for n in model.hook_dict if n.endswith(("hook_tangent", "hook_normal"))}
        wanted |= {n for n in model.hook_dict if n.endswith("hook_coords")}
        with model.hooks(bwd_hooks=[(lambda n: n in wanted, keep)]):
            helpers.loss_of(model, tokens).backward()
    for name, site in names.items():
        whole, basis = grads[name], subspaces[site].basis
        tangent, normal = grads[f"{name}.hook_tangent"], grads[f"{name}.hook_normal"]
        torch.testing.assert_close(tangent + normal, whole, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(tangent, whole @ basis @ basis.T, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(
            grads[f"{name}.hook_coords"], whole @ basis, atol=1e-12, rtol=1e-12
        )


@pytest.mark.parametrize("part", ["hook_coords", "hook_tangent", "hook_normal"])
@EVERY
def test_gradient_agrees_with_finite_differences(spec, part):
    """The reported gradient of a part is the derivative of the loss along an edit of that part."""
    model, tokens, subspaces = setup(spec, ["blocks.0.hook_resid_post"])
    name = f"blocks.0.hook_resid_post.{part}"
    with tt.tangents(model, subspaces):
        found = {}
        with model.hooks(bwd_hooks=[(name, lambda g, hook: found.update(g=g.clone()))]):
            helpers.loss_of(model, tokens).backward()
        basis = subspaces["blocks.0.hook_resid_post"].basis
        direction = _direction(found["g"], part, basis)
        eps = 1e-3  # some families compute norms or softmax in float32 whatever the model's dtype
        losses = []
        for sign in (1, -1):
            edit = lambda x, hook: x + sign * eps * direction  # noqa: B023, E731
            with torch.no_grad(), model.hooks(fwd_hooks=[(name, edit)]):
                losses.append(helpers.loss_of(model, tokens))
    numeric = (losses[0] - losses[1]) / (2 * eps)
    exact = (found["g"] * direction).sum()
    assert abs(numeric - exact) < 2e-3 * abs(exact)


def _direction(like, part, basis):
    """A direction inside the part, half along the gradient so that the derivative is large."""
    direction = torch.randn(
        like.shape, generator=torch.Generator().manual_seed(1), dtype=like.dtype
    )
    direction = direction / direction.norm() + like / like.norm()
    if part == "hook_tangent":
        return direction @ basis @ basis.T
    if part == "hook_normal":
        return direction - direction @ basis @ basis.T
    return direction


@EVERY
def test_edited_parts_differentiate_like_the_hand_written_edit(spec):
    """Doubling v and dropping n, by part hooks, has the gradients of the dense expression."""
    site = "blocks.0.hook_resid_post"
    model, tokens, subspaces = setup(spec, [site])
    subspace = subspaces[site]
    projector = helpers.projector(subspace)

    def by_hand(x, hook):
        return subspace.mean + 2 * (x - subspace.mean) @ projector

    with model.hooks(fwd_hooks=[(site, by_hand)]):
        expected_logits = model(tokens).detach()
        expected = helpers.parameter_gradients(model, tokens)
    edits = [(f"{site}.hook_tangent", lambda v, hook: 2 * v)]
    edits += [(f"{site}.hook_normal", lambda n, hook: torch.zeros_like(n))]
    with tt.tangents(model, subspaces), model.hooks(fwd_hooks=edits):
        logits = model(tokens).detach()
        gradients = helpers.parameter_gradients(model, tokens)
    torch.testing.assert_close(logits, expected_logits, atol=1e-10, rtol=1e-10)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-9, rtol=1e-9)


def one(dtype=torch.float32, site="blocks.0.hook_resid_post", **options):
    """A small model, its tokens and a subspace at one site: for what does not depend on family."""
    spec = helpers.MODELS[0]
    return *setup(spec, [site], dtype=dtype, **options), site


def run(model, subspaces, tokens, fwd=(), bwd=()):
    with tt.tangents(model, subspaces), model.hooks(fwd_hooks=list(fwd), bwd_hooks=list(bwd)):
        return model(tokens)


@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad"])
@pytest.mark.parametrize("part", ["hook_coords", "hook_tangent", "hook_normal"])
def test_an_in_place_edit_counts(mode, part):
    model, tokens, subspaces, site = one()
    context = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "grad": torch.enable_grad,
    }

    def in_place(x, hook):
        x.mul_(0)

    with context[mode]():
        replaced = run(model, subspaces, tokens, [(f"{site}.{part}", lambda x, hook: x * 0)])
        edited = run(model, subspaces, tokens, [(f"{site}.{part}", in_place)])
        plain = model(tokens)
    assert torch.equal(edited, replaced)
    assert not torch.allclose(edited, plain)


def test_zeroing_coords_and_tangent_together_is_zeroing_either():
    model, tokens, subspaces, site = one()

    def zero(x, hook):
        return torch.zeros_like(x)

    names = [[f"{site}.hook_coords"], [f"{site}.hook_tangent"]]
    names.append(names[0] + names[1])
    with torch.no_grad():
        logits = [run(model, subspaces, tokens, [(n, zero) for n in some]) for some in names]
    torch.testing.assert_close(logits[0], logits[1], atol=5e-6, rtol=0)
    torch.testing.assert_close(logits[0], logits[2], atol=5e-6, rtol=0)
    assert not torch.allclose(logits[0], model(tokens))


def test_the_tangent_hook_sees_what_the_coordinate_hook_left():
    model, tokens, subspaces, site = one()
    seen = {}
    fwd = [
        (f"{site}.hook_coords", lambda a, hook: seen.update(a=3 * a) or 3 * a),
        (f"{site}.hook_tangent", lambda v, hook: seen.update(v=v.clone())),
    ]
    run(model, subspaces, tokens, fwd)
    torch.testing.assert_close(seen["v"], seen["a"] @ subspaces[site].basis.T, atol=1e-5, rtol=1e-5)


def test_untouched_rows_stay_bit_identical():
    model, tokens, subspaces, site = one()

    def at_position_three(v, hook):
        v = v.clone()
        v[:, 3] = 0
        return v

    with tt.tangents(model, subspaces):
        hooks = [(f"{site}.hook_tangent", at_position_three)]
        _, plain = model.run_with_cache(tokens)
        with model.hooks(fwd_hooks=hooks):
            _, cache = model.run_with_cache(tokens)
    same = (cache[site] == plain[site]).all(dim=-1)
    assert not same[:, 3].any() and same[:, [0, 1, 2, 4]].all()


def test_the_site_caches_what_flows_on():
    model, tokens, subspaces, site = one()
    with tt.tangents(model, subspaces):
        with model.hooks(fwd_hooks=[(f"{site}.hook_tangent", lambda v, hook: v * 0)]):
            _, cache = model.run_with_cache(tokens)
    left = (cache[site] - subspaces[site].mean) @ subspaces[site].basis
    assert left.abs().max() < 1e-5


@pytest.mark.parametrize("part", ["hook_tangent", "hook_normal"])
def test_an_edit_off_its_part_is_refused(part):
    model, tokens, subspaces, site = one()
    with pytest.raises(tt.TangentError, match=f"hook {site} itself"):
        run(model, subspaces, tokens, [(f"{site}.{part}", lambda x, hook: x + 1)])


@pytest.mark.parametrize("part", ["hook_coords", "hook_tangent", "hook_normal"])
def test_a_wrong_shape_is_refused_not_broadcast(part):
    model, tokens, subspaces, site = one()
    with pytest.raises(tt.TangentValueError, match="keeps its shape"):
        run(model, subspaces, tokens, [(f"{site}.{part}", lambda x, hook: x[:1])])


@pytest.mark.parametrize("part", ["hook_coords", "hook_tangent", "hook_normal"])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_a_backward_hook_replaces_its_part(part, as_tuple):
    """Zeroing a part's gradient is projecting the gradient at the site."""
    model, tokens, subspaces, site = one(torch.float64)
    projector = helpers.projector(subspaces[site])
    keep = projector if part == "hook_normal" else torch.eye(len(projector)).double() - projector

    def zero(grad, hook):
        return (grad * 0,) if as_tuple else grad * 0

    with model.hooks(bwd_hooks=[(site, lambda grad, hook: grad @ keep)]):
        expected = helpers.parameter_gradients(model, tokens)
    with tt.tangents(model, subspaces), model.hooks(bwd_hooks=[(f"{site}.{part}", zero)]):
        gradients = helpers.parameter_gradients(model, tokens)
    plain = helpers.parameter_gradients(model, tokens)
    assert any(not torch.allclose(plain[name], expected[name]) for name in expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-10, rtol=1e-10)


def test_stopping_the_gradient_of_a_part_is_not_ignored():
    """``v.detach()`` has v's value, but no gradient: the skip path must not put it back."""
    model, tokens, subspaces, site = one(torch.float64)
    subspace = subspaces[site]

    def by_hand(x, hook):
        tangent = (x - subspace.mean) @ helpers.projector(subspace)
        return x - tangent + tangent.detach()

    with model.hooks(fwd_hooks=[(site, by_hand)]):
        expected = helpers.parameter_gradients(model, tokens)
    with tt.tangents(model, subspaces):
        with model.hooks(fwd_hooks=[(f"{site}.hook_tangent", lambda v, hook: v.detach())]):
            gradients = helpers.parameter_gradients(model, tokens)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-10, rtol=1e-10)


def test_a_loss_on_the_parts_reaches_the_parameters():
    model, tokens, subspaces, site = one(torch.float64)
    kept = {}
    hooks = [(f"{site}.hook_coords", lambda a, hook: kept.update(a=a))]
    with tt.tangents(model, subspaces), model.hooks(fwd_hooks=hooks):
        model(tokens)
        kept["a"].square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    whole = {}
    with model.hooks(fwd_hooks=[(site, lambda x, hook: whole.update(x=x))]):
        model(tokens)
    subspace = subspaces[site]
    ((whole["x"] - subspace.mean) @ subspace.basis).square().sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert expected and found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-10, rtol=1e-10)


def test_a_learned_steering_vector_gets_its_gradient():
    model, tokens, subspaces, site = one(torch.float64)
    model.requires_grad_(False)
    theta = torch.zeros(subspaces[site].rank, dtype=torch.float64, requires_grad=True)
    hooks = [(f"{site}.hook_coords", lambda a, hook: a + theta)]
    with tt.tangents(model, subspaces), model.hooks(fwd_hooks=hooks):
        helpers.loss_of(model, tokens).backward()
    assert theta.grad is not None and theta.grad.abs().max() > 0


def test_second_derivatives_pass_through_an_edited_splice():
    model, tokens, subspaces, site = one(torch.float64)
    subspace, weight = subspaces[site], next(model.parameters())

    def by_hand(x, hook):
        return x + (x - subspace.mean) @ helpers.projector(subspace)

    def curvature():
        (grad,) = torch.autograd.grad(helpers.loss_of(model, tokens), weight, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), weight)[0]

    with model.hooks(fwd_hooks=[(site, by_hand)]):
        expected = curvature()
    with tt.tangents(model, subspaces):
        with model.hooks(fwd_hooks=[(f"{site}.hook_tangent", lambda v, hook: 2 * v)]):
            found = curvature()
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)


def test_forward_mode_differentiation_goes_through():
    model, tokens, subspaces, site = one(torch.float64)
    if not hasattr(model, "W_E") or families.HOOKED_FAMILIES == []:
        pytest.skip("forward mode is tried on HookedTransformer")
    names = [(f"{site}.hook_tangent", lambda v, hook: 2 * v)]
    x = model.embed(tokens).detach()
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)

    def tail(x):
        return model(x, start_at_layer=0, stop_at_layer=1)

    with tt.tangents(model, subspaces), model.hooks(fwd_hooks=names):
        _, found = torch.func.jvp(tail, (x,), (tangent,))
        eps = 1e-6
        numeric = (tail(x + eps * tangent) - tail(x - eps * tangent)) / (2 * eps)
    torch.testing.assert_close(found, numeric, atol=1e-6, rtol=1e-6)


def test_bf16_parts_keep_the_dtype_and_leave_no_tangent():
    model, tokens, subspaces, site = one(torch.bfloat16)
    seen = {}
    fwd = [(f"{site}.hook_tangent", lambda v, hook: seen.update(v=v) or v * 0)]
    with torch.no_grad(), tt.tangents(model, subspaces):
        _, before = model.run_with_cache(tokens, names_filter=site)
        with model.hooks(fwd_hooks=fwd):
            _, after = model.run_with_cache(tokens, names_filter=site)
    assert seen["v"].dtype == after[site].dtype == torch.bfloat16
    subspace = subspaces[site]
    energy = [subspace.coordinates(cache[site].float()).square().sum() for cache in (before, after)]
    assert energy[1] < 1e-3 * energy[0]


def test_autocast_does_not_narrow_the_split():
    model, tokens, subspaces, site = one()
    kept = {}
    hooks = [(f"{site}.hook_coords", lambda a, hook: kept.update(a=a.float()))]
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        with tt.tangents(model, subspaces), model.hooks(fwd_hooks=hooks):
            _, cache = model.run_with_cache(tokens, names_filter=site)
    expected = subspaces[site].coordinates(cache[site].float())
    torch.testing.assert_close(kept["a"].float(), expected, atol=0.02, rtol=0.01)


def test_an_empty_batch_passes():
    model, tokens, subspaces, site = one()
    with torch.no_grad(), tt.tangents(model, subspaces):
        hooks = [(f"{site}.hook_tangent", lambda v, hook: None)]
        try:
            expected = model(tokens[:0]).shape
        except (RuntimeError, IndexError):
            pytest.skip("the host takes no empty batch")
        assert model.run_with_hooks(tokens[:0], fwd_hooks=hooks).shape == expected
