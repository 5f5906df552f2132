"""Who writes to the residual stream, and what they write in a pass.

The stream in front of layer l is the sum of the embeddings and of what the attention and the MLP of
every earlier layer wrote: ``hook_attn_out`` and ``hook_mlp_out``, behind the norms that some models
have there. That is checked in every pass, layer by layer: where a norm acts on the sum (BERT) or
a hook edits it, the stream is no sum of writes, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.hooks import compat
from tl_tangent.hooks.attention.norms import FrozenNorm, read_norm
from tl_tangent.hooks.positions import Run
from tl_tangent.hooks.stream.checks import check_adds_up, check_follows, relative, tolerance

EMBED, POSITIONS, ATTENTION, MLP = "embed", "pos_embed", "attn", "mlp"


@dataclass(frozen=True)
class Write:
    """One write to the stream: by whom, in which layer (None in front of the first)."""

    writer: str
    layer: int | None
    value: Float[Tensor, "batch pos d_model"]


@dataclass(frozen=True)
class LayerWrites:
    """What one layer finds in the stream, writes to it, and leaves behind.

    Attributes:
        layer: its number; -1 for the embeddings, which find nothing.
        before: the stream in front of it.
        writes: in the order in which they enter the sum.
        after: the stream behind it.
        z: ``hook_z`` where it was asked for.
        real: which tokens are no padding; None for all.
    """

    layer: int
    before: Float[Tensor, "batch pos d_model"]
    writes: tuple[Write, ...]
    after: Float[Tensor, "batch pos d_model"]
    z: Float[Tensor, "batch pos head d_head"] | None = None
    real: Bool[Tensor, "batch pos"] | None = None


Receive = Callable[[LayerWrites], None]


@contextmanager
def watching_writes(
    model: Any,
    receive: Receive,
    last: int | None = None,
    *,
    heads: bool = False,
    edited_at: int | None = None,
    run: Run | None = None,
) -> Iterator[None]:
    """Call ``receive`` with the embeddings and then with every layer's writes, in every pass.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        receive: called once for the embeddings (layer -1) and once a layer.
        last: the last layer to watch; by default the model's.
        heads: also keep ``hook_z``.
        edited_at: in front of which layer the stream is edited on purpose; it is refused otherwise.
        run: what the pass is about, so that its padding is not checked.

    Raises:
        TangentValueError: a model without a stream of blocks.
        TangentRuntimeError: in a pass, a layer whose writes do not add up, a stream that is edited
            between layers, or one that is not finite.
    """
    check_has_stream(model)
    last = model.cfg.n_layers - 1 if last is None else last
    watch = _Watch(model, receive, heads, edited_at, run)
    front = model.hook_dict["blocks.0.hook_resid_pre"]
    arriving = front.register_forward_pre_hook(watch.arrive)
    try:
        with model.hooks(fwd_hooks=watch.hooks(last)):
            yield
    finally:
        arriving.remove()


def check_has_stream(model: Any) -> None:
    """Refuse a model that is not one stack of blocks.

    Raises:
        TangentValueError: neither a HookedTransformer nor a bridge with blocks.
    """
    accepted = compat.is_bridge(model) or compat.is_hooked_transformer(model)
    if not accepted or not hasattr(model, "blocks"):
        raise TangentValueError(
            f"a {type(model).__name__} has no residual stream of one stack of blocks. Accepted: a "
            "HookedTransformer or a TransformerBridge of a decoder."
        )


@dataclass(repr=False)  # a host names every hook by its repr
class _Watch:
    """Gathers a layer's writes on the way through the model."""

    model: Any
    receive: Receive
    heads: bool
    edited_at: int | None
    run: Run | None
    noted: dict[str, Tensor] = field(default_factory=dict)
    left: Tensor | None = None  # a copy of the stream before anything between layers saw it

    def hooks(self, last: int) -> list[tuple[str, Callable]]:
        known = self.model.hook_dict
        names = [name for name in ("hook_embed", "hook_pos_embed") if name in known]
        found = [(name, self._noting(name)) for name in names]
        for layer in range(last + 1):
            block = f"blocks.{layer}"
            enters = self._entering(layer)
            found += [
                (f"{block}.hook_resid_pre", enters),
                (f"{block}.hook_attn_out", self._noting(ATTENTION)),
                (f"{block}.hook_mlp_out", self._noting(MLP)),
                (f"{block}.hook_resid_post", self._leaving(layer)),
            ]
            if self.heads:
                found.append((f"{block}.attn.hook_z", self._noting("z")))
        return found

    def arrive(self, point: Any, given: tuple[Tensor, ...]) -> None:
        """Keep what the embeddings leave in front of layer 0."""
        self.left = given[0].detach().clone()

    def _noting(self, name: str) -> Callable:
        def note(value: Tensor, hook: Any) -> None:
            self.noted[name] = value.detach()

        return note

    def _entering(self, layer: int) -> Callable:
        def enter(value: Tensor, hook: Any) -> None:
            stream = value.detach()
            if layer != self.edited_at:
                check_follows(layer, self.left, stream, self._real(stream))
            if layer == 0:
                self.receive(self._embeddings(stream))
            self.noted = {"before": stream}

        return enter

    def _embeddings(self, stream: Tensor) -> LayerWrites:
        """Token and position embeddings apart where the stream is their sum, else as one."""
        token, position = self.noted.get("hook_embed"), self.noted.get("hook_pos_embed")
        writes: tuple[Write, ...] = (Write(EMBED, None, stream),)
        if token is not None and position is not None and position.shape[1:] == stream.shape[1:]:
            position = position.expand_as(stream)
            error = relative(token + position - stream, stream, self._real(stream))
            if error < tolerance(stream):
                writes = (Write(EMBED, None, token), Write(POSITIONS, None, position))
        return LayerWrites(-1, torch.zeros_like(stream), writes, stream)

    def _leaving(self, layer: int) -> Callable:
        def leave(value: Tensor, hook: Any) -> None:
            noted, after = self.noted, value.detach()
            missing = [name for name in ("before", ATTENTION, MLP) if name not in noted]
            if missing:
                raise TangentRuntimeError(
                    f"layer {layer}: {missing[0]} was not seen before the layer ended, so its "
                    "writes can't be told. This architecture has another kind of block there."
                )
            writes = tuple(Write(name, layer, noted[name]) for name in (ATTENTION, MLP))
            found = LayerWrites(
                layer, noted["before"], writes, after, noted.get("z"), self._real(after)
            )
            check_adds_up(self.model, found)
            self.left = after.clone()
            self.receive(found)

        return leave

    def _real(self, stream: Tensor) -> Bool[Tensor, "batch pos"] | None:
        real = None if self.run is None else self.run.real_rows(stream.shape[1])
        return None if real is None else real.to(stream.device)


@torch.no_grad()
def head_writes(model: Any, found: LayerWrites) -> tuple[Write, ...]:
    """Split the attention's write into one of each head and that of its bias.

    A norm on the attention's output (Gemma 2, OLMo 2) has its scale frozen at each token's own, so
    that it is linear and each head's share of its output is known.

    Returns:
        Writes of ``"head_0"``, ``"head_1"``, ..., and ``"attn_bias"``, which add up to the write of
        the attention.

    Raises:
        TangentValueError: they do not, because something else acts on the attention's output.
    """
    assert found.z is not None
    attn, dtype = model.blocks[found.layer].attn, full_dtype(found.z.dtype)
    if attn.W_O.ndim != 3 or attn.W_O.shape[:2] != found.z.shape[2:]:
        raise TangentValueError(
            f"layer {found.layer}: hook_z is {list(found.z.shape)} and W_O {list(attn.W_O.shape)}, "
            "so what each head writes can't be told. Trace without heads=True."
        )
    heads = torch.einsum("bphe,hed->hbpd", found.z.to(dtype), attn.W_O.detach().to(dtype))
    bias = torch.zeros_like(heads[:1]) if attn.b_O is None else attn.b_O.detach().to(heads[:1])
    parts = torch.cat([heads, bias.expand_as(heads[:1])])
    whole = found.writes[0].value.to(dtype)
    for norm in _output_norms(model, found.layer):
        raw = parts.sum(0)
        normed = parts if norm is None else norm.linear(parts) / norm.scale(raw)
        error = relative(normed.sum(0) - whole, whole, found.real)
        if error < max(tolerance(found.after), 1e-6):
            names = [*(f"head_{i}" for i in range(len(heads))), "attn_bias"]
            pairs = zip(names, normed, strict=True)
            return tuple(Write(name, found.layer, part) for name, part in pairs)
    raise TangentValueError(
        f"layer {found.layer}: heads and bias do not add up to hook_attn_out, because something "
        "acts on the attention's output that is no known norm. Trace without heads=True."
    )


def _output_norms(model: Any, layer: int) -> Iterator[FrozenNorm | None]:
    """What may stand between the heads and the stream: nothing, or one of the block's norms."""
    yield None
    for name in ("ln1_post", "ln1"):
        norm = getattr(model.blocks[layer], name, None)
        if norm is not None:
            yield read_norm(model, norm)
