"""Flags that a gated hook point needs: held on, and put back as the user last set them."""

from __future__ import annotations

import functools
from typing import Any

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks import compat


class Flags:
    """The flags held on in one model, each with what the user wants it to be."""

    def __init__(self) -> None:
        self.wishes: dict[str, bool] = {}

    def hold(self, model: Any, flags: set[str]) -> None:
        """Hold exactly ``flags`` on, and release the others that are held.

        Raises:
            TangentValueError: the model can't switch one of them on.
        """
        for flag in list(self.wishes.keys() - flags):
            model.__dict__.pop(f"set_{flag}", None)
            compat.set_flag(model, flag, self.wishes.pop(flag))
        for flag in sorted(flags - self.wishes.keys()):
            wish = bool(getattr(model.cfg, flag))
            try:
                compat.set_flag(model, flag, True)
            except (AssertionError, NotImplementedError, ValueError) as refusal:
                raise TangentValueError(
                    f"this site needs {flag}=True, which the model refuses: {refusal}"
                ) from refusal
            self.wishes[flag] = wish
            model.__dict__[f"set_{flag}"] = functools.partial(_remember, self, flag)


def _remember(flags: Flags, flag: str, value: bool) -> None:
    """Stands in for the model's ``set_<flag>`` while it is held: noted now, carried out later."""
    flags.wishes[flag] = bool(value)
