"""How small changes of the residual stream travel: its Jacobian between two depths, times vectors.

Where a stretch of layers starts, the stream is given a direction; behind its last layer the change
that this makes there is read off, exact to rounding, without a finite step. By forward-mode
differentiation (dual numbers) one pass of the model does that for every stretch that does not
overlap another. Where a host has an operation that knows no forward mode, the vector-Jacobian
product is differentiated by its vector instead, which gives the same numbers.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.hooks import compat

Through: TypeAlias = Literal["both", "attention", "mlp", "neither"]

FROZEN: dict[str, tuple[str, ...]] = {
    "both": (),
    "attention": ("hook_mlp_out",),
    "mlp": ("hook_attn_out",),
    "neither": ("hook_attn_out", "hook_mlp_out"),
}


@dataclass(frozen=True, order=True)
class Stretch:
    """Layers ``start`` to ``stop - 1``: from the stream in front of one to that behind another."""

    start: int
    stop: int


Direct = Callable[[Stretch, Tensor], Tensor]
Receive = Callable[[Stretch, Tensor], None]


class Mode(Protocol):
    """A way to differentiate: marks the stream, reads the change, and cuts a branch out of it.

    Attributes:
        name: what it is, and why it is that.
    """

    name: str

    def running(self) -> Any:
        """The context that a pass runs in."""

    def mark(self, x: Tensor, direction: Tensor) -> Tensor:
        """Return ``x`` with a direction in which it changes."""

    def read(self, y: Tensor) -> Tensor | None:
        """Return the change of ``y``; None where none arrived."""

    def still(self, x: Tensor) -> Tensor:
        """Return ``x`` without its change."""


class Forward:
    """Dual numbers."""

    name = "forward mode"

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.inference_mode(False), torch.no_grad(), forward_ad.dual_level():
            yield

    def mark(self, x: Tensor, direction: Tensor) -> Tensor:
        return forward_ad.make_dual(self.still(x), direction)

    def read(self, y: Tensor) -> Tensor | None:
        return forward_ad.unpack_dual(y).tangent

    def still(self, x: Tensor) -> Tensor:
        return forward_ad.unpack_dual(x).primal


@dataclass
class TwiceBackward:
    """``J u`` as the derivative by w of ``<J^T w, u>``, for hosts without forward mode."""

    name: str = "backward mode, twice"
    marked: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.inference_mode(False), torch.enable_grad():
            yield
        self.marked.clear()

    def mark(self, x: Tensor, direction: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        self.marked = [(x, direction)]
        return x

    def read(self, y: Tensor) -> Tensor | None:
        x, direction = self.marked.pop()
        w = y.detach().requires_grad_()  # any w will do; at 0, splices would see no edit of a part
        pulled = _pulled(y, x, w, create_graph=True)
        return None if pulled is None else _pulled(pulled, w, direction)

    def still(self, x: Tensor) -> Tensor:
        return x.detach()


def _pulled(y: Tensor, x: Tensor, w: Tensor, create_graph: bool = False) -> Tensor | None:
    """The vector-Jacobian product; None where ``y`` does not depend on ``x``."""
    if not y.requires_grad:
        return None
    options: dict[str, Any] = {"create_graph": create_graph, "allow_unused": True}
    return torch.autograd.grad(y, x, w, **options)[0]


def check_through(through: str) -> None:
    """Refuse another branch than the known ones.

    Raises:
        TangentValueError: says which there are.
    """
    if not isinstance(through, str) or through not in FROZEN:
        accepted = ", ".join(map(repr, FROZEN))
        raise TangentValueError(f"through={through!r} is not one of {accepted}.")


def side_by_side(stretches: Iterable[Stretch]) -> list[list[Stretch]]:
    """Group stretches so that none overlaps another of its group: each group shares its passes."""
    groups: list[list[Stretch]] = []
    for stretch in sorted(set(stretches)):
        free = [group for group in groups if group[-1].stop <= stretch.start]
        if free:
            free[0].append(stretch)
        else:
            groups.append([stretch])
    return groups


def push_forward(
    model: Any,
    given: Any,
    options: dict[str, Any],
    stretches: list[Stretch],
    direct: Direct,
    receive: Receive,
    *,
    mode: Mode,
    through: Through = "both",
) -> None:
    """Run the model once; every stretch is given a direction and returns what becomes of it.

    Args:
        model: a HookedTransformer or a TransformerBridge of a decoder.
        given, options: its input and its keyword arguments.
        stretches: of which none overlaps another, see :func:`side_by_side`.
        direct: is called with a stretch and the stream where it starts, ``[batch, pos, d]``;
            returns the direction there.
        receive: is called with a stretch and ``J u`` where it ends.
        mode: see :func:`mode_for`.
        through: the branches that carry the change on; the others, and what they write, stand still
            ("neither" leaves the skip connections alone).

    Raises:
        TangentRuntimeError: a stretch whose end was never reached, or not by the change.
    """
    reached: list[Stretch] = []

    def end(stretch: Stretch, change: Tensor) -> None:
        reached.append(stretch)
        receive(stretch, change)

    hooks = [hook for stretch in stretches for hook in _hooks(stretch, direct, end, mode, through)]
    last = max(stretch.stop for stretch in stretches)
    with mode.running(), model.hooks(fwd_hooks=hooks):
        model(given, return_type=None, **{"stop_at_layer": last, **options})
    for stretch in stretches:
        if stretch not in reached:
            raise TangentRuntimeError(
                f"blocks.{stretch.stop - 1}.hook_resid_post never fired, so nothing is known of "
                "what reaches it. This architecture has another kind of block there."
            )


def _hooks(
    stretch: Stretch, direct: Direct, end: Receive, mode: Mode, through: str
) -> Iterator[tuple[str, Callable]]:
    def enter(x: Tensor, hook: Any) -> Tensor:
        return mode.mark(x, direct(stretch, mode.still(x)).to(x))

    def leave(y: Tensor, hook: Any) -> Tensor:
        change = mode.read(y)
        if change is None:  # the skip connections alone would carry it here
            raise TangentRuntimeError(
                f"a change in front of layer {stretch.start} does not reach {hook.name}: something "
                "in between drops derivatives, such as a hook that detaches the stream or replaces "
                "it. Take off that hook."
            )
        end(stretch, change.detach())
        return mode.still(y)

    def freeze(x: Tensor, hook: Any) -> Tensor:
        return mode.still(x)

    yield f"blocks.{stretch.start}.hook_resid_pre", enter
    for layer in range(stretch.start, stretch.stop):
        for name in FROZEN[through]:
            yield f"blocks.{layer}.{name}", freeze
    yield f"blocks.{stretch.stop - 1}.hook_resid_post", leave


def mode_for(model: Any, given: Any, options: dict[str, Any], stretches: list[Stretch]) -> Mode:
    """Choose how to differentiate ``model`` by trying forward mode on one pass.

    Raises:
        TangentRuntimeError: forward-mode differentiation is already going on around this call.
    """
    if compat.forward_ad_active():
        raise TangentRuntimeError(
            "forward-mode differentiation, or a torch.func transform, is already running around "
            "this call, and PyTorch can't nest it. Call it outside of that."
        )
    try:
        push_forward(model, given, options, stretches, _any_direction, _forget, mode=Forward())
    except NotImplementedError as error:
        return TwiceBackward(f"backward mode, twice: {_operation(error)} has no forward mode")
    return Forward()


def _operation(error: NotImplementedError) -> str:
    """The line of the host that failed: PyTorch's message does not name the operation."""
    frames = traceback.extract_tb(error.__traceback__)
    host = [frame for frame in frames if "/torch/" not in frame.filename.replace("\\", "/")]
    return f"{host[-1].line} ({Path(host[-1].filename).name}, line {host[-1].lineno})"


def _any_direction(
    stretch: Stretch, x: Float[Tensor, "batch pos d"]
) -> Float[Tensor, "batch pos d"]:
    return torch.ones_like(x)


def _forget(stretch: Stretch, change: Tensor) -> None:
    """The probe only asks whether the pass goes through."""
