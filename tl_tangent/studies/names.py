"""Names of models, for tables and for folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path


def folder_name(name: str) -> str:
    """Return the name of a model as that of a folder."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "model"


def distinct_tails(paths: Sequence[str | PathLike[str]]) -> list[str]:
    """Return of each path as few of its last parts as no other path ends with.

    A path that is given twice keeps all of its parts.
    """
    parts = [Path(path).resolve().parts for path in paths]
    tails = []
    for i, own in enumerate(parts):
        others = parts[:i] + parts[i + 1 :]
        lengths = range(1, len(own) + 1)
        n = next((n for n in lengths if all(one[-n:] != own[-n:] for one in others)), len(own))
        tails.append("/".join(own[-n:]))
    return tails
