"""Local processes read the script that starts them once more: it must not start them again."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

from tl_tangent.errors import TangentRuntimeError

ADVICE = (
    "local processes read the script that starts them once more. Put what it does under "
    'if __name__ == "__main__":'
)


def check_main_guard() -> None:
    """Refuse to start local processes from a script that would start them again.

    A script without the words ``__main__`` has no guard; one that has them elsewhere is met in the
    process that it started. A notebook has no script.

    Raises:
        TangentRuntimeError: with what to write.
    """
    main = sys.modules["__main__"]
    script, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise TangentRuntimeError(f"a process is started while its script is read: {ADVICE}")
    if script is None or not Path(script).is_file() or Path(script).suffix != ".py":
        return
    if spec is not None and spec.name.rpartition(".")[2] == "__main__":
        return  # of python -m package, which is not read again
    if b"__main__" not in Path(script).read_bytes():
        raise TangentRuntimeError(f"{script} has no guard, and {ADVICE}")
