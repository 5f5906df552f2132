"""Which subspace is meant at which layer, and what is said where that is not clear."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.attention import cases
from tl_tangent.hooks.attention.choose import choose
from tl_tangent.hooks.attention.norms import norms_folded


@pytest.fixture
def model():
    return cases.model_of(cases.any_family())


def at(model, site: str | None, **fields) -> tt.TangentSubspace:
    return cases.subspace(model, 1, "input", site=site, **fields)


def found(model, subspaces, layers=None, **options) -> list[tuple[int, str, str | None]]:
    return [
        (one.layer, one.space, one.subspace.site)
        for one in choose(model, subspaces, layers, **options)
    ]


# The site decides ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "site, expected",
    [
        ("blocks.1.attn.hook_in", (1, "input")),
        ("blocks.1.ln1.hook_out", (1, "input")),
        ("blocks.1.hook_resid_pre", (1, "residual")),
        ("blocks.0.hook_resid_post", (1, "residual")),
        ("blocks.0.attn.hook_in", (0, "input")),
    ],
)
def test_the_site_tells_layer_and_space(model, site, expected):
    subspace = at(model, site)
    assert found(model, subspace) == [(*expected, site)]
    assert found(model, {site: subspace}) == [(*expected, site)]
    assert found(model, tt.SubspaceSet([subspace])) == [(*expected, site)]
    assert found(model, subspace, expected[0]) == [(*expected, site)]


@pytest.mark.parametrize("layers, expected", [(1, [1]), (-1, [1]), (-2, [0]), ([1, 0], [1, 0])])
def test_layers_are_numbers_also_from_the_end(model, layers, expected):
    for space in cases.SPACES:
        chosen = found(model, cases.subspaces(model, space), layers)
        assert [layer for layer, _, _ in chosen] == expected


def test_a_layer_that_is_named_twice_is_split_once(model):
    assert len(found(model, cases.subspaces(model, "input"), [1, -1, 1])) == 1


def test_all_layers_with_a_subspace_by_default(model):
    both = cases.subspaces(model, "input")
    assert [layer for layer, _, _ in found(model, both)] == [0, 1]
    other = at(model, "blocks.0.hook_mlp_out")
    assert [layer for layer, _, _ in found(model, {**both, other.site: other})] == [0, 1]


@pytest.mark.parametrize("space", cases.SPACES)
def test_a_space_takes_a_subspace_anywhere(model, space):
    for site in (None, "blocks.0.attn.hook_in", "blocks.0.mlp.hook_in"):
        assert found(model, at(model, site), [0, 1], space=space) == [
            (0, space, site),
            (1, space, site),
        ]
    assert [layer for layer, _, _ in found(model, at(model, None), space=space)] == [0, 1]


@pytest.mark.parametrize("space", cases.SPACES)
def test_a_space_tells_two_sites_of_a_layer_apart(model, space):
    both = cases.subspaces(model, "input") | cases.subspaces(model, "residual")
    sites = [cases.SITES[space].format(layer) for layer in (0, 1)]
    assert found(model, both, space=space) == [(0, space, sites[0]), (1, space, sites[1])]


def test_attached_subspaces_are_the_default(model):
    subspaces = cases.subspaces(model, "input")
    with pytest.raises(tt.TangentValueError, match="nothing is attached"):
        found(model, None)
    tt.attach(model, tt.SubspaceSet(subspaces))
    try:
        assert [layer for layer, _, _ in found(model, None)] == [0, 1]
        given = subspaces["blocks.0.attn.hook_in"]
        assert torch.equal(choose(model, None)[0].subspace.basis, given.basis)
    finally:
        tt.detach(model)


# Errors tell the value, what is accepted and what to do -------------------------------------------


def refused(model, subspaces, layers=None, error=tt.TangentValueError, **options) -> str:
    with pytest.raises(error) as raised:
        choose(model, subspaces, layers, **options)
    return str(raised.value)


def test_a_site_of_another_layer(model):
    message = refused(model, at(model, "blocks.0.hook_resid_pre"), 1)
    assert "blocks.0.hook_resid_pre" in message and "layer 1" in message
    assert "space='residual'" in message


@pytest.mark.parametrize(
    "site", [None, "blocks.1.hook_mlp_out", "hook_embed", "blocks.1.attn.hook_q"]
)
def test_a_site_that_is_no_input_of_an_attention(model, site):
    message = refused(model, at(model, site), 1)
    assert f"({site})" in message
    assert "space='input'" in message and "space='residual'" in message


def test_two_sites_of_one_layer(model):
    both = cases.subspaces(model, "input") | cases.subspaces(model, "residual")
    message = refused(model, both)
    assert "layer 0" in message and "space='input'" in message
    assert "blocks.0.attn.hook_in" in message and "blocks.0.hook_resid_pre" in message


@pytest.mark.parametrize("layers", [2, -3, [0, 7]])
def test_a_layer_that_does_not_exist(model, layers):
    message = refused(model, cases.subspaces(model, "input"), layers)
    wrong = layers if isinstance(layers, int) else layers[-1]
    assert f"layer {wrong} does not exist" in message and "0 to 1" in message


def test_no_layer(model):
    assert "layers names none" in refused(model, cases.subspaces(model, "input"), [])


def test_a_subspace_of_a_layer_that_does_not_exist(model):
    message = refused(model, at(model, "blocks.5.attn.hook_in"))
    assert "blocks.5.attn.hook_in" in message


@pytest.mark.parametrize("space", [None, "input"])
def test_a_layer_without_a_subspace(model, space):
    only = at(model, "blocks.0.attn.hook_in")
    message = refused(model, {only.site: only}, [0, 1], tt.TangentKeyError, space=space)
    assert "layer 1" in message and only.site in message
    assert "blocks.1.attn.hook_in" in message and "blocks.1.hook_resid_pre" in message


def test_an_empty_set(model):
    message = refused(model, {}, error=tt.TangentKeyError)
    assert "layer 0" in message and "nothing" in message


@pytest.mark.parametrize("shape", [(16, 2), (64, 2)])
def test_a_wrong_width(model, shape):
    site = "blocks.1.attn.hook_in"
    message = refused(model, tt.TangentSubspace(torch.eye(*shape), site=site))
    assert f"{shape[0]} wide" in message and str(families.D_MODEL) in message


@pytest.mark.parametrize("heads", [1, families.N_KV_HEADS, 3])
def test_a_wrong_number_of_heads(model, heads):
    basis = torch.eye(families.D_MODEL, 2).expand(heads, -1, -1).clone()
    message = refused(model, tt.TangentSubspace(basis, site="blocks.1.attn.hook_in"))
    assert f"{heads} heads" in message and f"{families.N_HEADS} query heads" in message


def test_another_model(model, monkeypatch):
    monkeypatch.setattr(model.cfg, "model_name", "this-model", raising=False)
    subspace = at(model, "blocks.1.attn.hook_in")
    foreign, own = (subspace.replace(model=name) for name in ("other", "this-model"))
    message = refused(model, foreign)
    assert "'other'" in message and "'this-model'" in message and "any_model=True" in message
    assert found(model, own) == found(model, foreign, any_model=True)


@pytest.mark.parametrize("space", ["Input", "resid", ""])
def test_an_unknown_space(model, space):
    message = refused(model, cases.subspaces(model, "input"), space=space)
    assert repr(space) in message and "'input', 'residual'" in message


@pytest.mark.parametrize("compat", [False, True])
def test_gains_of_one_are_folded_only_where_weights_were_processed(compat):
    model = families.bridge("llama", compat=compat)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln" in name:
                parameter.fill_(1.0)
    assert norms_folded(model) is compat


def test_folded_and_unfolded_inputs_are_told_apart():
    """With the norm's gain in the weights the attention reads another vector."""
    raw, folded = (families.bridge("llama", compat=compat) for compat in (False, True))
    tokens = families.tiny_tokens()
    fitted = tt.fit_subspaces(raw, tokens, "blocks.*.attn.hook_in", rank=2)
    assert fitted["blocks.0.attn.hook_in"].metadata["norms_folded"] is False
    tt.split_attention_scores(raw, tokens, 0, fitted)
    with pytest.raises(tt.TangentValueError, match="are not folded .* here they are: what"):
        tt.split_attention_scores(folded, tokens, 0, fitted)
    tt.split_attention_scores(folded, tokens, 0, fitted, any_model=True)
