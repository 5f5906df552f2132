"""A subspace and a layer that was observed -> the parts of its queries and keys.

In the attention's input z, or in the residual stream x in front of the norm, a token is
``mean + v + n``. Through the norm (its scale frozen at the token's own), W_Q or W_K, the norm of
queries and keys (frozen too) and the rotation, all of them linear, each part becomes a part of the
query or of the key; biases and the norm's beta go with the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentRuntimeError
from tl_tangent.geometry import TangentSubspace
from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.geometry.score_terms import SideParts
from tl_tangent.hooks.attention.circuit import Projection, QKCircuit
from tl_tangent.hooks.attention.norms import FrozenNorm
from tl_tangent.hooks.attention.observe import Observed
from tl_tangent.hooks.attention.rotary import Rotate

Space: TypeAlias = Literal["input", "residual"]


@dataclass(frozen=True)
class Source:
    """The tokens in the space of the subspace, and the way from there to the attention's input.

    Attributes:
        x: in float32 at least.
        attn_input: what W_Q and W_K read.
        norm: the norm between the two; None where they are one space.
        scale: what that norm divides each token by.
    """

    x: Float[Tensor, "batch pos d_model"]
    attn_input: Float[Tensor, "batch pos d_model"]
    norm: FrozenNorm | None
    scale: Float[Tensor, "batch pos 1"] | None

    def image(self, vectors: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Send vectors through the norm, without its bias and its division."""
        return vectors if self.norm is None else self.norm.linear(vectors)


def source_of(circuit: QKCircuit, observed: Observed, space: Space) -> Source:
    """Return the tokens of the space that a subspace lives in.

    Raises:
        TangentRuntimeError: the norm in front of the attention is not the one that was read.
    """
    z = observed.attn_input.to(full_dtype(observed.attn_input.dtype))
    if space == "input" or observed.attn_input is observed.resid_pre:
        return Source(z, z, None, None)
    x = observed.resid_pre.to(z.dtype)
    if torch.equal(x, z):  # no norm in front of the attention
        return Source(z, z, None, None)
    norm = circuit.input_norm
    error = float("inf") if norm is None else _difference(norm, x.detach(), z.detach())
    if norm is None or not error < _NORM_TOLERANCE[observed.attn_input.dtype.itemsize]:
        raise TangentRuntimeError(
            f"layer {circuit.layer}: the attention does not read the norm of hook_resid_pre that "
            f"was found (relative difference {error:.1e}), so the split can't pass through it. Is "
            "something edited in between? Otherwise fit the subspace at attn.hook_in."
        )
    return Source(x, z, norm, norm.scale(x))


def _difference(norm: FrozenNorm, x: Tensor, z: Tensor) -> float:
    return float((norm(x) - z).abs().max() / z.abs().max())


# by bytes a number: half precision keeps 3 digits
_NORM_TOLERANCE = {1: 0.2, 2: 5e-2, 4: 1e-3, 8: 1e-5}


def split_sides(
    circuit: QKCircuit, observed: Observed, subspace: TangentSubspace, space: Space
) -> tuple[SideParts, SideParts]:
    """Return the parts of queries and keys, whose products add up to the scores before any cap.

    The scale is multiplied into the keys. Where every query head has a subspace of its own, keys
    come once a query head.

    Raises:
        TangentRuntimeError: see :func:`source_of`.
    """
    with torch.autocast(observed.attn_input.device.type, enabled=False):
        return _split_sides(circuit, observed, subspace, space)


def _split_sides(
    circuit: QKCircuit, observed: Observed, subspace: TangentSubspace, space: Space
) -> tuple[SideParts, SideParts]:
    source = source_of(circuit, observed, space)
    times = circuit.group if subspace.heads is not None else 1
    keys = observed.key.repeat_interleave(times, dim=2) if times > 1 else observed.key
    coordinates = _coordinates(source, subspace)
    query_parts = _parts(
        circuit.query, observed.query, source, subspace, coordinates, observed.rotate
    )
    key_parts = _parts(
        circuit.key.repeated(times), keys, source, subspace, coordinates, observed.rotate
    )
    return query_parts, SideParts(*(part * circuit.scale for part in key_parts))


def projection_error(circuit: QKCircuit, observed: Observed) -> float:
    """Compare the model's own queries and keys with ``z W + b``, at every position.

    Each head is compared along one random direction r: ``q . r`` with ``z (W r) + b . r``, which
    finds any difference and costs next to nothing (Freivalds 1977).

    Returns:
        The largest difference over the largest entry.
    """
    z = observed.attn_input.detach()
    z = z.to(full_dtype(z.dtype))
    errors = []
    for projection, found in ((circuit.query, observed.query), (circuit.key, observed.key)):
        heads, _, width = projection.weight.shape
        generator = torch.Generator().manual_seed(0)
        along = torch.randn(heads, width, 1, generator=generator, dtype=torch.float64).to(z)
        own = z @ (projection.weight.detach() @ along)[..., 0].T
        if projection.bias is not None:
            own = own + (projection.bias.detach() * along[..., 0]).sum(-1)
        difference = (found.detach().to(z.dtype) * along[..., 0]).sum(-1) - own
        used = (observed.seen.any(-1) | observed.seen.any(-2))[..., None]  # padding may be NaN
        largest = own.masked_fill(~used, 0.0).abs().max().clamp(min=torch.finfo(z.dtype).tiny)
        errors.append(float(difference.masked_fill(~used, 0.0).abs().max() / largest))
    return max(errors)


def _parts(
    projection: Projection,
    projected: Float[Tensor, "batch pos head d_head"],
    source: Source,
    subspace: TangentSubspace,
    coordinates: Tensor,
    rotate: Rotate | None,
) -> SideParts:
    """Split what was projected; the normal part is what mean and tangent part leave of it."""
    total, mean, tangent = (
        _by_head(x)
        for x in (
            projected.to(source.x.dtype),
            _mean_part(projection, source, subspace),
            _tangent_part(projection, source, subspace, coordinates),
        )
    )
    if projection.norm is not None:
        total, mean, tangent = _normed(projection, total, mean, tangent)
    if rotate is not None:
        total, mean, tangent = rotate(total), rotate(mean), rotate(tangent)
    return SideParts(mean, tangent, total - mean - tangent)


def _by_head(x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch head pos d_head"]:
    return x.transpose(1, 2)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _mean_part(
    projection: Projection, source: Source, subspace: TangentSubspace
) -> Float[Tensor, "_ pos head d_head"]:
    """The image of the mean, with all biases; the same at every token unless a norm divides."""
    _, mean = subspace.on(source.x.device, source.x.dtype)
    found = _through(projection, source.image(mean))[None, None]
    if source.scale is None:
        return _biased(found, projection.bias).expand(1, source.x.shape[1], -1, -1)
    found = found / source.scale[..., None]
    if source.norm is not None and source.norm.bias is not None:
        found = found + projection.project(source.norm.bias)
    return _biased(found, projection.bias)


def _coordinates(
    source: Source, subspace: TangentSubspace
) -> Float[Tensor, "batch pos *head rank"]:
    """Coordinates of every token in Q_T, over the scale of its norm."""
    basis, mean = subspace.on(source.x.device, source.x.dtype)
    if subspace.heads is None:
        found, scale = source.x @ basis - mean @ basis, source.scale
    else:
        found = torch.einsum("bpd,hdr->bphr", source.x, basis) - (mean[:, None] @ basis)[:, 0]
        scale = None if source.scale is None else source.scale[..., None]
    return found if scale is None else found / scale


def _tangent_part(
    projection: Projection, source: Source, subspace: TangentSubspace, coordinates: Tensor
) -> Float[Tensor, "batch pos head d_head"]:
    """Coordinates in Q_T times the image of Q_T, which is computed once for all tokens."""
    basis, _ = subspace.on(source.x.device, source.x.dtype)
    image = source.image(basis.mT)  # [*head, rank, d_model]
    if subspace.heads is not None:
        return torch.einsum("bphr,hrd,hde->bphe", coordinates, image, projection.weight)
    seen = projection.project(image)  # [rank, head, d_head]
    return (coordinates @ seen.flatten(1)).unflatten(-1, seen.shape[1:])


def _through(projection: Projection, mean: Tensor) -> Float[Tensor, "head d_head"]:
    if mean.ndim == 1:
        return projection.project(mean)
    return torch.einsum("hd,hde->he", mean, projection.weight)


def _over_positions(parameter: Tensor | None) -> Tensor | None:
    """Parameters ``[head, d_head]`` meet vectors ``[batch, head, pos, d_head]``."""
    return parameter if parameter is None or parameter.ndim == 1 else parameter[:, None]


def _normed(
    projection: Projection, total: Tensor, mean: Tensor, tangent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm queries or keys, the scale frozen at that of the whole vector."""
    norm, heads = projection.norm, projection.heads
    assert norm is not None
    if projection.norm_over_heads:
        total, mean, tangent = (x.transpose(1, 2).flatten(2) for x in (total, mean, tangent))
    else:
        norm = replace(norm, gain=_over_positions(norm.gain), bias=_over_positions(norm.bias))
    scale = norm.scale(total)
    parts = [norm.linear(x) / scale for x in (total, mean, tangent)]
    if norm.bias is not None:
        parts[0], parts[1] = parts[0] + norm.bias, parts[1] + norm.bias
    if projection.norm_over_heads:
        parts = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in parts]
    return parts[0], parts[1], parts[2]
