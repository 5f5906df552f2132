"""What can be done to the tangent part v, or the normal part n, of an activation.

Everything is decided in coordinates: a mode says what replaces the coordinates a of the tangent
part (or the normal part itself), a mask says at which positions and heads, and one low-rank product
writes the difference back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from tl_tangent.errors import TangentKeyError, TangentRuntimeError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.hooks.frame import Frame, Frames
from tl_tangent.hooks.positions import CUSTOM, NOT_FIRST, PositionMask, Positions, Run

Part: TypeAlias = Literal["tangent", "normal"]
Mode: TypeAlias = Literal["zero", "mean", "resample", "scale", "keep", "swap", "random"]


@dataclass(frozen=True)
class AblationSpec:
    """One ablation, checked: which part, what to do to it, and where.

    Attributes:
        part: "tangent" or "normal".
        mode: "zero" removes the part; "mean" replaces it by its mean; "resample" by the part of
            another position; "scale" multiplies it by ``factor``; "keep" removes the other part;
            "swap" takes it from ``source`` at the same positions; "random" removes a random
            subspace of the same rank in the orthogonal complement instead.
        factor: of "scale".
        source: activations by site, or one tensor for a single site: the run to "swap" from, or the
            pool to "mean" over or "resample" from instead of this run's own positions.
        heads: heads to edit at per-head sites; None for all.
        positions: a rule of positions; None for the one each subspace was fitted with.
        seed: of "resample" and "random".
    """

    part: Part = "tangent"
    mode: Mode = "zero"
    factor: float | None = None
    source: Mapping[str, Tensor] | Tensor | None = None
    heads: tuple[int, ...] | None = None
    positions: Positions | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("part", self.part, get_args(Part))
        _one_of("mode", self.mode, get_args(Mode))
        if (self.mode == "scale") != (self.factor is not None):
            raise TangentValueError(
                f"mode={self.mode!r} with factor={self.factor!r}: mode='scale' needs a factor, and "
                "no other mode takes one."
            )
        if self.mode == "swap" and self.source is None:
            raise TangentValueError(
                "mode='swap' needs a source: a cache of the run to swap from, or a tensor of the "
                "site's shape."
            )
        if self.source is not None and self.mode not in ("mean", "resample", "swap"):
            raise TangentValueError(f"mode={self.mode!r} takes no source.")
        if self.mode == "random" and self.part == "normal":
            raise TangentValueError(
                "mode='random' removes a random subspace of the tangent part's rank in its place; "
                "it goes with part='tangent'."
            )
        if self.positions is not None:
            PositionMask(self.positions)

    def source_at(self, names: Iterable[str]) -> Tensor | None:
        """The source activations of a site known by any of ``names``.

        Raises:
            TangentKeyError: the source has no entry of that site.
        """
        if self.source is None or isinstance(self.source, Tensor):
            return self.source
        names = list(names)
        for name in names:
            if name in self.source:
                return self.source[name].detach()
        raise TangentKeyError(
            f"the source holds no activations of {names[0]}. Cache that site in the source run."
        )


def _one_of(what: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise TangentValueError(f"{what}={value!r} is not one of {', '.join(map(repr, accepted))}.")


def heads_tuple(heads: Iterable[int] | int | None) -> tuple[int, ...] | None:
    """``heads`` as a tuple; None stays None (all heads)."""
    if heads is None:
        return None
    return (heads,) if isinstance(heads, int) else tuple(heads)


def remembered_positions(subspace: TangentSubspace) -> Positions:
    """The position rule that a subspace was fitted with; "not_first" where it knows none.

    Raises:
        TangentValueError: it was fitted with a mask that only fits its own batch.
    """
    if subspace.positions == CUSTOM:
        raise TangentValueError(
            f"the subspace at {subspace.site} was fitted with a mask of its own batch, which says "
            "nothing about this run. Say which positions to ablate: positions='not_first', 'all', "
            "a list, or a mask."
        )
    return NOT_FIRST if subspace.positions is None else subspace.positions


class Ablation:
    """One ablation at one site: a layer of a spliced hook point."""

    needs_run = True

    def __init__(self, spec: AblationSpec, subspace: TangentSubspace, site: str, names: list[str]):
        if spec.mode == "random":
            subspace = SubspaceSet({site: subspace}).random_normals(1, spec.seed)[0][site]
        self.spec = spec
        self.site = site
        self.frames = Frames(subspace)
        rule = spec.positions if spec.positions is not None else remembered_positions(subspace)
        self.positions = PositionMask(rule)
        self.source = spec.source_at(names)
        self.fired = 0  # passes that reached the site
        self.took = False  # whether any of them had a position to edit

    @property
    def listening(self) -> bool:
        return True

    def apply(self, flow: Tensor, carried: Tensor | None, run: Run | None) -> Tensor:
        frame = self.frames.at(flow, self.site)
        mask = self._mask(flow, run)
        x = flow.to(frame.dtype)
        whole = x if carried is None else (flow + carried).to(frame.dtype)
        edit = _tangent_edit if self._edits_tangent else _normal_edit
        self.fired += 1
        if not self.took and (mask is None or bool(mask.any())):
            self.took = True
        return edit(self, frame, x, whole, mask, run).to(flow.dtype)

    @property
    def _edits_tangent(self) -> bool:
        return (self.spec.part == "tangent") != (self.spec.mode == "keep")

    def _mask(self, flow: Tensor, run: Run | None) -> Tensor | None:
        """[batch or 1, pos, 1 ...] bool over positions and heads; None where all are taken."""
        if run is None:
            if self.positions.rule != "all":
                raise TangentRuntimeError(
                    f"{self.site} was reached without a call of the model itself, so the positions "
                    "of its tokens are unknown. Call the model, or ablate with positions='all'."
                )
            rows = None
        else:
            rows = run.select(self.positions, flow.shape[0], flow.shape[1], flow.device)
        mask = None if rows is None else rows.reshape(*rows.shape, *[1] * (flow.ndim - 2))
        if self.spec.heads is None:
            return mask
        heads = self._head_mask(flow)
        return heads if mask is None else mask & heads

    def _head_mask(self, flow: Tensor) -> Tensor:
        if flow.ndim != 4:
            raise TangentValueError(
                f"{self.site} has no heads: it holds {tuple(flow.shape)}. Name the per-head sites "
                "with sites=, or leave heads out."
            )
        n = flow.shape[2]
        bad = [head for head in self.spec.heads or () if not 0 <= head < n]
        if bad:
            raise TangentKeyError(f"head {bad[0]} of {self.site} does not exist: 0 to {n - 1} do.")
        mask = torch.zeros(n, 1, dtype=torch.bool, device=flow.device)
        mask[list(self.spec.heads or ())] = True
        return mask

    def replacement(
        self,
        part: Tensor,
        of_source: Callable[[Tensor], Tensor],
        mask: Tensor | None,
        run: Run | None,
    ) -> Tensor:
        """What the mode puts in the place of ``part`` [batch, pos, ..., k]."""
        if self.spec.factor is not None:
            return part * self.spec.factor
        if self.spec.mode == "swap":
            return of_source(self._aligned_source(part, run))
        rows = self._pool(part, of_source, mask)
        if self.spec.mode == "mean":
            return rows.mean(dim=0)
        return self._resampled(part, rows, mask)

    def _aligned_source(self, part: Tensor, run: Run | None) -> Tensor:
        """The source activations of this pass: its positions, at its offset in a cached run."""
        source: Any = self.source
        source = source.to(part.device)
        offset = 0 if run is None else run.offset
        if source.ndim == part.ndim and source.shape[1] > part.shape[1]:
            source = source[:, offset : offset + part.shape[1]]
        fits = source.ndim == part.ndim and source.shape[1:-1] == part.shape[1:-1]
        if not fits or source.shape[0] not in (1, part.shape[0]):
            raise TangentValueError(
                f"the source at {self.site} is {tuple(self.source.shape)} and the run needs "  # type: ignore[union-attr]
                f"[{part.shape[0]} or 1, {offset + part.shape[1]}, ...]: swap the same positions."
            )
        return source

    def _pool(
        self, part: Tensor, of_source: Callable[[Tensor], Tensor], mask: Tensor | None
    ) -> Tensor:
        """Rows [n, ..., k] to average or to draw from: the source, or this run's own positions."""
        if self.source is not None:
            pool = of_source(self.source.to(part.device))
            return pool.reshape(-1, *part.shape[2:])
        rows = part.reshape(-1, *part.shape[2:])
        if mask is not None:
            rows = rows[_position_rows(mask, part)]
        if rows.shape[0] < 2:
            raise TangentRuntimeError(
                f"mode={self.spec.mode!r} at {self.site} has {rows.shape[0]} position to draw on "
                "in this run, so it would change nothing. Give it a source of activations."
            )
        return rows

    def _resampled(self, part: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
        """Every selected position takes another row; within one run, never its own."""
        flat = part.new_zeros(part.shape[0] * part.shape[1], *part.shape[2:])
        taken = torch.ones(flat.shape[0], dtype=torch.bool, device=part.device)
        if mask is not None:
            taken = _position_rows(mask, part)
        count = int(taken.sum())
        generator = torch.Generator().manual_seed(self.spec.seed)
        if self.source is None:
            order = torch.randperm(count, generator=generator)
            drawn = torch.empty_like(order)
            drawn[order] = order.roll(1)
        else:
            drawn = torch.randint(rows.shape[0], (count,), generator=generator)
        flat = flat.masked_scatter(
            taken.reshape(-1, *[1] * (flat.ndim - 1)).expand_as(flat), rows[drawn.to(rows.device)]
        )
        return flat.reshape(part.shape)


def _position_rows(mask: Tensor, part: Tensor) -> Tensor:
    """Selected positions [batch * pos], whichever heads are selected."""
    positions = mask.reshape(*mask.shape[: max(mask.ndim - (part.ndim - 2), 0)], -1).any(dim=-1)
    return positions.expand(part.shape[:2]).reshape(-1)


def _tangent_edit(
    ablation: Ablation, frame: Frame, x: Tensor, whole: Tensor, mask: Tensor | None, run: Run | None
) -> Tensor:
    """x + Q (a' - a)."""
    coords = frame.coordinates(whole)
    if ablation.spec.mode in ("zero", "random", "keep"):
        change = -coords
    else:
        change = ablation.replacement(
            coords, lambda source: frame.coordinates(source.to(frame.dtype)), mask, run
        )
        change = change - coords
    return frame.add_lifted(x, _where(mask, change))


def _normal_edit(
    ablation: Ablation, frame: Frame, x: Tensor, whole: Tensor, mask: Tensor | None, run: Run | None
) -> Tensor:
    """x + (n' - n)."""

    def normal_of(source: Tensor) -> Tensor:
        source = source.to(frame.dtype)
        return frame.normal(source, frame.coordinates(source))

    normal = normal_of(whole)
    if ablation.spec.mode in ("zero", "keep"):
        change = -normal
    else:
        change = ablation.replacement(normal, normal_of, mask, run) - normal
    return x + _where(mask, change)


def _where(mask: Tensor | None, change: Tensor) -> Tensor:
    """The change where the mask selects, zero elsewhere (also where the change is not finite)."""
    return change if mask is None else torch.where(mask, change, change.new_zeros(()))
