"""Attach, detach and ablate, as functions of any model with TransformerLens hook points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tl_tangent.errors import TangentKeyError, TangentRuntimeError, TangentValueError
from tl_tangent.hooks import attachment
from tl_tangent.hooks.ablation import Ablation, AblationSpec, Mode, Part, heads_tuple
from tl_tangent.hooks.attachment import Placed
from tl_tangent.hooks.chain import Parts
from tl_tangent.hooks.positions import Positions
from tl_tangent.hooks.sites import Sites, expected_shape, find_sites, in_layers


def attach(model: Any, subspaces: Any, sites: Sites | None = None, *, any_model: bool = False):
    """Put the tangent hook points of ``subspaces`` into ``model``, until they are detached.

    At each site S the model gains ``S.hook_coords`` [..., rank], ``S.hook_tangent`` and
    ``S.hook_normal`` (both of S's shape): they are listed in ``hook_dict``, cached, hooked and
    differentiated like any other. Nothing is computed at a site that nobody listens to.

    Args:
        model: a HookedTransformer, a TransformerBridge, or any HookedRootModule.
        subspaces: a SubspaceSet, a mapping from site to TangentSubspace, or a TangentSubspace that
            knows its site.
        sites: restrict to these names, patterns, or a predicate on names.
        any_model: accept subspaces that were fitted on a model of another name.

    Returns:
        ``model``.

    Raises:
        TangentKeyError: a site that the model does not have; the nearest ones are listed.
        TangentValueError: a subspace of another width, of other heads, or of another model.
    """
    before = attachment.placed_on(model)
    new = attachment.place_parts(model, subspaces, sites, any_model=any_model)
    attachment.reconcile(model, [*before, *new])
    return model


def detach(model: Any, sites: Sites | None = None):
    """Take the tangent hook points out again, everywhere or at ``sites``.

    Returns:
        ``model``.

    Raises:
        TangentKeyError: nothing is attached at one of the sites.
    """
    placed = attachment.placed_on(model)
    if sites is None:
        remaining = [entry for entry in placed if not isinstance(entry.layer, Parts)]
    else:
        going = {id(site.hook_point) for site in _attached_sites(model, placed, sites)}
        remaining = [
            entry
            for entry in placed
            if not (isinstance(entry.layer, Parts) and id(entry.site.hook_point) in going)
        ]
    if placed:
        attachment.reconcile(model, remaining)
    return model


def _attached_sites(model: Any, placed: list[Placed], sites: Sites):
    points = {id(e.site.hook_point) for e in placed if isinstance(e.layer, Parts)}
    asked = find_sites(model, sites)
    absent = [site.name for site in asked if id(site.hook_point) not in points]
    if absent:
        names = sorted({e.site.name for e in placed if isinstance(e.layer, Parts)})
        raise TangentKeyError(
            f"nothing is attached at {absent[0]}. Attached: {', '.join(names) or 'nothing'}."
        )
    return asked


def attached(model: Any) -> dict[str, Any]:
    """The subspace at every spliced site of ``model``; at a stacked site, the innermost one."""
    entries = attachment.placed_on(model)
    return {e.site.name: e.layer.subspace for e in entries if isinstance(e.layer, Parts)}


@contextmanager
def tangents(model: Any, subspaces: Any, sites: Sites | None = None, *, any_model: bool = False):
    """Attach for the length of a ``with`` block, then put back what was attached before.

    Arguments and errors are those of :func:`attach`. User hooks on the model's own hook points
    survive; hooks on the parts go with the parts.
    """
    placed = attachment.place_parts(model, subspaces, sites, any_model=any_model)
    with attachment.temporarily(model, placed):
        yield model
        attachment.check_in_place(model, placed)


@contextmanager
def ablating(
    model: Any,
    subspaces: Any = None,
    *,
    part: Part = "tangent",
    mode: Mode = "zero",
    sites: Sites | None = None,
    layers: Iterable[int] | int | None = None,
    heads: Iterable[int] | int | None = None,
    positions: Positions | None = None,
    factor: float | None = None,
    source: Mapping[str, Tensor] | Tensor | None = None,
    seed: int = 0,
    any_model: bool = False,
) -> Iterator[Any]:
    """Ablate one part of the activations at some sites, for the length of a ``with`` block.

    The ablation is a layer of its own: it acts inside whatever is attached, does not use the
    ``S.hook_*`` points, and what it does is what S then caches.

    Args:
        model: a HookedTransformer, a TransformerBridge, or any HookedRootModule.
        subspaces: as for :func:`attach`; by default those that are attached to ``model``.
        part, mode, factor, source, seed: see :class:`~tl_tangent.hooks.ablation.AblationSpec`.
        sites: restrict to these names, patterns, or a predicate on names.
        layers: restrict to these layers; negative ones count from the end.
        heads: at per-head sites, edit these heads alone. Grouped key-value heads are addressed by
            their own index.
        positions: "not_first", "all", an int, a slice, a list of ints (absolute), or a boolean mask
            [pos] or [batch, pos]; by default what each subspace was fitted with.
        any_model: accept subspaces that were fitted on a model of another name.

    Yields:
        ``model``.

    Raises:
        TangentKeyError, TangentValueError: a site, head, layer, mode or mask that can't be.
        TangentRuntimeError: when the block ends and a site has never fired, or has been replaced.
    """
    spec = AblationSpec(part, mode, factor, source, heads_tuple(heads), positions, seed)
    chosen = _chosen(model, subspaces, sites, layers, any_model)
    if isinstance(source, Tensor) and len(chosen) > 1:
        raise TangentValueError(
            f"source is one tensor and {len(chosen)} sites are ablated: pass a mapping from site "
            "to activations, such as a cache."
        )
    if not chosen or spec.heads == ():
        raise TangentValueError(
            f"there is nothing to ablate: {len(chosen)} sites, heads={heads!r}. Name one at least."
        )
    _check_heads(model, chosen, spec)
    with attachment.undone_on_error(model):
        placed = [_place(model, site, subspace, spec) for site, subspace in chosen]
    with attachment.temporarily(model, placed):
        yield model
        attachment.check_in_place(model, placed)
        _check_fired(placed)


def _chosen(model: Any, subspaces: Any, sites: Any, layers: Any, any_model: bool):
    if subspaces is None:
        subspaces = attached(model)
        if not subspaces:
            raise TangentValueError(
                "nothing is attached to this model, so there is no subspace to ablate. Pass "
                "subspaces, or attach them first."
            )
    chosen = attachment.matched_subspaces(model, subspaces, sites, any_model=any_model)
    kept = in_layers([site for site, _ in chosen], layers, getattr(model.cfg, "n_layers", 0))
    return [(site, subspace) for site, subspace in chosen if site in kept]


def _place(model: Any, site: Any, subspace: Any, spec: AblationSpec) -> Placed:
    site = attachment.realised(model, site)
    names = attachment.names_of(model, site) if spec.source is not None else [site.name]
    return Placed(site, Ablation(spec, subspace, site.name, names))


def _check_heads(model: Any, chosen: Any, spec: AblationSpec) -> None:
    """Refuse a head that a site does not have, before anything runs."""
    for site, _ in chosen:
        n_heads, _ = expected_shape(model, site)
        for head in spec.heads or ():
            if n_heads is not None and not 0 <= head < n_heads:
                raise TangentKeyError(
                    f"head {head} of {site.name} does not exist: it has heads 0 to {n_heads - 1}."
                )


def _check_fired(placed: list[Placed]) -> None:
    silent = [e.site.name for e in placed if isinstance(e.layer, Ablation) and not e.layer.fired]
    if silent:
        shown = ", ".join(silent[:5]) + (" ..." if len(silent) > 5 else "")
        raise TangentRuntimeError(
            f"{len(silent)} of {len(placed)} ablated sites never fired: {shown}. Run the model "
            "inside the block; under stop_at_layer, restrict the ablation with layers=."
        )
    idle = [e.site.name for e in placed if isinstance(e.layer, Ablation) and not e.layer.took]
    if idle:
        raise TangentRuntimeError(
            f"the ablation at {idle[0]} found no position to edit in any pass, so it changed "
            "nothing. Check positions= against the length of the sequences."
        )
