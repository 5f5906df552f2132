"""The recorder as a callback of the Hugging Face Trainer."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests import families
from tl_tangent.errors import TangentRuntimeError
from tl_tangent.studies.gradient_run import GradientRun
from tl_tangent.studies.trainer import GradientCallback


def trained(folder, callback, accumulate: int = 1):
    model = families.hf_model("llama")
    rows = families.tiny_tokens(batch=12, pos=10)
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        max_grad_norm=0.5,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
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


def test_a_run_before_training_is_an_error():
    with pytest.raises(TangentRuntimeError, match=r"trainer\.train"):
        GradientCallback(proxy="follow").run()
