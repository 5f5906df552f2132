"""Everything that differs between TransformerLens 3.9 (HookedTransformer) and 4.x (bridge only).

No other module of the package imports TransformerLens names that differ between the two lines.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule

from tl_tangent.errors import TangentImportError, TangentValueError

SUPPORTED_RANGE = ">=3.9,<5"
GATED_HOOKS = {
    "hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
}

try:
    from transformer_lens.conversion_utils.conversion_steps.base_tensor_conversion import (
        BaseTensorConversion,
    )
except ImportError as error:  # pragma: no cover - needs an unsupported version
    raise TangentImportError(
        f"transformer-lens {importlib.metadata.version('transformer-lens')} is outside the "
        f"supported range {SUPPORTED_RANGE}: {error}. Install one that is inside it."
    ) from error


@functools.cache
def has_hooked_transformer() -> bool:
    """Whether this TransformerLens still has ``HookedTransformer`` (it was removed in 4.0)."""
    major = int(importlib.metadata.version("transformer-lens").split(".")[0])
    return major < 4


def hooked_transformer_class() -> type:
    """``HookedTransformer``, or a TangentImportError that says how to get it or do without."""
    if not has_hooked_transformer():
        raise TangentImportError(
            f"HookedTransformer was removed in TransformerLens 4.0 (installed: "
            f"{importlib.metadata.version('transformer-lens')}). Either install the extra "
            "'tl-tangent[hooked]', which brings transformer-lens<4, or use "
            "tl_tangent.TangentBridge, which offers the same methods here."
        )
    from transformer_lens import HookedTransformer

    return HookedTransformer


def hooked_config_class() -> type:
    """``HookedTransformerConfig`` of TransformerLens 3.9."""
    hooked_transformer_class()
    from transformer_lens import HookedTransformerConfig

    return HookedTransformerConfig


def weight_conversions() -> ModuleType:
    """The weight converters of TransformerLens 3.9, one a family."""
    hooked_transformer_class()
    from transformer_lens.pretrained import weight_conversions as conversions

    return conversions


def is_bridge(model: Any) -> bool:
    """Whether ``model`` is a TransformerBridge (a module that takes seconds to import)."""
    bridges = sys.modules.get("transformer_lens.model_bridge.bridge")
    return bridges is not None and isinstance(model, bridges.TransformerBridge)


def is_hooked_transformer(model: Any) -> bool:
    """Whether ``model`` is a HookedTransformer, which TransformerLens 4 no longer has."""
    return has_hooked_transformer() and isinstance(model, hooked_transformer_class())


def is_hooked(model: Any) -> bool:
    """Whether ``model`` has TransformerLens hook points that can be spliced."""
    return isinstance(model, HookedRootModule) or is_bridge(model)


def attention_mask_of_tokens(
    model: Any, tokens: Tensor, prepend_bos: bool | None, padding_side: str | None
) -> Tensor | None:
    """TransformerLens' own guess of the real tokens; None without a tokenizer or a pad token."""
    from transformer_lens.utilities import get_attention_mask

    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None or tokenizer.pad_token_id is None:
        return None
    if prepend_bos is None:
        prepend_bos = bool(getattr(model.cfg, "default_prepend_bos", True))
    return get_attention_mask(tokenizer, tokens, prepend_bos, padding_side)


class HeadsKept(BaseTensorConversion):
    """The identity, on a hook point whose tensors are [batch, pos, head, ...].

    A bridge reads ``splits_attention_heads`` to find the axis that ``pos_slice`` applies to.
    """

    splits_attention_heads = True

    def handle_conversion(self, input_value: Tensor, *full_context: Any) -> Tensor:
        return input_value

    def revert(self, input_value: Tensor, *full_context: Any) -> Tensor:
        return input_value


class PartNames(dict):
    """A bridge's hook registry that lists the parts of a spliced hook point beside it.

    ``TransformerBridge.hook_dict`` copies the registry and adds the aliases to the copy, so parts
    appear under every name that their site has, and still do after ``enable_compatibility_mode``
    has rebuilt the registry.
    """

    def __setitem__(self, name: str, hook_point: HookPoint) -> None:
        super().__setitem__(name, hook_point)
        for part, child in hook_point.named_children():
            if isinstance(child, HookPoint):
                child.name = f"{hook_point.name}.{part}"
                super().__setitem__(f"{name}.{part}", child)

    def copy(self) -> PartNames:
        return PartNames(self)


def refresh_names(model: Any) -> None:
    """Make ``hook_dict`` list exactly the hook points that the model has now."""
    if not is_bridge(model):
        model.setup()
        return
    present = PartNames()
    owners = {id(child) for hp in model._hook_registry.values() for child in hp.children()}
    for name, hook_point in model._hook_registry.items():
        if not _is_part(name) or id(hook_point) in owners:
            present[name] = hook_point
    model._hook_registry = present if owners else dict(present)


def _is_part(name: str) -> bool:
    return name.rpartition(".")[2] in ("hook_coords", "hook_tangent", "hook_normal")


def never_fires(model: Any, hook_point: HookPoint) -> bool:
    """Whether a bridge lists this hook point but never reaches it.

    ``mlp.hook_in`` and ``mlp.hook_out`` of a block that has no MLP module of its own (BERT's) are
    listed, while only the linear layers inside are called.
    """
    name = hook_point.name or ""
    if not name.endswith((".mlp.hook_in", ".mlp.hook_out")) or not is_bridge(model):
        return False
    return getattr(model.get_submodule(name.rpartition(".")[0]), "name", "") is None


def set_flag(model: Any, flag: str, value: bool) -> None:
    """Call the class's own ``set_<flag>``, past any override on the instance."""
    getattr(type(model), f"set_{flag}")(model, value)


def past_length(past: Any) -> int:
    """Number of positions already in a TransformerLens or Hugging Face key-value cache."""
    if past is None:
        return 0
    if hasattr(past, "get_seq_length"):
        return int(past.get_seq_length())
    first = past[0]
    keys = first.past_keys if hasattr(first, "past_keys") else first[0]
    axis = 1 if hasattr(first, "past_keys") else -2
    return int(keys.shape[axis])


def past_mask(past: Any) -> Tensor | None:
    """The attention mask that a TransformerLens key-value cache remembers, if any."""
    return getattr(past, "previous_attention_mask", None)


def rotated_share(config: Any) -> float:
    """Which share of a head's entries a rotary model rotates, as its configuration says."""
    from transformer_lens.utilities.hf_utils import get_rotary_pct_from_config

    return float(get_rotary_pct_from_config(config))


def forward_ad_active() -> bool:
    """Whether forward-mode differentiation or a functorch transform is running."""
    return (
        torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.maybe_current_level() is not None
    )


def check_not_bridged(hf_model: Any) -> None:
    """Refuse a Hugging Face model that a bridge has already been built around.

    Raises:
        TangentValueError: it has; a bridge puts its own modules into the model.
    """
    if any("_original_component" in name for name, _ in hf_model.named_modules()):
        raise TangentValueError(
            f"this {type(hf_model).__name__} is already part of a bridge, which changed it in "
            "place. Load it again (or deepcopy it before bridging)."
        )


def bridge_from_hf(hf_model: Any, tokenizer: Any, **kwargs: Any) -> Any:
    """A bridge around a Hugging Face model in memory, by its own architecture name."""
    check_not_bridged(hf_model)
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    if getattr(hf_model.config, "_attn_implementation", "eager") != "eager":
        hf_model.set_attn_implementation("eager")
    architecture = (hf_model.config.architectures or [type(hf_model).__name__])[0]
    kwargs.setdefault("dtype", hf_model.dtype)
    bridge = build_bridge_from_module(
        hf_model, architecture, hf_config=hf_model.config, tokenizer=tokenizer, **kwargs
    )
    if hf_model.config.name_or_path:  # TransformerLens calls every such model "external"
        bridge.cfg.model_name = Path(hf_model.config.name_or_path).name
    return bridge
