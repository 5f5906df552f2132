"""One weight matrix: where its gradient lies, and what the linear map reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_tangent.errors import TangentRuntimeError, TangentValueError

Side = Literal["input", "output"]
Choice = TypeVar("Choice", str, int)
SIDES: dict[str, Side] = {
    "q": "input",
    "k": "input",
    "v": "input",
    "o": "output",
    "gate": "input",
    "in": "input",
    "out": "output",
    "embed": "output",
    "pos": "output",
    "unembed": "input",
    "tied": "input",
}
KINDS = tuple(SIDES)
UNEMBED_SITE = "unembed.hook_in"


@dataclass(frozen=True, eq=False)
class Tap:
    """Where a tensor passes: an argument or the output of a module.

    Attributes:
        module: whose calls are watched.
        argument: of the call: its position, its name, or None for the output.
        axes: how many of the last axes are features (2 where heads are kept apart).
        features: of a fused weight, which features belong here; None for all.
    """

    module: nn.Module
    argument: int | str | None = None
    axes: int = 1
    features: Tensor | None = None

    def of_call(self, args: tuple, kwargs: dict[str, Any], output: Any) -> Tensor:
        """Return the tensor that passes here in one call."""
        if self.argument is None:
            return output[0] if isinstance(output, tuple) else output
        if isinstance(self.argument, str):
            return kwargs[self.argument]
        return args[self.argument] if args else next(iter(kwargs.values()))

    def rows(self, x: Tensor) -> Float[Tensor, "token feature"]:
        """Return the tensor, or its gradient, as one row a token."""
        flat = x.detach().flatten(-self.axes) if self.axes > 1 else x.detach()
        flat = flat.reshape(-1, flat.shape[-1])
        return flat if self.features is None else flat[:, self.features]


@dataclass(frozen=True, eq=False, repr=False)
class Weight:
    """A weight matrix of a model, by TransformerLens' name for it.

    Attributes:
        name: such as ``blocks.3.attn.W_Q``.
        kind: one of :data:`KINDS`; "tied" is one matrix that embeds and unembeds.
        layer: None outside of the blocks.
        d: width of the side that is compared.
        site: where the activations pass that a subspace for it is fitted on: what the map reads
            (input side), or the residual stream behind it (output side).
        parameter: that holds the gradient.
        matrix: turns a gradient of ``parameter`` into ``[out, in]``.
        reads, writes: where the map's input and output pass; None where no pair of them makes the
            gradient.
    """

    name: str
    kind: str
    layer: int | None
    d: int
    site: str
    parameter: nn.Parameter
    matrix: Callable[[Tensor], Float[Tensor, "d_out d_in"]]
    reads: Tap | None = None
    writes: Tap | None = None

    @property
    def side(self) -> Side:
        """Whether subspaces lie in the space that is read, or in that which is written to."""
        return SIDES[self.kind]

    def gradient(self) -> Float[Tensor, "other d"]:
        """Return the gradient with the compared side last: ``[out, in]``, or its transpose.

        Raises:
            TangentRuntimeError: there is none.
        """
        grad = self.parameter.grad
        if grad is None:
            raise TangentRuntimeError(
                f"{self.name} has no gradient: run backward first, and look whether the parameter "
                "takes part in the loss"
            )
        found = self.matrix(grad.detach())
        return found if self.side == "input" else found.mT

    def __repr__(self) -> str:
        return f"Weight({self.name}, {self.side} side, d={self.d}, {self.site})"


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of one model, and where the activations of their sites pass.

    Attributes:
        weights: in the order of the layers.
        sites: a tap for every site that a weight names.
        left_out: names of the matrices that are in the model and not here.
    """

    weights: tuple[Weight, ...]
    sites: dict[str, Tap]
    left_out: tuple[str, ...]

    def choose(
        self,
        kinds: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
    ) -> Weights:
        """Return some of the weights: of these kinds, and in these layers, or of one of them.

        Raises:
            TangentValueError: a kind or layer that is not here, or nothing is left.
        """
        kinds, layers = several(kinds), several(layers)
        here = {weight.kind for weight in self.weights}
        depth = 1 + max(weight.layer or 0 for weight in self.weights)
        wrong = [kind for kind in kinds or () if kind not in here]
        if wrong:
            raise TangentValueError(f"kinds {wrong} are not in this model; it has {sorted(here)}")
        outside = [layer for layer in layers or () if not -depth <= layer < depth]
        if outside:
            raise TangentValueError(f"layers {outside} are not in this model of {depth} layers")
        wanted = None if layers is None else {layer % depth for layer in layers}
        found = tuple(
            weight
            for weight in self.weights
            if (kinds is None or weight.kind in kinds)
            and (wanted is None or weight.layer in wanted)
        )
        if not found:
            raise TangentValueError(f"no weight of kinds {kinds} in layers {layers}")
        names = {weight.name for weight in found}
        left = [weight.name for weight in self.weights if weight.name not in names]
        sites = {weight.site: self.sites[weight.site] for weight in found}
        return Weights(found, sites, (*left, *self.left_out))


def several(chosen: Iterable[Choice] | Choice | None) -> tuple[Choice, ...] | None:
    """Return one choice or several as a tuple; None, which is no choice, stays None."""
    if chosen is None:
        return None
    return (chosen,) if isinstance(chosen, str | int) else tuple(chosen)


def out_in(features: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Of ``nn.Linear``: ``[out, in]``, of which a fused weight takes some rows."""
    return lambda grad: grad if features is None else grad[features]


def in_out(features: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Of Conv1D, of an embedding and of most of HookedTransformer's weights: ``[in, out]``."""
    return lambda grad: grad.mT if features is None else grad[:, features].mT


def head_in_out(grad: Float[Tensor, "head d_in d_head"]) -> Float[Tensor, "d_out d_in"]:
    """Of HookedTransformer's W_Q, W_K and W_V."""
    return grad.mT.flatten(0, 1)


def head_out(grad: Float[Tensor, "head d_head d_out"]) -> Float[Tensor, "d_out d_in"]:
    """Of HookedTransformer's W_O, whose input are all heads side by side."""
    return grad.flatten(0, 1).mT


def block_parts(widths: list[int]) -> list[Tensor]:
    """Which features belong to each part of a weight that has its parts one behind another."""
    return list(torch.arange(sum(widths)).split(widths))


def head_parts(n_heads: int, n_parts: int, width: int) -> list[Tensor]:
    """The same, of a weight that has the parts of each head one behind another."""
    index = torch.arange(n_heads * n_parts * width).view(n_heads, n_parts, width)
    return [index[:, part].flatten() for part in range(n_parts)]
