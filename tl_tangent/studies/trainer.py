"""The recorder as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.studies.gradient_run import GradientRun
from tl_tangent.studies.recorder import GradientRecorder


class GradientCallback(TrainerCallback):
    """Record gradient energies in ``Trainer(..., callbacks=[GradientCallback(out="runs/a")])``.

    Gradients are read where the optimizer is about to use them: behind accumulation and clipping.
    The step is the Trainer's ``global_step``; it does not tell the loss at every step, so that is
    kept as the Trainer logged it last. What a restart needs is kept with every checkpoint of the
    Trainer, and ``trainer.train(resume_from_checkpoint=True)`` goes on from there.

    Args:
        options: those of :class:`~tl_tangent.GradientRecorder`, without the model and ``start``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._loss: float | None = None
        self.recorder: GradientRecorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Place the recorder on the model that is trained.

        Raises:
            TangentValueError: nulls with accumulated gradients.
        """
        accumulated = args.gradient_accumulation_steps
        if self._options.get("nulls") and accumulated > 1:
            raise TangentValueError(
                f"nulls=True with gradient_accumulation_steps={accumulated}: the null is that of "
                "one forward and backward pass, and the gradient that of all. Record without "
                "nulls, or accumulate nothing."
            )
        if self.recorder is not None:
            self.recorder.close()
        start = state.global_step or None  # a new training doesn't undo the records of another
        self.recorder = GradientRecorder(given["model"], start=start, **self._options)
        self.recorder.__enter__()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note the loss."""
        self._loss = (given.get("logs") or {}).get("loss", self._loss)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Record the gradients of one step."""
        self._started().record(state.global_step, self._loss)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Keep what a restart from this checkpoint needs."""
        self._started().flush()

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
