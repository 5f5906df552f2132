"""Which subspace the residual stream is looked at in, at every depth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from tl_tangent.errors import TangentKeyError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.geometry.ledger import Frame
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
    def positions(self) -> Any:
        """The positions that the first subspace was fitted on."""
        fitted = self.subspaces[0].positions
        return "not_first" if fitted in (None, "custom") else fitted


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
    fixed = isinstance(subspaces, TangentSubspace)
    depths = n_layers + 1
    found = (subspaces,) * depths if fixed else _every_depth(SubspaceSet(subspaces), depths)
    for subspace in found[:1] if fixed else found:
        _check_fits(model, subspace, any_model)
    if n_controls < 0:
        raise TangentValueError(f"n_controls is {n_controls}; it must be 0 or more.")
    if fixed:
        return Reference(found, (_frame(subspaces, n_controls, seed),) * len(found), True)
    return Reference(found, tuple(_frame(one, n_controls, seed) for one in found), False)


def _frame(subspace: TangentSubspace, n_controls: int, seed: int) -> Frame:
    controls = subspace.random_normals(n_controls, seed) if n_controls else []
    bases = [subspace.basis, *(control.basis for control in controls)]
    return Frame(torch.stack(bases), subspace.mean)


def by_depth(given: SubspaceSet) -> dict[int, TangentSubspace]:
    """Return the subspaces of the stream among ``given`` by their depth.

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
        found[depth] = subspace
    return found


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
    name = getattr(model.cfg, "model_name", None)
    if not any_model and subspace.model is not None and name not in (None, subspace.model):
        raise TangentValueError(
            f"the subspace was fitted on {subspace.model!r} and this model is {name!r}. If that "
            "is meant, pass any_model=True."
        )
