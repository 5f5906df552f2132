"""Models made anew: the same shapes, other weights, and the original untouched."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import IDS, MODELS, build
from tl_tangent.hooks.attention.norms import norms_folded
from tl_tangent.hooks.untrained import untrained


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_same_shapes_and_other_weights(spec):
    model, tokens = build(spec), families.tiny_tokens()
    before = model(tokens)
    state = torch.random.get_rng_state()
    fresh, again, other = untrained(model), untrained(model), untrained(model, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(model(tokens), before)
    assert type(fresh) is type(model) and not fresh.training
    assert set(fresh.hook_dict) == set(model.hook_dict)
    assert fresh(tokens).shape == before.shape
    assert torch.equal(fresh(tokens), again(tokens))
    assert not torch.allclose(fresh(tokens), other(tokens))
    assert not torch.allclose(fresh(tokens), before)


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_its_name_says_what_it_is(spec):
    model = build(spec)
    fresh = untrained(model)
    name = f"{model.cfg.model_name} (untrained)"
    assert fresh.cfg.model_name == name == untrained(fresh).cfg.model_name
    assert not model.cfg.model_name.endswith("(untrained)")


def test_subspaces_of_the_trained_model_are_not_taken_for_its_own():
    model, tokens = families.bridge("llama"), families.tiny_tokens()
    site, fresh = "blocks.0.hook_resid_post", untrained(model)
    own, trained = (tt.fit_subspaces(one, tokens, site, 3)[site] for one in (fresh, model))
    tt.trace_residual(fresh, tokens, own)
    with pytest.raises(tt.TangentValueError, match=r"'external' and this model is .*untrained"):
        tt.trace_residual(fresh, tokens, trained)
    tt.trace_residual(fresh, tokens, trained, any_model=True)


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_a_model_in_compatibility_mode_comes_back_in_it(spec):
    model = build(spec)
    fresh = untrained(model)
    assert getattr(fresh, "compatibility_mode", None) == getattr(model, "compatibility_mode", None)
    if norms_folded(model):
        assert norms_folded(fresh)


def test_weights_in_compatibility_mode_are_processed_as_those_of_the_model():
    """Centred writes: what attention and MLP write to the stream has no mean over its entries."""
    tokens = families.tiny_tokens()
    for processed in (False, True):
        model = families.bridge("gpt2", dtype=torch.float64)
        model.enable_compatibility_mode(disable_warnings=True, no_processing=not processed)
        _, cache = untrained(model).run_with_cache(tokens)
        mean = float(cache["blocks.0.hook_mlp_out"].mean(-1).abs().max())
        assert mean < 1e-7 if processed else mean > 1e-4  # processed in float32


def test_device_and_dtype_are_those_of_the_model():
    model = families.bridge("llama", dtype=torch.bfloat16)
    assert untrained(model).original_model.dtype == torch.bfloat16
    model.to("meta")
    fresh = untrained(model)
    assert {parameter.device.type for parameter in fresh.parameters()} == {"meta"}
    assert str(fresh.cfg.device) == "meta"


@pytest.mark.parametrize("family", ["llama", *families.HOOKED_FAMILIES[:1]])
def test_no_generator_of_a_gpu_is_touched(family, monkeypatch, capsys):
    """Seeding all of them is what torch.manual_seed does; the weights are drawn on the CPU."""
    kind = "bridge" if family == "llama" else "hooked"
    model, seeded = build((kind, family, False)), []
    for backend in (torch.cuda, torch.mps):
        monkeypatch.setattr(
            backend, "manual_seed_all" if backend is torch.cuda else "manual_seed", seeded.append
        )
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    untrained(model)
    assert seeded == [] and capsys.readouterr().out == ""
    with torch.device("meta"):  # a default device does not matter
        assert next(untrained(model).parameters()).device.type == "cpu"


@pytest.mark.parametrize("seed", ["a", 1.5, None, True, 2**70, -1])
def test_seeds_are_whole_numbers(seed):
    with pytest.raises(tt.TangentValueError, match="seed is .*a whole number from 0 to"):
        untrained(build(("bridge", "llama", False)), seed)


def test_other_models_are_refused():
    with pytest.raises(tt.TangentValueError, match="a Linear can't be made anew"):
        untrained(torch.nn.Linear(2, 2))
