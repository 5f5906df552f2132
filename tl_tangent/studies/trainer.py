"""The recorder as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tl_tangent.errors import TangentRuntimeError
from tl_tangent.studies.recorder import GradientRecorder
from tl_tangent.studies.run_records import GradientRun


class GradientCallback(TrainerCallback):
    """Record gradient energies in ``Trainer(..., callbacks=[GradientCallback(out="runs/a")])``.

    Gradients are read where the optimizer is about to use them: behind accumulation and clipping.
    The step is the Trainer's ``global_step``; it does not tell the loss at every step, so that is
    kept as the Trainer logged it last.

    Args:
        options: those of :class:`~tl_tangent.studies.recorder.GradientRecorder`, without the model.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._loss: float | None = None
        self.recorder: GradientRecorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Place the recorder on the model that is trained."""
        self.recorder = GradientRecorder(given["model"], **self._options)
        self.recorder.__enter__()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note the loss."""
        self._loss = (given.get("logs") or {}).get("loss", self._loss)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Record the gradients of one step."""
        self._started().record(state.global_step, self._loss)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Put everything on disk and take the recorder off."""
        self._started().close()

    def run(self) -> GradientRun:
        """Return what was recorded so far.

        Raises:
            TangentRuntimeError: before the training began.
        """
        return self._started().run()

    def _started(self) -> GradientRecorder:
        if self.recorder is None:
            raise TangentRuntimeError("nothing is recorded yet: call trainer.train() first")
        return self.recorder
