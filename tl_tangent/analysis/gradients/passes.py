"""Forward and backward passes that leave a model as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tl_tangent.analysis.gradients.meter import GradientMeter
from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.hooks.gradients.objectives import Batch, Objective, loss_of
from tl_tangent.hooks.gradients.weight import Weights


def measure_gradients(
    model: Any,
    meter: GradientMeter,
    batches: Iterable[Batch],
    objective: Objective = "causal",
) -> None:
    """Add the gradients of every batch to a meter, one backward pass each, in evaluation mode.

    Gradients, training modes and weights of the model are afterwards what they were.

    Raises:
        TangentRuntimeError: a loss or gradient that is not finite.
        TangentError: as :func:`~tl_tangent.hooks.gradients.objectives.loss_of`.
    """
    device = next(model.parameters()).device
    with borrowed(model), torch.inference_mode(False), torch.enable_grad():
        for batch in batches:
            placed = batch.to(device)
            model.zero_grad(set_to_none=True)
            with meter.watching(placed.real_tokens(), placed.tokens):
                loss = loss_of(objective, model, placed)
                _check_loss(loss)
                loss.backward()
            real = batch.tokens.numel() if batch.mask is None else int(batch.mask.sum())
            meter.record(float(loss.detach()), real)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        what = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        detached = " without a graph" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise TangentValueError(
            f"an objective returns one number that depends on the weights, and this one {what}"
            f"{detached}: return the mean loss of the batch, not detached"
        )
    if not bool(loss.isfinite()):
        raise TangentRuntimeError(
            f"the loss of a batch is {float(loss.detach())}: look at its tokens and labels"
        )


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; what there was before, afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, grad in grads:
            parameter.grad = grad


def check_trainable(weights: Weights) -> None:
    """Refuse weights that take no gradient.

    Raises:
        TangentValueError: naming them.
    """
    frozen = [one.name for one in weights.weights if not one.parameter.requires_grad]
    if frozen:
        raise TangentValueError(
            f"{len(frozen)} weights are frozen (requires_grad=False), first {frozen[0]}: thaw them "
            "with model.requires_grad_(True), or leave them out by kinds= or layers="
        )
