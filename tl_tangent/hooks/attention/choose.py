"""Which subspace is meant at which layer's attention, and in which space it lives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tl_tangent.errors import TangentKeyError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.hooks import compat
from tl_tangent.hooks.attach import attached
from tl_tangent.hooks.attention.circuit import QKCircuit, read_circuit
from tl_tangent.hooks.attention.split import Space
from tl_tangent.hooks.numbers import wholes
from tl_tangent.hooks.positions import PositionMask, Positions
from tl_tangent.hooks.provenance import check_model_name, check_norms_alike

_INPUT_SITES = ("blocks.{}.attn.hook_in", "blocks.{}.ln1.hook_out")
_SPACES = ("input", "residual")


@dataclass(frozen=True)
class Chosen:
    """A layer's circuit and the subspace that its input is split by."""

    circuit: QKCircuit
    subspace: TangentSubspace
    space: Space

    @property
    def layer(self) -> int:
        return self.circuit.layer

    def positions(self, given: Positions | None) -> PositionMask:
        """Return the rule that was given, or else the one that the subspace was fitted by."""
        fitted = self.subspace.positions
        default = "not_first" if fitted in (None, "custom") else fitted
        return PositionMask(default if given is None else given)


def choose(
    model: Any,
    subspaces: TangentSubspace | SubspaceSet | Mapping[str, TangentSubspace] | None,
    layers: int | Iterable[int] | None = None,
    *,
    space: Space | None = None,
    any_model: bool = False,
) -> list[Chosen]:
    """Pair layers with subspaces.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        subspaces: one subspace, taken at every layer asked for; or a set with one a layer, at
            ``blocks.l.attn.hook_in``, ``blocks.l.hook_resid_pre`` or the equal
            ``blocks.{l-1}.hook_resid_post``; by default those that are attached to the model.
        layers: which layers; by default all that ``subspaces`` has a subspace for.
        space: "input" (what W_Q and W_K read) or "residual" (the stream in front of the norm), for
            subspaces whose site does not say so, or to take one at another layer than its own.
        any_model: accept subspaces that were fitted on a model of another name.

    Raises:
        TangentKeyError: a layer without a subspace.
        TangentValueError: a layer that does not exist or whose scores can't be split; a subspace
            whose space is not clear, or of another width, number of heads or model.
    """
    _check(model, space)
    if subspaces is None:
        subspaces = _attached(model)
    if isinstance(subspaces, Tensor | str) or not isinstance(
        subspaces, TangentSubspace | Mapping | Iterable
    ):
        raise TangentValueError(
            f"subspaces is a {type(subspaces).__name__}; accepted are a TangentSubspace, a "
            "SubspaceSet or a mapping from site to TangentSubspace."
        )
    if isinstance(subspaces, TangentSubspace):
        wanted = _layers(model, layers, _own_layers(subspaces, model.cfg.n_layers, space))
        found = {layer: [subspaces] for layer in wanted}
    else:
        found = _by_layer(model, SubspaceSet(subspaces), layers, space)
    return [
        _chosen(model, layer, _only(layer, given), space, any_model)
        for layer, given in found.items()
    ]


def _check(model: Any, space: str | None) -> None:
    if not (compat.is_bridge(model) or compat.is_hooked_transformer(model)):
        raise TangentValueError(
            f"the scores of a {type(model).__name__} can't be split. Accepted: a HookedTransformer "
            "or a TransformerBridge (which encoders such as BERT have too)."
        )
    if not hasattr(model, "blocks"):
        raise TangentValueError(
            f"this {getattr(model.cfg, 'model_name', None)} has no single stack of blocks (an "
            "encoder-decoder has two). Choose a decoder or an encoder."
        )
    if space not in (None, *_SPACES):
        raise TangentValueError(f"space={space!r} is not one of {', '.join(map(repr, _SPACES))}.")


def _attached(model: Any) -> dict[str, TangentSubspace]:
    found = attached(model)
    if not found:
        raise TangentValueError(
            "nothing is attached to this model, so there is no subspace to split by. Pass "
            "subspaces, or attach them first."
        )
    return found


def _layers(model: Any, layers: int | Iterable[int] | None, default: list[int]) -> list[int]:
    n_layers = model.cfg.n_layers
    asked = default if layers is None else wholes("layers", layers)
    for layer in asked:
        if not -n_layers <= layer < n_layers:
            raise TangentValueError(
                f"layer {layer} does not exist: this model has layers 0 to {n_layers - 1}."
            )
    return list(dict.fromkeys(layer % n_layers for layer in asked))


def _own_layers(subspace: TangentSubspace, n_layers: int, space: str | None) -> list[int]:
    home = _home(subspace.site)
    if home is None or home[0] >= n_layers:
        return list(range(n_layers)) if space is not None else [0]
    return [home[0]]


def _by_layer(model: Any, subspaces: SubspaceSet, layers: Any, space: str | None):
    homes: dict[int, list[TangentSubspace]] = {}
    for subspace in subspaces.values():
        home = _home(subspace.site)
        if home is not None and space in (None, home[1]):
            homes.setdefault(home[0], []).append(subspace)
    n_layers = model.cfg.n_layers
    wanted = _layers(model, layers, sorted(layer for layer in homes if layer < n_layers) or [0])
    missing = [layer for layer in wanted if layer not in homes]
    if missing:
        raise TangentKeyError(
            f"there is no subspace for the attention of layer {missing[0]}: it reads "
            f"blocks.{missing[0]}.attn.hook_in (or blocks.{missing[0]}.hook_resid_pre, in front of "
            f"its norm), so fit one there. Given: {', '.join(list(subspaces)[:5]) or 'nothing'}."
        )
    return {layer: homes[layer] for layer in wanted}


def _home(site: str | None) -> tuple[int, Space] | None:
    """The layer and the space of a site that an attention reads from; None for other sites."""
    match = re.match(r"blocks\.(\d+)\.", site or "")
    if match is None or site is None:
        return None
    layer = int(match.group(1))
    if site in (pattern.format(layer) for pattern in _INPUT_SITES):
        return layer, "input"
    if site.endswith(".hook_resid_pre"):
        return layer, "residual"
    return (layer + 1, "residual") if site.endswith(".hook_resid_post") else None


def _only(layer: int, given: list[TangentSubspace]) -> TangentSubspace:
    if len(given) > 1:
        raise TangentValueError(
            f"layer {layer} has subspaces at {', '.join(str(s.site) for s in given)}. Say which "
            "is meant: space='input' or space='residual'."
        )
    return given[0]


def _chosen(
    model: Any, layer: int, subspace: TangentSubspace, space: Space | None, any_model: bool
) -> Chosen:
    home = _home(subspace.site)
    if space is None:
        if home is None:
            raise TangentValueError(
                f"the site of the subspace ({subspace.site}) does not say in which space it lives. "
                "Pass space='input' (what W_Q and W_K read: attn.hook_in) or space='residual' "
                "(hook_resid_pre)."
            )
        if home[0] != layer:
            raise TangentValueError(
                f"the subspace was fitted at {subspace.site}, and layer {layer} reads another "
                f"site. To split it by that subspace all the same, pass space={home[1]!r}."
            )
        space = home[1]
    circuit = read_circuit(model, layer)
    _check_fits(model, circuit, subspace, any_model)
    return Chosen(circuit, subspace, space)


def _check_fits(model: Any, circuit: QKCircuit, subspace: TangentSubspace, any_model: bool) -> None:
    if subspace.d != circuit.d_model:
        raise TangentValueError(
            f"the subspace is {subspace.d} wide and the input of this model's attention "
            f"{circuit.d_model}. Fit it at attn.hook_in or hook_resid_pre of this model."
        )
    if subspace.heads not in (None, circuit.n_heads):
        raise TangentValueError(
            f"the subspace has {subspace.heads} heads and layer {circuit.layer} "
            f"{circuit.n_heads} query heads. Give one basis for all, or one a query head."
        )
    if not any_model:
        check_norms_alike(model, subspace, consequence="what the attention reads is another vector")
        check_model_name(model, subspace)
