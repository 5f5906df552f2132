"""Watch what linear maps read, and the gradient at what they write, in forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tl_tangent.hooks.gradients.weight import Tap, Weight

Received = Callable[[Weight, Tensor, Tensor], None]


@contextmanager
def watching_maps(weights: Iterable[Weight], receive: Received) -> Iterator[None]:
    """Call ``receive(weight, x, g)`` in every backward pass: one row a token.

    ``x`` [token, in] is what the map reads, as the graph keeps it anyway, and ``g`` [token, out]
    the gradient at what it writes. Weights whose two ends are not known are passed over. Nothing
    stays behind on return or error.
    """
    with _Handles() as handles:
        for weight in weights:
            if weight.reads is not None and weight.writes is not None:
                _Pair(weight, receive).place(handles)
        yield


@contextmanager
def watching_activations(
    taps: dict[str, Tap], receive: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call ``receive(site, x)`` with what passes at each tap in every forward pass."""
    with _Handles() as handles:
        for site, tap in taps.items():
            handles.add(tap, _told(site, receive))
        yield


def _told(site: str, receive: Callable[[str, Tensor], None]) -> Callable[[Tensor], None]:
    return lambda x: receive(site, x.detach())


class _Handles:
    """Forward hooks that are removed together."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def add(self, tap: Tap, receive: Callable[[Tensor], None]) -> None:
        def before(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            receive(tap.of_call(args, kwargs, None))

        def after(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            receive(tap.of_call(args, kwargs, output))

        module = tap.module
        self._handles.append(
            module.register_forward_hook(after, with_kwargs=True)
            if tap.argument is None
            else module.register_forward_pre_hook(before, with_kwargs=True)
        )

    def __enter__(self) -> _Handles:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


class _Pair:
    """Waits for what a map reads and then for what it writes, and puts the two together.

    Arguments are seen before their module runs, so that this order holds also where the map is
    inside of the module that reads for it, and in whatever passes there are.
    """

    def __init__(self, weight: Weight, receive: Received) -> None:
        self.weight, self.receive = weight, receive
        self.read: Tensor | None = None

    def place(self, handles: _Handles) -> None:
        weight = self.weight
        assert weight.reads is not None and weight.writes is not None
        handles.add(weight.reads, self._note_read)
        handles.add(weight.writes, self._note_written)

    def _note_read(self, x: Tensor) -> None:
        self.read = x

    def _note_written(self, y: Tensor) -> None:
        read, self.read = self.read, None
        if read is not None and torch.is_grad_enabled() and y.requires_grad:
            y.register_hook(lambda g: self._arrived(read, g))

    def _arrived(self, x: Tensor, g: Tensor) -> None:
        weight = self.weight
        assert weight.reads is not None and weight.writes is not None
        self.receive(weight, weight.reads.rows(x), weight.writes.rows(g))
