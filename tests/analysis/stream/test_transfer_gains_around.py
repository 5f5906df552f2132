"""Transfer gains around attached subspaces and the user's hooks, what they leave, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import tl_tangent as tt
from tests import families
from tests.analysis.stream.test_transfer_gains import a_model, a_subspace, table, tokens
from tests.hooks import helpers
from tl_tangent.analysis.stream.transfer_gains import transfer_gains
from tl_tangent.hooks.stream.jvp import Forward, Stretch, TwiceBackward, push_forward


def listened(model, sites):
    """Read-only hooks on every part, so that every splice runs."""
    for site in sites:
        for part in ("hook_coords", "hook_tangent", "hook_normal"):
            model.add_hook(f"{site}.{part}", lambda x, hook: None)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_a_spliced_model_has_the_gains_of_the_model(family):
    model, subspace = a_model(family), a_subspace()
    plain = transfer_gains(model, tokens(), subspace, None)
    subspaces = helpers.random_subspaces(model, tokens(), helpers.tangent_sites(model))
    with tt.tangents(model, subspaces):
        listened(model, subspaces)
        spliced = transfer_gains(model, tokens(), subspace, None)
        model.reset_hooks()
    assert table(spliced) == pytest.approx(table(plain), rel=1e-9)
    assert table(spliced, start=1) == pytest.approx(table(plain, start=1), rel=1e-9)


@pytest.mark.parametrize("family", families.HOOKED_FAMILIES)
def test_so_has_a_spliced_hooked_transformer(family):
    model, subspace = helpers.build(("hooked", family, False), torch.float64), a_subspace()
    plain = transfer_gains(model, tokens(), subspace, None)
    subspaces = helpers.random_subspaces(model, tokens(), helpers.tangent_sites(model))
    with tt.tangents(model, subspaces):
        listened(model, subspaces)
        spliced = transfer_gains(model, tokens(), subspace, None)
        model.reset_hooks()
    assert table(spliced) == pytest.approx(table(plain), rel=1e-9)


@pytest.mark.parametrize("family", ["gpt2", "bloom"])  # forward mode, and twice backward
def test_an_edit_of_an_attached_part_is_differentiated(family):
    model, subspace, site = a_model(family), a_subspace(), "blocks.0.hook_mlp_out"

    def halved(x, hook):
        return x - 0.5 * subspace.tangent(x)

    with model.hooks(fwd_hooks=[(site, halved)]):
        expected = transfer_gains(model, tokens(), subspace, 0)
    with tt.tangents(model, {site: subspace}):
        model.add_hook(f"{site}.hook_tangent", lambda v, hook: 0.5 * v)
        edited = transfer_gains(model, tokens(), subspace, 0)
        model.reset_hooks()
    assert table(edited) == pytest.approx(table(expected), rel=1e-9)
    assert table(edited)["tt"] != pytest.approx(
        table(transfer_gains(model, tokens(), subspace, 0))["tt"], rel=1e-3
    )


def test_gains_of_float32_are_those_of_float64():
    wide = transfer_gains(a_model(), tokens(), a_subspace(), None)
    model = helpers.build(("bridge", "gpt2", False), torch.float32)
    assert table(transfer_gains(model, tokens(), a_subspace(), None)) == pytest.approx(
        table(wide), rel=1e-4
    )


def test_nothing_is_left_on_the_model():
    model = a_model()
    names, before = set(model.hook_dict), model(tokens())
    transfer_gains(model, tokens(), a_subspace(), None, n_controls=1)
    with pytest.raises(tt.TangentValueError):
        transfer_gains(model, tokens(), a_subspace(), None, positions="nowhere")
    assert torch.equal(model(tokens()), before) and set(model.hook_dict) == names
    assert not any(point.fwd_hooks or point.bwd_hooks for point in model.hook_dict.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_same_seed_draws_the_same_directions():
    model = a_model()
    first, again, other = (
        table(transfer_gains(model, tokens(), a_subspace(), 0, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again and first != other


def test_conventions_and_headline():
    result = transfer_gains(a_model(), tokens(), a_subspace(), None, n_controls=1, through="mlp")
    made = result.conventions
    assert (made["through"], made["n_tokens"], made["positions"]) == ("mlp", 3, "not_first")
    assert "mechanical" in made["meaning"] and made["derivative"] == "forward mode"
    middle = result.to_dataframe().groupby(["source", "target"])["gain"].median()
    assert f"normal to normal {middle['normal', 'normal']:.3f} (copy 1.000" in result.headline()
    assert result.headline() in repr(result) and "<table>" in result._repr_html_()


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": 2}, "from 2 to 3 is no stretch of this model: depths are 0"),
        ({"start": 1, "stop": 1}, "from 1 to 1 .* start < stop"),
        ({"start": -1}, "from -1 to 0"),
        ({"start": []}, "start names none"),
        ({"start": None, "stop": 2}, "start=None is every layer"),
        ({"start": 0, "through": "heads"}, "through='heads' is not one of 'both', 'attention'"),
        ({"start": 0, "directions": "some"}, "directions='some' is not one of 'random'"),
        ({"start": 0, "n_directions": 0}, "n_directions is 0; .* whole number from 1"),
        ({"start": 0, "n_controls": -1}, "n_controls is -1"),
        ({"start": 0, "positions": [0, 1, 2], "batches": []}, "no token counts"),
    ],
)
def test_what_cannot_be_asked(options, words):
    options = {"batches": tokens(), "subspaces": a_subspace(), **options}
    with pytest.raises(tt.TangentValueError, match=words):
        transfer_gains(a_model(), **options)


def test_too_many_directions_to_try_all():
    with pytest.raises(
        tt.TangentValueError, match=r"5120 passes for 160 tokens .*directions='random'"
    ):
        transfer_gains(a_model(), tokens(21, batch=8), a_subspace(), 0, directions="all")


def test_a_depth_without_a_subspace():
    sets = {"blocks.0.hook_resid_pre": a_subspace(), "blocks.0.hook_mlp_out": a_subspace()}
    words = r"in front of layer 1 \(blocks.1.hook_resid_pre or blocks.0.hook_resid_post\)"
    with pytest.raises(tt.TangentKeyError, match=words):
        transfer_gains(a_model(), tokens(), sets, 0)
    sets |= {"blocks.1.hook_resid_pre": a_subspace(), "blocks.0.hook_resid_post": a_subspace()}
    with pytest.raises(tt.TangentValueError, match="two names of one place"):
        transfer_gains(a_model(), tokens(), sets, 0)


def test_models_without_a_stream_that_is_a_sum():
    model = families.bridge("bert", dtype=torch.float64)
    with pytest.raises(tt.TangentRuntimeError, match="do not add up"):
        transfer_gains(model, tokens(), a_subspace(), 0)
    with pytest.raises(tt.TangentValueError, match="no residual stream"):
        transfer_gains(torch.nn.Linear(2, 2), tokens(), a_subspace(), 0)


def test_forward_mode_does_not_nest():
    with forward_ad.dual_level(), pytest.raises(tt.TangentRuntimeError, match="already running"):
        transfer_gains(a_model(), tokens(), a_subspace(), 0)


# Derivatives that get lost -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "bloom"])  # forward mode, and twice backward
def test_inference_mode_around_it_changes_nothing(family):
    model, subspace = a_model(family), a_subspace()
    expected = transfer_gains(model, tokens(), subspace, None, n_controls=1)
    with torch.inference_mode():
        given = {"input": tokens(), "attention_mask": torch.ones_like(tokens())}
        found = transfer_gains(model, given, subspace, None, n_controls=1)
        assert torch.is_inference_mode_enabled()
    assert found.conventions["derivative"] == expected.conventions["derivative"]
    for start in (0, 1):
        for column in ("gain", "aligned", "control_gain_mean"):
            wanted = table(expected, column, start)
            assert table(found, column, start) == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    assert table(found)["tt"] > 0.1


@pytest.mark.parametrize("mode", [Forward(), TwiceBackward()], ids=lambda mode: mode.name)
def test_one_pass_leaves_inference_mode_by_itself(mode):
    model, given, found = a_model(), tokens(), []

    def push():
        push_forward(
            model,
            given,
            {},
            [Stretch(0, 2)],
            lambda stretch, x: torch.ones_like(x),
            lambda stretch, change: found.append(change),
            mode=mode,
        )

    push()
    with torch.inference_mode():
        push()
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)
    assert float(found[0].abs().min()) > 0


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
@pytest.mark.parametrize(
    ("site", "reached"),
    [("blocks.0.hook_resid_post", (0, 1)), ("blocks.1.hook_resid_pre", (0, 2))],
)
def test_a_hook_that_detaches_the_stream_is_told(family, site, reached):
    model, subspace = a_model(family), a_subspace()
    expected = table(transfer_gains(model, tokens(), subspace, 1), start=1)

    def constant(x, hook):
        return torch.as_tensor(x.detach().numpy().copy())

    for cut in (lambda x, hook: x.detach(), constant):
        with model.hooks(fwd_hooks=[(site, cut)]):
            words = rf"layer 0 does not reach blocks.{reached[1] - 1}.hook_(resid_post|out)"
            with pytest.raises(tt.TangentRuntimeError, match=words):
                transfer_gains(model, tokens(), subspace, *reached)
            behind = transfer_gains(model, tokens(), subspace, 1)  # where it does not matter
        assert table(behind, start=1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_a_hook_that_detaches_a_branch_freezes_it(family):
    """The skip connections carry the change on, so that nothing is lost."""
    model, subspace = a_model(family), a_subspace()
    expected = transfer_gains(model, tokens(), subspace, 0, through="attention")
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x.detach())]):
        found = transfer_gains(model, tokens(), subspace, 0)
    assert table(found) == pytest.approx(table(expected), rel=1e-9)


# Its headline ------------------------------------------------------------------------------------


def test_one_layer_or_stretch_is_no_median():
    model, subspace = a_model(), a_subspace()
    said = [transfer_gains(model, tokens(), subspace, 0, stop).headline() for stop in (None, 2)]
    assert said[0].startswith("Gain over layer 0 of external: tangent to tangent")
    assert said[1].startswith("Gain from depth 0 to 2 of external:")
