"""From a HuggingFace model in memory to a HookedTransformer, without a network."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tl_tangent.errors import TangentValueError, nearest
from tl_tangent.hooks import compat
from tl_tangent.hooks.from_hf.configs import FAMILIES, Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def hooked_from_hf(
    hf_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    model_class: type | None = None,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **cfg_overrides: Any,
) -> Any:
    """Turn a HuggingFace causal language model in memory into a HookedTransformer.

    No network is used and ``hf_model`` is left as it is; the weights are copied. The four
    processing switches mean what they mean in ``HookedTransformer.from_pretrained`` and change
    no log-probability. One that this architecture does not allow is switched off with a warning.
    Processing is done in float32, as TransformerLens does it, also for a float64 model.

    Args:
        hf_model: GPT-2, GPT-NeoX (Pythia), Llama (SmolLM2), Qwen2, Gemma 2, BLOOM or OLMo 2.
        tokenizer: A tokenizer that was loaded from a folder or by name: TransformerLens loads
            it once more from there. Without one the model takes token ids only.
        model_class: The class to build, ``HookedTransformer`` or a subclass of it.
        fold_ln: Fold the norms' weights into the layers that read them.
        center_writing_weights: Take the mean out of what is written to the residual stream.
        center_unembed: Take the mean over the vocabulary out of the logits.
        fold_value_biases: Move the value biases into the attention output bias.
        device: Where the model shall be; by default where ``hf_model`` is.
        dtype: The precision of the weights; by default that of ``hf_model``.
        **cfg_overrides: Fields of HookedTransformerConfig to set differently, such as ``n_ctx``
            or ``default_prepend_bos``.

    Returns:
        A ``model_class`` in evaluation mode.

    Raises:
        TangentImportError: On TransformerLens 4, which has no HookedTransformer.
        TangentValueError: For a family or a setting that HookedTransformer cannot represent, a
            quantised or modified model, an unknown override, a tokenizer that has no folder.
    """
    model_class = model_class or compat.hooked_transformer_class()
    family = _family_of(hf_model)
    _check_tokenizer(tokenizer)
    weight = next(hf_model.parameters())
    cfg = _build_config(
        hf_model.config,
        family,
        {**cfg_overrides, "device": str(device or weight.device), "dtype": dtype or weight.dtype},
    )
    processing = _allowed_processing(
        cfg,
        {
            "fold_ln": fold_ln,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
        },
    )
    state = _process(_convert(hf_model, family, cfg), cfg, processing)
    model = model_class(cfg, tokenizer, move_to_device=False)
    _load(model, state)
    model.move_model_modules_to_device()
    return model.eval()


def _family_of(hf_model: PreTrainedModel) -> Family:
    """The family of ``hf_model``, once it is certain that it is a plain model of that family."""
    config = getattr(hf_model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise TangentValueError(
            f"model_type {model_type!r} ({type(hf_model).__name__}) cannot be turned into a "
            f"HookedTransformer here. Supported: {', '.join(sorted(FAMILIES))}. "
            "TangentBridge can load it, if TransformerLens has an adapter for it."
        )
    family = FAMILIES[model_type]
    if family.architecture not in {cls.__name__ for cls in type(hf_model).__mro__}:
        raise TangentValueError(
            f"a {model_type} model must be a {family.architecture} to become a "
            f"HookedTransformer, this one is a {type(hf_model).__name__}."
        )
    _check_readable(hf_model)
    _check_unmodified(hf_model, family)
    return family


def _check_readable(hf_model: PreTrainedModel) -> None:
    """Refuse quantised or offloaded weights (a model dequantised on loading is welcome)."""
    from transformer_lens.utilities.quantization import unreadable_weight_reason

    for name, parameter in hf_model.named_parameters():
        reason = unreadable_weight_reason(parameter)
        if reason is not None:
            raise TangentValueError(
                f"{name} cannot be turned into a HookedTransformer's weight: {reason}. Load the "
                "model dequantised and without offloading, or use TangentBridge."
            )


def _check_unmodified(hf_model: PreTrainedModel, family: Family) -> None:
    """Refuse parameters that the family does not have (adapters), which would be left out."""
    import transformers

    compat.check_not_bridged(hf_model)

    with torch.device("meta"):
        plain = getattr(transformers, family.architecture)(copy.deepcopy(hf_model.config))
    differing = {n for n, _ in hf_model.named_parameters()} ^ {
        n for n, _ in plain.named_parameters()
    }
    if differing:
        raise TangentValueError(
            f"this model's parameters are not those of a plain {family.architecture}: "
            f"{', '.join(sorted(differing)[:4])}{', ...' if len(differing) > 4 else ''}. Merge "
            "adapters into the weights first, or use TangentBridge."
        )


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuse a tokenizer that TransformerLens could not load once more."""
    if tokenizer is None or tokenizer.bos_token is None:
        return
    if not tokenizer.init_kwargs.get("name_or_path"):
        raise TangentValueError(
            "the tokenizer was built in memory, but TransformerLens loads it once more by its "
            "name_or_path. Save it with tokenizer.save_pretrained(folder) and pass "
            "AutoTokenizer.from_pretrained(folder)."
        )


def _build_config(hf_config: Any, family: Family, overrides: dict[str, Any]) -> Any:
    config_class: Any = compat.hooked_config_class()
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in overrides:
        if name not in known:
            raise TangentValueError(
                f"HookedTransformerConfig has no field {name!r}. Close: {nearest(name, known)}."
            )
    fields = {
        **family.fields(hf_config),
        "original_architecture": family.architecture,
        "model_name": Path(hf_config.name_or_path).name or hf_config.model_type,
        "init_weights": False,
        **overrides,
    }
    return config_class(**fields)


def _allowed_processing(cfg: Any, requested: dict[str, bool]) -> dict[str, bool]:
    """Switch off, with one warning, what would change what the model computes.

    ``load_and_process_state_dict`` relies on ``from_pretrained`` for this.
    """
    from transformer_lens.utilities import softcap_enabled
    from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

    reasons = {}
    if cfg.normalization_type == "RMS":
        reasons["center_writing_weights"] = "RMSNorm does not take out the mean"
    if cfg.original_architecture in POST_NORM_ARCHITECTURES:
        reasons["fold_ln"] = reasons["center_writing_weights"] = "the norms follow the layers"
    if softcap_enabled(cfg.output_logits_soft_cap):
        reasons["center_unembed"] = "soft-capped logits are not invariant to a constant"
    dropped = [f"{name} ({why})" for name, why in reasons.items() if requested[name]]
    if dropped:
        warnings.warn(
            f"switched off for {cfg.original_architecture}: {'; '.join(dropped)}.",
            UserWarning,
            stacklevel=3,
        )
    return {name: on and name not in reasons for name, on in requested.items()}


@torch.no_grad()
def _convert(hf_model: PreTrainedModel, family: Family, cfg: Any) -> dict[str, Tensor]:
    """The weights of ``hf_model`` under HookedTransformer's names, on one device, in cfg.dtype."""
    state = getattr(compat.weight_conversions(), family.converter)(hf_model, cfg)
    if family.optional_attention_bias and hf_model.config.attention_bias:
        state.update(_attention_biases(hf_model, cfg))
    state.setdefault("unembed.b_U", torch.zeros(cfg.d_vocab))  # folding may write to it
    if cfg.positional_embedding_type == "alibi":  # HookedTransformer keeps a table it never reads
        state["pos_embed.W_pos"] = torch.zeros(cfg.n_ctx, cfg.d_model)
    device = next(hf_model.parameters()).device
    return {k: v.detach().to(device, cfg.dtype) for k, v in state.items()}


def _attention_biases(hf_model: Any, cfg: Any) -> dict[str, Tensor]:
    """Biases of separate projections: b_Q, b_K, b_V ``[head, d_head]`` and b_O ``[d_model]``."""
    grouped = "" if cfg.n_key_value_heads is None else "_"
    state = {}
    for index, layer in enumerate(hf_model.model.layers[: cfg.n_layers]):
        prefix, attn = f"blocks.{index}.attn", layer.self_attn
        state[f"{prefix}.b_Q"] = attn.q_proj.bias.reshape(-1, cfg.d_head)
        state[f"{prefix}.{grouped}b_K"] = attn.k_proj.bias.reshape(-1, cfg.d_head)
        state[f"{prefix}.{grouped}b_V"] = attn.v_proj.bias.reshape(-1, cfg.d_head)
        state[f"{prefix}.b_O"] = attn.o_proj.bias
    return state


def _process(state: dict[str, Tensor], cfg: Any, processing: dict[str, bool]) -> dict[str, Tensor]:
    """What ``load_and_process_state_dict`` does to the weights; sets the folded norm in ``cfg``.

    That method then loads them name by name, which takes most of its time. Nothing asked for,
    nothing done: TransformerLens would pass float64 through float32.
    """
    from transformer_lens.weight_processing import ProcessWeights

    if any(processing.values()):
        state = ProcessWeights.process_weights(state, cfg, **processing)
    if not processing["fold_ln"]:
        return state
    cfg.normalization_type += "Pre"
    folded = ("ln1", "ln2", "ln_final")
    return {k: v for k, v in state.items() if k.split(".")[-2] not in folded}


def _load(model: Any, state: dict[str, Tensor]) -> None:
    """Load ``state``, which must fit the model's parameters to the last name and shape."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    given = {k: v.shape for k, v in state.items()}
    wrong = sorted(k for k in shapes.keys() | given.keys() if shapes.get(k) != given.get(k))
    if wrong:
        shown = "; ".join(f"{k}: {given.get(k)} for {shapes.get(k)}" for k in wrong[:3])
        raise TangentValueError(
            f"{len(wrong)} weights do not fit the HookedTransformer ({shown}). Check the config "
            "overrides against the model."
        )
    model.load_state_dict(state, strict=False)  # its buffers are its own
