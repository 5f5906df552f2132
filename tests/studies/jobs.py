"""Pieces of work for other processes, in a module that is quick to import."""

import os
import signal
import time
from pathlib import Path


def square(x):
    return x * x


def slow_square(x):
    time.sleep(0.2)
    return x * x


def nap(seconds):
    time.sleep(seconds)


def fail(x):
    raise ZeroDivisionError(f"piece {x}")


def die_once(piece):
    """Square the number, but the first time that it is 3 this process is killed."""
    x, folder = piece
    scar = Path(folder) / "died"
    if x == 3 and not scar.exists():
        scar.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x * x


def die_at_3(x):
    if x == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return x * x


def follow_the_parent(path):
    """Say which process this is, and end with the one that started it."""
    from tl_tangent.studies.executors import leave_with_parent

    leave_with_parent()
    Path(path).write_text(str(os.getpid()))
