"""Batches of tokens on disk, so that any process can read its share of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.hooks.fit import listed
from tl_tangent.hooks.gradients.objectives import Batch, Objective

PARTS = ("tokens", "mask", "labels")


def read_once(given: Any) -> Any:
    """Return a generator of batches as a list, so that several models can read it."""
    return given if callable(given) else list(listed(given))


def batches_of(
    given: Any | Callable[[Any], Any], series: Any, objective: Objective = "causal"
) -> list[Batch]:
    """Return the batches of one model.

    Args:
        given: what :meth:`~tl_tangent.hooks.gradients.objectives.Batch.of` takes, a list of it, or
            a function from the series to one.
        series: that the function is asked about.
        objective: a masked one needs labels.

    Raises:
        TangentValueError: no batches, or no labels.
    """
    found = given(series) if callable(given) else given
    batches = [Batch.of(one) for one in listed(found)]
    if not batches:
        raise TangentValueError("there are no batches: give at least one tensor of tokens")
    unlabelled = [one for one in batches if one.labels is None]
    if objective == "masked" and unlabelled:
        raise TangentValueError(
            f"{len(unlabelled)} of {len(batches)} batches have no labels, and the objective is "
            "masked: make them by mask_tokens"
        )
    return batches


def check_tokens(batches: Iterable[Batch], model: Any) -> None:
    """Refuse tokens that the model has no embedding for.

    Raises:
        TangentValueError: naming the first.
    """
    vocabulary = vocabulary_of(model)
    for i, batch in enumerate(batches):
        wrong = batch.tokens[(batch.tokens < 0) | (batch.tokens >= vocabulary)]
        if len(wrong):
            raise TangentValueError(
                f"token id {int(wrong[0])} in batch {i}: the vocabulary of this "
                f"{type(model).__name__} has {vocabulary} ids, from 0 on. Encode the text with the "
                "tokenizer of the model."
            )


def vocabulary_of(model: Any) -> int:
    """Return how many token ids a model has embeddings for."""
    return len(model.get_input_embeddings().weight)


def describe_batches(batches: Sequence[Batch]) -> dict[str, Any]:
    """Return what tells batches apart: their number, their real tokens and a checksum."""
    digest = hashlib.sha256()
    real = 0
    for batch in batches:
        real += batch.tokens.numel() if batch.mask is None else int(batch.mask.sum())
        for name, tensor in _parts(batch).items():
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.long().numpy().tobytes())
    return {"batches": len(batches), "tokens": real, "sha256": digest.hexdigest()}


def rows_in_common(batches: Iterable[Batch], others: Iterable[Batch]) -> tuple[int, int]:
    """Return how many rows of tokens there are, and how many of them are among the others' too."""
    own, known = ([_row_keys(batch) for batch in some] for some in (batches, others))
    seen = {key for keys in known for key in keys}
    rows = [key for keys in own for key in keys]
    return len(rows), sum(key in seen for key in rows)


def _row_keys(batch: Batch) -> list[bytes]:
    return [row.numpy().tobytes() for row in batch.tokens.long().cpu()]


def save_batches(path: Path, batches: Iterable[Batch]) -> None:
    """Write batches to a safetensors file."""
    tensors = {
        f"{i}.{name}": tensor
        for i, batch in enumerate(batches)
        for name, tensor in _parts(batch).items()
    }
    save_file(tensors, path)


def load_batches(path: Path, start: int, stop: int) -> list[Batch]:
    """Read the batches from ``start`` up to ``stop``.

    Raises:
        TangentFileError: they can't be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            found = [
                {name: file.get_tensor(key) for name in PARTS if (key := f"{i}.{name}") in names}
                for i in range(start, stop)
            ]
    except (OSError, SafetensorError) as error:
        raise TangentFileError(
            f"{path} can't be read here ({error}): the folder of results must be one that every "
            "worker sees"
        ) from error
    return [Batch(**parts) for parts in found]


def _parts(batch: Batch) -> dict[str, Tensor]:
    found = {name: getattr(batch, name) for name in PARTS}
    return {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in found.items()
        if tensor is not None
    }
