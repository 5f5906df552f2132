"""The tangent hook points of one site: coordinates, tangent and normal part, as a chain.

    x --open--> a --hook_coords--> a' --lift--> v --hook_tangent--> v' --+
     \\                                                                    close --> y
      +-------> n ----------------------------- hook_normal --> n' ------+

``y = x + P_T (v' - v) + P_N (n' - n)``, and ``y`` is ``x`` itself, bit for bit, where no hook
changed a part. Backwards, close hands P_T g and P_N g of the gradient g at the site to the parts,
and open returns g itself where they come back unchanged, g plus the projected change elsewhere.
Changes are told by value, row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tl_tangent.geometry import TangentSubspace
from tl_tangent.hooks import compat
from tl_tangent.hooks.frame import Frame, Frames, change_of, check_on_part
from tl_tangent.hooks.part_points import PartHookPoint
from tl_tangent.hooks.positions import Run
from tl_tangent.hooks.sites import Site


class Parts:
    """The three hook points of a subspace attached at one site."""

    needs_run = False

    def __init__(self, subspace: TangentSubspace, site: Site):
        self.subspace = subspace
        self.site = site.name
        self.frames = Frames(subspace)
        self.coords = PartHookPoint()
        self.tangent = PartHookPoint()
        self.normal = PartHookPoint()
        for point in self.points.values():
            point.adopt(site.hook_point, site.per_head)

    @property
    def points(self) -> dict[str, PartHookPoint]:
        return {
            "hook_coords": self.coords,
            "hook_tangent": self.tangent,
            "hook_normal": self.normal,
        }

    @property
    def listening(self) -> bool:
        return self.coords.listening or self.tangent.listening or self.normal.listening

    def apply(self, flow: Tensor, carried: Tensor | None, run: Run | None = None) -> Tensor:
        """Run the chain on ``x = flow + carried`` (``x = flow`` without); returns what flows on."""
        frame = self.frames.at(flow, self.site)
        call = _Call(self, frame, flow.dtype)
        if torch.is_grad_enabled() and not compat.forward_ad_active():
            return call.with_gradients(flow, carried)
        return call.plainly(flow, carried)


class _Call:
    """One pass through the chain: the exact parts, and the gradients that were handed to them."""

    def __init__(self, parts: Parts, frame: Frame, dtype: torch.dtype):
        self.parts, self.frame, self.dtype = parts, frame, dtype
        self.coords: Tensor  # exact a, then a' as the hooks left it
        self.base: Tensor  # exact a
        self.tangent: Tensor  # exact Q a'
        self.normal: Tensor  # exact n
        self.sent_coords: Tensor | None = None  # Q^T g
        self.sent_tangent: Tensor | None = None
        self.sent_normal: Tensor | None = None

    def split(self, flow: Tensor, carried: Tensor | None) -> None:
        x = flow.to(self.frame.dtype)
        if carried is not None:
            x = (flow + carried).to(self.frame.dtype)
        self.base = self.coords = self.frame.coordinates(x)
        if self.parts.normal.listening:
            self.normal = self.frame.normal(x, self.base)

    def handed(self, exact: Tensor) -> Tensor:
        """A copy in the model's dtype, so that an in-place edit leaves the exact part alone."""
        return exact.to(self.dtype, copy=True)

    def settle_coords(self, returned: Tensor) -> None:
        returned = self.parts.coords.checked(returned, self.base, self.dtype)
        change = change_of(returned, self.base)
        self.coords = self.base if change is None else self.base + change

    def settle_tangent(self, returned: Tensor) -> None:
        """Fold an edit of v into the coordinates, where it has to lie."""
        returned = self.parts.tangent.checked(returned, self.tangent, self.dtype)
        change = change_of(returned, self.tangent)
        if change is not None:
            moved = self.frame.linear_coordinates(change)
            off = change - self.frame.lift(moved)
            check_on_part(change, off, self.tangent, self.dtype, f"{self.parts.site}.hook_tangent")
            self.coords = self.coords + moved

    def normal_change(self, returned: Tensor) -> Tensor | None:
        returned = self.parts.normal.checked(returned, self.normal, self.dtype)
        change = change_of(returned, self.normal)
        if change is None:
            return None
        along = self.frame.on_tangent(change)
        check_on_part(change, along, self.normal, self.dtype, f"{self.parts.site}.hook_normal")
        return change - along

    def joined(self, flow: Tensor, normal_change: Tensor | None) -> Tensor | None:
        """What flows on after an edit, or None where nothing was edited."""
        if self.coords is self.base and normal_change is None:
            return None
        y = flow.to(self.frame.dtype)
        if self.coords is not self.base:
            y = self.frame.add_lifted(y, self.coords - self.base)
        if normal_change is not None:
            y = y + normal_change
        return y.to(self.dtype)

    def plainly(self, flow: Tensor, carried: Tensor | None) -> Tensor:
        """Without backward rules: under no_grad, inference mode and forward-mode derivatives."""
        parts, normal_change = self.parts, None
        self.split(flow, carried)
        if parts.coords.listening:
            self.settle_coords(parts.coords(self.handed(self.base)))
        if parts.tangent.listening:
            self.tangent = self.frame.lift(self.coords)
            self.settle_tangent(parts.tangent(self.handed(self.tangent)))
        if parts.normal.listening:
            normal_change = self.normal_change(parts.normal(self.handed(self.normal)))
        edited = self.joined(flow, normal_change)
        return flow if edited is None else edited

    def with_gradients(self, flow: Tensor, carried: Tensor | None) -> Tensor:
        """With backward rules; ``flow`` itself where hooks only read and no gradient is asked."""
        parts, handled, normal_change = self.parts, False, None
        opened, along, across = _Open.apply(self, flow, carried)
        if parts.coords.listening:
            along, given = parts.coords(along), along
            handled |= along is not given or parts.coords.differentiated
            self.settle_coords(along)
        if parts.tangent.listening:
            given = _Lift.apply(self, along)
            along = parts.tangent(given)
            handled |= along is not given or parts.tangent.differentiated
            self.settle_tangent(along)
        if parts.normal.listening:
            across, given = parts.normal(across), across
            handled |= across is not given or parts.normal.differentiated
            normal_change = self.normal_change(across)
        with torch.no_grad():
            edited = self.joined(flow, normal_change)
        if edited is None and not handled:
            return flow
        return _Close.apply(self, opened, along, across, edited)


class _Open(torch.autograd.Function):
    """flow (and carried) -> flow, coordinates, normal part."""

    @staticmethod
    def forward(ctx: Any, call: _Call, flow: Tensor, carried: Tensor | None):
        ctx.set_materialize_grads(False)
        ctx.call = call
        call.split(flow, carried)
        ctx.has_carried = carried is not None
        ctx.listens = (
            call.parts.coords.listening or call.parts.tangent.listening,
            call.parts.normal.listening,
        )
        normal = call.handed(call.normal) if call.parts.normal.listening else None
        return flow.detach(), call.handed(call.base), normal

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, coords: Tensor | None, normal: Tensor | None):
        call: _Call = ctx.call
        extra = _returned_gradient(call, grad is not None, ctx.listens, coords, normal)
        call.sent_coords = call.sent_tangent = call.sent_normal = None
        if extra is None:
            return None, grad, None
        total = extra if grad is None else grad.to(extra.dtype) + extra
        return None, total.to(call.dtype), extra.to(call.dtype) if ctx.has_carried else None


def _returned_gradient(
    call: _Call,
    closed: bool,
    listens: tuple[bool, bool],
    coords: Tensor | None,
    normal: Tensor | None,
) -> Tensor | None:
    """What the parts' gradients add to the gradient at the site: the projected change, or None.

    ``closed`` says whether this backward pass came through close, which handed gradients out;
    without it, whatever arrives was asked of the parts themselves.
    """
    frame, extra = call.frame, None
    if listens[0]:
        change = _change(coords, call.sent_coords if closed else None, frame)
        extra = None if change is None else frame.lift(change)
    if listens[1]:
        change = _change(normal, call.sent_normal if closed else None, frame)
        if change is not None:
            across = frame.off_tangent(change)
            extra = across if extra is None else extra + across
    return extra


def _change(returned: Tensor | None, sent: Tensor | None, frame: Frame) -> Tensor | None:
    if sent is not None:
        return change_of(returned, sent)
    return None if returned is None else returned.to(frame.dtype)


class _Lift(torch.autograd.Function):
    """coordinates as the hooks left them -> tangent part."""

    @staticmethod
    def forward(ctx: Any, call: _Call, coords: Tensor) -> Tensor:
        ctx.call = call
        call.tangent = call.frame.lift(call.coords)
        return call.handed(call.tangent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        call: _Call = ctx.call
        if call.sent_tangent is None or call.sent_coords is None:
            return None, call.frame.linear_coordinates(grad.to(call.frame.dtype)).to(call.dtype)
        change = change_of(grad, call.sent_tangent)
        coords = call.sent_coords
        if change is not None:
            coords = coords + call.frame.linear_coordinates(change)
        return None, call.handed(coords)


class _Close(torch.autograd.Function):
    """flow and the parts as the hooks left them -> what flows on."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        flow: Tensor,
        along: Tensor,
        across: Tensor | None,
        edited: Tensor | None,
    ) -> Tensor:
        ctx.call = call
        ctx.listens = (
            call.parts.coords.listening or call.parts.tangent.listening,
            call.parts.tangent.listening,
            across is not None,
        )
        return flow.detach() if edited is None else edited

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        call, frame = ctx.call, ctx.call.frame
        g = grad.to(frame.dtype)
        along = across = None
        listens_along, ends_in_tangent, listens_across = ctx.listens
        coords = frame.linear_coordinates(g)
        tangent = frame.lift(coords) if ends_in_tangent or listens_across else None
        if listens_along:
            call.sent_coords = coords
            call.sent_tangent = tangent if ends_in_tangent else None
            along = call.handed(tangent if ends_in_tangent else coords)
        if tangent is not None and listens_across:
            call.sent_normal = g - tangent
            across = call.handed(call.sent_normal)
        return None, grad, along, across, None
