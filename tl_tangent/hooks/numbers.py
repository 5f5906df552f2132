"""Whole numbers as callers give them: Python's, numpy's, a tensor's, one or several."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from tl_tangent.errors import TangentValueError

MOST_SEED = 2**63 - 1  # what torch's generators take


def whole(name: str, given: Any, at_least: int, at_most: int | None = None) -> int:
    """Return a whole number of at least ``at_least``.

    Raises:
        TangentValueError: anything else, a bool too.
    """
    found = _index(given)
    if found is None or found < at_least or (at_most is not None and found > at_most):
        to = "" if at_most is None else f" to {at_most}"
        raise TangentValueError(
            f"{name} is {given!r}; it must be a whole number from {at_least}{to}."
        )
    return found


def whole_seed(given: Any) -> int:
    """Return a seed of random numbers.

    Raises:
        TangentValueError: anything but a whole number from 0 to ``MOST_SEED``.
    """
    return whole("seed", given, at_least=0, at_most=MOST_SEED)


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
    given = given.tolist() if hasattr(given, "tolist") else given  # of numpy and torch
    if isinstance(given, str) or not isinstance(given, Iterable):
        return None
    return [_index(number) for number in given]


def _index(given: Any) -> int | None:
    if isinstance(given, Tensor):
        given = given.item() if given.ndim == 0 else None
    if isinstance(given, bool | str):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None
