"""Which subspace the stream is looked at in at every depth, its controls, and what is refused."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers
from tests.hooks.attention.cases import any_family, model_of
from tl_tangent.analysis.stream.frames import depth_of, reference_of

LAYERS, D, RANK = families.N_LAYERS, families.D_MODEL, 3
DEPTHS = LAYERS + 1


def subspace(
    site: str, seed: int = 0, d: int = D, rank: int = RANK, **fields
) -> tt.TangentSubspace:
    generator = torch.Generator().manual_seed(seed)
    shape = (*fields.pop("heads", ()), d)
    basis = torch.randn(*shape, rank, generator=generator, dtype=torch.float64)
    mean = torch.randn(*shape, generator=generator, dtype=torch.float64)
    options = {"site": site, "orthonormalize": True, "positions": "all", **fields}
    return tt.TangentSubspace(basis, mean, **options)


def given(*names: str, **options) -> dict[str, tt.TangentSubspace]:
    return {name: subspace(name, seed, **options) for seed, name in enumerate(names)}


PRE = [f"blocks.{layer}.hook_resid_pre" for layer in range(LAYERS)]
POST = [f"blocks.{layer}.hook_resid_post" for layer in range(LAYERS)]


def reference(subspaces, n_controls: int = 0, seed: int = 0, **options):
    return reference_of(model_of(any_family()), subspaces, n_controls, seed, **options)


# Depths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "site, depth",
    [
        ("blocks.0.hook_resid_pre", 0),
        ("blocks.0.hook_resid_post", 1),
        ("blocks.3.hook_resid_pre", 3),
        ("blocks.29.hook_resid_post", 30),
        ("blocks.3.hook_resid_mid", None),
        ("blocks.3.attn.hook_in", None),
        ("blocks.3.hook_resid_post.hook_tangent", None),
        ("hook_embed", None),
        (None, None),
    ],
)
def test_the_depth_of_a_place_is_the_layer_behind_it(site, depth):
    assert depth_of(site) == depth


@pytest.mark.parametrize("names", [[*PRE, POST[-1]], [PRE[0], *POST], [POST[-1], *reversed(PRE)]])
def test_both_names_of_a_place_are_taken_in_any_order(names):
    made = given(*names)
    found = reference(made)
    assert not found.fixed
    assert [depth_of(one.site) for one in found.subspaces] == list(range(DEPTHS))
    for one, frame in zip(found.subspaces, found.frames, strict=True):
        assert torch.equal(one.basis, made[one.site].basis)
        assert torch.equal(frame.mean, one.mean)
        torch.testing.assert_close(frame.bases[0], one.basis, atol=1e-14, rtol=0)


def test_other_sites_of_a_set_are_left_out():
    names = [PRE[0], *POST, "blocks.0.attn.hook_in", "blocks.1.hook_resid_mid", "hook_embed"]
    assert [one.site for one in reference(given(*names)).subspaces] == [PRE[0], *POST]
    assert reference(tt.SubspaceSet(given(*names))).subspaces[0].site == PRE[0]


def test_one_subspace_is_for_every_depth_wherever_it_was_fitted():
    one = subspace("blocks.1.mlp.hook_in")
    found = reference(one, n_controls=2)
    assert found.fixed and len(found.subspaces) == len(found.frames) == DEPTHS
    assert all(other is one for other in found.subspaces)
    assert all(frame is found.frames[0] for frame in found.frames)


@pytest.mark.parametrize(
    "fitted, taken",
    [("all", "all"), ("not_first", "not_first"), (None, "not_first"), ([3, -1], [3, -1])],
)
def test_positions_are_those_of_the_fit(fitted, taken):
    assert reference(subspace(PRE[0], positions=fitted)).positions == taken
    assert reference(given(PRE[0], *POST, positions=fitted)).positions == taken


def test_positions_that_can_not_be_had_again_have_to_be_said():
    tokens = families.tiny_tokens()
    for rule in (slice(1, 5), torch.arange(9) > 3):
        made = tt.fit_subspaces(
            model_of(any_family()), tokens, [PRE[0], *POST], rank=RANK, positions=rule
        )
        message = r"blocks.0.hook_resid_pre was fitted with a slice or a mask .*Say which tokens"
        for subspaces in (made, made[PRE[0]]):
            with pytest.raises(tt.TangentValueError, match=message):
                tt.trace_residual(model_of(any_family()), tokens, subspaces)
            said = {"positions": rule, "any_model": True}
            trace = tt.trace_residual(model_of(any_family()), tokens, subspaces, **said)
            assert trace.ledger.n_tokens == 2 * (4 if isinstance(rule, slice) else 5)


def test_subspaces_of_different_positions_have_to_be_told_which():
    mixed = {**given(PRE[0], *POST), POST[0]: subspace(POST[0], positions="not_first")}
    with pytest.raises(tt.TangentValueError, match="different positions: 'all' and 'not_first'"):
        _ = reference(mixed).positions
    tokens, model = families.tiny_tokens(), model_of(any_family())
    for tool in (tt.trace_residual, tt.transfer_gains, tt.part_recovery):
        more = () if tool is tt.trace_residual else (0,)
        with pytest.raises(tt.TangentValueError, match="different positions"):
            tool(model, tokens, mixed, *more)
        assert tool(model, tokens, mixed, *more, positions="not_first") is not None


# Controls -----------------------------------------------------------------------------------------


def test_controls_stand_behind_the_subspace_around_the_same_mean():
    made = given(PRE[0], *POST)
    for one, frame in zip(made.values(), reference(made, 2, seed=5).frames, strict=True):
        controls = one.random_normals(2, seed=5)
        assert frame.bases.shape == (3, D, RANK) and torch.equal(frame.mean, one.mean)
        for control, basis in zip(controls, frame.bases[1:], strict=True):
            torch.testing.assert_close(basis, control.basis, atol=1e-14, rtol=0)
            assert float((basis.T @ frame.bases[0]).abs().max()) < 1e-12


def test_all_depths_draw_from_the_same_numbers():
    """The control of a subspace that does not change does not change."""
    alike = {name: subspace(name, seed=7) for name in (PRE[0], *POST)}
    frames = reference(alike, 2).frames
    assert all(torch.equal(frame.bases, frames[0].bases) for frame in frames)


def test_controls_follow_the_seed_and_not_their_number():
    one = subspace(PRE[0])
    few, more, other = (reference(one, n, s).frames[0] for n, s in ((1, 0), (3, 0), (1, 1)))
    assert torch.equal(few.bases, more.bases[:2]) and len(more.bases) == 4
    assert float((few.bases[1] - other.bases[1]).abs().max()) > 1e-2
    assert len(reference(one).frames[0].bases) == 1


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, missing",
    [
        (POST, r"blocks\.0\.hook_resid_pre"),
        ([PRE[0], *POST[1:]], r"blocks\.1\.hook_resid_pre"),
        (PRE, rf"blocks\.{LAYERS - 1}\.hook_resid_post"),
        (["hook_embed"], r"blocks\.0\.hook_resid_pre"),
    ],
)
def test_a_depth_without_a_subspace_is_named(names, missing):
    message = rf"no subspace at {missing}\. Fit one.*blocks\.\*\.hook_resid_post.*Given: {names[0]}"
    with pytest.raises(tt.TangentKeyError, match=message):
        reference(given(*names))


def test_a_set_without_subspaces_is_refused():
    with pytest.raises(tt.TangentKeyError, match=r"no subspace at blocks\.0.*Given: nothing"):
        reference({})


def test_two_subspaces_at_one_place_are_refused():
    message = r"blocks\.0\.hook_resid_post and blocks\.1\.hook_resid_pre are two names of one place"
    with pytest.raises(tt.TangentValueError, match=message):
        reference(given(PRE[0], *POST, PRE[1]))


def test_another_width_and_a_basis_a_head_are_refused():
    message = rf"at {POST[0]} is 16 wide; the residual stream of this model is {D} wide"
    with pytest.raises(tt.TangentValueError, match=message):
        reference({**given(PRE[0], *POST), POST[0]: subspace(POST[0], d=16)})
    with pytest.raises(tt.TangentValueError, match=rf"is {D} wide with 4 heads; .*without heads"):
        reference(subspace(PRE[0], heads=(4,)))


def test_a_subspace_of_another_model_is_refused_unless_that_is_meant():
    name, foreign = model_of(any_family()).cfg.model_name, subspace(PRE[0], model="another")
    with pytest.raises(
        tt.TangentValueError, match=f"'another' and this model is '{name}'.*any_model"
    ):
        reference(foreign)
    assert reference(foreign, any_model=True).fixed
    assert reference(subspace(PRE[0], model=name)).fixed
    with pytest.raises(tt.TangentValueError, match="'another'"):
        reference({**given(PRE[0], *POST), POST[-1]: subspace(POST[-1], model="another")})


def test_controls_that_can_not_be_drawn_are_refused():
    with pytest.raises(tt.TangentValueError, match=r"needs 2 \* rank <= d"):
        reference(subspace(PRE[0], rank=D // 2 + 1), n_controls=1)


def test_a_subspace_of_the_whole_stream_leaves_no_normal_part():
    tokens, model = families.tiny_tokens(), model_of(any_family())
    whole = subspace(PRE[0], rank=D)
    for tool, more in (
        (tt.trace_residual, ()),
        (tt.transfer_gains, (0,)),
        (tt.part_recovery, (0,)),
    ):
        with pytest.raises(tt.TangentValueError, match=f"has rank {D}.*nothing is normal"):
            tool(
                model,
                tokens,
                whole,
                *more,
                **({} if tool is tt.transfer_gains else {"n_controls": 0}),
            )


@pytest.mark.parametrize("folded", [False, True])
def test_folded_and_unfolded_models_do_not_share_subspaces(folded):
    models = {
        kind: helpers.build(("bridge", "gpt2", kind), torch.float64) for kind in (False, True)
    }
    tokens = families.tiny_tokens()
    fitted = tt.fit_subspaces(models[folded], tokens, [PRE[0], *POST], rank=RANK)
    here, there = models[folded], models[not folded]
    for subspaces in (fitted, fitted[PRE[0]]):
        with pytest.raises(tt.TangentValueError, match=r"gains are( not)? folded.*any_model=True"):
            reference_of(there, subspaces, 0, 0)
        assert reference_of(there, subspaces, 0, 0, any_model=True).subspaces
        assert reference_of(here, subspaces, 0, 0).subspaces


def test_a_subspace_in_a_set_goes_by_its_name_there():
    """Wherever it was fitted: one subspace for every depth, as a set."""
    one, names = subspace("blocks.1.mlp.hook_in"), [PRE[0], *POST]
    found = reference(dict.fromkeys(names, one))
    assert [each.site for each in found.subspaces] == names
    model, tokens = model_of(any_family()), families.tiny_tokens()
    trace = tt.trace_residual(model, tokens, dict.fromkeys(names, one))
    assert trace.conventions["sites"] == names
    gains = tt.transfer_gains(model, tokens, dict.fromkeys(names, one), 0)
    assert gains.conventions["sites"] == names[:2]


@pytest.mark.parametrize(
    "wrong", [None, torch.eye(D), 3, "blocks", [{PRE[0]: 1}], {PRE[0]: torch.eye(D)}]
)
def test_other_things_than_subspaces_are_refused(wrong):
    model, tokens = model_of(any_family()), families.tiny_tokens()
    for tool, more in (
        (tt.trace_residual, ()),
        (tt.transfer_gains, (0,)),
        (tt.part_recovery, (0,)),
    ):
        with pytest.raises(tt.TangentValueError, match="accepted are a TangentSubspace"):
            tool(model, tokens, wrong, *more)


def test_a_set_in_a_list_is_refused():
    with pytest.raises(tt.TangentValueError, match="subspaces is a list; accepted are"):
        reference([tt.SubspaceSet(given(PRE[0], *POST))])
    assert [one.site for one in reference(list(given(PRE[0], *POST).values())).subspaces]


def test_a_model_without_a_stream_is_refused():
    with pytest.raises(tt.TangentValueError, match="a Linear has no residual stream.*Accepted"):
        reference_of(torch.nn.Linear(D, D), subspace(PRE[0]), 0, 0)
