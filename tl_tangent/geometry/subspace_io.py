"""The file format of subspaces: safetensors, JSON metadata and a checksum; nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tl_tangent.errors import TangentFileError, TangentValueError

FORMAT = "tl_tangent.subspace"
FORMAT_VERSION = "1"
PACKAGES = ("tl-tangent", "torch", "transformer-lens")


@dataclass(frozen=True)
class Record:
    """One subspace on its way to or from a file: named tensors and JSON-able fields."""

    tensors: Mapping[str, Tensor]
    fields: Mapping[str, Any]


def write_records(path: str | os.PathLike[str], records: Sequence[Record], kind: str) -> None:
    """Write ``records`` to ``path`` in one step: a temporary file, then a rename.

    Raises:
        TangentValueError: if a field cannot be written as JSON.
    """
    path = Path(path)
    tensors = {
        f"{i}.{name}": tensor.cpu().contiguous()
        for i, record in enumerate(records)
        for name, tensor in record.tensors.items()
    }
    content = _to_json(
        {
            "kind": kind,
            "records": [dict(record.fields) for record in records],
            "versions": package_versions(),
        }
    )
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "content": content,
        "sha256": _digest(content, tensors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, scratch, metadata=header)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def read_records(path: str | os.PathLike[str], kind: str) -> list[Record]:
    """Read the records of a file written by :func:`write_records`.

    The versions of the packages that wrote the file are added to each record's metadata.

    Raises:
        FileNotFoundError: if there is no such file.
        TangentFileError: if the file is truncated, altered, foreign, or of another kind.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no subspace file at {path}")
    header, tensors = _read_safetensors(path)
    content = _checked_content(path, header, tensors)
    if content["kind"] != kind:
        raise TangentFileError(
            f"{path} holds a {content['kind']}, not a {kind}: load it with {content['kind']}.load"
        )
    records = []
    for i, fields in enumerate(content["records"]):
        fields["metadata"] = {**fields.get("metadata", {}), "versions": content["versions"]}
        own = {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{i}.")}
        records.append(Record(own, fields))
    return records


def package_versions() -> dict[str, str | None]:
    """Return the installed versions of the packages a file depends on, without importing them."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TangentValueError(
            f"metadata and positions must be JSON (str, numbers, lists, dicts) to be saved: {error}"
        ) from error


def _digest(content: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(content.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise TangentFileError(
            f"{path} is truncated or is not a safetensors file ({error}): fit and save it again"
        ) from error


def _checked_content(
    path: Path, header: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    if header.get("format") != FORMAT:
        raise TangentFileError(
            f"{path} is a safetensors file of format {header.get('format')!r}, not {FORMAT!r}; "
            "make a subspace of its tensors with TangentSubspace(basis, mean) instead"
        )
    if header.get("format_version") != FORMAT_VERSION:
        raise TangentFileError(
            f"{path} has format version {header.get('format_version')!r}, this package reads "
            f"{FORMAT_VERSION!r}: load it with the version of tl_tangent that wrote it"
        )
    content = header.get("content", "")
    if header.get("sha256") != _digest(content, tensors):
        raise TangentFileError(f"{path} was altered after it was saved: its checksum differs")
    return json.loads(content)
