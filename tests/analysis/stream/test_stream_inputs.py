"""What the tools that follow the stream take and refuse: batches, numbers, caches, dropout."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.analysis.stream.test_transfer_gains import a_subspace, table, tokens
from tests.hooks import helpers
from tests.hooks.attention.cases import any_family, model_of


def trace(model, batches, depth=0, **options):
    return tt.trace_residual(model, batches, a_subspace(), **options)


def gains(model, batches, depth=0, **options):
    options = {"n_directions": 2, **options}
    return tt.transfer_gains(model, batches, a_subspace(), depth, **options)


def recovery(model, batches, depth=0, **options):
    return tt.part_recovery(model, batches, a_subspace(), depth, **options)


every_tool = pytest.mark.parametrize("tool", [trace, gains, recovery])
paired = pytest.mark.parametrize("tool", [gains, recovery])
every_host = pytest.mark.parametrize(
    "spec",
    [("bridge", "llama", False), *[("hooked", f, False) for f in families.HOOKED_FAMILIES[:1]]],
)


def numbers(result) -> list:
    if isinstance(result, tt.ResidualTrace):
        return result.ledger.energy.flatten().tolist()
    columns = ("gain", "coefficient")
    return [row[name] for row in result.rows for name in columns if name in row]


# Batches ------------------------------------------------------------------------------------------


@every_host
@every_tool
def test_a_group_is_for_fits_and_a_late_stop_is_no_matter(tool, spec):
    model, given = helpers.build(spec, torch.float64), tokens()
    expected = numbers(tool(model, given))
    assert numbers(tool(model, {"input": given, "group": 0})) == expected
    assert numbers(tool(model, {"input": given, "stop_at_layer": families.N_LAYERS})) == expected


@every_host
@every_tool
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"return_type": "loss"}, "return_type='loss'.*Leave it out"),
        ({"stop_at_layer": 0}, "stop_at_layer=0.*followed up to depth"),
        ({"stop_at_layer": -1}, "stop_at_layer is -1"),
        ({"start_at_layer": 1}, "start_at_layer=1.*from the embeddings on"),
        ({"attention_mask": torch.ones(4)}, r"attention_mask has the shape \[4\]"),
        ({"input": "hello"}, "the input is text and this model has no tokenizer"),
        ({"input": ["hello", "there"]}, "the input is text and this model has no tokenizer"),
        ({"input": np.arange(4, 8)[None]}, "input of a batch is a ndarray.*torch.as_tensor"),
        ({"input": [[4, 5, 6]]}, "input of a batch is a list.*torch.as_tensor"),
        ({"input": None}, "input of a batch is a NoneType"),
        ({"input": torch.zeros(2, 0, dtype=torch.long)}, r"shape \[2, 0\].*one token at least"),
        ({"input": torch.zeros(4)}, r"float32 tensor of shape \[4\]"),
        ({"input": torch.zeros(1, 4, 32, dtype=torch.long)}, r"shape \[1, 4, 32\]"),
    ],
)
def test_batches_that_are_refused(tool, spec, batch, words):
    model = helpers.build(spec, torch.float64)
    with pytest.raises(tt.TangentValueError, match=words):
        tool(model, {"input": tokens(), **batch})
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


@every_tool
def test_a_text_without_a_mapping_and_rows_of_numpy(tool):
    model = helpers.build(("bridge", "llama", False), torch.float64)
    with pytest.raises(tt.TangentValueError, match="no tokenizer"):
        tool(model, "hello")
    with pytest.raises(tt.TangentValueError, match="is a ndarray"):
        tool(model, tokens().numpy())


@pytest.mark.skipif(not families.HAS_HOOKED_TRANSFORMER, reason="a bridge takes no embeddings so")
@every_tool
def test_embeddings_are_taken_in_front_of_layer_0(tool):
    model, given = model_of("learned"), tokens()
    _, cache = model.run_with_cache(given, names_filter=["blocks.0.hook_resid_pre"])
    embeddings = cache["blocks.0.hook_resid_pre"]
    found = numbers(tool(model, {"input": embeddings, "start_at_layer": 0}))
    expected = numbers(tool(model, given))
    assert found[-4:] == pytest.approx(expected[-4:], rel=1e-12)


# Numbers ------------------------------------------------------------------------------------------

NUMBERS = [np.int64(1), torch.tensor(1), np.array(1)]


@pytest.mark.parametrize("one", NUMBERS, ids=["numpy", "tensor", "array"])
def test_whole_numbers_of_any_kind_are_taken(one):
    model, given = model_of(any_family()), tokens()
    expected = table(gains(model, given, depth=1, n_directions=1, n_controls=1, seed=1), start=1)
    made = tt.transfer_gains(
        model, given, a_subspace(), one, one + 1, n_directions=one, n_controls=one, seed=one
    )
    assert table(made, start=1) == expected
    assert numbers(recovery(model, given, depth=one)) == numbers(recovery(model, given, depth=1))
    traced = trace(model, given, n_controls=one, seed=one)
    for result in (made, traced, recovery(model, given, depth=one, n_controls=one, seed=one)):
        json.dumps({**result.conventions})
        assert result.conventions["n_controls"] == result.conventions["seed"] == 1


@pytest.mark.parametrize("several", [np.arange(2), torch.arange(2), (0, 1), range(2), [1, 0, 1]])
def test_several_starts_of_any_kind_are_taken(several):
    model = model_of(any_family())
    starts = [row["start"] for row in gains(model, tokens(), depth=several).rows]
    assert starts == sorted(starts, key=list(map(int, dict.fromkeys(map(int, several)))).index)
    assert set(starts) == {0, 1}


@pytest.mark.parametrize("wrong", ["0", 0.0, True, [0.5], torch.tensor(0.5), np.bool_(True)])
def test_other_depths_are_refused(wrong):
    model = model_of(any_family())
    for options in ({"start": wrong}, {"start": 0, "stop": wrong}):
        with pytest.raises(tt.TangentValueError, match="whole number"):
            tt.transfer_gains(model, tokens(), a_subspace(), **options)
    with pytest.raises(tt.TangentValueError, match="depth is .*whole number"):
        recovery(model, tokens(), depth=wrong)


def test_a_depth_has_to_be_said():
    with pytest.raises(tt.TangentValueError, match="depth is None"):
        recovery(model_of(any_family()), tokens(), depth=None)


@every_tool
@pytest.mark.parametrize("name", ["n_controls", "seed"])
@pytest.mark.parametrize("wrong", [1.5, None, "2", -1, True, "a", 2**70])
def test_other_controls_and_seeds_are_refused(tool, name, wrong):
    if (name, wrong) == ("n_controls", 2**70):
        return  # is a whole number
    with pytest.raises(tt.TangentValueError, match=f"{name} is .*a whole number from 0"):
        tool(model_of(any_family()), tokens(), **{name: wrong})


@pytest.mark.parametrize("wrong", [2.5, None, "2", 0, True])
@pytest.mark.parametrize("directions", ["random", "data"])
def test_other_numbers_of_directions_are_refused(wrong, directions):
    with pytest.raises(tt.TangentValueError, match="n_directions is .*a whole number from 1"):
        gains(model_of(any_family()), tokens(), n_directions=wrong, directions=directions)


def test_seeds_far_apart_draw_other_directions():
    model = model_of(any_family())
    near, far = (table(gains(model, tokens(), seed=seed)) for seed in (0, 2**32))
    assert near != far


@pytest.mark.parametrize("wrong", [["mlp"], None, 1, "heads"])
def test_other_branches_are_refused(wrong):
    with pytest.raises(tt.TangentValueError, match="through=.* is not one of 'both'"):
        gains(model_of(any_family()), tokens(), through=wrong)


# What makes runs differ ---------------------------------------------------------------------------


@pytest.mark.skipif(not families.HAS_HOOKED_TRANSFORMER, reason="the cache of a HookedTransformer")
@paired
def test_a_cache_that_grows_is_refused_and_a_frozen_one_stands_for_the_rows(tool):
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Cache

    model, given = model_of("learned"), tokens(7, batch=2)
    cache = Cache.init_cache(model.cfg, "cpu", batch_size=2)
    seen = torch.ones_like(given)  # else it asks for a tokenizer
    model(given[:, :3], past_kv_cache=cache, attention_mask=seen[:, :3])
    batch = {"input": given[:, 3:], "past_kv_cache": cache, "attention_mask": seen[:, 3:]}
    with pytest.raises(tt.TangentValueError, match="past_kv_cache, which grows.*cache.freeze"):
        tool(model, batch, positions="all")
    assert cache.entries[0].past_keys.shape[1] == 3
    cache.freeze()
    found = numbers(tool(model, batch, positions="all"))
    assert cache.entries[0].past_keys.shape[1] == 3
    whole = numbers(tool(model, given, positions=[3, 4, 5, 6]))
    assert found == pytest.approx(whole, rel=1e-9, abs=1e-12)


@paired
def test_a_cache_of_hugging_face_is_refused(tool):
    from transformers import DynamicCache

    model, cache = helpers.build(("bridge", "llama", False), torch.float64), DynamicCache()
    batch = {"input": tokens(), "past_key_values": cache}
    with pytest.raises(tt.TangentValueError, match="past_key_values, which grows"):
        tool(model, batch)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("gpt2", {"attn_pdrop": 0.3, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        ("llama", {"attention_dropout": 0.3}),
        ("bloom", {"hidden_dropout": 0.3}),
    ],
)
@paired
def test_dropout_in_training_mode_is_refused(tool, family, rates):
    model = families.bridge(family, dtype=torch.float64, **rates)
    expected = numbers(tool(model, tokens(), n_controls=0))
    model.train()
    with pytest.raises(tt.TangentValueError, match=r"at a rate of 0.3.*Call model.eval\(\)"):
        tool(model, tokens())
    still = families.bridge(family, dtype=torch.float64, **dict.fromkeys(rates, 0.0)).train()
    assert numbers(tool(still, tokens(), n_controls=0)) == pytest.approx(expected)


# Padding ------------------------------------------------------------------------------------------


@every_host
@every_tool
def test_padding_may_hold_anything_and_real_tokens_only_numbers(tool, spec):
    model, given = helpers.build(spec, torch.float64), tokens(5, batch=2)
    mask = torch.ones_like(given)
    mask[1, -1] = 0
    batch = {"input": given, "attention_mask": mask}
    expected = numbers(tool(model, batch, depth=1))

    def breaking(position: int):
        def broken(x, hook):
            x = x.clone()
            x[1, position] = torch.nan
            return x

        return model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", broken)])

    with breaking(-1):
        assert numbers(tool(model, batch, depth=1)) == expected
    with breaking(2), pytest.raises(tt.TangentRuntimeError, match="at position 2 of row 1"):
        tool(model, batch, depth=1)
