"""The same architecture with new random weights: the control for what training has made."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks import compat
from tl_tangent.hooks.numbers import whole_seed

_LABEL = " (untrained)"


def untrained(model: Any, seed: int = 0) -> Any:
    """Return a model like ``model`` whose weights were never trained, of the same class.

    A HookedTransformer is initialised as TransformerLens does it, a bridge's Hugging Face model as
    its own class does it; a bridge in compatibility mode comes back in it, its weights processed as
    is usual there where those of ``model`` are processed. It has the dtype and the device of
    ``model`` and the name of it with "(untrained)" behind, so that subspaces of the one are not
    taken for those of the other. The weights are drawn on the CPU. ``model`` and all of torch's
    global generators are left as they are.

    Raises:
        TangentValueError: neither of the two; a seed that is no whole number from 0.
    """
    seed = whole_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU too
        if compat.is_hooked_transformer(model):
            made = _hooked(model)
        elif compat.is_bridge(model):
            made = _bridged(model)
        else:
            raise TangentValueError(
                f"a {type(model).__name__} can't be made anew. Accepted: a HookedTransformer or a "
                "TransformerBridge."
            )
    name = getattr(model.cfg, "model_name", None) or type(model).__name__
    made.cfg.model_name = name.removesuffix(_LABEL) + _LABEL
    return made.eval()


def _hooked(model: Any) -> Any:
    cfg = copy.deepcopy(model.cfg)
    cfg.init_weights, cfg.seed = True, None
    made = type(model)(cfg, tokenizer=model.tokenizer)
    return made.to(next(model.parameters()).dtype, print_details=False)


def _bridged(model: Any) -> Any:
    inner = model.original_model
    fresh = type(inner)(copy.deepcopy(inner.config)).to(device=inner.device, dtype=inner.dtype)
    made = compat.bridge_from_hf(fresh, model.tokenizer)
    made.__class__ = type(model)
    if model.compatibility_mode:
        made.enable_compatibility_mode(
            disable_warnings=True, no_processing=not model._weights_processed
        )
    return made
