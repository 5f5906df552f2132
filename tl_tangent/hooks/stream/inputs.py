"""A batch for the tools that follow the residual stream, checked before the model runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks.fit import batch_input
from tl_tangent.hooks.numbers import whole

_CACHES = ("past_kv_cache", "past_key_values")


def stream_input(batch: Any, depth: int) -> tuple[Any, dict[str, Any]]:
    """Take a batch apart into the model's input and its keyword arguments.

    A ``group``, which only fits read, is left out, and so is a ``stop_at_layer`` behind ``depth``.

    Args:
        batch: tokens, text, embeddings, or a mapping with an ``input``.
        depth: the last depth that has to be reached, in front of this layer.

    Raises:
        TangentValueError: another input, or an empty one; a pass that would start behind the
            embeddings or stop before ``depth``; a ``return_type``, which is not the caller's here.
    """
    given, options = batch_input(batch)
    options.pop("group", None)
    _check_input(given)
    if "return_type" in options:
        raise TangentValueError(
            f"the batch has return_type={options['return_type']!r}, and nothing of what the model "
            "returns is read here. Leave it out."
        )
    if options.get("start_at_layer") not in (None, 0):
        raise TangentValueError(
            f"the batch has start_at_layer={options['start_at_layer']!r}, and the stream is "
            "followed from the embeddings on. Give tokens, or embeddings with start_at_layer=0."
        )
    _take_stop(options, depth)
    return given, options


def _check_input(given: Any) -> None:
    texts = isinstance(given, list) and given and all(isinstance(text, str) for text in given)
    if not texts and not isinstance(given, Tensor | str):
        raise TangentValueError(
            f"the input of a batch is a {type(given).__name__}; accepted are a tensor of tokens "
            "[batch, pos] or of embeddings [batch, pos, d_model], a text or a list of texts. For "
            "numbers of numpy or in lists take torch.as_tensor."
        )
    if isinstance(given, Tensor):
        axes = (3,) if given.is_floating_point() else (1, 2)
        if given.ndim not in axes or given.numel() == 0:
            raise TangentValueError(
                f"the input of a batch is a {given.dtype} tensor of shape {list(given.shape)}; "
                "accepted are tokens [batch, pos] or embeddings [batch, pos, d_model], one token "
                "at least."
            )


def _take_stop(options: dict[str, Any], depth: int) -> None:
    """Take ``stop_at_layer`` out: a tool stops where it has seen enough."""
    stop = options.pop("stop_at_layer", None)
    if stop is not None and whole("stop_at_layer", stop, at_least=0) < depth:
        raise TangentValueError(
            f"the batch has stop_at_layer={stop}, and the stream is followed up to depth {depth} "
            "(in front of that layer, or behind the last). Leave it out."
        )


def ordinary_input(value: Any) -> Any:
    """Return a tensor that autograd may keep; other values as they are."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def check_same_again(options: dict[str, Any]) -> None:
    """Refuse a batch that a second run would not repeat: its key-value cache has grown by then.

    Raises:
        TangentValueError: a cache that is not frozen.
    """
    for name in _CACHES:
        past = options.get(name)
        if past is not None and not getattr(past, "frozen", False):
            raise TangentValueError(
                f"the batch has {name}, which grows in every pass, and this runs a batch several "
                "times. Freeze it (cache.freeze(), which a HookedTransformer's has), or give the "
                "whole rows as tokens, without a cache."
            )


def check_no_dropout(model: Any) -> None:
    """Refuse a model that drops other entries in every pass.

    Raises:
        TangentValueError: dropout in training mode.
    """
    for name, module in model.named_modules():
        rate = _dropout(module) if module.training else 0.0
        if rate > 0:
            raise TangentValueError(
                f"the model is in training mode and {name} drops entries at a rate of {rate:g}, "
                "so that two runs of a batch differ by chance. Call model.eval()."
            )


def _dropout(module: torch.nn.Module) -> float:
    """The rate of a dropout layer, or the largest that a module keeps as a number."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p
    rates = [v for k, v in vars(module).items() if "drop" in k and isinstance(v, float)]
    return max(rates, default=0.0)
