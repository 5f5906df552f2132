"""Nulls are what brute force finds: over all pairings, over all signs, and on real tokens alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tests import families
from tests.analysis.gradients.cases import (
    IDS,
    KIND,
    MODELS,
    RANK,
    assert_close,
    assert_same_statistics,
    bases,
    batches,
    build,
    fresh,
    llama,
    measure,
)
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.objectives import Batch, loss_of, mask_tokens
from tl_tangent.hooks.gradients.watch import watching_maps


def both_sides(model, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """By the weight's name: the vectors of each real token on the compared side and the other."""
    found, real = {}, batch.real_tokens()

    def receive(weight, x, g):
        if weight.kind == "embed":
            x = one_hot(x.flatten(), weight.parameter.shape[0]).to(g)
        own, other = (x, g) if weight.side == "input" else (g, x)
        found[weight.name] = (own, other) if real is None else (own[real], other[real])

    with watching_maps(find_weights(model).weights, receive):
        loss_of("causal", model, batch).backward()
    model.zero_grad(set_to_none=True)
    return found


def mean_energy(gradients: list[Tensor], spaces: list[Tensor]) -> Tensor:
    """The mean over gradients of their energy in each space."""
    stacked = torch.stack(gradients)
    return torch.stack([(stacked @ q).square().sum((1, 2)).mean() for q in spaces])


def by_brute_force(own: Tensor, other: Tensor, mu: Tensor, spaces: list[Tensor]) -> dict:
    n = len(own)
    pairings = [other.T @ own[list(order)] for order in itertools.permutations(range(n))]
    signs = itertools.product((1.0, -1.0), repeat=n)
    flipped = [(other * torch.tensor(s, dtype=own.dtype)[:, None]).T @ own for s in signs]
    mean_part = torch.outer(other.sum(0), mu)
    return {
        "gradient": mean_energy([other.T @ own], spaces),
        "centred_gradient": mean_energy([other.T @ own - mean_part], spaces),
        "mean_part": mean_energy([mean_part], spaces),
        "sign_flip": mean_energy(flipped, spaces),
        "pairing": mean_energy(pairings, spaces),
        "activations": mean_energy([own], spaces),
        "centred_activations": mean_energy([own - mu], spaces),
    }


def assert_energies(energies: Tensor, kind: str, expected: Tensor, atol: float = 0.0) -> None:
    """The gradient's in Q_T and all normals; what is mechanical in Q_T alone."""
    measured = len(expected) - 1 if kind == "gradient" else 1
    assert_close(energies[KIND[kind], :measured], expected[:measured], 1e-9, atol=atol)
    assert torch.isnan(energies[KIND[kind], measured:]).all()


def five_tokens(padding: str) -> Batch:
    """Five real tokens: a row of five, or two rows with padding between or around them."""
    if padding == "none":
        return Batch.of(batches(1, batch=1, pos=5)[0])
    tokens, mask = batches(1, batch=2, pos=4)[0], torch.ones(2, 4)
    mask[0, 3:], mask[1, 2:] = 0, 0
    return Batch.of({"input_ids": tokens, "attention_mask": mask})


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_nulls_are_the_means_over_all_pairings_and_all_signs(spec, padding):
    model, batch = build(*spec), five_tokens(padding)
    result = measure(model, [batch], fit_batches=batches())
    sides = both_sides(model, batch)
    with_pairs = [w.name for w in find_weights(model).weights if w.reads is not None]
    assert set(sides) == set(with_pairs)
    for row, label in enumerate(result.statistics.labels):
        energies, totals = result.statistics.energies[row], result.statistics.totals[row]
        if label.name not in sides:
            assert torch.isnan(energies[1:]).all()
            assert torch.isnan(totals[1:]).all()
            continue
        own, other = sides[label.name]
        assert len(own) == 5
        mu = own.mean(0)
        spaces = [*bases(result, label.site), torch.eye(label.d, dtype=own.dtype)]
        for kind, expected in by_brute_force(own, other, mu, spaces).items():
            scale = (
                float(totals.nan_to_num().max()) * 1e-14
            )  # dL/db of W_K is zero but for rounding
            assert_energies(energies, kind, expected, scale)
            assert_close(totals[KIND[kind]], expected[-1], 1e-9, atol=scale)


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_a_padded_batch_is_its_rows_without_padding(spec):
    model = build(*spec)
    (tokens,), mask = batches(1, batch=3), torch.ones(3, 9)
    mask[:, 6:] = 0
    padded = {"input_ids": tokens, "attention_mask": mask}
    one = measure(model, [tokens[:, :6]])
    other = measure(model, [padded])
    assert_same_statistics(other, one, 1e-6)  # Q_T is float32
    assert other.statistics.n_tokens == one.statistics.n_tokens == 18
    with_noise = measure(model, [padded | {"input_ids": tokens.where(mask.bool(), 5)}])
    assert_same_statistics(with_noise, one, 1e-6)


def test_a_padded_masked_batch_is_its_rows_without_padding():
    model = build("hf", "bert")
    whole = mask_tokens(batches(1, batch=3)[0], mask_token=3, vocabulary=64, share=0.4)
    labels, mask = whole.labels.clone(), torch.ones(3, 9, dtype=torch.bool)
    mask[:, 6:], labels[:, 6:] = False, -100
    padded = Batch(whole.tokens, mask, labels)
    bare = Batch(whole.tokens[:, :6], None, whole.labels[:, :6])
    one, other = (measure(model, [batch], objective="masked") for batch in (bare, padded))
    assert_same_statistics(other, one, 1e-6)
    assert one.conventions["objective"] == "masked"


def test_a_token_that_the_embedding_ignores_is_in_no_null_of_it():
    """Its padding token, where it stands in the text: the embedding's row gets no gradient."""
    model, tokens = llama(), batches(1, batch=1, pos=6)[0]
    tokens[0, 2] = model.config.pad_token_id
    result = measure(model, [tokens], kinds=("embed",), fit_batches=batches())
    own, other = both_sides(model, Batch.of(tokens))["embed.W_E"]
    kept = torch.arange(6) != 2
    own, other = own[kept], other[kept]
    spaces = [*bases(result, "blocks.0.hook_resid_pre"), torch.eye(own.shape[1]).double()]
    for kind, expected in by_brute_force(own, other, own.mean(0), spaces).items():
        assert_energies(result.statistics.energies[0], kind, expected)


def test_signs_and_pairings_bring_nothing_where_there_is_one_token_to_learn_from():
    """One token with a gradient: every sign leaves the energy, every pairing its scale."""
    tokens = batches(1, batch=1, pos=9)[0]

    def last(model, batch):
        return model(batch.tokens).logits[0, -1].log_softmax(-1)[5]

    result = measure(data=[tokens], kinds=("unembed", "in", "gate"), layers=None, objective=last)
    for row, label in enumerate(result.statistics.labels):
        energies = result.statistics.energies[row]
        if label.name in ("unembed.W_U", "blocks.1.mlp.W_in", "blocks.1.mlp.W_gate"):
            assert_close(energies[KIND["sign_flip"], 0], energies[KIND["gradient"], 0], 1e-9)


# What the nulls are for -----------------------------------------------------------------------


def with_noise(direction: str):
    """A loss that gives every token of the unembedding a random gradient, or its own input."""
    generator = torch.Generator().manual_seed(0)

    def objective(model, batch):
        found = model(batch.tokens, output_hidden_states=True)
        logits, read = found.logits, found.hidden_states[-1].detach()
        noise = torch.randn(logits.shape, generator=generator)
        aligned = (read - read.mean((0, 1))) @ torch.eye(read.shape[-1], logits.shape[-1])
        return (logits * (noise if direction == "random" else aligned)).mean()

    return objective


def test_where_all_is_mechanical_the_excess_is_one():
    """Random gradients at the logits of a random model: 8192 tokens, in four batches.

    At the unembedding they are independent of its inputs: with 64 outputs, rank 4 and four batches
    the ratio has about 1000 degrees of freedom, a standard error below 5 %. Further down they
    depend on the inputs through the Jacobian, whose sign is random.
    """
    model = fresh("hf", "llama", torch.float32)
    data = batches(4, batch=64, pos=32)
    frame = measure(model, data, objective=with_noise("random")).to_dataframe()
    frame = frame.set_index("weight")
    head = frame.loc["unembed.W_U"]
    assert head["energy_ratio_exact"] > 4  # Q_T holds a lot
    assert head["excess_pairing"] == pytest.approx(1, abs=0.15)
    assert head["excess_sign_flip"] == pytest.approx(1, abs=0.15)
    excess = frame["excess_pairing"].astype(float)
    assert np.exp(np.log(excess).mean()) == pytest.approx(1, abs=0.15)
    assert excess.between(0.5, 2).all()


def test_gradients_along_the_inputs_are_an_excess():
    """The same with gradients that are the centred inputs: energies go with variance squared."""
    model = fresh("hf", "llama", torch.float32)
    data = batches(4, batch=64, pos=32)
    frame = measure(model, data, kinds=("unembed",), objective=with_noise("aligned")).to_dataframe()
    assert frame.loc[0, "excess_pairing"] > 2
    assert frame.loc[0, "excess_sign_flip"] > 2


@pytest.mark.parametrize("spec", MODELS[:1], ids=IDS[:1])
def test_without_nulls_the_gradient_alone_is_measured(spec):
    one, other = measure(build(*spec), nulls=False), measure(build(*spec))
    assert_close(one.statistics.energies[:, 0], other.statistics.energies[:, 0], 1e-12)
    assert torch.isnan(one.statistics.energies[:, 1:]).all()
    frame = one.to_dataframe()
    assert not {"pairing_ratio", "excess_pairing", "mean_part"} & set(frame)
    assert "Paired at random" in other.headline()
    assert "Paired at random" not in one.headline()


def test_the_table_follows_from_the_sums():
    result = measure()
    frame, d = result.to_dataframe().set_index("weight"), families.D_MODEL
    for row, label in enumerate(result.statistics.labels):
        share = result.statistics.energies[row, :, 0] / result.statistics.totals[row]
        exact = share / (1 - share) * (d - RANK) / RANK
        told = frame.loc[label.name]
        for kind in ("pairing", "sign_flip"):
            assert told[f"{kind}_ratio"] == pytest.approx(float(exact[KIND[kind]]))
            excess = float(exact[0] / exact[KIND[kind]])
            assert told[f"excess_{kind}"] == pytest.approx(excess)
        assert told["energy_ratio_centred"] == pytest.approx(float(exact[KIND["centred_gradient"]]))
        own = result.subspaces[label.site].explained
        activations = own / (1 - own) * (d - RANK) / RANK
        assert told["activation_ratio"] == pytest.approx(activations)
        if label.side == "input":
            assert told["excess_activations"] == pytest.approx(float(exact[0]) / activations)
        around = float(exact[KIND["centred_activations"]])
        assert told["excess_centred"] == pytest.approx(told["energy_ratio_centred"] / around)
        mean = result.statistics.totals[row, KIND["mean_part"]] / result.statistics.totals[row, 0]
        assert told["mean_part"] == pytest.approx(float(mean))


# Within input tokens --------------------------------------------------------------------------


def test_tokens_alone_decide_the_gradient_where_the_model_sees_nothing_else():
    """At the first block's W_V the inputs of equal tokens are equal without positions and context:
    permuting their pairs changes nothing, and permuting pairs of others does."""
    model, data = llama(), batches(2, batch=8, pos=9)
    frame = measure(model, data, within="token", kinds="v", layers=0).to_dataframe()
    assert frame.loc[0, "excess_within_token"] == pytest.approx(1, rel=1e-9)
    assert frame.loc[0, "excess_pairing"] != pytest.approx(1, rel=1e-2)
    shuffled = measure(model, data, within="shuffled", kinds="v", layers=0).to_dataframe()
    assert shuffled.loc[0, "excess_within_token"] != pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_within_tokens_is_the_mean_over_pairings_of_equal_ones(spec):
    """Two rows of three tokens, of two kinds, with padding that belongs to no kind."""
    model = build(*spec)
    tokens, mask = torch.tensor([[5, 7, 5, 9], [7, 5, 9, 9]]), torch.ones(2, 4)
    mask[0, 3:], mask[1, 2:] = 0, 0
    batch = Batch.of({"input_ids": tokens, "attention_mask": mask})
    result = measure(model, [batch], fit_batches=batches(), within="token")
    labels = tokens.flatten()[mask.flatten().bool()].tolist()
    orders = [list(o) for o in itertools.permutations(range(5)) if [labels[i] for i in o] == labels]
    sides = both_sides(model, batch)
    for row, label in enumerate(result.statistics.labels):
        energies, totals = result.statistics.energies[row], result.statistics.totals[row]
        if label.name not in sides or label.kind == "embed":
            assert torch.isnan(energies[KIND["within_pairing"]]).all()
            continue
        own, other = sides[label.name]
        spaces = [*bases(result, label.site), torch.eye(label.d, dtype=own.dtype)]
        expected = mean_energy([other.T @ own[o] for o in orders], spaces)
        scale = float(totals.nan_to_num().max()) * 1e-14
        assert_energies(energies, "within_pairing", expected, scale)
        assert_close(totals[KIND["within_pairing"]], expected[-1], 1e-9, atol=scale)


def test_another_way_within_is_refused():
    with pytest.raises(ValueError, match="within is None, 'token' or 'shuffled', got 'row'"):
        measure(within="row")


# Where a map is not what it seems ---------------------------------------------------------------


def scaled(module, args, output):
    return output * torch.linspace(0.1, 2, output.shape[1], dtype=output.dtype)[None, :, None]


def test_a_hook_behind_a_map_is_refused_and_gradients_alone_are_measured():
    model = fresh("hf", "llama")
    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(scaled)
    with pytest.raises(RuntimeError, match="blocks.0.attn.W_Q is not sum g x.*nulls=False"):
        measure(model)
    assert measure(model, nulls=False).statistics.n_batches == 2
    handle.remove()
    measure(model)


def test_a_gradient_that_was_clipped_is_still_that_of_its_map():
    model = llama()
    found = measure(model)
    half = measure(model, objective=lambda model, batch: loss_of("causal", model, batch) / 2)
    row = KIND["gradient"]
    assert_close(half.statistics.energies[:, row] * 4, found.statistics.energies[:, row], 1e-9)


@pytest.mark.parametrize("scale", [1e-25, 1e-21, 1e21, 1e25])
def test_ratios_are_free_of_the_scale_of_the_loss_in_float32_too(scale):
    model = fresh("hf", "llama", torch.float32)
    if scale < 1e-23 or scale > 1e23:
        model.double()  # float32 gradients of these would underflow themselves

    def objective(model, batch):
        return loss_of("causal", model, batch) * scale

    one, other = measure(model).to_dataframe(), measure(model, objective=objective).to_dataframe()
    for column in ("energy_ratio_exact", "pairing_ratio", "sign_flip_ratio"):
        np.testing.assert_allclose(other[column], one[column], rtol=2e-3)


def test_one_token_leaves_nothing_around_its_mean():
    """What is left of a difference is rounding, and no ratio is made of it."""

    def only(model, batch):
        return -model(batch.tokens).logits[0, 0].log_softmax(-1)[5]

    model, token = fresh("hf", "llama", torch.float32), batches(1, batch=1, pos=1)[0]
    frame = measure(model, [token], fit_batches=batches(), objective=only).to_dataframe()
    heard = frame[~frame["kind"].isin(["q", "k"])]  # one position attends to itself alone
    assert heard["energy_ratio_exact"].notna().all()
    assert "energy_ratio_centred" not in frame or frame["energy_ratio_centred"].isna().all()
