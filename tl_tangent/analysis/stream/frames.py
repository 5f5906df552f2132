"""Which subspace the residual stream is looked at in, at every depth."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tl_tangent.errors import TangentKeyError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.geometry.ledger import Frame
from tl_tangent.hooks.positions import CUSTOM, NOT_FIRST, Positions
from tl_tangent.hooks.provenance import check_model_name, check_norms_alike
from tl_tangent.hooks.stream.writes import check_has_stream


@dataclass(frozen=True)
class Reference:
    """A subspace at every depth, with its controls.

    Attributes:
        subspaces: for the stream in front of layer 0, 1, ..., and behind the last.
        frames: the same with the controls beside it.
        fixed: whether it is one subspace for all.
    """

    subspaces: tuple[TangentSubspace, ...]
    frames: tuple[Frame, ...]
    fixed: bool

    @property
    def positions(self) -> Positions:
        """The positions that the subspaces were fitted on, see :func:`fitted_positions`."""
        return fitted_positions(self.subspaces)


def fitted_positions(subspaces: Iterable[TangentSubspace]) -> Positions:
    """Return the rule that all of ``subspaces`` were fitted by; "not_first" where they know none.

    Raises:
        TangentValueError: one was fitted with a slice or a mask, which says nothing about other
            rows, or they were fitted by different rules.
    """
    rules: dict[str, Positions] = {}
    for subspace in subspaces:
        if subspace.positions == CUSTOM:
            raise TangentValueError(
                f"the subspace at {subspace.site} was fitted with a slice or a mask of its own "
                "batch, which says nothing about this run. Say which tokens to follow: "
                "positions='not_first', 'all', a list, a slice or a mask."
            )
        rule = NOT_FIRST if subspace.positions is None else subspace.positions
        rules.setdefault(repr(rule), rule)
    if len(rules) > 1:
        raise TangentValueError(
            f"the subspaces were fitted on different positions: {' and '.join(rules)}. Say which "
            "tokens to follow: positions='not_first', 'all', a list, a slice or a mask."
        )
    return next(iter(rules.values()))


def reference_of(
    model: Any, subspaces: Any, n_controls: int, seed: int, *, any_model: bool = False
) -> Reference:
    """Pair every depth of ``model`` with its subspace.

    Raises:
        TangentKeyError: a depth without a subspace.
        TangentValueError: see :func:`tl_tangent.trace_residual`.
    """
    check_has_stream(model)
    n_layers = model.cfg.n_layers
    depths = n_layers + 1
    if isinstance(subspaces, TangentSubspace):
        _check_fits(model, subspaces, any_model)
        frame = _frame(subspaces, n_controls, seed)
        return Reference((subspaces,) * depths, (frame,) * depths, True)
    found = _every_depth(as_set(subspaces), depths)
    for subspace in found:
        _check_fits(model, subspace, any_model)
    return Reference(found, tuple(_frame(one, n_controls, seed) for one in found), False)


def _frame(subspace: TangentSubspace, n_controls: int, seed: int) -> Frame:
    controls = subspace.random_normals(n_controls, seed) if n_controls else []
    bases = [subspace.basis, *(control.basis for control in controls)]
    return Frame.exact(torch.stack(bases).cpu(), subspace.mean.cpu())


def by_depth(given: SubspaceSet) -> dict[int, TangentSubspace]:
    """Return the subspaces of the stream among ``given`` by their depth, under their names there.

    Raises:
        TangentValueError: two for one place.
    """
    found: dict[int, TangentSubspace] = {}
    for site, subspace in given.items():
        depth = depth_of(site)
        if depth is None:
            continue
        if depth in found:
            raise TangentValueError(
                f"{found[depth].site} and {site} are two names of one place in the stream, and "
                "each has a subspace. Give one of them."
            )
        found[depth] = subspace if subspace.site == site else subspace.replace(site=site)
    return found


def as_set(subspaces: Any) -> SubspaceSet:
    """Return subspaces, in a mapping from site or one by one, as a set.

    Raises:
        TangentValueError: anything else.
    """
    if isinstance(subspaces, Iterable) and not isinstance(subspaces, Tensor):
        given = subspaces if isinstance(subspaces, Mapping) else list(subspaces)
        values = given.values() if isinstance(given, Mapping) else given
        if all(isinstance(one, TangentSubspace) for one in values):
            return SubspaceSet(given)
    raise TangentValueError(
        f"subspaces is a {type(subspaces).__name__}; accepted are a TangentSubspace, a SubspaceSet "
        "or a mapping from site to TangentSubspace, or several that know their site."
    )


def _every_depth(given: SubspaceSet, n_depths: int) -> tuple[TangentSubspace, ...]:
    found = by_depth(given)
    missing = [depth for depth in range(n_depths) if depth not in found]
    if missing:
        where = (
            f"blocks.{missing[0]}.hook_resid_pre"
            if missing[0] < n_depths - 1
            else f"blocks.{n_depths - 2}.hook_resid_post"
        )
        raise TangentKeyError(
            f"there is no subspace at {where}. Fit one in front of every layer and behind the last "
            f"(['blocks.*.hook_resid_post', 'blocks.0.hook_resid_pre']), or give one "
            f"TangentSubspace for every depth. Given: {', '.join(list(given)[:5]) or 'nothing'}."
        )
    return tuple(found[depth] for depth in range(n_depths))


def depth_of(site: str | None) -> int | None:
    """In front of which layer a place of the stream lies: behind layer 3 is depth 4."""
    match = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", site or "")
    if match is None:
        return None
    return int(match.group(1)) + (match.group(2) == "post")


def _check_fits(model: Any, subspace: TangentSubspace, any_model: bool) -> None:
    if subspace.d != model.cfg.d_model or subspace.heads is not None:
        heads = f" with {subspace.heads} heads" if subspace.heads is not None else ""
        raise TangentValueError(
            f"the subspace at {subspace.site} is {subspace.d} wide{heads}; the residual stream of "
            f"this model is {model.cfg.d_model} wide, without heads."
        )
    if subspace.rank == subspace.d:
        raise TangentValueError(
            f"the subspace at {subspace.site} has rank {subspace.rank}, the width of the stream: "
            "nothing is normal. Truncate it to a lower rank."
        )
    if not any_model:
        check_model_name(model, subspace)
        check_norms_alike(
            model, subspace, consequence="what such models write to the stream can differ"
        )
