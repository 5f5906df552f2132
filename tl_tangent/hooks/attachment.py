"""What is attached to a model: one ordered list of layers, and the model made to match it.

Attaching, detaching and every context change that list and call :func:`reconcile`, which splices
and un-splices hook points, lists the parts' names, holds flags and makes missing hook points.
Nothing else touches the model, so leaving a context is reconciling with the list from before.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.hooks import compat, made
from tl_tangent.hooks.chain import Parts
from tl_tangent.hooks.flags import Flags
from tl_tangent.hooks.positions import Run, run_of_forward
from tl_tangent.hooks.provenance import check_model_name
from tl_tangent.hooks.sites import PARTS, Site, expected_shape, find_sites, known_sites
from tl_tangent.hooks.splice import Layer, RunBox, Stream, splice_in, splice_out

_KEY = "_tangent_attachments"


@dataclass(frozen=True)
class Placed:
    """A layer at a site."""

    site: Site
    layer: Layer
    scoped: bool = False  # placed by a context, and gone with it


class Attachments:
    """Everything tl_tangent keeps on one model, under one attribute."""

    def __init__(self) -> None:
        self.placed: list[Placed] = []
        self.runs = RunBox()
        self.flags = Flags()
        self.streams: dict[str, Stream] = {}
        self.made: dict[str, bool] = {}  # hook points made for a site, and whether they are listed
        self.inner_forward: Any = None

    @property
    def needs_runs(self) -> bool:
        return any(entry.layer.needs_run for entry in self.placed)


def attachments_of(model: Any) -> Attachments | None:
    """The attachments of ``model``, or None where it has none."""
    return model.__dict__.get(_KEY)


def reconcile(model: Any, placed: Sequence[Placed]) -> None:
    """Make ``model`` run exactly the layers in ``placed``; all of them, or none of the change."""
    state = model.__dict__.setdefault(_KEY, Attachments())
    before = state.placed
    try:
        _apply(model, state, list(placed))
    except BaseException:
        _apply(model, state, before)
        raise
    finally:
        if not state.placed:
            del model.__dict__[_KEY]


def _apply(model: Any, state: Attachments, placed: list[Placed]) -> None:
    state.flags.hold(model, {entry.site.gate for entry in placed if entry.site.gate})
    names_changed = _splice_all(model, state, placed)
    state.placed = placed
    names_changed |= _unmake_unused(model, state)
    _note_runs(model, state)
    if names_changed:
        compat.refresh_names(model)


def _splice_all(model: Any, state: Attachments, placed: list[Placed]) -> bool:
    """Give every hook point its layers, in order; returns whether names have changed."""
    layers: dict[Any, list[Any]] = defaultdict(list)
    parts: dict[Any, list[Parts]] = defaultdict(list)
    for entry in placed:
        point = id(entry.site.hook_point)
        layers[point, entry.site.stream].append(entry.layer)
        if isinstance(entry.layer, Parts):
            parts[point].append(entry.layer)
    sites = {
        (id(entry.site.hook_point), entry.site.stream): entry.site
        for entry in [*state.placed, *placed]
    }
    hooks = model.hook_dict if any(site.stream for site in sites.values()) else {}
    for key, site in sites.items():
        if site.stream:
            _set_stream_layers(state, site, layers[key], hooks)
        else:
            _set_layers(state, site.hook_point, layers[key])
    points = {id(site.hook_point): site.hook_point for site in sites.values()}
    changed = [_list_parts(point, parts[key]) for key, point in points.items()]
    return any(changed)


def _set_layers(state: Attachments, point: Any, layers: list[Any]) -> None:
    splice_in(point, state.runs).layers = layers
    splice_out(point)


def _set_stream_layers(state: Attachments, site: Site, layers: list[Any], hooks: Any) -> None:
    """Place layers on the stream between attention and MLP of a bridge's block."""
    block = f"blocks.{site.layer}"
    stream = state.streams.setdefault(block, Stream(f"{block}.hook_resid_mid"))
    stream.layers = layers
    live = stream if layers else None
    roles = {
        "hook_resid_pre": "enters",
        "hook_attn_out": "writes",
        "hook_resid_mid": "witnesses",
    }
    for name, role in roles.items():
        point = hooks[f"{block}.{name}"]
        setattr(splice_in(point, state.runs), role, live)
        splice_out(point)
    if live is None:
        del state.streams[block]


def _list_parts(point: Any, parts: list[Parts]) -> bool:
    """Put the parts of the innermost attachment under their names; returns whether any changed."""
    wanted = parts[-1].points if parts else {}
    changed = False
    for name in PARTS:
        if point._modules.get(name) is wanted.get(name):
            continue
        changed = True
        if name in wanted:
            point.add_module(name, wanted[name])
        else:
            del point._modules[name]
    return changed


def _unmake_unused(model: Any, state: Attachments) -> bool:
    """Remove made hook points that no layer needs; returns whether names have changed."""
    unused = state.made.keys() - {entry.site.name for entry in state.placed}
    for name in unused:
        made.unmake(model, name)
        del state.made[name]
    unlisted = [name for name, listed in state.made.items() if not listed]
    state.made.update(dict.fromkeys(unlisted, True))
    return bool(unused or unlisted)


def _note_runs(model: Any, state: Attachments) -> None:
    """Let ``model.forward`` say which positions a pass is about, while anything needs to know."""
    current = model.__dict__.get("forward")
    noting = isinstance(current, functools.partial) and current.func is _forward_noting_run
    if state.needs_runs and not noting:
        state.inner_forward = current
        model.__dict__["forward"] = functools.partial(_forward_noting_run, model)
    elif not state.needs_runs and noting:
        del model.__dict__["forward"]
        if state.inner_forward is not None:
            model.__dict__["forward"] = state.inner_forward
        state.inner_forward = None


def _forward_noting_run(model: Any, *args: Any, **kwargs: Any) -> Any:
    state: Attachments = model.__dict__[_KEY]
    inner = state.inner_forward or functools.partial(type(model).forward, model)
    outer, state.runs.run = state.runs.run, run_of_forward(model, args, kwargs)
    try:
        return inner(*args, **kwargs)
    finally:
        state.runs.run = outer


@contextmanager
def temporarily(model: Any, placed: Iterable[Placed]) -> Iterator[None]:
    """Place layers inside everything that is there; afterwards put back what was there before."""
    before = placed_on(model)
    own = [replace(entry, scoped=True) for entry in placed]
    reconcile(model, [*before, *own])
    try:
        yield
    finally:
        reconcile(model, _after(before, own, placed_on(model)))


def _after(before: list[Placed], own: list[Placed], current: list[Placed]) -> list[Placed]:
    """What was attached before a context, and the other contexts that are still open."""
    kept = [entry for entry in before if not entry.scoped or entry in current]
    opened = [entry for entry in current if entry.scoped and entry not in [*before, *own]]
    return [*kept, *opened]


class _RunWanted:
    """A layer that acts on nothing: while it is placed, every pass says what it is about."""

    needs_run = True
    listening = False

    def __init__(self, site: str) -> None:
        self.site = site

    def apply(self, flow: Any, carried: Any, run: Any) -> Any:
        return flow


@contextmanager
def noting_runs(model: Any) -> Iterator[None]:
    """Let :func:`current_run` know of every pass, for the length of a ``with`` block."""
    (site,) = find_sites(model, ["blocks.0.hook_resid_pre"])
    with temporarily(model, [Placed(site, _RunWanted(site.name))]):
        yield


def current_run(model: Any) -> Run | None:
    """What the pass that is running is about; None outside of one."""
    state = attachments_of(model)
    return state.runs.run if state else None


def placed_on(model: Any) -> list[Placed]:
    """The layers on ``model``, in order."""
    state = attachments_of(model)
    return list(state.placed) if state else []


@contextmanager
def undone_on_error(model: Any) -> Iterator[None]:
    """Remove hook points that were made for layers which then could not be placed."""
    try:
        yield
    except BaseException:
        reconcile(model, placed_on(model))
        raise


def realised(model: Any, site: Site) -> Site:
    """The site with its hook point, made first where the model has none."""
    if site.hook_point is not None:
        return site
    state = model.__dict__.setdefault(_KEY, Attachments())
    point = made.make(model, site.name)
    state.made.setdefault(site.name, False)
    return replace(site, hook_point=point)


def names_of(model: Any, site: Site) -> list[str]:
    """Every name of a site's hook point, the one it was asked for by first."""
    aliases = [name for name, point in model.hook_dict.items() if point is site.hook_point]
    return [site.name, *(name for name in aliases if name != site.name)]


def place_parts(
    model: Any, subspaces: Any, sites: Any = None, *, any_model: bool = False
) -> list[Placed]:
    """Layers that show the parts of ``subspaces`` at their sites."""
    chosen = matched_subspaces(model, subspaces, sites, any_model=any_model)
    with undone_on_error(model):
        found = [(realised(model, site), subspace) for site, subspace in chosen]
        return [Placed(site, Parts(subspace, site)) for site, subspace in found]


def matched_subspaces(
    model: Any, subspaces: Any, sites: Any = None, *, any_model: bool = False
) -> list[tuple[Site, TangentSubspace]]:
    """Pair every subspace with its site in ``model``, restricted to ``sites`` where given.

    Raises:
        TangentKeyError: a site that the model or the set does not have.
        TangentValueError: a subspace of another width or model, or two for one hook point.
    """
    given = as_subspace_set(subspaces)
    known = known_sites(model)
    found: dict[Any, tuple[Site, TangentSubspace]] = {}
    for name, subspace in given.items():
        (site,) = find_sites(model, [name], known)
        check_fits(model, site, subspace, any_model=any_model)
        key = site.name if site.hook_point is None else id(site.hook_point)
        if key in found:
            raise TangentValueError(
                f"{found[key][0].name} and {name} are two names of one hook point, and each has a "
                "subspace. Give one of them."
            )
        found[key] = (site, subspace)
    if sites is None:
        return list(found.values())
    asked = find_sites(model, sites, known)
    keys = [site.name if site.hook_point is None else id(site.hook_point) for site in asked]
    for key, site in zip(keys, asked, strict=True):
        if key not in found:
            given[site.name]  # raises the error that lists what the set does have
    return [found[key] for key in keys]


def as_subspace_set(subspaces: Any) -> SubspaceSet:
    """A SubspaceSet from one, a mapping, or an iterable of subspaces that know their site."""
    if isinstance(subspaces, SubspaceSet):
        return subspaces
    if isinstance(subspaces, TangentSubspace):
        return SubspaceSet([subspaces])
    return SubspaceSet(subspaces)


def check_fits(model: Any, site: Site, subspace: TangentSubspace, *, any_model: bool) -> None:
    """Refuse a subspace of another width, of other heads, or fitted on a model of another name."""
    heads, width = expected_shape(model, site)
    if width is not None and subspace.d != width:
        raise TangentValueError(
            f"the subspace for {site.name} is {subspace.d} wide and the site of this model {width}."
            " Fit it on this model."
        )
    if subspace.heads is not None and heads is not None and subspace.heads != heads:
        raise TangentValueError(
            f"the subspace for {site.name} has {subspace.heads} heads and the site {heads}."
        )
    if subspace.heads is not None and width is not None and not site.per_head:
        raise TangentValueError(
            f"the subspace for {site.name} has a basis a head, and the site holds no heads."
        )
    if not any_model:
        check_model_name(model, subspace, subject=f"the subspace for {site.name}")


def check_in_place(model: Any, placed: Iterable[Placed]) -> None:
    """Refuse to leave quietly when somebody has taken a spliced hook point out of the model.

    Raises:
        TangentRuntimeError: the hook point of a site is no longer part of the model.
    """
    known = known_sites(model)
    for entry in placed:
        if known.get(entry.site.name) is not entry.site.hook_point:
            raise TangentRuntimeError(
                f"{entry.site.name} was spliced and has since been replaced in the model"
                f"{_by_whom(model, entry.site.name)}, so the splice no longer acts. Detach first."
            )


def _by_whom(model: Any, name: str) -> str:
    try:
        return f" by a {type(model.get_submodule(name)).__name__}"
    except AttributeError:
        return ""
