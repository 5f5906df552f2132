"""Put the weights of modules together, under TransformerLens' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks.gradients.weight import (
    SIDES,
    UNEMBED_SITE,
    Tap,
    Weight,
    Weights,
    in_out,
    out_in,
)

FIRST_STREAM = "blocks.0.hook_resid_pre"
NAMES = {
    "embed": "embed.W_E",
    "pos": "pos_embed.W_pos",
    "q": "attn.W_Q",
    "k": "attn.W_K",
    "v": "attn.W_V",
    "o": "attn.W_O",
    "gate": "mlp.W_gate",
    "in": "mlp.W_in",
    "out": "mlp.W_out",
}


def is_conv1d(module: Any) -> bool:
    """Whether this is GPT-2's layer, which stores ``[in, out]``."""
    return type(module).__name__ == "Conv1D"


def is_linear(module: Any) -> bool:
    """Whether this is a linear layer with a dense weight."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def site_of(kind: str, layer: int) -> str:
    """Where the activations pass that a weight in a block is compared with."""
    if kind in ("q", "k", "v"):
        return f"blocks.{layer}.attn.hook_in"
    if kind in ("gate", "in"):
        return f"blocks.{layer}.mlp.hook_in"
    return f"blocks.{layer}.hook_resid_post"


def embedding_weight(kind: str, parameter: nn.Parameter, module: Any, *, bare: bool) -> Weight:
    """Return the token or position embedding; only a bare lookup of tokens has its two ends."""
    reads, writes = (Tap(module, 0), Tap(module)) if kind == "embed" and bare else (None, None)
    width = parameter.shape[1]
    return Weight(NAMES[kind], kind, None, width, FIRST_STREAM, parameter, in_out(), reads, writes)


def block_weight(
    kind: str,
    layer: int,
    parameter: nn.Parameter,
    matrix: Callable[[Tensor], Tensor],
    reads: Tap,
    writes: Tap,
) -> Weight:
    """Return a weight of a block, compared on the side that its kind decides."""
    out, inside = matrix(parameter.detach()).shape
    d = inside if SIDES[kind] == "input" else out
    name = f"blocks.{layer}.{NAMES[kind]}"
    return Weight(name, kind, layer, d, site_of(kind, layer), parameter, matrix, reads, writes)


class Assembly:
    """Weights of modules, gathered one by one."""

    def __init__(self) -> None:
        self._weights: list[Weight] = []
        self._sites: dict[str, Tap] = {}
        self._embedding: nn.Parameter | None = None
        self._replaced: set[int] = set()

    def embedding(self, kind: str, module: Any) -> None:
        """Add the token or position embedding."""
        if kind == "embed":
            self._embedding = module.weight
        bare = type(module).forward is nn.Embedding.forward  # not scaled
        self._weights.append(embedding_weight(kind, module.weight, module, bare=bare))

    def block(self, layer: int, module: nn.Module) -> None:
        """Note where the residual stream passes a block."""
        if layer == 0:
            self._sites[FIRST_STREAM] = Tap(module, 0)
        self._sites[f"blocks.{layer}.hook_resid_post"] = Tap(module)

    def linear(self, kind: str, layer: int, module: Any, features: Tensor | None = None) -> None:
        """Add a linear layer of a block, or the part of a fused one."""
        matrix = (in_out if is_conv1d(module) else out_in)(features)
        reads, writes = Tap(module, 0), Tap(module, features=features)
        made = block_weight(kind, layer, module.weight, matrix, reads, writes)
        if made.side == "input":
            self._sites.setdefault(made.site, reads)
        self._weights.append(made)

    def replaced(self, module: Any) -> None:
        """Note a fused layer that others were made from, and that takes no part in any pass."""
        self._replaced.add(id(module.weight))

    def unembedding(self, module: Any) -> None:
        """Add the unembedding; where it shares the embedding's matrix, the two as one."""
        if module is None:
            return
        reads, writes, weight = Tap(module, 0), Tap(module), module.weight
        self._sites[UNEMBED_SITE] = reads
        width, tied = weight.shape[1], weight is self._embedding
        if tied:
            self._weights = [one for one in self._weights if one.kind != "embed"]
        made = Weight("unembed.W_U", "unembed", None, width, UNEMBED_SITE, weight, out_in())
        self._weights.append(
            replace(made, kind="tied") if tied else replace(made, reads=reads, writes=writes)
        )

    def finished(self, model: nn.Module) -> Weights:
        """Return what was gathered.

        Raises:
            TangentValueError: a weight that is quantized, and has no gradient.
        """
        for weight in self._weights:
            if not weight.parameter.is_floating_point():
                raise TangentValueError(
                    f"{weight.name} is stored as {weight.parameter.dtype} and has no gradient: "
                    "load the model without quantization"
                )
        taken = {id(weight.parameter) for weight in self._weights} | self._replaced
        left = [
            name
            for name, parameter in model.named_parameters()
            if parameter.ndim > 1 and id(parameter) not in taken
        ]
        needed = {weight.site for weight in self._weights}
        sites = {site: tap for site, tap in self._sites.items() if site in needed}
        return Weights(tuple(self._weights), sites, tuple(left))
