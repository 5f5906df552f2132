"""A small training run: seeded, resumable bit for bit, with its control and its baselines."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

from tl_tangent.assets import EncodedText
from tl_tangent.assets.docstrings import TOKENIZER, train_tokenizer
from tl_tangent.errors import (
    TangentFileError,
    TangentRuntimeError,
    TangentValueError,
)
from tl_tangent.studies.ngrams import ngram_losses
from tl_tangent.studies.small_model import SmallShape, load_small, small_model
from tl_tangent.studies.small_options import SmallRunOptions
from tl_tangent.studies.small_run import LOSSES, STATE, run_rows, train_small, training_batch
from tl_tangent.studies.small_state import SmallState, learning_rate

VOCABULARY = 12
SHAPE = SmallShape(n_layers=1, d_model=16, n_heads=2, d_mlp=16, n_ctx=8, vocabulary=VOCABULARY)
OPTIONS = SmallRunOptions(SHAPE, steps=6, batch=4, warmup=2, every=3, validation_rows=5, seed=3)


def random_text(n: int = 3000) -> EncodedText:
    """A hundred documents of random tokens, the later ones rarer."""
    weights = torch.arange(VOCABULARY, 0, -1).float()
    drawn = torch.multinomial(weights, n, True, generator=torch.Generator().manual_seed(0))
    return EncodedText(drawn, torch.arange(0, n, n // 100), VOCABULARY)


def cycle_text(n: int = 12_000) -> EncodedText:
    """Each token is followed by the next one: the label is a function of the token before."""
    return EncodedText(torch.arange(n) % VOCABULARY, torch.arange(0, n, n // 100), VOCABULARY)


def train(folder, options=OPTIONS, text=None, on_step=None):
    return train_small(folder, options, text=text or random_text(), on_step=on_step, progress=False)


def assert_same_runs(a, b):
    pd.testing.assert_frame_equal(a.losses, b.losses, check_exact=True)
    assert (a.folder / LOSSES).read_bytes() == (b.folder / LOSSES).read_bytes()
    assert list(a.checkpoints) == list(b.checkpoints)
    for step in a.checkpoints:
        one, two = (load_small(run.checkpoints[step]).state_dict() for run in (a, b))
        assert all(torch.equal(one[name], two[name]) for name in one), step


def test_one_seed_makes_one_run_and_another_seed_another(tmp_path):
    first = train(tmp_path / "a")
    torch.manual_seed(99)  # the global generator has no part in it
    assert_same_runs(first, train(tmp_path / "b"))
    other = train(tmp_path / "c", replace(OPTIONS, seed=4))
    assert (first.losses.train_loss[:6] != other.losses.train_loss[:6]).all()


def test_the_global_generator_is_left_alone(tmp_path):
    state = torch.get_rng_state()
    train(tmp_path)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("stop", [0, 2, 4, 5])
def test_a_run_that_was_stopped_ends_where_an_undisturbed_one_does(tmp_path, stop):
    def interrupt(model, step, loss):
        if step == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", on_step=interrupt)
    seen = []
    resumed = train(tmp_path / "stopped", on_step=lambda model, step, loss: seen.append(step))
    assert_same_runs(resumed, train(tmp_path / "whole"))
    last_checkpoint = max(step for step in OPTIONS.checkpoint_steps if step <= stop)
    assert seen == list(range(last_checkpoint, OPTIONS.steps))


def test_a_finished_run_is_only_read(tmp_path):
    seen = []
    first = train(tmp_path, on_step=lambda model, step, loss: seen.append(step))
    second = train(tmp_path, on_step=lambda model, step, loss: seen.append(step))
    assert seen == list(range(6))
    pd.testing.assert_frame_equal(first.losses, second.losses, check_exact=True)
    assert first.baselines == second.baselines


def test_a_folder_keeps_to_its_options_and_its_text(tmp_path):
    train(tmp_path)
    with pytest.raises(TangentValueError, match="learning_rate was 0.004 and is now 0.01"):
        train(tmp_path, replace(OPTIONS, learning_rate=0.01))
    with pytest.raises(TangentValueError, match="text.sha256 was"):
        train(tmp_path, text=random_text(2900))


def test_a_broken_state_is_told(tmp_path):
    train(tmp_path)
    (tmp_path / STATE).write_bytes((tmp_path / STATE).read_bytes()[:-10])
    with pytest.raises(TangentFileError, match="delete the folder and train again"):
        train(tmp_path)


def test_on_step_sees_the_gradient_of_the_checkpoint_before_it_is_clipped(tmp_path):
    options = replace(OPTIONS, clip=1e-3, every=1)  # a checkpoint before every update
    seen = {}

    def record(model, step, loss):
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        seen[step] = loss, gradients

    run = train(tmp_path, options, on_step=record)
    rows, _ = run_rows(random_text(), options)
    assert list(seen) == list(range(6))
    for step, (loss, gradients) in seen.items():
        model = load_small(run.checkpoints[step])
        inputs, labels = training_batch(rows, step, options)
        mean = -model(inputs).logits.log_softmax(-1).gather(-1, labels[..., None]).mean()
        mean.backward()
        assert loss == run.losses.train_loss[step]
        assert loss == pytest.approx(mean.item(), rel=1e-5)  # float32, another order of sums
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
        assert max(g.norm() for g in gradients.values()) > 10 * options.clip


def test_every_update_follows_the_learning_rate():
    """Without moments and decay, Adam's first update moves each weight by the learning rate."""
    state = SmallState(replace(OPTIONS, weight_decay=0.0))
    before = [p.detach().clone() for p in state.model.parameters()]
    rows, _ = run_rows(random_text(), OPTIONS)
    state.update(*training_batch(rows, 0, OPTIONS))
    moved = max(
        (p - q).abs().max().item() for p, q in zip(state.model.parameters(), before, strict=True)
    )
    assert moved == pytest.approx(OPTIONS.learning_rate / OPTIONS.warmup, rel=1e-3)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero():
    options = replace(OPTIONS, steps=10, warmup=4, learning_rate=1.0)
    found = [learning_rate(step, options) for step in range(11)]
    assert found == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


def test_checkpoints_come_at_powers_of_two_and_then_evenly():
    options = SmallRunOptions(steps=170, warmup=40, every=50)
    assert options.checkpoint_steps == (0, 1, 2, 4, 8, 16, 32, 50, 100, 150, 170)
    assert replace(options, every=64).checkpoint_steps == (0, 1, 2, 4, 8, 16, 32, 64, 128, 170)
    assert replace(OPTIONS, every=1000).checkpoint_steps == (0, 1, 2, 4, 6)


def test_the_losses_are_those_of_the_checkpoints(tmp_path):
    run = train(tmp_path)
    table = pd.read_csv(tmp_path / LOSSES)
    pd.testing.assert_frame_equal(table, run.losses)
    assert table.step.tolist() == list(range(7)) and table.tokens[2] == 2 * 4 * 8
    assert table.train_loss.isna().tolist() == [False] * 6 + [True]
    assert set(table.step[table.validation_loss.notna()]) == set(run.checkpoints)
    _, rows = run_rows(random_text(), OPTIONS)
    for step, folder in run.checkpoints.items():
        logits = load_small(folder)(rows[:, :-1]).logits.double()
        expected = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
        assert table.validation_loss[step] == pytest.approx(expected, rel=1e-5)  # float32


def test_rows_are_held_out_by_document_and_an_epoch_sees_each_row_once():
    text = EncodedText(torch.arange(3000), torch.arange(0, 3000, 30), 3000)
    options = replace(OPTIONS, shape=replace(SHAPE, vocabulary=3000))
    train_rows, validation = run_rows(text, options)
    assert train_rows.shape[1] == validation.shape[1] == 9 and len(validation) == 5
    assert train_rows.max() < 2850 <= validation.min()  # the last 5 of 100 documents
    assert len(validation.unique()) == validation.numel()
    per_epoch = len(train_rows) // 4
    epochs = [
        torch.cat([training_batch(train_rows, first + i, options)[0] for i in range(per_epoch)])
        for first in (0, per_epoch)
    ]
    for epoch in epochs:
        assert len(epoch.unique()) == epoch.numel()
    assert not torch.equal(*epochs)
    inputs, labels = training_batch(train_rows, 0, options)
    assert torch.equal(labels, inputs + 1)


def test_shuffled_labels_keep_their_histogram_and_their_inputs():
    control = replace(OPTIONS, control="shuffled_labels")
    rows, _ = run_rows(random_text(), OPTIONS)
    for step in range(3):
        inputs, labels = training_batch(rows, step, OPTIONS)
        same, shuffled = training_batch(rows, step, control)
        assert torch.equal(inputs, same) and not torch.equal(labels, shuffled)
        assert torch.equal(labels.flatten().bincount(), shuffled.flatten().bincount())
        assert torch.equal(shuffled, training_batch(rows, step, control)[1])
    places = torch.arange(rows.numel()).view(rows.shape)  # no label twice: what went where?
    batches = [
        [training_batch(places, k, o)[1].flatten() for o in (OPTIONS, control)] for k in (0, 1)
    ]
    orders = [(shuffled[:, None] == labels).nonzero()[:, 1] for labels, shuffled in batches]
    assert not torch.equal(*orders)  # another permutation at every step


def test_labels_are_learned_from_the_context_unless_they_are_shuffled(tmp_path):
    options = replace(OPTIONS, steps=60, batch=16, warmup=10, every=60, learning_rate=0.02)
    run = train(tmp_path / "main", options, cycle_text())
    control = train(tmp_path / "control", replace(options, control="shuffled_labels"), cycle_text())
    unigram = math.log(VOCABULARY)  # all tokens are equally frequent
    main, other = (r.losses.validation_loss.iloc[-1] for r in (run, control))
    assert run.baselines.unigram == pytest.approx(unigram, abs=0.05)  # of a few rows
    assert main < 0.1 * unigram
    assert other > 0.95 * unigram


def test_baselines_of_a_toy_sequence():
    """Labels 1 0 1 1 after 0 1 0 1: p(1) = 4/6, p(1|0) = (2 + 2 p(1)) / 4, p(0|1) = 5/12."""
    found = ngram_losses(torch.tensor([[0, 1, 0, 1, 1]]), torch.tensor([[0, 1, 0]]), 2, prior=2)
    assert found.unigram == pytest.approx(-(math.log(4 / 6) + math.log(2 / 6)) / 2, rel=1e-12)
    assert found.bigram == pytest.approx(-(math.log(10 / 12) + math.log(5 / 12)) / 2, rel=1e-12)


def test_baselines_are_probabilities_also_of_what_was_never_seen():
    rows, _ = run_rows(random_text(), OPTIONS)
    rows = rows.clamp(max=VOCABULARY - 2)  # one token never occurs
    for a in (0, 5, VOCABULARY - 1):
        losses = [ngram_losses(rows, torch.tensor([[a, b]]), VOCABULARY) for b in range(VOCABULARY)]
        assert sum(math.exp(-x.unigram) for x in losses) == pytest.approx(1, rel=1e-12)
        assert sum(math.exp(-x.bigram) for x in losses) == pytest.approx(1, rel=1e-12)
    with pytest.raises(TangentValueError, match="prior=0 must be positive"):
        ngram_losses(rows, rows, VOCABULARY, prior=0)


def test_a_checkpoint_is_an_ordinary_folder_with_its_tokenizer(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = ["one two three four five six seven eight nine ten"] * 40
    tokenizer = train_tokenizer(words, vocabulary=300)
    tokenizer.save(str(tmp_path / TOKENIZER))
    ids = [tokenizer.encode(text).ids for text in words]
    starts = torch.arange(len(words)) * len(ids[0])
    text = EncodedText(torch.tensor(ids).flatten(), starts, 300, tmp_path)
    options = replace(OPTIONS, shape=replace(SHAPE, vocabulary=300), validation_rows=1)
    folder = train(tmp_path / "run", options, text).checkpoints[6]
    ours, theirs = load_small(folder), AutoModelForCausalLM.from_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded(words[0])["input_ids"] == ids[0] and loaded.decode(ids[0]) == words[0]
    assert theirs.dtype == torch.float32
    assert torch.equal(ours(text.tokens[None, :8]).logits, theirs(text.tokens[None, :8]).logits)
    with pytest.raises(TangentFileError, match="holds no checkpoint"):
        load_small(tmp_path)


def test_the_shape_decides_the_number_of_parameters():
    found = sum(p.numel() for p in small_model(SmallShape(), seed=0).parameters())
    embeddings, attention, mlp = 2 * 2048 * 128, 4 * 128 * 128, 3 * 128 * 384
    assert found == embeddings + 4 * (attention + mlp + 2 * 128) + 128
    with pytest.raises(TangentValueError, match="d_model=20 and n_heads=4"):
        small_model(replace(SHAPE, d_model=20, n_heads=4), seed=0)


def test_a_run_that_diverges_is_told(tmp_path):
    with pytest.raises(TangentRuntimeError, match="learning_rate=1e\\+30"):
        train(tmp_path, replace(OPTIONS, learning_rate=1e30))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"warmup": 6}, "warmup=6 of steps=6"),
        ({"warmup": 0}, "warmup=0 of steps=6"),
        ({"batch": 0}, "batch=0, every=3 and validation_rows=5"),
        ({"control": "random"}, "control 'random'"),
    ],
)
def test_options_out_of_range_are_refused(knobs, message):
    with pytest.raises(TangentValueError, match=message):
        replace(OPTIONS, **knobs)


def test_a_text_that_does_not_suffice_is_refused():
    with pytest.raises(TangentValueError, match="has 316 rows of 9 tokens to train on and 16 to"):
        run_rows(random_text(), replace(OPTIONS, validation_rows=17))
    with pytest.raises(TangentValueError, match="12 token ids and the model 11"):
        run_rows(random_text(), replace(OPTIONS, shape=replace(SHAPE, vocabulary=11)))
