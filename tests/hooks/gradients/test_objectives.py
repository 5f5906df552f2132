"""Losses are those that training takes: of Hugging Face, of TransformerLens, of BERT's authors."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import tl_tangent as tt
from tests import families
from tests.hooks.gradients.cases import KINDS_OF_MODEL, build, fresh, tokens_for
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.objectives import IGNORED, Batch, loss_of, mask_tokens
from tl_tangent.hooks.gradients.watch import watching_maps

KIND_IDS = [kind for kind, _ in KINDS_OF_MODEL]


def padded(model, seed: int = 0) -> Batch:
    tokens = tokens_for(model, seed)
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    return Batch.of({"input_ids": tokens, "attention_mask": mask})


def test_the_causal_loss_is_that_of_hugging_face():
    model = build("hf", "llama")
    batch = padded(model)
    labels = batch.tokens.masked_fill(~batch.mask, IGNORED)
    expected = model(input_ids=batch.tokens, attention_mask=batch.mask, labels=labels).loss
    assert float(loss_of("causal", model, batch)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(("kind", "family"), KINDS_OF_MODEL, ids=KIND_IDS)
def test_the_causal_loss_is_that_of_the_model_itself(kind, family):
    model, tokens = build(kind, family), tokens_for(build(kind, family))
    if kind == "hf":
        expected = model(input_ids=tokens, labels=tokens).loss
    else:
        expected = model(tokens, return_type="loss")
    assert float(loss_of("causal", model, Batch.of(tokens))) == pytest.approx(float(expected), 1e-6)


@pytest.mark.parametrize(("kind", "family"), KINDS_OF_MODEL, ids=KIND_IDS)
def test_padding_takes_no_part(kind, family):
    """Rows of one length, with and without padding behind them."""
    model = build(kind, family)
    tokens, mask = tokens_for(model), torch.ones(2, 9)
    mask[:, 6:] = 0
    given = Batch.of({"input_ids": tokens, "attention_mask": mask})
    found = loss_of("causal", model, given)
    assert float(found) == pytest.approx(float(loss_of("causal", model, Batch.of(tokens[:, :6]))))
    assert float(found) != pytest.approx(float(loss_of("causal", model, Batch.of(tokens))), 1e-3)


@pytest.mark.parametrize(("kind", "family"), KINDS_OF_MODEL, ids=KIND_IDS)
def test_no_gradient_comes_from_padding_on_either_side(kind, family):
    model = fresh(kind, family, torch.float32)  # Hugging Face's mask is no number in float64
    weights = find_weights(model).choose(("q", "k", "in", "out"))
    for side in (slice(6, None), slice(None, 3)):
        mask, found = torch.ones(2, 9), []
        mask[1, side] = 0
        batch = Batch.of({"input_ids": tokens_for(model), "attention_mask": mask})
        with watching_maps(weights.weights, lambda weight, x, g, found=found: found.append(g)):
            loss_of("causal", model, batch).backward()
        assert len(found) == len(weights.weights)
        real = batch.real_tokens()
        assert all(g[~real].abs().max() == 0 for g in found)
        assert all(g[real].abs().max() > 0 for g in found)


def test_labels_are_shifted_as_by_hugging_face():
    model, tokens = build("hf", "llama"), tokens_for(build("hf", "llama"))
    labels = tokens.masked_fill(torch.arange(9) % 3 == 0, IGNORED)
    expected = model(input_ids=tokens, labels=labels).loss
    found = loss_of("causal", model, Batch.of({"input_ids": tokens, "labels": labels}))
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_the_masked_loss_is_that_of_hugging_face():
    model = build("hf", "bert")
    batch = mask_tokens(tokens_for(model), mask_token=3, vocabulary=64, share=0.5)
    expected = model(input_ids=batch.tokens, labels=batch.labels).loss
    assert float(loss_of("masked", model, batch)) == pytest.approx(float(expected), rel=1e-6)


def test_a_function_is_called_with_the_model_and_the_batch():
    model, batch = build("hf", "llama"), padded(build("hf", "llama"))
    found = loss_of(lambda *given: given, model, batch)
    assert found == (model, batch)


def test_half_precision_logits_are_read_in_float32():
    model = fresh("hf", "llama", torch.bfloat16)
    batch = Batch.of(tokens_for(model))
    found = loss_of("causal", model, batch)
    assert found.dtype == torch.float32
    logits = model(input_ids=batch.tokens).logits[:, :-1].float()
    expected = cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten())
    assert float(found) == float(expected)


@pytest.mark.parametrize(
    ("objective", "options", "told"),
    [
        ("next", {}, "objective 'next' is not 'causal', 'masked' or a callable"),
        ("masked", {}, "a masked objective needs labels: make the batches by mask_tokens"),
        ("masked", {"labels": torch.full((2, 9), IGNORED)}, r"nothing is predicted in .*\[2, 9\]"),
        ("causal", {"attention_mask": torch.zeros(2, 9)}, "nothing is predicted"),
    ],
)
def test_losses_of_nothing_are_refused(objective, options, told):
    model = build("hf", "llama")
    batch = Batch.of({"input_ids": tokens_for(model), **options})
    with pytest.raises(tt.TangentValueError, match=told):
        loss_of(objective, model, batch)


# Batches --------------------------------------------------------------------------------------


def test_batches_are_tokens_or_mappings():
    tokens = torch.arange(6).view(2, 3)
    for given in (tokens, {"input_ids": tokens}, {"input": tokens}, Batch(tokens)):
        assert Batch.of(given).tokens is tokens
        assert Batch.of(given).real_tokens() is None
    full = Batch.of({"input_ids": tokens, "attention_mask": torch.ones(2, 3)})
    assert full.mask is None  # all are real
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    real = Batch.of({"input_ids": tokens, "attention_mask": mask}).real_tokens()
    assert real.tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.arange(3), r"token ids \[batch, pos\].*got \[3\]"),
        (torch.ones(2, 3), r"got \[2, 3\]"),
        ("text", "got str"),
        ({"tokens": torch.ones(2, 3)}, "got NoneType"),
        (torch.zeros(2, 0, dtype=torch.int64), r"of \[2, 0\] tokens is empty"),
        (
            {"input_ids": torch.arange(6).view(2, 3), "position_ids": torch.arange(3)[None]},
            "has position_ids, which is not passed on",
        ),
        (
            {"input_ids": torch.arange(6).view(2, 3), "token_type_ids": torch.ones(2, 3).long()},
            r"has token_type_ids \(other than 0\), which is not passed on",
        ),
        (
            {"input_ids": torch.arange(6).view(2, 3), "attention_mask": torch.ones(2, 2)},
            r"attention_mask is \[2, 2\] and the tokens \[2, 3\]",
        ),
        (
            {"input_ids": torch.arange(6).view(2, 3), "labels": torch.ones(6)},
            r"labels is \[6\] and the tokens \[2, 3\]",
        ),
    ],
)
def test_what_is_no_batch_is_refused(given, told):
    with pytest.raises(tt.TangentValueError, match=told):
        Batch.of(given)


def test_a_moved_batch_holds_no_inference_tensors():
    with torch.inference_mode():
        tokens = torch.arange(6).view(2, 3)
        batch = Batch.of({"input_ids": tokens, "attention_mask": tokens > 0, "labels": tokens})
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.tokens, tokens)
    assert not any(x.is_inference() for x in (moved.tokens, moved.mask, moved.labels))


# Masking --------------------------------------------------------------------------------------

N, SPECIAL, MASK = 200, (0, 1), 3


def masked(**options) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(4, families.D_VOCAB, (N, N), generator=generator)
    tokens[:, 0], tokens[:, 1] = SPECIAL
    real = torch.ones_like(tokens)
    real[:, -50:] = 0
    batch = mask_tokens(
        tokens,
        mask_token=MASK,
        vocabulary=families.D_VOCAB,
        attention_mask=real,
        special=SPECIAL,
        **options,
    )
    return tokens, real.bool(), batch


def test_masking_follows_its_shares():
    """Of 0.15: 80 % hidden, 10 % random, 10 % kept; binomial counts to five deviations."""
    tokens, real, batch = masked()
    chosen = batch.labels != IGNORED
    allowed = real & (tokens >= 4)
    n, k = int(allowed.sum()), int(chosen.sum())
    assert abs(k / n - 0.15) < 5 * (0.15 * 0.85 / n) ** 0.5
    hidden, same = chosen & (batch.tokens == MASK), chosen & (batch.tokens == tokens)
    own = 1 / families.D_VOCAB  # a random token may be the one that was there, or the mask
    for found, share in ((hidden, 0.8 + 0.1 * own), (same, 0.1 + 0.1 * own)):
        assert abs(int(found.sum()) / k - share) < 5 * (share * (1 - share) / k) ** 0.5


def test_masking_spares_padding_special_tokens_and_all_that_is_not_chosen():
    tokens, real, batch = masked(share=1.0)
    chosen = batch.labels != IGNORED
    assert torch.equal(chosen, real & (tokens >= 4))
    assert torch.equal(batch.labels[chosen], tokens[chosen])
    assert torch.equal(batch.tokens[~chosen], tokens[~chosen])
    assert torch.equal(batch.mask, real)


def test_masking_leaves_its_input_and_follows_its_seed():
    tokens, _, first = masked()
    again, _, same = masked()
    assert torch.equal(tokens, again)
    assert torch.equal(first.tokens, same.tokens)
    assert not torch.equal(first.labels, masked(seed=1)[2].labels)


@pytest.mark.parametrize(
    "options", [{"share": 0.0}, {"share": 1.5}, {"replaced": -0.1}, {"replaced": 0.6, "kept": 0.5}]
)
def test_shares_outside_of_their_range_are_refused(options):
    with pytest.raises(tt.TangentValueError, match="are no shares"):
        masked(**options)
