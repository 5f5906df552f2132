"""One family of errors: each states the offending value, what is accepted, and the next step.

Every error is a :class:`TangentError` and also the builtin that a caller would catch.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class TangentError(Exception):
    """Base class of every error raised on purpose by tl_tangent."""


class TangentValueError(TangentError, ValueError):
    """A value, shape, rank, mode or mask that the operation does not accept."""


class TangentKeyError(TangentError, KeyError):
    """A site, head or subspace name that does not exist here."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class TangentRuntimeError(TangentError, RuntimeError):
    """Something that only a run can tell: a site that never fired, an edit off its part."""


class TangentFileError(TangentError, ValueError):
    """A truncated, foreign or mismatched subspace file."""


class TangentImportError(TangentError, ImportError):
    """An optional package is missing, or an installed one is outside the supported range."""


def nearest(name: str, known: Iterable[str], n: int = 5) -> str:
    """Return the names in ``known`` closest to ``name``, joined for an error message."""
    known = list(known)
    close = get_close_matches(name, known, n=n, cutoff=0.3) or known[:n]
    return ", ".join(close)
