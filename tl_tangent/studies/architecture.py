"""What the checkpoints of one run must have in common: the kind of model, and its sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tl_tangent.errors import TangentFileError
from tl_tangent.hooks.gradients.objectives import Objective
from tl_tangent.studies.checkpoints import CONFIG, Checkpoint
from tl_tangent.studies.hf_auto import auto_class

SIZES = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


def architecture_of(config: Any) -> dict[str, Any]:
    """Return the kind of a model and its sizes, from its Hugging Face configuration."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {name: getattr(text, name, None) for name in SIZES}
    return {name: value for name, value in found.items() if isinstance(value, str | int)}


def config_of(checkpoint: Checkpoint) -> Any | None:
    """Return the Hugging Face configuration; None where there is none, which loading will tell."""
    from transformers import AutoConfig

    try:
        where = {"revision": checkpoint.revision or "main"}
        return AutoConfig.from_pretrained(checkpoint.location, **where)
    except (OSError, ValueError, KeyError):
        return None


def outline(checkpoint: Checkpoint, objective: Objective = "causal") -> Any | None:
    """Return the model without its weights, to look at what it has; None without a configuration.

    Its parameters are on torch's "meta" device and take no memory.
    """
    config = config_of(checkpoint)
    if config is None:
        return None
    try:
        with torch.device("meta"):
            return auto_class(objective).from_config(config)
    except ValueError:  # no language model of this objective, which loading will tell
        return None


def check_alike(checkpoints: Iterable[Checkpoint]) -> None:
    """Refuse folders with models of different architectures, by their configurations alone.

    Raises:
        TangentFileError: naming two of them.
    """
    first: tuple[Checkpoint, dict[str, Any]] | None = None
    for one in checkpoints:
        local = (Path(one.location) / CONFIG).is_file()
        config = config_of(one) if local else None
        if config is None:
            continue
        found = architecture_of(config)
        first = first or (one, found)
        refuse_others(str(one), found, str(first[0]), first[1])


def refuse_others(
    name: str, found: Mapping[str, Any], first: str, wanted: Mapping[str, Any]
) -> None:
    """Refuse the architecture of one checkpoint where it is not that of the first.

    Raises:
        TangentFileError: naming both, and in what they differ.
    """
    names = [one for one in SIZES if found.get(one) != wanted.get(one)]
    if names:
        told = ", ".join(f"{one} {found.get(one)} and not {wanted.get(one)}" for one in names)
        raise TangentFileError(
            f"{name} is another model than {first}: {told}. A series has the checkpoints of one "
            "run: leave it out, or look whether two runs wrote into one folder."
        )
