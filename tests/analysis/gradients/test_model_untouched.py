"""A model is afterwards what it was, whatever happened and whatever surrounds the call."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.analysis.gradients.cases import (
    MODELS,
    assert_same_statistics,
    batches,
    build,
    fresh,
    loss_of,
    measure,
)
from tests.hooks.gradients.cases import hook_counts

SPECS = [("hf", "gpt2"), *(spec for spec in MODELS if spec[0] != "hf")]  # GPT-2 has dropout
IDS = [spec[0] for spec in SPECS]


def state_of(model) -> dict:
    """All that a pass could change: gradients (the same objects), modes, weights, hooks, RNG."""
    return {
        "gradients": [
            None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()
        ],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "weights": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "training": [module.training for module in model.modules()],
        "hooks": hook_counts(model),
        "random": torch.get_rng_state(),
        "grad_enabled": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
    }


def assert_same_state(found: dict, expected: dict) -> None:
    for name, value in expected.items():
        for one, other in zip(_leaves(found[name]), _leaves(value), strict=True):
            same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            assert same, name


def _leaves(value):
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value]


def in_training(spec):
    """A model in the middle of training: some gradients, one frozen weight, modes of all sorts."""
    model = fresh(*spec, torch.float32)
    loss_of(model, batches(1)[0]).backward()
    model.train()
    list(model.modules())[-1].eval()
    frozen = next(p for name, p in model.named_parameters() if p.ndim == 1)
    frozen.requires_grad_(False)
    frozen.grad = None
    return model


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_a_model_in_training_is_left_as_it_was(spec):
    model = in_training(spec)
    before = state_of(model)
    assert any(before["training"])
    assert not all(before["training"])
    measure(model, moments=True)
    assert_same_state(state_of(model), before)


@pytest.mark.parametrize("where", ["fit", "loss", "backward", "gradient"])
@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_so_it_is_on_error(spec, where):
    model = in_training(spec)
    before = state_of(model)

    def objective(model, batch):
        loss = loss_of(model, batch.tokens)
        if where == "loss":
            raise RuntimeError("on purpose")
        if where == "backward":
            loss.register_hook(_fail)
        if where == "gradient":
            loss.register_hook(lambda g: g * torch.nan)
        return loss

    bad = [torch.full((1, 4), 10_000)] if where == "fit" else None
    with pytest.raises((RuntimeError, IndexError)):
        measure(model, bad, objective=objective)
    assert_same_state(state_of(model), before)


def _fail(*_):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_training_mode_does_not_change_a_number(spec):
    """Subspaces and gradients are those of evaluation mode: without dropout."""
    one, other = fresh(*spec, torch.float32), fresh(*spec, torch.float32).train()
    assert_same_statistics(measure(other), measure(one), 0)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("tokens_inside", [True, False])
def test_what_surrounds_the_call_does_not_change_a_number(around, tokens_inside):
    model, expected = build(*SPECS[0]), measure(build(*SPECS[0]))
    data = None if tokens_inside else batches()
    with around():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = measure(model, data or batches())
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert_same_statistics(found, expected, 0)
    tensors = [found.statistics.energies, *found.stacks.values()]
    tensors += [q.basis for q in found.subspaces.values()]
    assert not any(x.is_inference() for x in tensors)
    assert not any(x.requires_grad for x in tensors)


def test_under_autocast_energies_are_those_of_bfloat16():
    model = fresh("hf", "llama", torch.float32)
    data = batches(2, batch=8, pos=32)
    plain = measure(model, data)
    with torch.autocast("cpu", torch.bfloat16):
        found = measure(model, data, plain.subspaces)
    ratio = found.statistics.energies[:, 0] / plain.statistics.energies[:, 0]
    assert 1e-5 < float((ratio - 1).abs().max()) < 0.03


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_does_not_change_a_number(reentrant):
    """Blocks are run again in training mode alone, which Llama computes alike."""
    model, expected = fresh("hf", "llama"), measure(fresh("hf", "llama"))

    def objective(model, batch):
        model.train()
        return loss_of(model, batch.tokens)

    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_statistics(measure(model, objective=objective), expected, 1e-9)


def test_a_second_call_gives_the_same_numbers():
    model = build(*SPECS[0])
    assert_same_statistics(measure(model), measure(model), 0)


def test_a_result_does_not_keep_its_model():
    model = fresh("hf", "llama")
    gone = weakref.ref(model)
    result = measure(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(result.to_dataframe()) == 16


@pytest.mark.skipif(not families.HAS_HOOKED_TRANSFORMER, reason="needs HookedTransformer")
def test_attachments_stay_and_are_not_seen():
    hf = fresh("hf", "llama", torch.float32)
    model = tt.TangentHookedTransformer.from_hf(hf, None, fold_ln=False)
    plain = measure(model)
    site = "blocks.0.hook_resid_post"
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.tangents({site: plain.subspaces[site]}))
        names = set(model.hook_dict)
        assert f"{site}.hook_tangent" in names
        found = measure(model)
        assert set(model.hook_dict) == names
    assert_same_statistics(found, plain, 1e-5)
