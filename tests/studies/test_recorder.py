"""Gradients recorded in a training loop: what is recorded, when, and that nothing stays behind."""

from __future__ import annotations

import math
import os

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from tests import families
from tl_tangent.analysis.gradients.gradient_energy import gradient_energy
from tl_tangent.errors import TangentFileError, TangentRuntimeError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.geometry.gradient_flow import energy_ratio_at
from tl_tangent.geometry.token_energies import KINDS
from tl_tangent.hooks.gradients.objectives import Batch, loss_of
from tl_tangent.hooks.gradients.weight import Tap, Weight, Weights, out_in
from tl_tangent.studies import run_records
from tl_tangent.studies.gradient_run import GradientRun
from tl_tangent.studies.recorder import GradientRecorder

RANK, CONTROLS = 4, 3


def a_model(dtype: torch.dtype = torch.float64):
    return families.hf_model("llama", dtype)


def tokens(step: int):
    return families.tiny_tokens(batch=4, pos=12, seed=step)


def subspaces_of(model) -> SubspaceSet:
    return gradient_energy(model, tokens(99), rank=RANK, n_controls=0, nulls=False).subspaces


def train(model, recorder, first: int, last: int, rate: float = 1e-2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for step in range(first, last):
        loss = loss_of("causal", model, Batch(tokens(step)))  # Hugging Face's own is float32
        loss.backward()
        recorder.record(step, loss)
        optimizer.step()
        optimizer.zero_grad()


def hooks_of(model) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_records_the_energies_of_the_gradients_that_the_optimizer_uses():
    model = a_model()
    subspaces = subspaces_of(model)
    with GradientRecorder(model, subspaces, n_controls=CONTROLS, nulls=True) as recorder:
        train(model, recorder, 0, 1, rate=0.0)
    alone = gradient_energy(model, tokens(0), subspaces, n_controls=CONTROLS).statistics
    (step,) = recorder.run().steps
    torch.testing.assert_close(step.energies, alone.energies, rtol=1e-9, atol=0, equal_nan=True)
    torch.testing.assert_close(step.totals, alone.totals, rtol=1e-9, atol=0, equal_nan=True)


def test_without_nulls_only_the_gradient_is_measured_and_it_is_the_same():
    model = a_model()
    subspaces = subspaces_of(model)
    with GradientRecorder(model, subspaces, n_controls=CONTROLS) as recorder:
        train(model, recorder, 0, 1, rate=0.0)
    alone = gradient_energy(model, tokens(0), subspaces, n_controls=CONTROLS).statistics
    (step,) = recorder.run().steps
    row = KINDS.index("gradient")
    torch.testing.assert_close(step.energies[:, row], alone.energies[:, row], rtol=1e-9, atol=0)
    assert step.energies[:, row + 1 :].isnan().all()


def test_accumulated_gradients_are_recorded_as_accumulated():
    model = a_model()
    subspaces = subspaces_of(model)
    with GradientRecorder(model, subspaces, n_controls=0) as recorder:
        for part in (0, 1):
            model(input_ids=tokens(part), labels=tokens(part)).loss.backward()
        recorder.record(0)
        whole = {one.name: one.gradient().norm() ** 2 for one in recorder.weights.weights}
    (step,) = recorder.run().steps
    expected = torch.stack(list(whole.values()))
    torch.testing.assert_close(step.totals[:, 0], expected, rtol=1e-9, atol=0)


def test_recording_changes_nothing_and_leaves_nothing():
    plain, recorded = a_model(), a_model()
    optimizer = torch.optim.SGD(plain.parameters(), 1e-2)
    for step in range(3):
        loss_of("causal", plain, Batch(tokens(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    options = {"proxy": "follow", "rank": RANK, "refit_every": 2, "n_controls": CONTROLS}
    with GradientRecorder(recorded, activations_every=1, nulls=True, **options) as recorder:
        train(recorded, recorder, 0, 3)
        assert hooks_of(recorded) > 0
    assert hooks_of(recorded) == 0
    for one, other in zip(plain.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_error_in_the_loop_takes_the_hooks_off_and_keeps_the_records(tmp_path):
    model = a_model()
    recorder = GradientRecorder(model, subspaces_of(model), out=tmp_path, nulls=True)
    with pytest.raises(KeyboardInterrupt), recorder:
        train(model, recorder, 0, 3)
        raise KeyboardInterrupt
    assert hooks_of(model) == 0
    assert [one.step for one in GradientRun.load(tmp_path).steps] == [0, 1, 2]


# The proxy ----------------------------------------------------------------------------------------


def fits(recorder) -> list[int]:
    return recorder.run().conventions["fits"]


def test_a_frozen_proxy_stays():
    model = a_model()
    subspaces = subspaces_of(model)
    with GradientRecorder(model, subspaces, n_controls=CONTROLS) as recorder:
        train(model, recorder, 0, 5)
    assert fits(recorder) == []
    assert all(
        torch.equal(recorder.subspaces[site].basis, subspaces[site].basis) for site in subspaces
    )


def test_a_proxy_that_follows_is_fitted_again_on_the_steps_since():
    model = a_model()
    options = {"rank": RANK, "refit_every": 3, "activations_every": 1, "n_controls": CONTROLS}
    with GradientRecorder(model, proxy="follow", **options) as recorder:
        train(model, recorder, 0, 7)
    assert fits(recorder) == [0, 2, 5]
    assert [one.step for one in recorder.run().steps] == [1, 2, 3, 4, 5, 6]
    n_rows = {one.n_tokens for one in recorder.subspaces.values()}
    assert n_rows == {3 * 4 * 11}  # steps 3, 4, 5; 4 rows; 12 positions without the first


def test_an_early_proxy_stays_after_its_last_fit_on_all_steps_before():
    model = a_model()
    options = {"rank": RANK, "refit_every": 2, "activations_every": 1, "n_controls": CONTROLS}
    with GradientRecorder(model, proxy="early", freeze_at=4, **options) as recorder:
        train(model, recorder, 0, 9)
    assert fits(recorder) == [0, 1, 3, 4]
    assert {one.n_tokens for one in recorder.subspaces.values()} == {5 * 4 * 11}


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in model.state_dict().items()}


def same_runs(a: GradientRun, b: GradientRun) -> bool:
    return [one.step for one in a.steps] == [one.step for one in b.steps] and all(
        torch.equal(one.totals.nan_to_num(), other.totals.nan_to_num())
        and torch.equal(one.energies.nan_to_num(), other.energies.nan_to_num())
        and one.shares.keys() == other.shares.keys()
        and all(torch.equal(share, other.shares[site]) for site, share in one.shares.items())
        for one, other in zip(a.steps, b.steps, strict=True)
    )


def test_a_restart_replaces_steps_and_goes_on_with_the_last_fit(tmp_path):
    options = {"proxy": "early", "freeze_at": 2, "rank": RANK, "n_controls": CONTROLS}
    options |= {"refit_every": 2, "activations_every": 1, "flush_every": 2, "out": tmp_path}
    model = a_model()
    with GradientRecorder(model, **options) as first:
        train(model, first, 0, 6)
    before = first.run().steps[4]
    with GradientRecorder(model, start=4, **options) as second:
        train(model, second, 4, 8)
    held = first.subspaces
    assert all(torch.equal(second.subspaces[site].basis, held[site].basis) for site in held)
    run = GradientRun.load(tmp_path)
    assert [one.step for one in run.steps] == list(range(1, 8))
    after = run.steps[4]
    assert before.step == after.step == 5
    assert before.loss != after.loss


def cut_run(options, folder, at: int, dies_at: int, last: int):
    """Train, die in the middle of a step, and go on from the checkpoint in front of step ``at``."""
    model = a_model()
    recorder = GradientRecorder(model, **options, out=folder)
    with pytest.raises(KeyboardInterrupt), recorder:
        train(model, recorder, 0, at)
        recorder.flush()
        kept = weights_of(model)
        train(model, recorder, at, dies_at)
        loss_of("causal", model, Batch(tokens(dies_at))).backward()
        raise KeyboardInterrupt
    model.load_state_dict(kept)
    model.zero_grad()
    with GradientRecorder(model, **options, out=folder, start=at) as recorder:
        train(model, recorder, at, last)
    return recorder


@pytest.mark.parametrize("proxy", ["early", "follow"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("at", "dies_at"), [(4, 6), (6, 6), (3, 9), (10, 10)])
def test_a_restart_behind_a_flush_ends_where_an_undisturbed_run_does(
    tmp_path, proxy, every, at, dies_at
):
    options = {"proxy": proxy, "freeze_at": 9 if proxy == "early" else None, "rank": RANK}
    options |= {"refit_every": 4, "activations_every": every, "flush_every": 3, "n_controls": 1}
    model = a_model()
    with GradientRecorder(model, **options) as whole:
        train(model, whole, 0, 12)
    cut = cut_run(options, tmp_path, at, dies_at, 12)
    assert fits(cut) == fits(whole) == [0, 3, 7, 9 if proxy == "early" else 11]
    for site, one in whole.subspaces.items():
        assert torch.equal(cut.subspaces[site].basis, one.basis)
        assert cut.subspaces[site].n_tokens == one.n_tokens
    assert same_runs(cut.run(), whole.run())
    (resumed,) = cut.run().conventions["resumed"]
    assert resumed["activations_until"] is None


def test_a_restart_of_a_frozen_proxy_looks_at_activations_in_the_same_steps(tmp_path):
    options = {"activations_every": 3, "n_controls": 1}
    model = a_model()
    with GradientRecorder(model, subspaces_of(model), **options) as whole:
        train(model, whole, 0, 8)
    options |= {"subspaces": subspaces_of(a_model())}
    cut = cut_run(options, tmp_path, at=4, dies_at=5, last=8)
    assert same_runs(cut.run(), whole.run())


def test_a_restart_elsewhere_says_which_activations_are_missing(tmp_path):
    options = {"proxy": "early", "freeze_at": 9, "rank": RANK, "n_controls": 1, "out": tmp_path}
    options |= {"refit_every": 4, "activations_every": 1}
    model = a_model()
    with GradientRecorder(model, **options, save_at=[3]) as recorder:
        train(model, recorder, 0, 11)
    with pytest.warns(UserWarning, match="knows those up to step 2"):
        again = GradientRecorder(model, **options, start=5)
    assert [one.step for one in again.run().steps] == [1, 2, 3, 4]  # and no later step of the first
    assert fits(again) == [0, 3]
    assert again.run().conventions["resumed"][-1]["activations_until"] == 2
    with pytest.warns(UserWarning, match="knows none"):
        GradientRecorder(model, **options, start=2)


def test_a_restart_in_front_of_the_first_fit_begins_anew(tmp_path):
    options = {"proxy": "follow", "rank": RANK, "n_controls": 1, "out": tmp_path}
    model = a_model()
    with GradientRecorder(model, **options) as recorder:
        train(model, recorder, 0, 4)
    with GradientRecorder(model, **options, start=0) as recorder:
        assert recorder.subspaces is None
        train(model, recorder, 0, 2)
    assert [one.step for one in GradientRun.load(tmp_path).steps] == [1]


def test_a_step_that_is_known_already_needs_a_start(tmp_path):
    model = a_model()
    subspaces = subspaces_of(model)
    with GradientRecorder(model, subspaces, out=tmp_path) as recorder:
        train(model, recorder, 0, 3)
    again = GradientRecorder(model, subspaces, out=tmp_path)
    with pytest.raises(TangentRuntimeError, match="give start=2"), again:
        train(model, again, 2, 3)
    with again:
        train(model, again, 3, 4)
    assert [one.step for one in again.run().steps] == [0, 1, 2, 3]


def test_fits_follow_the_first_recorded_step_that_passes_their_points():
    model = a_model()
    options = {"proxy": "early", "freeze_at": 35, "rank": RANK, "n_controls": 0}
    with GradientRecorder(model, **options, refit_every=12, activations_every=1) as recorder:
        for step in range(0, 60, 5):
            train(model, recorder, step, step + 1)
    assert fits(recorder) == [0, 15, 25, 35]


def test_a_fit_waits_until_something_was_looked_at():
    model = a_model()
    options = {"rank": RANK, "n_controls": 0, "refit_every": 2, "activations_every": 5}
    with GradientRecorder(model, proxy="follow", **options) as recorder:
        train(model, recorder, 0, 12)
    assert fits(recorder) == [0, 5, 10]


def test_a_proxy_that_was_never_frozen_is_told():
    model = a_model()
    recorder = GradientRecorder(model, proxy="early", freeze_at=30, rank=RANK, n_controls=0)
    with pytest.warns(UserWarning, match="freeze_at=30"), recorder:
        train(model, recorder, 0, 2)


def test_with_a_folder_no_step_stays_in_memory_and_parts_are_small(tmp_path):
    model = a_model()
    with GradientRecorder(
        model, subspaces_of(model), out=tmp_path, n_controls=CONTROLS, flush_every=2
    ) as recorder:
        train(model, recorder, 0, 5)
        assert len(recorder._records._pending) == 1
        assert not recorder._records._steps
    assert len(list(tmp_path.glob("steps-*.safetensors"))) == 3
    assert {one.energies.shape[1] for one in GradientRun.load(tmp_path).steps} == {1}


def test_the_order_of_parts_is_that_of_their_numbers(tmp_path):
    model = a_model()
    with GradientRecorder(model, subspaces_of(model), out=tmp_path, flush_every=1) as recorder:
        train(model, recorder, 0, 2)
        for loss in (1.0, 2.0):
            loss_of("causal", model, Batch(tokens(1))).backward()
            recorder.record(1, loss)
    for age, part in enumerate(sorted(tmp_path.glob("steps-*"), reverse=True)):
        os.utime(part, (age, age))
    assert [one.loss for one in GradientRun.load(tmp_path).steps][1] == 2.0


def test_a_saved_run_is_read_again(tmp_path):
    model = a_model()
    with GradientRecorder(model, proxy="follow", rank=RANK, nulls=True) as recorder:
        train(model, recorder, 0, 3)
    run = recorder.run()
    run.save(tmp_path / "run.safetensors")
    again = GradientRun.load(tmp_path / "run.safetensors")
    assert same_runs(run, again)
    assert again.conventions == run.conventions
    pd.testing.assert_frame_equal(run.to_dataframe(), again.to_dataframe())


def test_other_subspaces_are_another_run(tmp_path):
    model = a_model()
    subspaces = subspaces_of(model)
    GradientRecorder(model, subspaces, out=tmp_path)
    others = SubspaceSet(
        {
            site: TangentSubspace(torch.linalg.qr(torch.randn(one.d, RANK))[0], site=site)
            for site, one in subspaces.items()
        }
    )
    with pytest.raises(TangentValueError, match="given was"):
        GradientRecorder(model, others, out=tmp_path)


def test_another_run_in_the_same_folder_is_refused(tmp_path):
    model = a_model()
    GradientRecorder(model, subspaces_of(model), out=tmp_path, n_controls=2)
    with pytest.raises(TangentValueError, match="n_controls was 2 and is now 3"):
        GradientRecorder(model, subspaces_of(model), out=tmp_path, n_controls=3)


def test_two_recorders_at_once_do_not_mix_in_one_folder(tmp_path):
    model = a_model()
    options = {"subspaces": subspaces_of(model), "out": tmp_path, "n_controls": 0}
    with GradientRecorder(model, **options) as first:
        second = GradientRecorder(model, **options)
        train(model, first, 0, 2)
        first.flush()
        with pytest.raises(TangentRuntimeError, match="give each its own out="), second:
            train(model, second, 0, 1)
    assert [one.step for one in GradientRun.load(tmp_path).steps] == [0, 1]


def test_positions_are_those_of_any_other_fit():
    model = a_model()
    options = {"rank": RANK, "refit_every": 9, "n_controls": 0, "positions": [1, 2, -1]}
    with GradientRecorder(model, proxy="follow", **options) as recorder:
        train(model, recorder, 0, 1)
    assert {one.n_tokens for one in recorder.subspaces.values()} == {4 * 3}
    assert {str(one.positions) for one in recorder.subspaces.values()} == {"[1, 2, -1]"}


# What else can happen -----------------------------------------------------------------------------


def test_a_step_that_overflowed_is_counted_and_left_out():
    model = a_model()
    with GradientRecorder(model, subspaces_of(model), n_controls=0) as recorder:
        for step in range(2):
            model(input_ids=tokens(step), labels=tokens(step)).loss.backward()
            if step == 0:
                next(iter(recorder.weights.weights)).parameter.grad[0, 0] = math.inf
            recorder.record(step)
            model.zero_grad()
    assert [one.step for one in recorder.run().steps] == [1]
    assert recorder.run().conventions["overflows"] == [0]


@pytest.mark.parametrize("nulls", [False, True])
def test_a_forward_pass_that_overflows_is_left_out_of_the_fit_too(nulls):
    model = a_model()
    options = {"rank": RANK, "refit_every": 4, "activations_every": 1, "n_controls": 0}
    with GradientRecorder(model, proxy="follow", nulls=nulls, **options) as recorder:
        train(model, recorder, 0, 2)
        weight = model.model.layers[1].mlp.down_proj.weight
        kept = weight.detach().clone()
        weight.data.fill_(math.inf)
        loss_of("causal", model, Batch(tokens(2))).backward()
        recorder.record(2)  # and the optimizer's step is passed over
        model.zero_grad()
        weight.data.copy_(kept)
        train(model, recorder, 3, 5)
    run = recorder.run()
    assert [one.step for one in run.steps] == [1, 3, 4]
    assert run.conventions["overflows"] == [2]
    assert recorder.subspaces["unembed.hook_in"].n_tokens == 2 * 4 * 11  # of steps 1 and 3


def test_entered_twice_it_sees_a_pass_once():
    model = a_model()
    with GradientRecorder(model, proxy="follow", rank=RANK, n_controls=0) as recorder:
        with recorder:
            train(model, recorder, 0, 1)
    assert {one.n_tokens for one in recorder.subspaces.values()} == {4 * 11}


def test_overflows_alone_reach_the_disk_and_are_told_when_drawn(tmp_path):
    model = a_model()
    subspaces = subspaces_of(model)
    with GradientRecorder(model, subspaces, n_controls=0, out=tmp_path) as recorder:
        train(model, recorder, 0, 1)
        next(iter(recorder.weights.weights)).parameter.grad = None
        loss_of("causal", model, Batch(tokens(1))).backward()
        next(iter(recorder.weights.weights)).parameter.grad[0, 0] = math.nan
        recorder.record(1)
    run = GradientRun.load(tmp_path)
    assert run.conventions["overflows"] == [1]
    assert "1 steps, 0 to 0, 1 left out for overflows" in repr(run)
    with GradientRecorder(model, subspaces, n_controls=0) as recorder:
        pass
    with pytest.raises(TangentRuntimeError, match="nothing was recorded"):
        recorder.run().plot()


def test_a_validation_pass_within_a_step_is_not_taken_for_training():
    model = a_model()
    options = {"proxy": "follow", "rank": RANK, "refit_every": 10, "n_controls": 0}
    with GradientRecorder(model, activations_every=1, **options) as recorder:
        with torch.no_grad():
            model(input_ids=families.tiny_tokens(batch=9, pos=12))
        train(model, recorder, 0, 1)
    assert {one.n_tokens for one in recorder.subspaces.values()} == {4 * 11}


def test_checkpoints_are_saved_before_the_update(tmp_path):
    model = a_model(torch.float32)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with GradientRecorder(model, subspaces_of(model), out=tmp_path, save_at=[0, 2]) as recorder:
        train(model, recorder, 0, 3)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step-0", "step-2"]
    again = type(model).from_pretrained(tmp_path / "checkpoints" / "step-0")
    assert all(torch.equal(one, before[name]) for name, one in again.state_dict().items())


def test_a_checkpoint_of_an_undone_future_is_replaced(tmp_path):
    model = a_model(torch.float32)
    subspaces = subspaces_of(model)
    for start in (None, 1):
        with GradientRecorder(
            model, subspaces, out=tmp_path, save_at=[1], start=start, n_controls=0
        ) as recorder:
            train(model, recorder, start or 0, 1)
            before = weights_of(model)
            train(model, recorder, 1, 2)
    again = type(model).from_pretrained(tmp_path / "checkpoints" / "step-1")
    assert all(torch.equal(one, before[name]) for name, one in again.state_dict().items())


def test_a_restart_may_load_the_model_from_a_checkpoint_of_its_own(tmp_path):
    model = a_model(torch.float32)
    model.config.name_or_path = "org/llama"
    options = {"proxy": "follow", "rank": RANK, "n_controls": 0, "out": tmp_path, "save_at": [2]}
    with GradientRecorder(model, **options) as recorder:
        train(model, recorder, 0, 4)
    again = type(model).from_pretrained(tmp_path / "checkpoints" / "step-2").train()
    assert again.config.name_or_path != "org/llama"
    with GradientRecorder(again, **options, start=2) as recorder:
        train(again, recorder, 2, 5)
    run = GradientRun.load(tmp_path)
    assert [one.step for one in run.steps] == [1, 2, 3, 4]
    assert run.conventions["model"] == "org/llama"


def test_activation_shares_are_those_of_all_parts_of_a_batch():
    model = a_model()
    subspaces = subspaces_of(model)
    with GradientRecorder(model, subspaces, n_controls=1, activations_every=1) as recorder:
        for step, parts in enumerate(((0,), (1,), (0, 1))):
            for part in parts:
                loss_of("causal", model, Batch(tokens(part))).backward()
            recorder.record(step)
            model.zero_grad()
    first, second, both = recorder.run().steps
    for site, share in both.shares.items():
        torch.testing.assert_close(share, first.shares[site] + second.shares[site])


def test_a_pass_that_is_not_seen_is_no_silent_nothing():
    model = a_model()
    subspaces = subspaces_of(model)
    loss_of("causal", model, Batch(tokens(0))).backward()
    with (
        pytest.raises(TangentRuntimeError, match="enter it before the forward pass"),
        GradientRecorder(model, proxy="follow", rank=RANK) as recorder,
    ):
        recorder.record(0)
    with (
        pytest.warns(UserWarning, match="Activations are not recorded"),
        GradientRecorder(model, subspaces, n_controls=0) as recorder,
    ):
        recorder.record(0)
    assert len(recorder.run().steps) == 1


@pytest.mark.parametrize("of", [np.int64, torch.tensor], ids=["numpy", "torch"])
def test_steps_are_any_whole_numbers(tmp_path, of):
    model = a_model()
    subspaces = subspaces_of(model)
    for start in (None, of(1)):
        options = {"out": tmp_path, "n_controls": 0, "start": start}
        with GradientRecorder(model, subspaces, **options) as recorder:
            for step in (0, 1, 1, 2)[0 if start is None else 1 :]:
                loss_of("causal", model, Batch(tokens(step))).backward()
                recorder.record(of(step), of(step))
    run = GradientRun.load(tmp_path)
    assert [(one.step, one.loss) for one in run.steps] == [(0, 0.0), (1, 1.0), (2, 2.0)]


@pytest.mark.parametrize(
    ("step", "loss", "said"),
    [
        (2.0, 1.0, "step is 2.0"),
        (-1, 1.0, "step is -1"),
        ("2", 1.0, "step is '2'"),
        (2, torch.ones(2), r"shape \[2\]"),
        (2, "low", "'low'"),
    ],
)
def test_what_is_no_step_or_loss_is_refused(step, loss, said):
    model = a_model()
    with (
        pytest.raises(TangentValueError, match=said),
        GradientRecorder(model, subspaces_of(model), n_controls=0) as recorder,
    ):
        recorder.record(step, loss)


def test_steps_that_begin_again_with_every_epoch_do_not_replace_the_first(tmp_path):
    model = a_model()
    with (
        pytest.raises(TangentRuntimeError, match="step 0 comes behind step 2"),
        GradientRecorder(model, subspaces_of(model), out=tmp_path, n_controls=0) as recorder,
    ):
        for _ in range(2):
            train(model, recorder, 0, 3)
    assert [one.step for one in GradientRun.load(tmp_path).steps] == [0, 1, 2]


def test_steps_that_could_not_be_written_still_wait(tmp_path, monkeypatch):
    model = a_model()
    with GradientRecorder(model, subspaces_of(model), out=tmp_path, n_controls=0) as recorder:
        train(model, recorder, 0, 2)
        with monkeypatch.context() as patch, pytest.raises(TangentFileError, match="full"):
            patch.setattr(run_records, "write_steps", full_disk)
            recorder.flush()
    assert [one.step for one in GradientRun.load(tmp_path).steps] == [0, 1]


def full_disk(*given):
    raise OSError(28, "the disk is full")


def damaged(folder, pattern: str, content: str | None) -> None:
    file = sorted(folder.glob(pattern))[-1]
    if content is None:
        file.unlink()
    else:
        file.write_text(content)


@pytest.mark.parametrize(
    ("pattern", "content", "said"),
    [
        ("notes.json", "{}", "does not tell the restarts"),
        ("notes.json", "[1]", "can't be read"),
        ("notes.json", '{"overflows": [], "resumed": [], "states": [{"step": 1}]}', "calls"),
        ("activations-*", None, "behind step 3, can't be read.* give a start of 3 or less"),
        ("activations-*", "", "behind step 3, can't be read.* give a start of 3 or less"),
        ("steps-*", "", "can't be read"),
    ],
)
def test_a_damaged_folder_is_named_with_what_to_do(tmp_path, pattern, content, said):
    model = a_model()
    options = {"proxy": "follow", "rank": RANK, "n_controls": 0, "activations_every": 1}
    with GradientRecorder(model, out=tmp_path, **options) as recorder:
        train(model, recorder, 0, 4)
    damaged(tmp_path, pattern, content)
    with pytest.raises(TangentFileError, match=said):
        GradientRecorder(model, out=tmp_path, **options)


def test_a_copy_of_a_part_is_no_part(tmp_path):
    model = a_model()
    with GradientRecorder(model, subspaces_of(model), out=tmp_path, n_controls=0) as recorder:
        train(model, recorder, 0, 1)
    part = tmp_path / "steps-000001.safetensors"
    part.with_name("steps-000001 (copy).safetensors").write_bytes(part.read_bytes())
    with pytest.raises(TangentFileError, match="move it out"):
        GradientRun.load(tmp_path)


def test_a_table_by_something_else_is_refused():
    model = a_model()
    with GradientRecorder(model, subspaces_of(model), n_controls=0) as recorder:
        train(model, recorder, 0, 1)
    with pytest.raises(TangentValueError, match="got 'layers'"):
        recorder.run().to_dataframe("layers")


def test_recording_without_watching_is_an_error():
    model = a_model()
    recorder = GradientRecorder(model, subspaces_of(model))
    with pytest.raises(TangentRuntimeError, match="not watching"):
        recorder.record(0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "subspaces are missing"),
        ({"proxy": "early"}, "freeze_at=None"),
        ({"proxy": "follow", "freeze_at": 3}, "freeze_at=3"),
        ({"proxy": "follow", "refit_every": 0}, "refit_every is 0"),
        ({"proxy": "early", "freeze_at": 0.3}, "freeze_at is 0.3"),
        ({"proxy": "follow", "activations_every": 1.5}, "activations_every is 1.5"),
        ({"proxy": "follow", "flush_every": 0}, "flush_every is 0"),
        ({"proxy": "follow", "method": "ica"}, "method='ica'.*pca or svd"),
        ({"proxy": "follow", "save_at": 2.5}, "save_at is 2.5"),
        ({"proxy": "follow", "save_at": lambda step: step == 3}, "give out="),
        ({"proxy": "follow", "rank": 0.9}, "rank=0.9"),
        ({"proxy": "sometimes"}, "'sometimes'"),
        ({"proxy": "follow", "save_at": [1]}, "give out="),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, said):
    with pytest.raises(TangentValueError, match=said):
        GradientRecorder(a_model(), **options)


@pytest.mark.parametrize("of", [np.int64, torch.tensor], ids=["numpy", "torch"])
def test_options_are_any_whole_numbers(tmp_path, of):
    model = a_model(torch.float32)
    options = {"refit_every": 3, "activations_every": 2, "flush_every": 2, "n_controls": 1}
    options = {name: of(value) for name, value in options.items()}
    options |= {"save_at": [of(1), of(3)], "seed": of(0), "out": tmp_path, "rank": RANK}
    with GradientRecorder(model, proxy="follow", **options) as recorder:
        train(model, recorder, 0, 4)
    assert fits(recorder) == [0, 2]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["step-1", "step-3"]


def test_a_model_that_can_not_save_itself_is_refused_before_the_training(tmp_path):
    model = families.hooked_transformer("rotary_gqa")
    with pytest.raises(TangentValueError, match="a HookedTransformer has not"):
        GradientRecorder(model, proxy="follow", save_at=[3], out=tmp_path)


# The feedback loop --------------------------------------------------------------------------------


def regression(d: int, o: int, variances: torch.Tensor, n: int = 64):
    """A linear map, its teacher, and inputs whose second moment is exactly diagonal."""
    generator = torch.Generator().manual_seed(0)
    x, _ = torch.linalg.qr(torch.randn(n, d, generator=generator, dtype=torch.float64))
    x = x * (n * variances).sqrt()
    teacher = torch.randn(o, d, generator=generator, dtype=torch.float64)
    student = nn.Linear(d, o, bias=False, dtype=torch.float64)
    nn.init.zeros_(student.weight)
    return student, x, x @ teacher.mT, teacher


def test_a_linear_regression_gives_the_closed_form_of_gradient_flow():
    d, o, rank, rate = 12, 3, 3, 1e-2
    variances = torch.tensor([0.5] * rank + [0.05] * (d - rank), dtype=torch.float64)
    student, x, y, teacher = regression(d, o, variances)
    site = "blocks.0.attn.hook_in"
    tap = Tap(student, 0)
    weight = Weight("W", "q", 0, d, site, student.weight, out_in(), tap, Tap(student))
    weights = Weights((weight,), {site: tap}, ())
    proxy = {site: TangentSubspace(torch.eye(d, dtype=torch.float64)[:, :rank], site=site)}
    options = {"weights": weights, "n_controls": 4, "flush_every": 1000}
    steps = range(900)
    with GradientRecorder(student, proxy, **options) as recorder:
        for step in steps:
            loss = (student(x) - y).square().sum() / (2 * len(x))
            loss.backward()
            recorder.record(step, loss)
            with torch.no_grad():
                student.weight -= rate * student.weight.grad
                student.weight.grad = None
    frame = recorder.run().to_dataframe("weight")
    options = {"tangent_variance": 0.5, "normal_variance": 0.05}
    options |= {"tangent_error": float(teacher[:, :rank].norm())}
    options |= {"normal_error": float(teacher[:, rank:].norm())}
    directions = (d - rank) / rank  # energy_ratio_exact compares averages over directions
    expected = [energy_ratio_at(s * rate, **options) * directions for s in steps]
    found = frame["energy_ratio_exact"].to_list()
    assert found == pytest.approx(expected, rel=0.03)  # Euler's error at this rate
    assert found[0] > 1 > found[-1]


def test_activations_and_gradients_are_coupled_twofold_until_something_is_learned():
    """Gradient energies go with the square of the variances at first, and fall from there."""
    d, o, rank, rate = 12, 400, 3, 1e-2
    variances = torch.tensor([0.5] * rank + [0.05] * (d - rank), dtype=torch.float64)
    student, x, y, _ = regression(d, o, variances)
    site = "blocks.0.attn.hook_in"
    tap = Tap(student, 0)
    weight = Weight("W", "q", 0, d, site, student.weight, out_in(), tap, Tap(student))
    weights = Weights((weight,), {site: tap}, ())
    proxy = {site: TangentSubspace(torch.eye(d, dtype=torch.float64)[:, :rank], site=site)}
    options = {"weights": weights, "positions": "all", "activations_every": 1}
    with GradientRecorder(student, proxy, **options, n_controls=0) as recorder:
        for step in range(300):
            loss = (student(x[None])[0] - y).square().sum() / (2 * len(x))
            loss.backward()
            recorder.record(step, loss)
            with torch.no_grad():
                student.weight -= rate * student.weight.grad
                student.weight.grad = None
    for by in ("weight", "side"):
        coupling = recorder.run().to_dataframe(by)["coupling"].to_numpy()
        assert coupling[0] == pytest.approx(2, abs=0.1)  # 400 outputs: the error is even to 5 %
        # ln of the closed form over ln(0.5 / 0.05): a line of this slope
        slope = -2 * (0.5 - 0.05) * rate / math.log(10)
        assert np.polyfit(range(300), coupling, 1)[0] == pytest.approx(slope, rel=0.03)
