"""Energies are ``||G Q||^2`` of the gradients that autograd gives, summed over batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import families
from tests.analysis.gradients.cases import (
    IDS,
    KIND,
    MODELS,
    RANK,
    B,
    assert_close,
    assert_same_statistics,
    bases,
    batches,
    build,
    fresh,
    gradients_of,
    llama,
    loss_of,
    measure,
    measured,
    random_subspace,
    row_of,
)
from tl_tangent.geometry.token_energies import KINDS

D = families.D_MODEL


def _heads(g):
    """W_Q of a HookedTransformer, ``[head, d_model, d_head]``, as ``[head * d_head, d_model]``."""
    return g.transpose(1, 2).reshape(-1, D)


# By hand: which parameter a name stands for, and its gradient with the compared side last.
BY_HAND = {
    ("hf", "llama"): {
        "embed.W_E": ("model.embed_tokens.weight", lambda g: g),
        "unembed.W_U": ("lm_head.weight", lambda g: g),
        "blocks.0.attn.W_Q": ("model.layers.0.self_attn.q_proj.weight", lambda g: g),
        "blocks.1.attn.W_V": ("model.layers.1.self_attn.v_proj.weight", lambda g: g),
        "blocks.0.attn.W_O": ("model.layers.0.self_attn.o_proj.weight", lambda g: g.T),
        "blocks.1.mlp.W_gate": ("model.layers.1.mlp.gate_proj.weight", lambda g: g),
        "blocks.1.mlp.W_out": ("model.layers.1.mlp.down_proj.weight", lambda g: g.T),
    },
    ("hf", "gpt2"): {
        "pos_embed.W_pos": ("transformer.wpe.weight", lambda g: g),
        "unembed.W_U": ("transformer.wte.weight", lambda g: g),
        "blocks.1.attn.W_Q": ("transformer.h.1.attn.c_attn.weight", lambda g: g[:, :D].T),
        "blocks.1.attn.W_K": ("transformer.h.1.attn.c_attn.weight", lambda g: g[:, D : 2 * D].T),
        "blocks.0.attn.W_V": ("transformer.h.0.attn.c_attn.weight", lambda g: g[:, 2 * D :].T),
        "blocks.0.attn.W_O": ("transformer.h.0.attn.c_proj.weight", lambda g: g),
        "blocks.0.mlp.W_in": ("transformer.h.0.mlp.c_fc.weight", lambda g: g.T),
        "blocks.1.mlp.W_out": ("transformer.h.1.mlp.c_proj.weight", lambda g: g),
    },
    ("hooked", "rotary_gqa"): {
        "embed.W_E": ("embed.W_E", lambda g: g),
        "unembed.W_U": ("unembed.W_U", lambda g: g.T),
        "blocks.0.attn.W_Q": ("blocks.0.attn.W_Q", _heads),
        "blocks.1.attn.W_K": ("blocks.1.attn._W_K", _heads),
        "blocks.1.attn.W_O": ("blocks.1.attn.W_O", lambda g: g.reshape(-1, D)),
        "blocks.1.mlp.W_gate": ("blocks.1.mlp.W_gate", lambda g: g.T),
        "blocks.0.mlp.W_out": ("blocks.0.mlp.W_out", lambda g: g),
    },
}


@pytest.mark.parametrize(
    "spec", [spec for spec in BY_HAND if spec in MODELS], ids=lambda spec: spec[0] + "-" + spec[1]
)
def test_energies_are_those_of_dense_gradients(spec):
    model, result = build(*spec), measured(*spec)
    gradients = [gradients_of(model, tokens) for tokens in batches()]
    for name, (parameter, matrix) in BY_HAND[spec].items():
        row = row_of(result, name)
        label = result.statistics.labels[row]
        found = result.statistics.energies[row, KIND["gradient"]]
        dense = [matrix(one[parameter]) for one in gradients]
        expected = [sum((g @ q).square().sum() for g in dense) for q in bases(result, label.site)]
        assert_close(found, torch.stack(expected))
        total = sum(g.square().sum() for g in dense)
        assert_close(result.statistics.totals[row, KIND["gradient"]], total)


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_the_bases_are_q_t_and_normals_of_its_rank(spec):
    result = measured(*spec)
    for site, subspace in result.subspaces.items():
        tangent, *normals = bases(result, site)
        assert_close(tangent @ tangent.T, (subspace.basis @ subspace.basis.T).double(), 0, 1e-6)
        assert len(normals) == B
        for normal in normals:
            assert normal.shape == (D, RANK)
            assert_close(normal.T @ normal, torch.eye(RANK, dtype=torch.float64), 0, 1e-6)
            assert float((tangent.T @ normal).abs().max()) < 1e-6


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_ratios_follow_from_energies(spec):
    result = measured(*spec)
    frame = result.to_dataframe().set_index("weight")
    for row, label in enumerate(result.statistics.labels):
        tangent, *normals = result.statistics.energies[row, 0].tolist()
        total = float(result.statistics.totals[row, 0])
        told, share = frame.loc[label.name], tangent / total
        assert told["fraction"] == pytest.approx(share)
        assert 0 < told["fraction"] < 1
        assert told["energy_ratio"] == pytest.approx(tangent / np.mean(normals))
        exact = share / (1 - share) * (D - RANK) / RANK
        assert told["energy_ratio_exact"] == pytest.approx(exact)
        assert told["p_value"] == (1 + sum(x >= tangent for x in normals)) / (1 + B)


def test_many_normals_approach_the_exact_ratio():
    """The mean of B Haar normals, whose spread over B is the standard error."""
    result = measure(n_controls=200, nulls=False, kinds=("q",))
    for row, label in enumerate(result.statistics.labels):
        normals = result.statistics.energies[row, 0, 1:]
        rest = result.statistics.totals[row, 0] - result.statistics.energies[row, 0, 0]
        expected = rest * RANK / (label.d - RANK)
        assert abs(normals.mean() - expected) < 4.5 * normals.std() / 200**0.5
        assert normals.std() < 0.5 * expected  # else the bound above says nothing


def test_batches_add_up():
    data = batches(3)
    whole = measure(data=data, moments=True)
    parts = [measure(None, [one], whole.subspaces, moments=True).statistics for one in data]
    summed = parts[0] + parts[1] + parts[2]
    assert_close(summed.energies, whole.statistics.energies, 1e-12)
    assert_close(summed.totals, whole.statistics.totals, 1e-12)
    for name, moment in whole.statistics.moments.items():
        assert_close(summed.moments[name], moment, 1e-12, atol=1e-18)
    assert (summed.n_batches, summed.n_tokens) == (3, 54)
    assert summed.loss == pytest.approx(whole.statistics.loss)
    expected = sum(float(loss_of(llama(), one).detach()) for one in data)
    assert whole.statistics.loss == pytest.approx(expected)
    assert whole.conventions["mean_loss"] == pytest.approx(expected / 3)


def test_a_larger_loss_scales_energies_and_no_ratio():
    one = measured()
    many = measure(
        None,
        batches(),
        one.subspaces,
        objective=lambda model, batch: 4 * loss_of(model, batch.tokens),  # a power of 2: exact
        moments=True,
    )
    scaled = [KIND[kind] for kind in KINDS if "activations" not in kind]
    assert_close(many.statistics.energies[:, scaled], 16 * one.statistics.energies[:, scaled])
    rest = [KIND[kind] for kind in KINDS if "activations" in kind]
    inputs = [row for row, label in enumerate(one.statistics.labels) if label.side == "input"]
    assert_close(
        many.statistics.energies[inputs][:, rest], one.statistics.energies[inputs][:, rest]
    )
    frames = [result.to_dataframe() for result in (one, many)]
    for column in frames[0].select_dtypes(float).columns.drop(["energy", "layer"]):
        np.testing.assert_allclose(frames[1][column], frames[0][column], rtol=1e-8)


def test_seeds_decide_the_normals_and_nothing_else():
    first, same, other = (measure(seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.statistics.energies[:, 0], same.statistics.energies[:, 0])
    assert first.to_dataframe().equals(same.to_dataframe())
    tangent = [result.statistics.energies[..., 0].nan_to_num() for result in (first, other)]
    assert torch.equal(*tangent)
    normals = [result.statistics.energies[:, 0, 1:] for result in (first, other)]
    assert (normals[0] != normals[1]).all()


def test_layers_do_not_share_their_normals():
    """Each site draws from a seed of its own, so that controls are independent over layers."""
    result = measured()
    one, other = (result.stacks[f"blocks.{layer}.attn.hook_in"][:, RANK:] for layer in (0, 1))
    own = list(one.split(RANK, 1))
    assert all(float((q.T @ other).square().sum()) < 0.6 * RANK * B for q in own)


# Extremes -------------------------------------------------------------------------------------


def test_a_subspace_that_spans_a_batch_holds_all_of_its_gradient():
    """The rows of dL/dW lie in the span of the inputs: 4 tokens, rank 4."""
    tokens = batches(1, batch=1, pos=RANK)
    result = measure(
        data=tokens, kinds=("q", "gate", "unembed"), nulls=False, positions="all", method="svd"
    )
    assert result.to_dataframe()["fraction"].min() > 1 - 1e-6  # Q_T is float32


def test_without_controls_the_exact_ratio_is_left():
    frame = measure(n_controls=0).to_dataframe()
    assert not {"energy_ratio", "p_value"} & set(frame)
    expected = measured().to_dataframe()["energy_ratio_exact"]
    np.testing.assert_allclose(frame["energy_ratio_exact"], expected, rtol=1e-6)


def test_a_weight_whose_gradient_is_zero_is_listed_and_not_compared():
    result = measure(objective=lambda model, batch: 0 * loss_of(model, batch.tokens))
    frame = result.to_dataframe()
    assert (frame["energy"] == 0).all()
    assert "fraction" not in frame
    assert "nothing to compare" in result.headline()


def test_bfloat16_is_within_two_percent_of_float32():
    """One set of rounded weights; only the arithmetic differs (8 bits, so 0.4 % an operation)."""
    low = fresh("hf", "llama", torch.bfloat16)
    full = fresh("hf", "llama", torch.bfloat16).float()
    data = batches(2, batch=8, pos=32)
    one = measure(full, data)
    other = measure(low, data, one.subspaces)
    ratio = (other.statistics.energies / one.statistics.energies)[:, KIND["gradient"]]
    assert 1e-6 < float((ratio - 1).abs().max()) < 0.02
    excess = [result.to_dataframe()["excess_pairing"] for result in (one, other)]
    np.testing.assert_allclose(excess[1], excess[0], rtol=0.04)


def test_energies_are_free_of_the_basis_within_q_t():
    one = measured()
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(RANK, RANK, generator=generator, dtype=torch.float64))[0]
    turned = {site: q.replace(basis=q.basis.double() @ turn) for site, q in one.subspaces.items()}
    other = measure(None, batches(), turned, n_controls=0)
    assert_close(
        other.statistics.energies[..., 0], one.statistics.energies[..., 0], 1e-5, atol=1e-12
    )


def test_given_subspaces_are_used_as_they_are():
    sites = measured().subspaces
    given = {site: random_subspace(D, seed=i) for i, site in enumerate(sites)}
    result = measure(None, batches(), given | {"elsewhere": random_subspace(7)})
    assert set(result.subspaces) == set(sites)
    assert result.conventions["subspaces"] == "given subspaces"
    for site, q in given.items():
        assert torch.equal(result.subspaces[site].basis, q.basis)
    assert_same_statistics(measure(None, batches(), given), result, 0)
