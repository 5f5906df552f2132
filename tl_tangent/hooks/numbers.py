"""Whole numbers as callers give them: Python's, numpy's, one or several."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from tl_tangent.errors import TangentValueError


def whole(name: str, given: Any, at_least: int) -> int:
    """Return a whole number of at least ``at_least``.

    Raises:
        TangentValueError: anything else, a bool too.
    """
    found = _index(given)
    if found is None or found < at_least:
        raise TangentValueError(f"{name} is {given!r}; it must be a whole number from {at_least}.")
    return found


def wholes(name: str, given: Any) -> list[int]:
    """Return one whole number or several as a list, without repeats, in their order.

    Raises:
        TangentValueError: anything else, or none.
    """
    one = _index(given)
    listed = [one] if one is not None else _listed(given)
    if listed is None or any(number is None for number in listed):
        raise TangentValueError(f"{name} is {given!r}; give a whole number or several.")
    if not listed:
        raise TangentValueError(f"{name} names none: there is nothing to do. Give one at least.")
    return list(dict.fromkeys(listed))  # type: ignore[arg-type]


def _listed(given: Any) -> list[int | None] | None:
    if isinstance(given, str) or not isinstance(given, Iterable):
        return None
    return [_index(number) for number in (given.tolist() if isinstance(given, Tensor) else given)]


def _index(given: Any) -> int | None:
    if isinstance(given, (bool, str, Tensor)):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None
