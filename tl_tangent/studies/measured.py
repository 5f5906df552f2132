"""What is kept of one checkpoint: energies of its gradients, and what removing Q_T does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tl_tangent.analysis.gradients.probe import normal_stack
from tl_tangent.analysis.gradients.removals import Removals, removals_of
from tl_tangent.analysis.gradients.rows import weight_rows
from tl_tangent.analysis.gradients.statistics import GradientStatistics
from tl_tangent.geometry import SubspaceSet

ENERGIES, REMOVALS = "energies.safetensors", "removals.safetensors"


@dataclass(frozen=True, eq=False, repr=False)
class MeasuredCheckpoint:
    """One checkpoint.

    Attributes:
        step: updates made before it.
        statistics: energies of its gradients, summed over batches; second moments left out.
        removals: what was read off the second moments, if there were any.
    """

    step: int
    statistics: GradientStatistics
    removals: Removals | None = None

    @property
    def loss(self) -> float:
        """Mean over batches, in nats a predicted token."""
        return self.statistics.loss / max(self.statistics.n_batches, 1)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row a weight, with the columns of a table of gradient energies."""
        return weight_rows(self.statistics, self.removals)

    def save(self, folder: Path) -> None:
        """Write it into a folder that there is not yet; the energies come last."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.removals is not None:
            save_file(vars(self.removals), folder / REMOVALS)
        self.statistics.save(folder / ENERGIES)

    @classmethod
    def load(cls, folder: Path, step: int) -> MeasuredCheckpoint:
        """Read what :meth:`save` wrote.

        Raises:
            TangentFileError: it can't be read.
        """
        statistics = GradientStatistics.load(folder / ENERGIES)
        removals = folder / REMOVALS
        found = Removals(**load_file(removals)) if removals.exists() else None
        return cls(step, statistics, found)


def measured_of(
    step: int,
    pieces: Sequence[GradientStatistics],
    subspaces: SubspaceSet,
    *,
    seed: int = 0,
    zeta: float = 0.0,
) -> MeasuredCheckpoint:
    """Add up the pieces of one checkpoint in their order, and read off their second moments.

    Args:
        step: of the checkpoint.
        pieces: its batches.
        subspaces: that the energies were measured in.
        seed: of their normals.
        zeta: shrinkage of the second moments, towards the identity of their trace.

    Raises:
        TangentValueError: pieces of different weights, subspaces or numbers of controls.
    """
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    sites = {label.site for label in whole.labels} if whole.moments else set()
    stacks = {site: normal_stack(site, subspaces[site], whole.n_controls, seed) for site in sites}
    removals = removals_of(whole, stacks, zeta=zeta)
    return MeasuredCheckpoint(step, replace(whole, moments={}), removals)
