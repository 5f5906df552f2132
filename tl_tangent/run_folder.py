"""A folder that holds one run: its configuration, what is finished, and its results.

Whatever is written here appears whole or not at all, and a finished piece is on disk at once, so
that a run that was stopped goes on where it stood when it is started again.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tl_tangent.errors import TangentFileError, TangentValueError

CONFIGURATION = "configuration.json"
PIECES = "finished.jsonl"


class RunFolder:
    """The folder of one configuration.

    Args:
        path: the folder; made where it is missing.
        configuration: JSON-able values that decide what is computed.

    Raises:
        TangentValueError: the folder holds a run of another configuration.
        TangentFileError: the folder can't be written, or what it holds can't be read.
    """

    def __init__(self, path: str | os.PathLike[str], configuration: Mapping[str, Any]) -> None:
        self.path = Path(path)
        wanted = json.loads(json.dumps(configuration))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._settle(wanted)
        except OSError as error:
            raise TangentFileError(
                f"{self.path} can't be used as a folder of results ({error.strerror or error}); "
                "name another one"
            ) from error

    def _settle(self, wanted: dict[str, Any]) -> None:
        file = self.path / CONFIGURATION
        if not file.exists():
            stray = sorted(self.path.glob(PIECES)) + sorted(self.path.glob("*.safetensors"))
            if stray:
                raise TangentFileError(
                    f"{self.path} holds {stray[0].name} and no {CONFIGURATION}, so nobody knows "
                    "what it was measured with. Name another folder, or delete this one."
                )
            self.write_text(CONFIGURATION, json.dumps(wanted, indent=2) + "\n")
            return
        changed = differences(read_json(file), wanted)
        if changed:
            raise TangentValueError(
                f"{self.path} holds a run of another configuration: {'; '.join(changed)}. Name "
                "another folder, or delete this one."
            )

    def finished(self, *fields: str) -> list[dict[str, Any]]:
        """Return the pieces that are finished; one that was cut off while it was written is not.

        Args:
            fields: that each of them has.

        Raises:
            TangentFileError: a line that is damaged.
        """
        file = self.path / PIECES
        if not file.exists():
            return []
        whole = file.read_bytes().split(b"\n")[:-1]
        return [_piece(line, fields, file, number) for number, line in enumerate(whole, start=1)]

    def finish(self, piece: Mapping[str, Any]) -> None:
        """Put one finished piece on disk."""
        file = self.path / PIECES
        with file.open("a+b") as stream:
            _end_line(stream)
            stream.write(json.dumps(dict(piece)).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def write_text(self, name: str, text: str) -> Path:
        """Write one text file in one step."""
        return self.write(name, lambda path: path.write_text(text, encoding="utf-8"))

    def write(self, name: str, writer: Callable[[Path], Any]) -> Path:
        """Let ``writer`` write a temporary file, which then takes the place of ``name``.

        Raises:
            TangentFileError: the disk is full, or the folder can't be written.
        """
        target = self.path / name
        scratch = target.with_name(f".{uuid.uuid4().hex}.{name}")
        try:
            writer(scratch)
            os.replace(scratch, target)
        except (OSError, SafetensorError) as error:
            raise TangentFileError(
                f"{target} can't be written ({error}): make room for it and see who may write "
                "there; what is in the folder is whole, and the run goes on from it"
            ) from error
        finally:
            scratch.unlink(missing_ok=True)
        return target


def _piece(line: bytes, fields: Iterable[str], file: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
        missing = [name for name in fields if name not in found]
        reason = f"{', '.join(missing)} is missing" if missing else "it is no JSON object"
    except (ValueError, TypeError) as error:
        found, missing, reason = None, [], str(error)
    if missing or not isinstance(found, dict):
        raise TangentFileError(
            f"line {number} of {file} is damaged ({reason}): delete that line, and its piece is "
            "measured again; or delete the folder and start again"
        )
    return found


def read_json(file: Path) -> Any:
    """Return what a JSON file of a folder holds.

    Raises:
        TangentFileError: it is damaged.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TangentFileError(f"{file} is not JSON ({error}); name another folder") from error


def _end_line(stream: Any) -> None:
    """Cut off what an interrupted write has left behind the last whole line."""
    stream.seek(0)
    whole = stream.read().rfind(b"\n") + 1
    stream.truncate(whole)
    stream.seek(whole)


def differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """Name every value in which two nested configurations differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = list(dict.fromkeys([*wanted, *found]))
        dotted = [(f"{name}.{key}" if name else key, key) for key in keys]
        nested = [differences(found.get(key), wanted.get(key), path) for path, key in dotted]
        return [change for changes in nested for change in changes]
    return [] if found == wanted else [f"{name} was {found!r} and is now {wanted!r}"]
