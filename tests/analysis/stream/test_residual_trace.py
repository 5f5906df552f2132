"""The ledger of a model's stream against its cached activations, projected by hand."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch import Tensor

import tl_tangent as tt
from tests import families
from tests.hooks import helpers
from tests.hooks.attention.cases import any_family, captured, hooks_left, model_of
from tests.hooks.helpers import IDS, MODELS, projector

F64, RANK, CONTROLS, PARTS = torch.float64, 3, 2, ("tangent", "normal")
LAYERS, DEPTHS = families.N_LAYERS, families.N_LAYERS + 1
STREAMS = {name: spec for spec, name in zip(MODELS, IDS, strict=True) if "bert" not in name}
every_stream = pytest.mark.parametrize("name", STREAMS)
both_references = pytest.mark.parametrize("reference", ["fixed", "own"])


def site_of(depth: int) -> str:
    return f"blocks.{min(depth, LAYERS - 1)}.hook_resid_{'pre' if depth < LAYERS else 'post'}"


def subspaces_of(reference: str, positions="all"):
    """A seeded subspace with a mean that is not small, for every depth or at each."""
    made = {}
    for depth in range(DEPTHS):
        generator = torch.Generator().manual_seed(depth)
        basis = torch.randn(families.D_MODEL, RANK, generator=generator, dtype=F64)
        mean = torch.randn(families.D_MODEL, generator=generator, dtype=F64)
        made[site_of(depth)] = tt.TangentSubspace(
            basis, mean, site=site_of(depth), orthonormalize=True, positions=positions
        )
    return made[site_of(1)] if reference == "fixed" else made


def at_depth(subspaces, depth: int) -> tt.TangentSubspace:
    return subspaces if isinstance(subspaces, tt.TangentSubspace) else subspaces[site_of(depth)]


@functools.cache
def traced(name: str, reference: str, n_controls: int = CONTROLS, **options):
    model = helpers.build(STREAMS[name], F64)
    tokens = families.tiny_tokens(model)
    subspaces = subspaces_of(reference)
    return tt.trace_residual(model, tokens, subspaces, n_controls=n_controls, **options)


def plain(reference: str, **options):
    """The same of one family that every TransformerLens has."""
    return traced("bridge-llama", reference, **options)


def parts_of(subspace: tt.TangentSubspace, vectors: Tensor) -> Tensor:
    """Both parts ``[part, token, d]`` of vectors ``[batch, pos, d]``, by a d x d projector."""
    flat, dense = vectors.flatten(0, -2), projector(subspace)
    return torch.stack([flat @ dense, flat - flat @ dense])


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)


def close(found, expected) -> None:
    assert list(found) == pytest.approx(torch.as_tensor(expected).tolist(), rel=1e-11, abs=1e-13)


def part_rows(frame: pd.DataFrame, part: str) -> pd.DataFrame:
    return frame[frame["part"] == part].reset_index(drop=True)


# Against cached activations -----------------------------------------------------------------------


@every_stream
@both_references
def test_energies_are_those_of_the_cached_streams_and_writes(name, reference):
    model, subspaces = helpers.build(STREAMS[name], F64), subspaces_of(reference)
    ledger = traced(name, reference).ledger
    assert ledger.closing_error < 1e-12
    outs = [f"blocks.{i}.hook_{x}_out" for i in range(LAYERS) for x in ("attn", "mlp")]
    names = [site_of(depth) for depth in range(DEPTHS)] + outs
    cache = captured(model, families.tiny_tokens(model), names)
    streams = []
    for depth in range(DEPTHS):
        subspace = at_depth(subspaces, depth)
        streams.append(parts_of(subspace, cache[site_of(depth)] - subspace.mean))
        same(ledger.stream[depth], streams[-1].square().sum(-1))
    for layer in range(LAYERS):
        same(ledger.copied[layer], (streams[layer] * streams[layer + 1]).sum(-1))
        for writer in ("attn", "mlp"):
            write = cache[f"blocks.{layer}.hook_{writer}_out"]
            # a layer writes into the subspace behind it, where its write is looked at
            parts = parts_of(at_depth(subspaces, layer + 1), write)
            at = ledger.writers.index(f"{layer}.{writer}")
            same(ledger.energy[at], parts.square().sum(-1))


@every_stream
@both_references
def test_energies_and_interference_telescope_to_the_stream(name, reference):
    ledger = traced(name, reference).ledger
    change, control = (
        energy + 2 * carried
        for energy, carried in (
            (ledger.energy, ledger.carried),
            (ledger.control_energy, ledger.control_carried),
        )
    )
    for depth in range(DEPTHS):
        so_far = [layer is None or layer < depth for layer in ledger.layers]
        same(change[so_far].sum(0), ledger.stream[depth])
        same(control[so_far].sum(0), ledger.control_stream[depth])


@every_stream
def test_heads_and_bias_do_what_the_attention_does(name):
    whole, apart = traced(name, "own").ledger, traced(name, "own", heads=True).ledger
    heads = [f"head_{i}" for i in range(families.N_HEADS)] + ["attn_bias"]
    # float32 norms of the host stand between the heads and the stream
    loose = (
        {"atol": 1e-4, "rtol": 1e-4} if name.startswith(("bridge-gemma2", "bridge-olmo2")) else {}
    )
    for layer in range(LAYERS):
        at = [apart.writers.index(f"{layer}.{head}") for head in heads]
        found = (apart.energy + 2 * apart.carried)[at].sum(0)
        one = whole.writers.index(f"{layer}.attn")
        expected = (whole.energy + 2 * whole.carried)[one]
        torch.testing.assert_close(found, expected, **(loose or {"atol": 1e-11, "rtol": 1e-11}))
        assert f"{layer}.attn" not in apart.writers and f"{layer}.mlp" in apart.writers
    assert apart.closing_error < (1e-5 if loose else 1e-12)


def test_who_writes_in_which_order():
    inner = ["attn", "mlp"]
    fixed = [f"{layer}.{x}" for layer in range(LAYERS) for x in inner]
    own = [f"{layer}.{x}" for layer in range(LAYERS) for x in ("subspace", "mean", *inner)]
    assert list(plain("fixed").writers) == ["mean", "embed", *fixed]
    assert list(plain("own").writers) == ["mean", "embed", *own]
    assert traced("bridge-gpt2", "fixed").writers[:3] == ("mean", "embed", "pos_embed")


def test_writes_that_stay_in_the_subspace_leave_the_normal_part_as_it_was():
    """Attention and MLP projected on T: the normal part behind every layer is the embedding's."""
    model, subspace = families.bridge("gpt2", dtype=F64), subspaces_of("fixed")
    for name, parameter in model.named_parameters():
        if ".attn.o." in name or ".c_proj." in name:
            parameter.data = parameter.data @ projector(subspace)
    trace = tt.trace_residual(model, families.tiny_tokens(model), subspace)
    same(trace.ledger.stream[:, 1], trace.ledger.stream[:1, 1].expand(DEPTHS, -1))
    normal = part_rows(trace.stream(), "normal")[:LAYERS]
    for column in ("gain", "cosine", "kept"):
        close(normal[column], [1] * LAYERS)
    inner = trace.writes().dropna(subset="layer")
    assert float(inner[inner["part"] == "normal"]["energy"].abs().max()) < 1e-13
    assert float(inner[inner["part"] == "tangent"]["energy"].min()) > 1e-2
    assert (part_rows(trace.stream(), "tangent")["gain"][:LAYERS] - 1).abs().min() > 1e-2


# Tables -------------------------------------------------------------------------------------------


@both_references
@pytest.mark.parametrize("part", range(2))
def test_the_rows_of_the_stream_by_definition(reference, part):
    ledger = plain(reference).ledger
    energy, copied = ledger.stream[:, part].mean(-1), ledger.copied[:, part].mean(-1)
    rows = part_rows(plain(reference).stream(), PARTS[part])
    close(rows["depth"], range(DEPTHS))
    close(rows["energy"], energy)
    close(rows["share"], energy / ledger.stream.mean(-1).sum(1))
    inner = rows[:LAYERS]
    close(inner["gain"], (energy[1:] / energy[:-1]).sqrt())
    close(inner["cosine"], copied / (energy[1:] * energy[:-1]).sqrt())
    close(inner["kept"], copied / energy[:-1])
    assert rows[["gain", "cosine", "kept"]].iloc[LAYERS].isna().all()
    control = ledger.control_stream[:, part].mean(-1)
    gains = (control[1:] / control[:-1]).sqrt()
    close(inner["control_gain_mean"], gains.mean(-1))
    close(inner["control_gain_min"], gains.amin(-1))
    close(inner["control_gain_max"], gains.amax(-1))
    assert (gains.amax(-1) > gains.amin(-1)).all()


@both_references
@pytest.mark.parametrize("part", range(2))
def test_the_rows_of_the_writes_by_definition(reference, part):
    ledger = plain(reference).ledger
    rows = part_rows(plain(reference).to_dataframe(), PARTS[part])
    energy = ledger.energy[:, part].mean(-1)
    close(rows["energy"], energy)
    close(rows["interference"], 2 * ledger.carried[:, part].mean(-1))
    inner = [i for i, layer in enumerate(ledger.layers) if layer is not None]
    before = ledger.stream[:, part].mean(-1)[[ledger.layers[i] for i in inner]]
    close(rows["written"][inner], (energy[inner] / before).sqrt())
    assert rows["written"].isna().sum() == len(rows) - len(inner)
    control = ledger.control_energy[:, part].mean(-1)
    close(rows["control_energy_mean"], control.mean(-1))
    close(rows["control_energy_max"], control.amax(-1))


def test_rows_by_position_token_and_frequency():
    trace = plain("fixed")
    ids, position = trace.ledger.ids, trace.ledger.position
    assert torch.equal(ids, families.tiny_tokens().flatten())
    assert position.tolist() == [*range(9)] * 2
    for by, values in (("position", position), ("token", ids)):
        frame = trace.stream(by=by)
        assert set(frame[by]) == set(values.tolist())
        for value, rows in part_rows(frame, "normal").groupby(by):
            close(rows["energy"], trace.ledger.stream[:, 1, values == value].mean(-1))
            assert set(rows["n_tokens"]) == {int((values == value).sum())}
            controls = trace.ledger.control_stream[:, 1][..., values == value].mean(-1)
            close(rows["control_energy_mean"], controls.mean(-1))
    counts = {int(i): int(i) for i in ids}  # the rarest quarter has the lowest ids
    frame = trace.writes(by="frequency", counts=counts)
    assert sorted(set(frame["frequency"])) == [1, 2, 3, 4]
    rarest = ids.double() <= ids.double().quantile(0.25)
    rows = part_rows(frame[frame["frequency"] == 1], "tangent")
    close(rows["energy"], trace.ledger.energy[:, 0, rarest].mean(-1))


def test_classes_that_are_not_there_are_refused():
    trace = plain("fixed")
    with pytest.raises(tt.TangentValueError, match="by='head' is not one of 'position', 'token'"):
        trace.stream(by="head")
    without = replace(trace.ledger, ids=torch.full_like(trace.ledger.ids, -1))
    with pytest.raises(tt.TangentValueError, match="by='token' needs token ids.*Trace tokens"):
        replace(trace, ledger=without).writes(by="token")


def test_pairs_are_inner_products_of_writes_and_add_up_to_the_last_energy():
    trace = plain("fixed")
    model, subspace = helpers.build(STREAMS["bridge-llama"], F64), subspaces_of("fixed")
    names = [f"blocks.{layer}.hook_{x}_out" for layer, x in ((0, "mlp"), (1, "attn"))]
    cache = captured(model, families.tiny_tokens(model), names)
    pair = [trace.writers.index(x) for x in ("0.mlp", "1.attn")]
    first, second = (parts_of(subspace, cache[name]) for name in names)
    for part, name in enumerate(PARTS):
        matrix, energy = trace.pairs[name], trace.ledger.energy[:, part].mean(-1)
        same(matrix, matrix.T)
        same(matrix.diagonal(), energy)
        same(matrix.sum(), trace.ledger.stream[-1, part].mean())
        same(matrix[*pair], (first[part] * second[part]).sum(-1).mean())
    assert plain("own").pairs is None
    assert traced("bridge-llama", "fixed", interference=False).pairs is None


# Which tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_the_first_position_are_not_followed(side):
    # in float64 other hosts give NaN for queries that see no key
    model = helpers.build(STREAMS["bridge-gpt2"], F64)
    subspaces = subspaces_of("own", positions="not_first")
    tokens, mask = families.tiny_tokens(model), torch.ones(2, 9, dtype=torch.long)
    padding = slice(0, 4) if side == "left" else slice(5, 9)
    mask[1, padding] = 0
    batch = {"input": tokens, "attention_mask": mask}
    ledger = tt.trace_residual(model, batch, subspaces, n_controls=1).ledger
    assert ledger.position.tolist() == [*range(1, 9), *range(1, 5)]
    real = mask.bool()
    first = torch.tensor([0, 4 if side == "left" else 0])
    real[[0, 1], first] = False
    assert torch.equal(ledger.ids, tokens[real])
    alone = tt.trace_residual(model, tokens[1:, mask[1].bool()], subspaces).ledger
    same(ledger.stream[..., 8:], alone.stream)


def test_positions_choose_tokens_and_default_to_those_of_the_fit():
    model = model_of(any_family())
    tokens, subspaces = families.tiny_tokens(model), subspaces_of("own")
    whole = tt.trace_residual(model, tokens, subspaces).ledger
    some = tt.trace_residual(model, tokens, subspaces, positions=[2, 5]).ledger
    assert whole.position.tolist() == [*range(9)] * 2
    assert some.position.tolist() == [2, 5] * 2
    same(some.stream, whole.stream[..., torch.isin(whole.position, torch.tensor([2, 5]))])
    for empty in ([], tokens[:, :1]):
        with pytest.raises(tt.TangentValueError, match="no token counts.*Give longer rows"):
            tt.trace_residual(model, empty, subspaces, positions="not_first")


@both_references
def test_batches_add_up(reference):
    model = helpers.build(STREAMS["bridge-llama"], F64)
    batches = families.tiny_tokens(model).split(1)
    apart = tt.trace_residual(model, batches, subspaces_of(reference), n_controls=CONTROLS)
    together = plain(reference)
    for name in ("energy", "carried", "stream", "copied", "position", "ids"):
        same(getattr(apart.ledger, name), getattr(together.ledger, name))
        if name not in ("position", "ids"):
            name = f"control_{name}"
            same(getattr(apart.ledger, name), getattr(together.ledger, name))
    if reference == "fixed":
        same(apart.pairs["normal"], together.pairs["normal"])


# Controls and surroundings ------------------------------------------------------------------------


@both_references
def test_a_control_is_the_trace_of_that_matched_random_subspace(reference):
    trace, subspaces = plain(reference), subspaces_of(reference)
    for i in range(CONTROLS):
        if reference == "fixed":
            control = subspaces.random_normals(CONTROLS, seed=0)[i]
        else:
            control = {k: one.random_normals(CONTROLS, 0)[i] for k, one in subspaces.items()}
        model = helpers.build(STREAMS["bridge-llama"], F64)
        alone = tt.trace_residual(model, families.tiny_tokens(model), control).ledger
        for name in ("energy", "carried", "stream", "copied"):
            same(getattr(trace.ledger, f"control_{name}")[..., i, :], getattr(alone, name))


def test_half_precision_and_inference_mode():
    model, tokens = helpers.build(STREAMS["bridge-llama"], torch.bfloat16), families.tiny_tokens()
    trace = tt.trace_residual(model, tokens, subspaces_of("own"))
    assert trace.ledger.stream.dtype == torch.float32
    assert 1e-5 < trace.closing_error < 3e-2
    torch.testing.assert_close(
        trace.ledger.stream, plain("own").ledger.stream.float(), rtol=0.1, atol=0.5
    )
    with torch.inference_mode():
        inferred = plain("own", progress=False)
    assert torch.equal(inferred.ledger.energy, plain("own").ledger.energy)


def test_the_model_is_as_it_was_after_a_trace_and_a_refusal():
    model = model_of(any_family())
    tokens, hooks = families.tiny_tokens(model), hooks_left(model)
    before = model(tokens)
    tt.trace_residual(model, tokens, subspaces_of("own"), heads=True)
    edit = ("blocks.1.hook_resid_post", lambda x, hook: x + 1)
    with model.hooks(fwd_hooks=[edit]):
        with pytest.raises(tt.TangentRuntimeError, match="layer 1 .*do not add up"):
            tt.trace_residual(model, tokens, subspaces_of("own"))
    assert torch.equal(model(tokens), before) and hooks_left(model) == hooks
    with pytest.raises(tt.TangentRuntimeError, match="as in BERT"):
        bert = helpers.build(("bridge", "bert", False), F64)
        tt.trace_residual(bert, tokens, subspaces_of("fixed"))


def test_words():
    trace = plain("own")
    made = json.loads(json.dumps(trace.conventions))
    assert made["sites"] == [site_of(depth) for depth in range(DEPTHS)]
    assert (made["rank"], made["n_controls"], made["positions"]) == (RANK, CONTROLS, "all")
    assert "one at each depth" in made["reference"] and "one subspace" in str(
        plain("fixed").conventions
    )
    assert set(trace.conventions["meaning"]) >= {"share", "subspace", "mean", "control"}
    assert f"{trace.closing_error:.1e}" in repr(trace) and "18 tokens" in repr(trace)
    assert "<table>" in trace._repr_html_() and "The ledger closes to" in trace._repr_html_()
