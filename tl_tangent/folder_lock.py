"""One process at a time writes into a folder of results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tl_tangent.errors import TangentFileError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


@contextmanager
def only_writer(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a folder while this process writes into it; its death gives it back.

    The folder is made where it is missing. Workers that compute for this process take no lock.
    Where the system or the file system has no locks, nothing is held.

    Raises:
        TangentFileError: another process holds it, or it can't be written.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        stream = (path / LOCK).open("a")
    except OSError as error:
        raise TangentFileError(
            f"{path} can't be used as a folder of results ({error.strerror or error}); name "
            "another one"
        ) from error
    with stream:
        held = _lock(stream, path)
        try:
            yield
        finally:
            if held:  # a process that was forked from this one would otherwise go on to hold it
                fcntl.flock(stream, fcntl.LOCK_UN)


def _lock(stream: IO[str], folder: Path) -> bool:
    """Take the lock; whether there is one."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TangentFileError(
            f"{folder} is being written by another process: wait for it, stop it, or name another "
            "folder"
        ) from error
    except OSError:  # a file system without locks
        return False
    return True
