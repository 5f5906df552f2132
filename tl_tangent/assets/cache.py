"""The user's cache folder, and folders in it that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tl_tangent.errors import TangentFileError

CACHE_VARIABLE = "TL_TANGENT_CACHE"
_MANIFEST = "manifest.json"


def cache_folder(*parts: str) -> Path:
    """Return ``parts`` joined onto the cache folder of this user; nothing is created.

    The folder is ``$TL_TANGENT_CACHE`` if that is set, else ``$XDG_CACHE_HOME/tl_tangent``, else
    ``~/.cache/tl_tangent``.
    """
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).expanduser().absolute().joinpath(*parts)
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG rule: a relative folder is ignored
    base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    return base.joinpath("tl_tangent", *parts)


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` was finished by :func:`build_once` and its files have their sizes."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return ``target``, first filling it by ``build(folder)`` unless it is there and complete.

    ``build`` writes plain files into a temporary folder beside ``target``, which is then renamed:
    processes that race for the same target each see a whole folder, and the first one stays.

    Raises:
        TangentFileError: the cache folder cannot be written.
    """
    if is_complete(target):
        return target
    temporary = _temporary_beside(target)
    try:
        build(temporary)
        _write_manifest(temporary)
        _move_into_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _temporary_beside(target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise TangentFileError(_cannot_write(target, error)) from error


def _write_manifest(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


def _move_into_place(temporary: Path, target: Path) -> None:
    try:
        os.replace(temporary, target)
        return
    except OSError:
        if is_complete(target):  # another process was first, with the same content
            return
    _replace_broken(temporary, target)


def _replace_broken(temporary: Path, target: Path) -> None:
    stale = temporary.with_name(temporary.name + "-stale")
    try:
        os.replace(target, stale)
        os.replace(temporary, target)
    except OSError as error:
        if not is_complete(target):
            raise TangentFileError(_cannot_write(target, error)) from error
    finally:
        shutil.rmtree(stale, ignore_errors=True)


def _cannot_write(target: Path, error: OSError) -> str:
    return (
        f"the cache folder {target} cannot be written ({error}); free it, or set the environment "
        f"variable {CACHE_VARIABLE} to a folder that can be written"
    )
