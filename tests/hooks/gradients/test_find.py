"""Which weights are found: all of them, under the right names, taken apart where they are fused."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.gradients.cases import ALL, IDS, backward, build, error, fresh, tokens_for
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.watch import watching_activations

FUSED = ["gpt2", "gpt_neox", "bloom", "mpt", "glm", "phi3", "ModernBert"]
NOT_FUSED = ["llama", "bert", "EuroBert"]
SINGLE = 1e-6  # rotations and RMSNorms are float32 in float64 models, too
GATED = {"llama", "olmo2", "gemma2", "gemma3", "qwen2", "qwen3", "glm", "phi3", "cohere"}
GATED |= {"olmo_clipped", "stablelm_qk_norm", "EuroBert", "ModernBert"}
GATED_HOOKED = {"rotary_gqa", "softcap", "postnorm"}


def matrices(kind: str, model) -> dict[str, torch.nn.Parameter]:
    """All parameters that multiply. Biases of a HookedTransformer have two axes, and don't."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
        and (kind != "hooked" or name.rpartition(".")[2].lstrip("_").startswith("W_"))
    }


@pytest.mark.parametrize(("kind", "family"), ALL, ids=IDS)
def test_every_matrix_that_learns_is_found_or_listed_as_left_out(kind, family):
    model = build(kind, family)
    weights, there = find_weights(model), matrices(kind, model)
    backward(model, weights, tokens_for(model))
    found = {id(weight.parameter) for weight in weights.weights}
    assert set(weights.left_out) <= set(there)
    for name, parameter in there.items():
        assert (id(parameter) in found) + (name in weights.left_out) <= 1
        if id(parameter) not in found and name not in weights.left_out:
            assert parameter.grad is None  # the fused original of what a bridge took apart
        if name in weights.left_out and kind != "hooked":  # it has a W_pos that it may not use
            assert parameter.grad is not None


@pytest.mark.parametrize(("kind", "family"), ALL, ids=IDS)
def test_every_block_has_one_weight_of_each_kind(kind, family):
    model = build(kind, family)
    weights = find_weights(model).weights
    gated = family in (GATED_HOOKED if kind == "hooked" else GATED)
    expected = sorted(["q", "k", "v", "o", "in", "out", *(["gate"] if gated else [])])
    depth = 1 + max(weight.layer or 0 for weight in weights)
    assert depth == len(getattr(model, "blocks", ())) or depth == model.config.num_hidden_layers
    for layer in range(depth):
        assert sorted(one.kind for one in weights if one.layer == layer) == expected
    outside = [weight.kind for weight in weights if weight.layer is None]
    assert outside.count("tied") + outside.count("unembed") == 1
    assert ("embed" in outside) == ("tied" not in outside)
    assert set(outside) <= {"embed", "pos", "unembed", "tied"}


def test_names_kinds_and_sites_of_one_model():
    found = {one.name: (one.kind, one.side, one.site) for one in find_weights(_llama()).weights}
    block = {
        "attn.W_Q": ("q", "input", "attn.hook_in"),
        "attn.W_K": ("k", "input", "attn.hook_in"),
        "attn.W_V": ("v", "input", "attn.hook_in"),
        "attn.W_O": ("o", "output", "hook_resid_post"),
        "mlp.W_gate": ("gate", "input", "mlp.hook_in"),
        "mlp.W_in": ("in", "input", "mlp.hook_in"),
        "mlp.W_out": ("out", "output", "hook_resid_post"),
    }
    expected = {
        f"blocks.{layer}.{name}": (kind, side, f"blocks.{layer}.{site}")
        for layer in range(families.N_LAYERS)
        for name, (kind, side, site) in block.items()
    }
    expected["embed.W_E"] = ("embed", "output", "blocks.0.hook_resid_pre")
    expected["unembed.W_U"] = ("unembed", "input", "unembed.hook_in")
    assert found == expected


@pytest.mark.parametrize("family", [*FUSED, *NOT_FUSED])
def test_parts_of_fused_weights_are_those_of_the_bridge(family):
    """Bit by bit: the same rows of the same matrix, and the gradients to rounding."""
    models = build("hf", family), build("bridge", family)
    tokens = tokens_for(models[0])
    found = []
    for model in models:
        weights = find_weights(model)
        backward(model, weights, tokens)
        found.append({weight.name: weight for weight in weights.weights})
    plain, bridged = found
    assert set(plain) == set(bridged)
    shared = [len({id(w.parameter) for w in one.values()}) < len(one) for one in found]
    assert shared == [family in FUSED, False]  # else nothing was fused, and nothing tested
    for name, weight in plain.items():
        other = bridged[name]
        assert torch.equal(weight.matrix(weight.parameter), other.matrix(other.parameter))
        assert (weight.kind, weight.site, weight.d) == (other.kind, other.site, other.d)
        assert error(weight.gradient(), other.gradient()) < SINGLE


def test_token_types_and_the_head_of_a_masked_model_are_left_out():
    for family, head in (("bert", "cls.predictions.transform"), ("roberta", "lm_head")):
        assert find_weights(build("hf", family)).left_out == (
            f"{family}.embeddings.token_type_embeddings.weight",
            f"{head}.dense.weight",
        )


def test_tied_weights_are_one():
    for tie in (True, False):
        model = fresh("hf", "llama", tie_word_embeddings=tie)
        kinds = [weight.kind for weight in find_weights(model).weights if weight.layer is None]
        assert kinds == (["tied"] if tie else ["embed", "unembed"])
    (tied,) = find_weights(build("hf", "gpt2")).choose(("tied",)).weights
    assert (tied.name, tied.side, tied.site) == ("unembed.W_U", "input", "unembed.hook_in")
    assert tied.parameter is build("hf", "gpt2").transformer.wte.weight


def test_new_models_whose_gains_are_one_are_not_taken_for_folded():
    hf = fresh("hf", "llama")
    for name, parameter in hf.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1)
    assert len(find_weights(tt.TangentBridge.from_hf(hf)).weights) == len(_all())
    if families.HAS_HOOKED_TRANSFORMER:
        hooked = fresh("hooked", "learned")
        for name, parameter in hooked.named_parameters():
            if ".ln" in name or name.startswith("ln_final"):
                parameter.data.fill_(name.endswith("w"))
        assert len(find_weights(hooked).weights) == 3 + 6 * families.N_LAYERS


# Sites ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "family"), [spec for spec in ALL if spec[0] != "hf"])
def test_sites_see_what_the_hook_points_of_that_name_see(kind, family):
    model = build(kind, family)
    weights, tokens, seen = find_weights(model), tokens_for(model), {}
    with torch.no_grad(), watching_activations(weights.sites, seen.__setitem__):
        model(tokens)
    assert set(seen) == {weight.site for weight in weights.weights}
    known = [name for name in seen if _has(model, name)]
    assert {"hook_in", "hook_resid_post"} <= {name.rpartition(".")[2] for name in known}
    fitters = tt.collect(model, tokens, known, positions="all")
    for name, fitter in fitters.items():
        assert error(seen[name].double().mean((0, 1)), fitter.mean) < 1e-12
    for weight in weights.weights:
        assert seen[weight.site].shape[-1] == weight.d


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "glm", "EuroBert"])
def test_sites_of_a_plain_model_are_those_of_its_bridge(family):
    found = []
    for kind in ("hf", "bridge"):
        model, seen = build(kind, family), {}
        with torch.no_grad(), watching_activations(find_weights(model).sites, seen.__setitem__):
            model(tokens_for(model))
        found.append(seen)
    plain, bridged = found
    assert set(plain) == set(bridged)
    for name, x in plain.items():
        assert error(x, bridged[name]) < SINGLE


def _has(model, name: str) -> bool:
    from tests.hooks.helpers import has_site

    return has_site(model, name)


# Choosing -------------------------------------------------------------------------------------


def _llama():
    return build("hf", "llama")


def _all():
    return find_weights(_llama()).weights


def test_choosing_by_kinds_and_layers():
    weights = find_weights(_llama())
    assert weights.choose().weights == weights.weights

    def names(**options):
        return [weight.name for weight in weights.choose(**options).weights]

    assert names(kinds=("q",)) == ["blocks.0.attn.W_Q", "blocks.1.attn.W_Q"]
    assert names(kinds=("unembed", "embed")) == ["embed.W_E", "unembed.W_U"]
    assert names(kinds=("o", "k"), layers=(-1,)) == ["blocks.1.attn.W_K", "blocks.1.attn.W_O"]
    assert names(layers=(-2,)) == names(layers=(0,))
    assert names(layers=(0, 1, -1)) == [one.name for one in _all() if one.layer is not None]


def test_what_was_not_chosen_is_left_out_and_its_sites_are_gone():
    weights = find_weights(build("hf", "bert"))
    chosen = weights.choose(kinds=("q",), layers=(1,))
    assert set(chosen.sites) == {"blocks.1.attn.hook_in"}
    others = {weight.name for weight in weights.weights} - {"blocks.1.attn.W_Q"}
    assert set(chosen.left_out) == others | set(weights.left_out)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kinds": ("q", "z")}, r"kinds \['z'\] are not in this model.*'embed', 'gate'"),
        ({"kinds": ("pos",)}, r"kinds \['pos'\] are not in this model"),
        ({"layers": (2,)}, r"layers \[2\] are not in this model of 2 layers"),
        ({"layers": (0, -3)}, r"layers \[-3\] are not in this model of 2 layers"),
        ({"kinds": ("embed",), "layers": (0,)}, r"no weight of kinds \('embed',\) in layers \(0,"),
        ({"kinds": ()}, "no weight of kinds"),
    ],
)
def test_what_can_not_be_chosen_is_told(options, told):
    with pytest.raises(tt.TangentValueError, match=told):
        find_weights(_llama()).choose(**options)
