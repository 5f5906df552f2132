"""What a training run is at one step: the model, the optimizer and the losses so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_tangent.errors import TangentFileError, TangentRuntimeError
from tl_tangent.studies.small_model import small_model
from tl_tangent.studies.small_options import SmallRunOptions

if TYPE_CHECKING:
    import pandas as pd
    from transformers import LlamaForCausalLM

OnStart = Callable[["LlamaForCausalLM", int], None]
OnStep = Callable[["LlamaForCausalLM", int, float], None]
_MODEL, _MOMENTS, _TRAIN = "model.", "optimizer.", "losses.train"
_VALIDATED, _VALIDATION = "losses.validated_steps", "losses.validation"


class SmallState:
    """The state of a run; :meth:`save` and :meth:`resume` keep all of it, bit for bit.

    Attributes:
        model: the model as ``step`` updates left it.
        step: the updates made.
        train_loss: the loss of the batch of every update made.
        validation_loss: the losses on held-out text, by the updates made before.
    """

    def __init__(self, options: SmallRunOptions) -> None:
        self.options = options
        self.model = small_model(options.shape, options.seed)
        self.train_loss: list[float] = []
        self.validation_loss: dict[int, float] = {}
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=options.weight_decay
        )

    @property
    def step(self) -> int:
        return len(self.train_loss)

    def update(
        self,
        inputs: Int[Tensor, "batch query"],
        labels: Int[Tensor, "batch query"],
        on_step: OnStep | None = None,
    ) -> None:
        """Make one update, and call ``on_step`` before it with the gradients in place.

        Raises:
            TangentRuntimeError: the loss is not finite.
        """
        self._optimizer.zero_grad()
        loss = token_loss(self.model(input_ids=inputs).logits, labels)
        if not math.isfinite(loss.item()):
            raise TangentRuntimeError(
                f"the loss is {loss.item()} after {self.step} updates with learning_rate="
                f"{self.options.learning_rate}; lower it, or warm up for longer"
            )
        loss.backward()
        if on_step is not None:
            on_step(self.model, self.step, loss.item())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.options)
        self._optimizer.step()
        self.train_loss.append(loss.item())

    def losses(self) -> pd.DataFrame:
        """Return a row a step: step, tokens, train_loss, validation_loss, in nats a token."""
        import pandas as pd

        steps = range(self.step + 1)
        tokens_a_step = self.options.batch * self.options.shape.n_ctx
        return pd.DataFrame(
            {
                "step": steps,
                "tokens": [step * tokens_a_step for step in steps],
                "train_loss": [*self.train_loss, math.nan],  # the next batch was not seen yet
                "validation_loss": [self.validation_loss.get(step, math.nan) for step in steps],
            }
        )

    def save(self, path: Path) -> None:
        """Write the state into one safetensors file."""
        from safetensors.torch import save_file

        tensors = {_MODEL + name: value for name, value in self.model.state_dict().items()}
        for index, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"{_MOMENTS}{index}.{name}": value for name, value in moments.items()}
        tensors[_TRAIN] = torch.tensor(self.train_loss, dtype=torch.float64)
        tensors[_VALIDATED] = torch.tensor(list(self.validation_loss))
        tensors[_VALIDATION] = torch.tensor(
            list(self.validation_loss.values()), dtype=torch.float64
        )
        save_file(tensors, path)

    def resume(self, path: Path) -> None:
        """Take the state in ``path``, if there is such a file.

        Raises:
            TangentFileError: the file is broken.
        """
        if not path.exists():
            return
        tensors = _read(path)
        self.train_loss = tensors[_TRAIN].tolist()
        steps, values = tensors[_VALIDATED].tolist(), tensors[_VALIDATION].tolist()
        self.validation_loss = dict(zip(steps, values, strict=True))
        self.model.load_state_dict(_below(_MODEL, tensors))
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in _below(_MOMENTS, tensors).items():
            index, name = key.split(".")
            moments.setdefault(int(index), {})[name] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise TangentFileError(
            f"{path} can't be read ({error}); delete the folder and train again"
        ) from error


def _below(prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): v for key, v in tensors.items() if key.startswith(prefix)}


def learning_rate(step: int, options: SmallRunOptions) -> float:
    """Return the learning rate of the update after ``step`` others."""
    rising = (step + 1) / options.warmup
    falling = (options.steps - step) / (options.steps - options.warmup)
    return options.learning_rate * min(rising, falling)


def mean_loss(model: LlamaForCausalLM, rows: Int[Tensor, "row pos"], *, batch: int = 32) -> float:
    """Return the mean cross-entropy of the next token over ``rows``, in nats."""
    total = 0.0
    with torch.no_grad():
        for some in rows.split(batch):
            logits = model(input_ids=some[:, :-1]).logits
            total += token_loss(logits, some[:, 1:], reduction="sum").item()
    return total / rows[:, 1:].numel()


def token_loss(
    logits: Float[Tensor, "batch query vocabulary"],
    labels: Int[Tensor, "batch query"],
    reduction: str = "mean",
) -> Float[Tensor, ""]:
    """Return the cross-entropy of ``labels``, in nats."""
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
