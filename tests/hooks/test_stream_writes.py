"""Writes to the stream: they add up on every family, are whose they say, and are told if not."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers
from tests.hooks.attention.cases import EXACT, SINGLE, any_family, captured, hooks_left, model_of
from tests.hooks.helpers import IDS, MODELS
from tl_tangent.hooks.positions import run_of_forward
from tl_tangent.hooks.stream.writes import LayerWrites, head_writes, watching_writes

F64 = torch.float64
POST_NORM = ("bert", "roberta")
STREAMS = [(spec, name) for spec, name in zip(MODELS, IDS, strict=True) if spec[1] not in POST_NORM]
# Hugging Face's RMSNorm is in float32, on the attention's output too
SINGLE_NORMS = ("gemma2", "olmo2")

every_stream = pytest.mark.parametrize("spec", [s for s, _ in STREAMS], ids=[n for _, n in STREAMS])
hooked_only = pytest.mark.skipif(
    not families.HAS_HOOKED_TRANSFORMER, reason="HookedTransformer needs transformer-lens<4"
)


def watched(model, tokens=None, **options) -> list[LayerWrites]:
    tokens = families.tiny_tokens(model) if tokens is None else tokens
    found: list[LayerWrites] = []
    with watching_writes(model, found.append, **options):
        model(tokens, return_type=None)
    return found


def heads_of(model, found: LayerWrites):
    with torch.no_grad():
        return head_writes(model, found)


def total(writes) -> torch.Tensor:
    return torch.stack([write.value.expand_as(writes[0].value) for write in writes]).sum(0)


def same(found, expected, atol: float = EXACT) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def shifted(value, hook):
    return value + torch.linspace(-1, 1, value.shape[-1], dtype=value.dtype)


# Adding up ----------------------------------------------------------------------------------------


@every_stream
def test_the_stream_is_the_sum_of_all_writes_before(spec):
    model = helpers.build(spec, F64)
    tokens = families.tiny_tokens(model)
    found = watched(model, tokens)
    assert [one.layer for one in found] == [-1, *range(families.N_LAYERS)]
    assert torch.equal(found[0].before, torch.zeros_like(found[0].after))
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(families.N_LAYERS)]
    names += ["blocks.0.hook_resid_pre"]
    cache = captured(model, tokens, names)
    sum_of_all = torch.zeros_like(found[0].after)
    for one in found:
        name = f"blocks.{max(one.layer, 0)}.hook_resid_{'pre' if one.layer < 0 else 'post'}"
        sum_of_all = sum_of_all + total(one.writes)
        same(sum_of_all, cache[name])
        same(one.after, cache[name], 0)


@every_stream
def test_writes_are_the_outputs_of_attention_and_mlp_in_this_order(spec):
    model = helpers.build(spec, F64)
    tokens = families.tiny_tokens(model)
    found = watched(model, tokens)[1:]
    names = [f"blocks.{i}.hook_{x}_out" for i in range(len(found)) for x in ("attn", "mlp")]
    cache = captured(model, tokens, names)
    for layer, one in enumerate(found):
        assert [(w.writer, w.layer) for w in one.writes] == [("attn", layer), ("mlp", layer)]
        for write in one.writes:
            same(write.value, cache[f"blocks.{layer}.hook_{write.writer}_out"], 0)
        assert one.z is None


@every_stream
def test_heads_and_bias_add_up_to_the_attention(spec):
    model = helpers.build(spec, F64)
    tolerance = SINGLE if spec[0] == "bridge" and spec[1] in SINGLE_NORMS else EXACT
    for one in watched(model, heads=True)[1:]:
        found = heads_of(model, one)
        names = [*(f"head_{i}" for i in range(families.N_HEADS)), "attn_bias"]
        assert [(write.writer, write.layer) for write in found] == [(n, one.layer) for n in names]
        same(total(found), one.writes[0].value, tolerance)
        assert all(float(write.value.abs().max()) > 1e-3 for write in found[:-1])


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_a_head_writes_what_its_own_z_gives(family):
    """Writes with every other head's z cut out, and no bias, are the head's alone."""
    model = helpers.build(("bridge", family, False), F64)
    tokens = families.tiny_tokens(model)
    found = heads_of(model, watched(model, tokens, heads=True)[1])
    bias = found[-1].value

    def keep(head):
        def cut(z, hook):
            others = torch.arange(z.shape[2]) != head
            return z.masked_fill(others[:, None], 0.0)

        return cut

    for head, write in enumerate(found[:-1]):
        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", keep(head))]):
            cut = captured(model, tokens, ["blocks.0.hook_attn_out"])["blocks.0.hook_attn_out"]
        same(cut, write.value + bias)


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "softcap", "postnorm"])
def test_a_norm_on_the_output_is_in_the_writes(family):
    """A write enters the stream behind the norm, and each head's share has that norm's scale."""
    if family in families._HOOKED and not families.HAS_HOOKED_TRANSFORMER:
        pytest.skip("HookedTransformer needs transformer-lens<4")
    model = model_of(family)
    one = watched(model, heads=True)[1]
    attn, found = model.blocks[0].attn, heads_of(model, one)
    raw = torch.einsum("bphe,hed->hbpd", one.z, attn.W_O.detach())
    ratio = found[0].value / raw[0]  # gain / scale: the same for every head
    for head, write in enumerate(found[:-1]):
        same(write.value, raw[head] * ratio, SINGLE)
    unnormed = raw.sum(0) + (0 if attn.b_O is None else attn.b_O.detach())
    assert float((unnormed - one.writes[0].value).abs().max()) > 0.1


def test_parallel_and_sequential_blocks_read_different_streams_and_both_add_up():
    tokens = families.tiny_tokens()
    together = families.bridge("gpt_neox", dtype=F64)
    in_turn = families.bridge("gpt_neox_sequential", dtype=F64)
    parallel, sequential = watched(together, tokens)[1], watched(in_turn, tokens)[1]
    for one in (parallel, sequential):
        same(one.before + total(one.writes), one.after)
    same(parallel.writes[0].value, sequential.writes[0].value)  # attention reads the same
    assert float((parallel.writes[1].value - sequential.writes[1].value).abs().max()) > 0.1


# Embeddings ---------------------------------------------------------------------------------------


@every_stream
def test_token_and_position_are_apart_where_the_stream_is_their_sum(spec):
    model = helpers.build(spec, F64)
    tokens = families.tiny_tokens(model)
    first = watched(model, tokens)[0]
    learned = spec[1] in ("learned", "gpt2")
    writers = ["embed", "pos_embed"] if learned else ["embed"]
    assert [(w.writer, w.layer) for w in first.writes] == [(name, None) for name in writers]
    same(total(first.writes), first.after)
    if learned:
        token = captured(model, tokens, ["hook_embed"])["hook_embed"]
        same(first.writes[0].value, token, 0)
        position = first.writes[1].value
        same(position, position[:1].expand_as(position))
        assert float((position[0, 0] - position[0, 1]).abs().max()) > 0.1


def test_embeddings_that_do_not_add_up_are_one_write():
    """Dropout on the sum of both: what is left is neither token nor position."""
    rates = {"embd_pdrop": 0.5, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    model = families.bridge("gpt2", dtype=F64, **rates).train()
    first, second, *_ = watched(model)
    (write,) = first.writes
    assert write.writer == "embed" and float((write.value == 0).double().mean()) > 0.2
    same(write.value, second.before, 0)


def test_an_edited_embedding_is_what_was_embedded():
    model = model_of(any_family())
    before = watched(model)[0].writes[0].value
    with model.hooks(fwd_hooks=[("hook_embed", shifted)]):
        same(watched(model)[0].writes[0].value, shifted(before, None))


# What is told -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, compat", [x for x in families.BRIDGE_FAMILIES if x[0] in POST_NORM]
)
def test_a_norm_on_the_sum_is_refused_with_the_reason(family, compat):
    model = helpers.build(("bridge", family, compat), F64)
    with pytest.raises(tt.TangentRuntimeError, match=r"layer 0 .*do not add up.*norm.*as in BERT"):
        watched(model)


def test_an_edit_of_the_sum_is_told():
    model = model_of(any_family())
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", shifted)]):
        with pytest.raises(tt.TangentRuntimeError, match=r"layer 1 .*do not add up.*edited"):
            watched(model)


@hooked_only
def test_an_edit_between_attention_and_mlp_is_told():
    """On a HookedTransformer resid_mid is the stream itself; on a bridge it feeds the MLP alone."""
    model = helpers.build(("hooked", "learned", False), F64)
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_mid", shifted)]):
        with pytest.raises(tt.TangentRuntimeError, match=r"layer 0 .*do not add up"):
            watched(model)


@pytest.mark.parametrize("writer", ["attn", "mlp"])
def test_an_edited_write_is_what_was_written(writer):
    model, name = model_of(any_family()), f"blocks.0.hook_{writer}_out"
    before = {write.writer: write.value for write in watched(model)[1].writes}
    with model.hooks(fwd_hooks=[(name, shifted)]):
        after = watched(model)[1]
    found = {write.writer: write.value for write in after.writes}
    same(found[writer], shifted(before[writer], None))
    same(after.before + total(after.writes), after.after)


def test_heads_that_do_not_add_up_are_refused():
    model = model_of(any_family())
    with model.hooks(fwd_hooks=[("blocks.0.hook_attn_out", shifted)]):
        one = watched(model, heads=True)[1]
    with pytest.raises(tt.TangentValueError, match=r"layer 0: heads .*Trace without heads=True"):
        heads_of(model, one)


def test_a_model_without_a_stream_is_refused():
    with pytest.raises(tt.TangentValueError, match=r"a Linear has no residual stream.*Accepted"):
        watched(torch.nn.Linear(3, 3), torch.zeros(1, 3))


# Padding and numbers that are none ----------------------------------------------------------------


def with_entries(x, value, row=1, position=-1):
    x = x.clone()
    x[row, position] = value
    return x


@pytest.mark.parametrize("site", ["blocks.1.hook_mlp_out", "blocks.1.attn.hook_z"])
def test_padding_may_hold_anything(site):
    model, tokens = model_of(any_family()), families.tiny_tokens()
    mask = torch.ones_like(tokens)
    mask[1, -1] = 0
    run = run_of_forward(model, (tokens,), {"attention_mask": mask})
    broken = (site, lambda x, hook: with_entries(x, torch.nan))
    found: list[LayerWrites] = []
    with model.hooks(fwd_hooks=[broken]):
        with watching_writes(model, found.append, run=run, heads=True):
            model(tokens, attention_mask=mask, return_type=None)
    assert len(found) == 1 + families.N_LAYERS
    assert found[-1].after[1, -1].isnan().any()
    real = mask.bool()
    total_of_heads = total(heads_of(model, found[-1]))
    same(total_of_heads[real], found[-1].writes[0].value[real])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_stream_that_is_not_finite_is_told_with_its_token(value):
    model = model_of(any_family())
    broken = ("blocks.1.hook_mlp_out", lambda x, hook: with_entries(x, value, 1, 3))
    words = r"layer 1: the stream behind it has NaN or infinite entries at 1 tokens, .* 3 of row 1"
    with model.hooks(fwd_hooks=[broken]), pytest.raises(tt.TangentRuntimeError, match=words):
        watched(model)
    broken = ("blocks.0.hook_resid_pre", lambda x, hook: with_entries(x, value, 0, 2))
    with model.hooks(fwd_hooks=[broken]), pytest.raises(tt.TangentRuntimeError, match="2 of row 0"):
        watched(model)


# What is left behind ------------------------------------------------------------------------------


def test_no_hook_is_left_and_the_pass_is_as_it_was():
    model = model_of(any_family())
    tokens, hooks = families.tiny_tokens(model), hooks_left(model)
    expected, inside = model(tokens), []
    with watching_writes(model, lambda found: None, heads=True):
        assert torch.equal(model(tokens), expected)
        inside.append(hooks_left(model))
    assert inside[0] > hooks_left(model) == hooks


def test_no_hook_is_left_after_an_exception():
    model = model_of(any_family())
    hooks, called = hooks_left(model), []

    def fail(found):
        called.append(found.layer)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        with watching_writes(model, fail):
            model(families.tiny_tokens(model), return_type=None)
    assert called == [-1]
    assert hooks_left(model) == hooks


def test_hooks_of_the_user_stay():
    model, called = model_of(any_family()), []
    model.add_hook("blocks.0.hook_attn_out", lambda value, hook: called.append(1))
    try:
        watched(model)
        model(families.tiny_tokens(model))
    finally:
        model.reset_hooks()
    assert len(called) == 2


def test_only_the_layers_up_to_the_last_are_watched():
    assert [one.layer for one in watched(model_of(any_family()), last=0)] == [-1, 0]


def in_place(x, hook):
    x[:, 2] += 1e-3  # the tensor that the layer before has left


EDITS = pytest.mark.parametrize("edit", [shifted, in_place])


@pytest.mark.parametrize("layer", range(families.N_LAYERS))
@EDITS
@every_stream
def test_an_edit_in_front_of_a_layer_is_told(spec, edit, layer):
    """Of layer 0 too, where it is no embedding; and where it is meant, not."""
    model, site = helpers.build(spec, F64), f"blocks.{layer}.hook_resid_pre"
    with model.hooks(fwd_hooks=[(site, edit)]):
        with pytest.raises(tt.TangentRuntimeError, match=f"layer {layer}: .*edits it in between"):
            watched(model)
        found = watched(model, edited_at=layer)
        assert len(found) == 1 + families.N_LAYERS
        with pytest.raises(tt.TangentRuntimeError, match=f"layer {layer}: .*edits it in between"):
            watched(model, edited_at=1 - layer)  # that is another layer


@pytest.mark.parametrize("layer", range(families.N_LAYERS))
def test_an_edit_of_an_attached_part_in_front_of_a_layer_is_told(layer):
    model, site = model_of(any_family()), f"blocks.{layer}.hook_resid_pre"
    subspaces = helpers.random_subspaces(model, families.tiny_tokens(model), [site])
    with tt.tangents(model, subspaces):
        watched(model)
        model.add_hook(f"{site}.hook_tangent", lambda v, hook: 2 * v)
        with pytest.raises(tt.TangentRuntimeError, match=f"layer {layer}: .*edits it in between"):
            watched(model)
        model.reset_hooks()


def test_an_edit_of_a_small_token_beside_a_huge_one_is_told():
    model, tokens = helpers.build(("bridge", "gpt2", False), F64), families.tiny_tokens()

    def edit(x, hook):
        x = x.clone()
        x[:, 0] *= 1e8
        return x

    def nudge(x, hook):
        return x + 1e-3

    first = ("hook_embed", edit)
    with model.hooks(fwd_hooks=[first]), watching_writes(model, lambda found: None):
        model(tokens)
    later = ("blocks.1.hook_resid_post", nudge)
    with model.hooks(fwd_hooks=[first, later]):
        with pytest.raises(tt.TangentRuntimeError, match="do not add up"):
            with watching_writes(model, lambda found: None):
                model(tokens)
