"""Whether the residual stream of a pass is the sum of what was written to it, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.errors import TangentRuntimeError

if TYPE_CHECKING:
    from tl_tangent.hooks.stream.writes import LayerWrites

# by bytes a number: what rounding leaves between the stream and the sum of its writes
_TOLERANCE = {1: 0.2, 2: 5e-2, 4: 1e-4, 8: 1e-9}


def tolerance(x: Tensor) -> float:
    """What rounding may leave of a difference, over the largest entry of a token."""
    return _TOLERANCE[x.dtype.itemsize]


def relative(
    difference: Float[Tensor, "batch pos d"],
    whole: Float[Tensor, "batch pos d"],
    real: Bool[Tensor, "batch pos"] | None = None,
) -> float:
    """The largest entry of a difference over the largest of the whole, at the worst real token."""
    ratio = difference.abs().amax(-1) / whole.abs().amax(-1).clamp(min=1e-30)
    ratio = ratio if real is None else ratio[real]
    return float(ratio.max()) if ratio.numel() else 0.0


def check_adds_up(model: Any, found: LayerWrites) -> None:
    """Refuse a layer that leaves another stream than what it found and what it wrote.

    Raises:
        TangentRuntimeError: by how much, or that the stream is not even finite.
    """
    total = found.before
    for write in found.writes:
        total = total + write.value
    error = relative(total - found.after, found.after, found.real)
    if error < tolerance(found.after):
        return
    _check_finite(found.layer, found.after, found.real, "behind it")
    raise TangentRuntimeError(
        f"layer {found.layer} of {getattr(model.cfg, 'model_name', None)}: resid_pre, attn_out "
        f"and mlp_out do not add up to resid_post (largest difference {error:.1e} of a token's "
        "largest entry). A norm or a multiplier acts on the sum, as in BERT, or something is "
        "edited on the way: the stream is no sum of what was written, and can't be traced."
    )


def check_follows(
    layer: int,
    left: Float[Tensor, "batch pos d"] | None,
    stream: Float[Tensor, "batch pos d"],
    real: Bool[Tensor, "batch pos"] | None,
) -> None:
    """Refuse a stream in front of a layer that is not what was left there.

    Raises:
        TangentRuntimeError: something edits it in between, or it is not finite.
    """
    if left is not None and (
        torch.equal(stream, left) or relative(stream - left, stream, real) < tolerance(stream)
    ):
        return
    _check_finite(layer, stream, real, "in front of it")
    source = f"the one behind layer {layer - 1}" if layer else "what the embeddings wrote"
    raise TangentRuntimeError(
        f"layer {layer}: the stream in front of it is not {source}, so something edits it in "
        "between and it is no sum of what was written. Take off that hook or ablation."
    )


def _check_finite(
    layer: int, stream: Tensor, real: Bool[Tensor, "batch pos"] | None, where: str
) -> None:
    bad = ~stream.isfinite().all(-1)
    bad = bad if real is None else bad & real
    if bool(bad.any()):
        row, position = bad.nonzero()[0].tolist()
        raise TangentRuntimeError(
            f"layer {layer}: the stream {where} has NaN or infinite entries at {int(bad.sum())} "
            f"tokens, the first at position {position} of row {row}, so there is nothing to "
            "follow. Take off the hook that makes them; where float16 overflowed, use bfloat16 or "
            "float32; where padding on the left left queries without a key, pad on the right."
        )
