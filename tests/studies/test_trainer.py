"""The recorder as a callback of the Hugging Face Trainer."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests import families
from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.studies.gradient_run import GradientRun
from tl_tangent.studies.trainer import GradientCallback


def trained(folder, callback, accumulate: int = 1, resume: bool = False, **changed):
    model = families.hf_model("llama")
    rows = families.tiny_tokens(batch=12, pos=10)
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        max_grad_norm=0.5,
        **{"save_strategy": "no", **changed},
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_record_an_optimizer_step_behind_clipping(tmp_path, accumulate):
    callback = GradientCallback(
        out=tmp_path / "run", proxy="follow", rank=4, n_controls=2, refit_every=2
    )
    model = trained(tmp_path, callback, accumulate)
    steps = callback.run().steps
    assert [one.step for one in steps] == list(range(1, 6 // accumulate))
    for one in steps:
        # the weights that are measured are all but norms: their norm can't exceed the clipped one
        assert 0 < float(one.totals[:, 0].sum()) <= 0.5**2 * (1 + 1e-5)
    assert sum(len(module._forward_hooks) for module in model.modules()) == 0
    again = GradientRun.load(tmp_path / "run")
    assert all(
        torch.equal(a.totals[:, 0], b.totals[:, 0]) for a, b in zip(steps, again.steps, strict=True)
    )


class Interrupts(transformers.TrainerCallback):
    """Ends the training in the middle of a step, as a killed job would."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_pre_optimizer_step(self, args, state, control, **given):
        if state.global_step == self.at:
            raise KeyboardInterrupt


def test_a_training_that_was_stopped_goes_on_from_its_checkpoint_exactly(tmp_path, monkeypatch):
    options = {"proxy": "early", "freeze_at": 4, "rank": 4, "n_controls": 2, "refit_every": 2}
    whole = GradientCallback(**options, activations_every=1)
    trained(tmp_path / "whole", whole)
    saving = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
    folder = tmp_path / "cut"
    first = GradientCallback(**options, activations_every=1, out=folder / "run")
    train = transformers.Trainer.train
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(
            transformers.Trainer,
            "train",
            lambda self, **given: (self.add_callback(Interrupts(4)), train(self, **given)),
        )
        trained(folder, first, **saving)
    first.recorder._stop_watching()  # what the death of the process does
    second = GradientCallback(**options, activations_every=1, out=folder / "run")
    trained(folder, second, resume=True, **saving)
    a, b = whole.run(), second.run()
    assert [one.step for one in a.steps] == [one.step for one in b.steps] == [1, 2, 3, 4, 5]
    assert b.conventions["fits"] == a.conventions["fits"] == [0, 1, 3, 4]
    for one, other in zip(a.steps, b.steps, strict=True):
        torch.testing.assert_close(one.totals, other.totals, rtol=1e-4, atol=0)
        torch.testing.assert_close(one.energies, other.energies, rtol=1e-3, atol=1e-9)


def test_a_new_training_does_not_undo_the_records_of_another(tmp_path):
    options = {"proxy": "follow", "rank": 4, "n_controls": 2, "out": tmp_path / "run"}
    trained(tmp_path, GradientCallback(**options))
    with pytest.raises(TangentRuntimeError, match="name another folder"):
        trained(tmp_path, GradientCallback(**options))


def test_nulls_of_accumulated_gradients_are_refused(tmp_path):
    with pytest.raises(TangentValueError, match="gradient_accumulation_steps=2"):
        trained(tmp_path, GradientCallback(proxy="follow", nulls=True), accumulate=2)


def test_a_run_before_training_is_an_error():
    with pytest.raises(TangentRuntimeError, match=r"trainer\.train"):
        GradientCallback(proxy="follow").run()
