"""A split that is not the model's is refused; an ablation in front of the attention is seen."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.attention import cases
from tl_tangent.analysis.attention.scores import split_attention_layers, split_attention_scores
from tl_tangent.hooks.attention import choose, observe, rotary
from tl_tangent.hooks.attention.circuit import Projection, QKCircuit, read_circuit

BOTH = pytest.mark.parametrize("family", ["rotary_gqa", "llama"])
FAULTS = {
    "scale": lambda c: dataclasses.replace(c, scale=1.001 * c.scale),
    "cap": lambda c: dataclasses.replace(c, cap=5.0),
    "query_bias": lambda c: dataclasses.replace(c, query=with_bias(c.query)),
    "key_bias": lambda c: dataclasses.replace(c, key=with_bias(c.key)),
    "key_heads": lambda c: dataclasses.replace(c, key=flipped(c.key)),
}


def with_bias(projection: Projection) -> Projection:
    wrong = torch.full_like(projection.weight[:, 0], 0.01)
    bias = wrong if projection.bias is None else projection.bias + wrong
    return dataclasses.replace(projection, bias=bias)


def flipped(projection: Projection) -> Projection:
    return dataclasses.replace(projection, weight=projection.weight.flip(0))


def split(model, space: str = "input", layer: int = 1, **options):
    subspace = cases.subspace(model, layer, space)
    return split_attention_scores(model, families.tiny_tokens(model), layer, subspace, **options)


# A circuit that was misread -----------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_circuit_is_refused(family, fault, monkeypatch):
    def misread(model, layer: int) -> QKCircuit:
        return FAULTS[fault](read_circuit(model, layer))

    model = cases.model_of(family)
    split(model)
    monkeypatch.setattr(choose, "read_circuit", misread)
    with pytest.raises(tt.TangentRuntimeError, match=r"layer 1"):
        split(model)


@BOTH
@pytest.mark.parametrize("name", ["gain", "eps"])
def test_a_wrong_norm_is_refused(family, name, monkeypatch):
    def misread(model, layer: int) -> QKCircuit:
        circuit = read_circuit(model, layer)
        norm = circuit.input_norm
        wrong = {"gain": norm.gain * 1.01, "eps": 0.1}
        norm = dataclasses.replace(norm, **{name: wrong[name]})
        return dataclasses.replace(circuit, input_norm=norm)

    model = cases.model_of(family)
    monkeypatch.setattr(choose, "read_circuit", misread)
    split(model, "input")  # which does not pass through the norm
    with pytest.raises(tt.TangentRuntimeError, match="does not read the norm of hook_resid_pre"):
        split(model, "residual")


@BOTH
@pytest.mark.parametrize("wrong", ["adjacent", "angle", "none"])
def test_a_wrong_rotation_is_refused(family, wrong, monkeypatch):
    found = observe._Watch._rotation

    def misread(watch, noted, length):
        turn = found(watch, noted, length)
        changed = {
            "adjacent": dataclasses.replace(turn, adjacent=True),
            "angle": rotary.Rotation(turn.cos.roll(1, 2), turn.sin.roll(1, 2), turn.adjacent),
            "none": None,
        }
        return changed[wrong]

    model = cases.model_of(family)
    monkeypatch.setattr(observe._Watch, "_rotation", misread)
    with pytest.raises(tt.TangentRuntimeError, match="the terms add up to something else"):
        split(model)


# Edits of queries, keys and scores ----------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "name, message",
    [
        ("hook_q", "hook_q and hook_k are not the projections of attn.hook_in"),
        ("hook_k", "hook_q and hook_k are not the projections of attn.hook_in"),
        ("hook_attn_scores", "the terms add up to something else"),
    ],
)
@pytest.mark.parametrize("space", cases.SPACES)
def test_an_edit_behind_the_input_is_refused(family, name, message, space):
    model = cases.model_of(family)
    edit = (f"blocks.1.attn.{name}", lambda x, hook: 1.1 * x)
    with model.hooks(fwd_hooks=[edit]), pytest.raises(tt.TangentRuntimeError, match=message):
        split(model, space)
    split(model, space)


@BOTH
def test_an_edit_of_one_head_is_told_by_its_number(family):
    def edit(scores, hook):
        scores = scores.clone()
        scores[:, 2] += 0.1
        return scores

    model = cases.model_of(family)
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_attn_scores", edit)]):
        with pytest.raises(tt.TangentRuntimeError, match="layer 1, head 2: the terms"):
            split(model)


@BOTH
@pytest.mark.parametrize("site", ["attn.hook_in", "hook_resid_pre"])
@pytest.mark.parametrize("space", cases.SPACES)
def test_an_ablation_in_front_is_seen(family, site, space):
    """The terms are those of the ablated run, whose tangent part at its own site is nothing."""
    model = cases.model_of(family)
    name = f"blocks.1.{site}"
    given = cases.subspace(model, 1, "input" if site == "attn.hook_in" else "residual")
    options = {"space": space, "positions": "all"}
    tokens = families.tiny_tokens(model)
    before = split_attention_scores(model, tokens, 1, given, **options)
    with tt.ablating(model, {name: given}, positions="all"):
        if site == "attn.hook_in" and space == "residual":
            with pytest.raises(tt.TangentRuntimeError, match="Is something edited in between"):
                split_attention_scores(model, tokens, 1, given, **options)
            return
        ablated = split_attention_scores(model, tokens, 1, given, **options)
    assert ablated.error < cases.EXACT
    assert not torch.equal(ablated.scores, before.scores)
    own = (site == "attn.hook_in") == (space == "input")
    vanished = float(ablated.tangent.abs().max()) < 1e-12
    assert vanished == own and float(before.tangent.abs().max()) > 1e-3


@BOTH
def test_an_ablation_of_an_earlier_layer_is_seen(family):
    model = cases.model_of(family)
    earlier = cases.subspaces(model, "input")
    tokens = families.tiny_tokens(model)
    plain = split_attention_layers(model, tokens, earlier)
    with tt.ablating(model, earlier, part="normal", layers=[0], positions="all"):
        ablated = split_attention_layers(model, tokens, earlier)
    assert float(ablated[0].normal.abs().max()) < 1e-12
    assert all(one.error < cases.EXACT for one in ablated.values())
    assert not torch.equal(ablated[1].tangent, plain[1].tangent)


# Passes that can't be split -----------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["use_split_qkv_input", "use_attn_in"])
def test_an_input_for_every_head_is_refused(flag):
    family = "learned" if families.HAS_HOOKED_TRANSFORMER else "gpt2"
    model = cases.model_of(family)
    if not hasattr(type(model), f"set_{flag}"):
        pytest.skip(f"this TransformerLens has no {flag}")
    getattr(model, f"set_{flag}")(True)
    try:
        with pytest.raises(tt.TangentValueError, match=rf"{flag} is on.*set_{flag}\(False\)"):
            split(model)
    finally:
        getattr(model, f"set_{flag}")(False)
    split(model)


@BOTH
def test_a_pass_on_a_cache_is_refused(family):
    model = cases.model_of(family, torch.float32)
    tokens = families.tiny_tokens(model)
    with observe.observing(model, [0], lambda observed: None):
        with pytest.raises(tt.TangentRuntimeError, match="1 positions and its scores .* keys"):
            model.generate(tokens[:1], max_new_tokens=2, stop_at_eos=False, verbose=False)


def test_a_pass_from_a_later_layer_hands_over_the_layers_it_runs():
    model = cases.model_of("rotary_gqa")  # a bridge runs all layers all the same
    tokens = families.tiny_tokens(model)
    residual = cases.captured(model, tokens, ["blocks.1.hook_resid_pre"])
    handed = []
    with observe.observing(model, [0, 1], lambda observed: handed.append(observed.layer)):
        model(residual["blocks.1.hook_resid_pre"], start_at_layer=1)
    assert handed == [1]


def test_what_is_no_model_is_refused():
    with pytest.raises(tt.TangentValueError, match="a Linear .*Accepted: a HookedTransformer or"):
        split_attention_scores(torch.nn.Linear(2, 2), torch.zeros(1, 2), 0, None)
