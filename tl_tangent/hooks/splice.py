"""A spliced hook point: the model's own HookPoint, turned in place into one that runs layers.

The object keeps its identity, its name and its hooks, so closures that hold it (a bridge's do) stay
right, and ``deepcopy`` copies the splice with it. Layers see what enters the hook point, outermost
first; hooks on the hook point itself run afterwards. With no active layer it is the identity.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from tl_tangent.errors import TangentRuntimeError
from tl_tangent.hooks.positions import Run


@runtime_checkable
class Layer(Protocol):
    """One thing done to the activation at a hook point."""

    site: str
    needs_run: bool  # whether it has to know which positions a pass is about

    @property
    def listening(self) -> bool:
        """Whether the layer would do anything in the present pass."""

    def apply(self, flow: Tensor, carried: Tensor | None, run: Run | None) -> Tensor:
        """Return what flows on instead of ``flow``, given ``x = flow + carried``."""


class Stream:
    """The residual stream between attention and MLP of a bridge's block.

    A bridge's ``hook_resid_mid`` feeds the MLP branch alone. Layers placed there therefore act
    where the attention's output joins the stream: they see ``x = resid_pre + attn_out``, and what
    they change is added to ``attn_out``, which both the MLP branch and the skip path read.
    """

    def __init__(self, site: str) -> None:
        self.site = site
        self.layers: list[Layer] = []
        self.entered: Tensor | None = None
        self.expected: Tensor | None = None

    @property
    def listening(self) -> bool:
        return any(layer.listening for layer in self.layers)

    def enter(self, resid_pre: Tensor) -> None:
        self.entered = resid_pre if self.listening else None

    def write(self, attn_out: Tensor, run: Run | None) -> Tensor:
        carried = self._carried(attn_out)
        for layer in self.layers:
            if layer.listening:
                attn_out = layer.apply(attn_out, carried, run)
        self.entered, self.expected = None, (carried + attn_out).detach()
        return attn_out

    def _carried(self, attn_out: Tensor) -> Tensor:
        if self.entered is None or self.entered.shape != attn_out.shape:
            raise self._broken("attention was reached without passing hook_resid_pre")
        return self.entered.to(attn_out.device)

    def witness(self, resid_mid: Tensor) -> None:
        """Check that what reaches ``hook_resid_mid`` is resid_pre + attn_out.

        Raises:
            TangentRuntimeError: it is not, so an edit would not be one of the whole stream.
        """
        if self.expected is None:
            return
        expected, self.expected = self.expected, None
        same = resid_mid.shape == expected.shape
        if not same or not _close(resid_mid.detach(), expected):
            raise self._broken("hook_resid_mid is not resid_pre + attn_out")

    def _broken(self, why: str) -> TangentRuntimeError:
        return TangentRuntimeError(
            f"{self.site} can't be spliced on this architecture: {why}, so the residual stream has "
            "no such point. Take hook_resid_pre, hook_attn_out or hook_resid_post."
        )


def _close(a: Tensor, b: Tensor) -> bool:
    scale = b.float().norm()
    return bool((a.float() - b.float()).norm() <= 4 * torch.finfo(a.dtype).eps * scale)


class Splice:
    """What happens at one hook point, besides the user's own hooks."""

    def __init__(self, runs: RunBox) -> None:
        self.runs = runs
        self.layers: list[Layer] = []
        self.enters: Stream | None = None  # this is the hook_resid_pre of that stream
        self.writes: Stream | None = None  # this is its hook_attn_out
        self.witnesses: Stream | None = None  # this is its hook_resid_mid

    @property
    def empty(self) -> bool:
        streams = (self.enters, self.writes, self.witnesses)
        return not self.layers and all(stream is None for stream in streams)

    @property
    def listening(self) -> bool:
        return any(layer.listening for layer in self.layers)

    def enter(self, x: Tensor, conversion: Any) -> Tensor:
        """Run the layers on what enters the hook point, in the layout that its hooks see."""
        if self.witnesses is not None:
            self.witnesses.witness(x)
        if not self.listening:
            return x
        seen = x if conversion is None else conversion.convert(x)
        with _full_precision(seen):
            left = self._through(seen)
        if left is seen:
            return x
        return left if conversion is None else conversion.revert(left)

    def _through(self, seen: Tensor) -> Tensor:
        for layer in self.layers:
            if layer.listening:
                seen = layer.apply(seen, None, self.runs.run)
        return seen

    def leave(self, x: Tensor) -> Tensor:
        """Serve the residual stream with what leaves the hook point, after the user's hooks."""
        if self.enters is not None:
            self.enters.enter(x)
        if self.writes is not None and self.writes.listening:
            with _full_precision(x):
                x = self.writes.write(x, self.runs.run)
        return x


class RunBox:
    """The run that is going on in one model; shared by its spliced hook points."""

    def __init__(self) -> None:
        self.run: Run | None = None


def _full_precision(x: Tensor) -> Any:
    """Autocast must not narrow the products of a split."""
    return torch.autocast(device_type=x.device.type, enabled=False)


class SplicedHookPoint(HookPoint):
    """A HookPoint that runs a splice; instances are made by changing a HookPoint's class."""

    def __call__(self, x: Any) -> Any:
        splice = self.splice  # a hook may detach it
        x = super().__call__(x)
        return splice.leave(x) if isinstance(x, Tensor) else x

    def forward(self, x: Any) -> Any:
        return self.splice.enter(x, self.hook_conversion) if isinstance(x, Tensor) else x

    @property
    def splice(self) -> Splice:
        return self.__dict__["_splice"]


def splice_in(hook_point: HookPoint, runs: RunBox) -> Splice:
    """Turn ``hook_point`` into a spliced one, unless it is; returns its splice."""
    if not isinstance(hook_point, SplicedHookPoint):
        hook_point.__dict__["_splice"] = Splice(runs)
        cls: Any = type(hook_point)
        hook_point.__class__ = _spliced_class(cls)
    return hook_point.__dict__["_splice"]


def splice_out(hook_point: HookPoint) -> None:
    """Give a hook point back the class that it had, once its splice is empty."""
    if isinstance(hook_point, SplicedHookPoint) and hook_point.splice.empty:
        hook_point.__class__ = _plain_class(type(hook_point))
        del hook_point.__dict__["_splice"]


@functools.cache
def _spliced_class(cls: Any) -> type:
    if cls is HookPoint:
        return SplicedHookPoint
    return type(f"Spliced{cls.__name__}", (SplicedHookPoint, cls), {"_plain": cls})


def _plain_class(cls: type) -> type:
    return getattr(cls, "_plain", HookPoint)
