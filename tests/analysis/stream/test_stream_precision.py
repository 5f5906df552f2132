"""Massive activations, and models of low precision: what rounding may not make of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tl_tangent as tt
from tests import families
from tests.analysis.stream.test_residual_trace import LAYERS, PARTS, both_references, site_of
from tests.analysis.stream.test_transfer_gains import table
from tests.hooks import helpers
from tests.hooks.attention.cases import captured

D, RANK, SIZE = families.D_MODEL, 3, 1e4
LOW = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)


def single(seed: int = 0, **fields) -> tt.TangentSubspace:
    """A subspace in float32, as fits of most models leave it."""
    generator = torch.Generator().manual_seed(seed)
    basis, mean = torch.randn(D, RANK, generator=generator), torch.randn(D, generator=generator)
    return tt.TangentSubspace(basis, mean, orthonormalize=True, positions="all", **fields)


def subspaces_of(reference: str):
    """One subspace, or one a depth, which share the first direction."""
    if reference == "fixed":
        return single()
    made = {}
    for depth in range(LAYERS + 1):
        own = torch.randn(D, RANK - 1, generator=torch.Generator().manual_seed(depth))
        basis = torch.linalg.qr(torch.cat([single().basis[:, :1], own], dim=1).double())[0]
        made[site_of(depth)] = tt.TangentSubspace(
            basis.float(), single(depth).mean, positions="all"
        )
    return made


def exact_parts(subspace: tt.TangentSubspace, vectors: Tensor) -> Tensor:
    """``[part, token, d]`` in float64: Q Q^T x and x - Q Q^T x."""
    flat, basis = vectors.double().flatten(0, 1), subspace.basis.double()
    tangent = (flat @ basis) @ basis.T
    return torch.stack([tangent, flat - tangent])


@both_references
def test_normal_energies_beside_a_massive_tangent_activation(reference):
    """Each has the digits of float32 activations, not of the massive one among them."""
    model, tokens = helpers.build(("bridge", "llama", False)), families.tiny_tokens()
    subspaces = subspaces_of(reference)
    massive = SIZE * single().basis[:, 0]
    hook = ("blocks.0.hook_mlp_out", lambda x, hook: x + massive)
    names = [site_of(depth) for depth in range(LAYERS + 1)]
    names += [f"blocks.{layer}.hook_{x}_out" for layer in range(LAYERS) for x in ("attn", "mlp")]
    with model.hooks(fwd_hooks=[hook]):
        ledger = tt.trace_residual(model, tokens, subspaces).ledger
        cache = captured(model, tokens, names)
    at = {
        d: subspaces if reference == "fixed" else subspaces[site_of(d)] for d in range(LAYERS + 1)
    }
    streams = {
        d: exact_parts(one, cache[site_of(d)].double() - one.mean.double()) for d, one in at.items()
    }
    assert float(streams[LAYERS][0].square().sum(-1).min()) > 1e4 * float(
        streams[LAYERS][1].square().sum(-1).max()
    )
    close = {"rtol": 1e-4, "atol": 1e-3}  # sums of float32 numbers differ from the stream's own
    for depth, parts in streams.items():
        torch.testing.assert_close(ledger.stream[depth].double(), parts.square().sum(-1), **close)
    for layer in range(LAYERS):
        both = (streams[layer] * streams[layer + 1]).sum(-1)
        torch.testing.assert_close(ledger.copied[layer].double(), both, rtol=1e-4, atol=1e-2)
        for writer in ("attn", "mlp"):
            wrote = exact_parts(at[layer + 1], cache[f"blocks.{layer}.hook_{writer}_out"])
            found = ledger.energy[ledger.writers.index(f"{layer}.{writer}")].double()
            torch.testing.assert_close(found, wrote.square().sum(-1), rtol=1e-5, atol=1e-4)


def test_products_of_writes_beside_a_massive_tangent_activation():
    model, tokens, subspace = (
        helpers.build(("bridge", "llama", False)),
        families.tiny_tokens(),
        single(),
    )
    hook = ("blocks.0.hook_mlp_out", lambda x, hook: x + SIZE * subspace.basis[:, 0])
    names = [f"blocks.{layer}.hook_{x}_out" for layer in range(LAYERS) for x in ("attn", "mlp")]
    with model.hooks(fwd_hooks=[hook]):
        trace = tt.trace_residual(model, tokens, subspace)
        cache = captured(model, tokens, names)
    parts = torch.stack([exact_parts(subspace, cache[name]) for name in names], 1)
    at = [trace.writers.index(f"{layer}.{x}") for layer in range(LAYERS) for x in ("attn", "mlp")]
    for part, name in enumerate(PARTS):
        found = trace.pairs[name][at][:, at]
        expected = torch.einsum("itd,jtd->ij", parts[part], parts[part]) / tokens.numel()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * SIZE ** (1 - part))


def test_products_of_many_tokens_are_summed_piece_by_piece(monkeypatch):
    from tl_tangent.analysis.stream import trace_sums

    model, tokens = helpers.build(("bridge", "llama", False), torch.float64), families.tiny_tokens()
    whole = tt.trace_residual(model, tokens, single()).pairs
    monkeypatch.setattr(trace_sums, "_AT_ONCE", 6 * D * 5)  # 5 tokens of 6 writes
    pieces = tt.trace_residual(model, tokens, single()).pairs
    for part in PARTS:
        torch.testing.assert_close(pieces[part], whole[part], rtol=1e-12, atol=1e-12)


def test_no_energy_is_negative():
    """Layers that write inside the subspace alone, next to nothing normal in the embeddings."""
    subspace = single()
    model, inside = families.bridge("gpt2"), helpers.projector(subspace)

    def project(x, hook):
        return SIZE * x @ inside

    sites = ["hook_embed", "hook_pos_embed"]
    sites += [f"blocks.{layer}.hook_{x}_out" for layer in range(LAYERS) for x in ("attn", "mlp")]
    subspace = subspace.replace(mean=torch.zeros(D))
    with model.hooks(fwd_hooks=[(site, project) for site in sites]):
        trace = tt.trace_residual(model, families.tiny_tokens(), subspace, n_controls=2)
    ledger = trace.ledger
    for energy in (ledger.energy, ledger.stream, ledger.control_energy, ledger.control_stream):
        assert float(energy.min()) >= 0
    rounding = (4 * torch.finfo(torch.float32).eps) ** 2
    assert float((ledger.stream[:, 1] / ledger.stream[:, 0]).max()) < 100 * rounding


# Low precision ------------------------------------------------------------------------------------


@LOW
def test_rounding_of_a_direction_is_no_copy_into_the_other_part(dtype):
    model, tokens = helpers.build(("bridge", "llama", False), dtype), families.tiny_tokens(pos=4)
    for directions in ("random", "data"):
        made = tt.transfer_gains(
            model, tokens, single(), 0, n_directions=2, n_controls=1, directions=directions
        )
        copy, excess, aligned = (table(made, name) for name in ("copy", "excess", "aligned"))
        control = table(made, "control_aligned_mean")
        for across in ("tn", "nt"):
            assert (copy[across], aligned[across], control[across]) == (0, 0, 0)
            assert math.isnan(excess[across]) and table(made, "aligned_se")[across] == 0
            assert table(made)[across] > 0.05
        for within in ("tt", "nn"):
            assert copy[within] == pytest.approx(1, abs=1e-6)
            assert excess[within] == pytest.approx(table(made)[within], rel=1e-6)


@LOW
@pytest.mark.parametrize("part", PARTS)
def test_what_is_left_of_a_cut_part_has_no_direction(dtype, part):
    model, tokens = helpers.build(("bridge", "llama", False), dtype), families.tiny_tokens(pos=5)
    made = tt.part_recovery(model, tokens, single(), 0, part=part, n_controls=1)
    cut, kept = ([row for row in made.rows if row["removed"] == is_cut] for is_cut in (True, False))
    assert math.isnan(cut[0]["cosine"]) and math.isnan(cut[0]["control_cosine_mean"])
    for row in (*kept, *cut[1:]):
        assert not math.isnan(row["cosine"])
    assert kept[0]["cosine"] == pytest.approx(1, abs=1e-2)
