"""The same architecture with new random weights: the control for what training has made."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks import compat


def untrained(model: Any, seed: int = 0) -> Any:
    """Return a model like ``model`` whose weights were never trained, of the same class.

    A HookedTransformer is initialised as TransformerLens does it, a bridge's Hugging Face model as
    its own class does it. ``model`` and torch's global generator are left as they are.

    Raises:
        TangentValueError: neither of the two.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if compat.is_hooked_transformer(model):
            return _hooked(model).eval()
        if compat.is_bridge(model):
            return _bridged(model).eval()
    raise TangentValueError(
        f"a {type(model).__name__} can't be made anew. Accepted: a HookedTransformer or a "
        "TransformerBridge."
    )


def _hooked(model: Any) -> Any:
    cfg = copy.deepcopy(model.cfg)
    cfg.init_weights, cfg.seed = True, None
    made = type(model)(cfg, tokenizer=model.tokenizer)
    return made.to(next(model.parameters()).dtype)


def _bridged(model: Any) -> Any:
    inner = model.original_model
    fresh = type(inner)(copy.deepcopy(inner.config)).to(inner.dtype)
    made = compat.bridge_from_hf(fresh, model.tokenizer)
    made.__class__ = type(model)
    return made
