"""What tells one study from another: the code of its objective, the files of its checkpoints."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from tl_tangent.errors import TangentFileError
from tl_tangent.hooks.gradients.objectives import Objective
from tl_tangent.loading import weights_fingerprint
from tl_tangent.run_folder import RunFolder, read_json
from tl_tangent.studies.checkpoints import Checkpoint

READ = ("config.json", "*.safetensors", "pytorch_model*.bin", "*.index.json")
FILES = "checkpoint-files.json"
END = 2**20  # bytes at either end of a file that are looked at
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe_objective(objective: Objective) -> str:
    """Return the name of an objective, of a function with a checksum of its code.

    Its constants, defaults and what it closes over count; the globals that it reads do not. Another
    version of Python compiles to other code.
    """
    if isinstance(objective, str):
        return objective
    name = getattr(objective, "__qualname__", type(objective).__qualname__)
    parts = _parts(objective, set())
    return f"{name}, code {_checksum(parts)}" if parts else name


def _parts(value: Any, seen: set[int]) -> list[str]:
    """Return what a callable computes with; nothing if it is not written in Python."""
    if id(value) in seen:
        return ["itself"]
    seen.add(id(value))
    if isinstance(value, partial):
        return [*_told(value.func, seen), *_told([value.args, value.keywords], seen)]
    if isinstance(value, MethodType):
        return [*_parts(value.__func__, seen), *_state(value.__self__, seen)]
    if isinstance(value, FunctionType):
        cells = [_contents(cell) for cell in value.__closure__ or ()]
        bound = [value.__defaults__, value.__kwdefaults__, cells]
        return [*_code(value.__code__), *_told(bound, seen)]
    call = getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None)
    return [*_parts(call, seen), *_state(value, seen)] if isinstance(call, FunctionType) else []


def _state(value: Any, seen: set[int]) -> list[str]:
    """Return what a method finds in its own object."""
    if isinstance(value, type | nn.Module) or not hasattr(value, "__dict__"):
        return _told(value, seen)
    return [type(value).__qualname__, *_told(vars(value), seen)]


def _code(code: CodeType) -> list[str]:
    found = [code.co_code.hex(), *code.co_names]
    for one in code.co_consts:
        found += _code(one) if isinstance(one, CodeType) else _told(one, set())
    return found


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _told(value: Any, seen: set[int]) -> list[str]:
    """Return a value in words that are the same in every process."""
    if isinstance(value, nn.Module):
        return [type(value).__qualname__, weights_fingerprint(value)]
    if isinstance(value, Tensor):
        value = value.detach().cpu().double().numpy()
    if hasattr(value, "tobytes"):
        return [str(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, set | frozenset):
        return sorted(word for one in value for word in _told(one, seen))
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        return [str(len(value)), *(word for one in value for word in _told(one, seen))]
    if isinstance(value, FunctionType | MethodType | partial):
        return _parts(value, seen)
    return [ADDRESS.sub("", repr(value))]


def _checksum(words: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def files_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the size and a checksum of the ends of every file that a local model is read from."""
    folder = Path(checkpoint.location)
    found = sorted({path for pattern in READ for path in folder.glob(pattern)})
    return {path.name: _ends(path) for path in found}


def _ends(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(END))
        file.seek(max(END, size - END))
        digest.update(file.read())
    return f"{size} bytes, sha256 of its ends {digest.hexdigest()[:16]}"


def check_unchanged(checkpoints: Iterable[Checkpoint], folder: RunFolder) -> dict[str, Any]:
    """Note which files a study reads, or compare them with those that were there when it began.

    Returns:
        By step, what :func:`files_of` tells; nothing of a revision on the hub.

    Raises:
        TangentFileError: a checkpoint was overwritten.
    """
    many = tuple(checkpoints)
    now = {str(one.step): files_of(one) for one in many}
    file = folder.path / FILES
    if not file.exists():
        folder.write_text(FILES, json.dumps(now, indent=2) + "\n")
        return now
    before = read_json(file)
    for one in many:
        was, found = before.get(str(one.step), {}), now[str(one.step)]
        changed = sorted(name for name in {*was, *found} if was.get(name) != found.get(name))
        if changed:
            raise TangentFileError(
                f"{one} has changed since the study in {folder.path} began: {', '.join(changed)} "
                "was overwritten, added or removed. Put back what was there, or delete the folder "
                "and start again."
            )
    return now
