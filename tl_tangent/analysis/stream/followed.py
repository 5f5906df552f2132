"""What of a residual stream is followed: at which depths, in which frames, and at which tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_tangent.analysis.stream.frames import (
    Reference,
    as_set,
    by_depth,
    fitted_positions,
    reference_of,
)
from tl_tangent.errors import TangentKeyError, TangentValueError
from tl_tangent.geometry import TangentSubspace
from tl_tangent.geometry.ledger import Frame
from tl_tangent.hooks.positions import CUSTOM, PositionMask, Positions, Run


@dataclass(frozen=True)
class Followed:
    """The subspaces at some depths, with their controls.

    Attributes:
        references: by depth; where one subspace serves all, it is one object.
        fixed: whether one does.
    """

    references: Mapping[int, Reference]
    fixed: bool

    def frame(self, depth: int) -> Frame:
        """The basis at a depth, and those of its controls."""
        return self.references[depth].frames[0]

    def subspace(self, depth: int) -> TangentSubspace:
        return self.references[depth].subspaces[0]

    @property
    def positions(self) -> Positions:
        """The positions that the subspaces were fitted on, see :func:`fitted_positions`."""
        return fitted_positions(self.subspace(depth) for depth in self.references)

    def described(self) -> dict[str, Any]:
        """Which subspaces these are, JSON-able."""
        first = next(iter(self.references.values())).subspaces[0]
        return {
            "reference": "one subspace for every depth" if self.fixed else "one at each depth",
            "sites": list(dict.fromkeys(self.subspace(depth).site for depth in self.references)),
            "rank": first.rank,
            "method": first.method,
        }


def follow(
    model: Any,
    subspaces: Any,
    depths: Iterable[int],
    n_controls: int,
    seed: int,
    *,
    any_model: bool = False,
) -> Followed:
    """Pair some depths of ``model`` with their subspaces; depth l is in front of layer l.

    Raises:
        TangentKeyError: a depth without a subspace.
        TangentValueError: a model without a stream; subspaces that do not fit it.
    """
    if isinstance(subspaces, TangentSubspace):
        one = reference_of(model, subspaces, n_controls, seed, any_model=any_model)
        return Followed(dict.fromkeys(depths, one), fixed=True)
    known = by_depth(as_set(subspaces))
    found = {}
    for depth in dict.fromkeys(depths):
        if depth not in known:
            raise TangentKeyError(_missing(depth, known))
        found[depth] = reference_of(model, known[depth], n_controls, seed, any_model=any_model)
    return Followed(found, fixed=False)


def _missing(depth: int, known: Mapping[int, TangentSubspace]) -> str:
    names = [f"blocks.{depth}.hook_resid_pre"]
    if depth > 0:
        names.append(f"blocks.{depth - 1}.hook_resid_post")
    given = ", ".join(str(subspace.site) for subspace in list(known.values())[:5])
    return (
        f"there is no subspace of the stream in front of layer {depth} ({' or '.join(names)}). Fit "
        "one there, or give one TangentSubspace for every depth. Given of the stream: "
        f"{given or 'nothing'}."
    )


class BatchPositions:
    """Which tokens are followed: those of the call, or a batch's own."""

    def __init__(self, positions: Positions):
        self.of_call = PositionMask(positions)
        self.description = self.of_call.description

    def of(self, options: dict[str, Any]) -> PositionMask:
        """Take a batch's own ``positions`` out of its keyword arguments; else those of the call."""
        own = options.pop("positions", None)
        if own is None:
            return self.of_call
        self.description = CUSTOM
        return PositionMask(own)


def followed_rows(run: Run, mask: PositionMask, stream: Tensor) -> Bool[Tensor, "batch pos"]:
    """Which tokens of a pass count.

    Raises:
        TangentValueError: a mask with a row for each of other than this batch's sequences.
    """
    batch, length = stream.shape[:2]
    rule = mask.rule
    if isinstance(rule, Tensor) and rule.ndim == 2 and rule.shape[0] not in (1, batch):
        raise TangentValueError(
            f"positions is a mask of {rule.shape[0]} rows and this batch has {batch}. Give every "
            "batch its own: {'input': tokens, 'positions': mask}, with a row for each sequence."
        )
    rows = run.select(mask, batch, length, stream.device)
    if rows is None:
        return torch.ones(batch, length, dtype=torch.bool, device=stream.device)
    return rows.expand(batch, length)


def in_float64(x: Tensor) -> Tensor:
    """Return ``x`` in float64, on the CPU where its device has none."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def with_controls(name: str, values: Sequence[float]) -> dict[str, float]:
    """One quantity as columns: of the subspace (first), and mean and extremes of its controls."""
    return {name: values[0]} | of_controls(name, values[1:])


def of_controls(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and extremes of a quantity over the controls; nothing without one."""
    if not values:
        return {}
    return {
        f"control_{name}_mean": sum(values) / len(values),
        f"control_{name}_min": min(values),
        f"control_{name}_max": max(values),
    }
