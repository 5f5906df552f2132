"""Norms with a frozen scale: what a LayerNorm or an RMSNorm does once its scale is a given number.

A norm maps x to ``gain * C x / scale(x) + bias`` with C the centring (LayerNorm) or the identity
(RMSNorm). With the scale frozen at its value for x, the map is affine, and so splits over a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.hooks import compat


@dataclass(frozen=True)
class FrozenNorm:
    """``x -> gain * C x / scale + bias``, in float32 at least.

    Attributes:
        centred: whether C takes out the mean over the last axis.
        gain, bias: of the affine part; None for 1 and 0.
        eps: added to the mean square, inside of the root.
    """

    centred: bool
    gain: Float[Tensor, "*axes width"] | None
    bias: Float[Tensor, "*axes width"] | None
    eps: float

    def scale(self, x: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes 1"]:
        """Return what the norm divides x by."""
        return (self._centre(x).square().mean(-1, keepdim=True) + self.eps).sqrt()

    def linear(self, x: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes width"]:
        """Return ``gain * C x``: the norm without its division and its bias."""
        x = self._centre(x)
        return x if self.gain is None else x * self.gain

    def __call__(self, x: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes width"]:
        found = self.linear(x) / self.scale(x)
        return found if self.bias is None else found + self.bias

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x


def read_norm(model: Any, norm: Any) -> FrozenNorm | None:
    """Return a norm of ``model`` as a :class:`FrozenNorm`; None for a norm that does nothing."""
    inner = getattr(norm, "original_component", norm)
    if norm is None or isinstance(inner, torch.nn.Identity):
        return None
    return _of_bridge(model, norm) if compat.is_bridge(model) else _of_hooked(norm)


def norms_folded(model: Any) -> bool | None:
    """Whether the gain of the norm in front of the first attention is folded into its weights.

    What an attention or an MLP reads is another vector then. None without such a norm.
    """
    blocks = getattr(model, "blocks", None)
    norm = getattr(blocks[0], "ln1", None) if blocks else None
    if norm is None or not (compat.is_bridge(model) or compat.is_hooked_transformer(model)):
        return None
    found = read_norm(model, norm)
    if found is None:
        return None
    if not compat.is_bridge(model):
        return found.gain is None
    # A bridge keeps gains of one when it folds; those of a new model are one without it.
    return bool(getattr(model, "_weights_processed", False)) and (
        found.gain is None or bool((found.gain.detach() == 1).all())
    )


def _of_hooked(norm: Any) -> FrozenNorm:
    return FrozenNorm(
        centred="LayerNorm" in type(norm).__name__,
        gain=_full(getattr(norm, "w", None)),
        bias=_full(getattr(norm, "b", None)),
        eps=float(norm.eps),
    )


def _of_bridge(model: Any, norm: Any) -> FrozenNorm:
    component = norm.original_component
    if hasattr(component, "norms"):
        return _a_head(component.norms)
    rms = bool(norm.uses_rms_norm)
    gain = _full(getattr(component, "weight", None))
    offset = getattr(norm, "uses_weight_offset", None)
    if offset is None:  # TransformerLens 3.9
        offset = rms and bool(getattr(norm.config, "rmsnorm_uses_offset", False))
    native = norm.use_native_layernorm_autograd or getattr(norm.config, "layer_norm_folding", False)
    eps: Any = getattr(component, "eps", getattr(component, "variance_epsilon", None))
    if eps is None or not native:
        eps = getattr(norm.config, "eps", 1e-5)
    return FrozenNorm(
        centred=not rms,
        gain=gain + 1 if offset and gain is not None else gain,
        bias=None if rms else _full(getattr(component, "bias", None)),
        eps=float(eps),
    )


def _a_head(norms: Any) -> FrozenNorm:
    """LayerNorms of queries or keys, one module a head (StableLM)."""
    gain = torch.stack([norm.weight for norm in norms])
    bias = None if norms[0].bias is None else torch.stack([norm.bias for norm in norms])
    return FrozenNorm(True, _full(gain), _full(bias), float(norms[0].eps))


def _full(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.to(full_dtype(parameter.dtype))
