"""What is kept of one checkpoint: energies of its gradients, and what removing Q_T does to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from tl_tangent.analysis.gradients.rows import weight_rows
from tl_tangent.analysis.gradients.statistics import GradientStatistics
from tl_tangent.geometry import SubspaceSet
from tl_tangent.geometry.energy import stack_bases, upper_p_value
from tl_tangent.geometry.energy_bounds import efficiency
from tl_tangent.geometry.removal import ROUNDING, removal

ENERGIES, REMOVALS = "energies.safetensors", "removals.safetensors"


@dataclass(frozen=True, eq=False, repr=False)
class Removals:
    """Of ``sum G^T G`` of each weight; NaN where the gradient is zero.

    Attributes:
        isoscore: IsoScore* of the whole.
        deltas: its change when Q_T, and then when each normal is removed.
        efficiency: energy in Q_T over the most that a subspace of its rank can hold.
    """

    isoscore: Float[Tensor, " weight"]
    deltas: Float[Tensor, "weight basis"]
    efficiency: Float[Tensor, " weight"]

    def row(self, index: int) -> dict[str, float]:
        """Return the columns of one weight, named as in a table of gradient energies."""
        tangent, *normals = self.deltas[index].tolist()
        return {
            "efficiency": float(self.efficiency[index]),
            "isoscore": float(self.isoscore[index]),
            "delta_tangent": tangent,
            "delta_normal": math.fsum(normals) / len(normals),
            "delta_p_value": upper_p_value(tangent, normals, rounding=ROUNDING),
        }


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
        rows = weight_rows(self.statistics, {})
        if self.removals is None:
            return rows
        return [
            {**row, **self.removals.row(i)} if row["energy"] > 0 else row
            for i, row in enumerate(rows)
        ]

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
    removals = None
    if whole.moments:
        sites = {label.site for label in whole.labels}
        stacks = normal_stacks(subspaces, sites, whole.n_controls, seed)
        removals = removals_of(whole, stacks, zeta=zeta)
    return MeasuredCheckpoint(step, replace(whole, moments={}), removals)


def normal_stacks(
    subspaces: SubspaceSet, sites: set[str], n_controls: int, seed: int
) -> dict[str, Float[Tensor, "d columns"]]:
    """Return Q_T and the normals that gradients were measured in, side by side at each site."""
    draws = subspaces.random_normals(n_controls, seed)
    return {
        site: stack_bases(subspaces[site], [one[site] for one in draws], dtype=torch.float32)
        for site in subspaces
        if site in sites
    }


def removals_of(
    statistics: GradientStatistics, stacks: Mapping[str, Tensor], *, zeta: float = 0.0
) -> Removals:
    """Read the second moments of every weight."""
    shape = (len(statistics.labels), 1 + statistics.n_controls)
    deltas = torch.full(shape, torch.nan, dtype=torch.float64)
    scores, shares = deltas[:, 0].clone(), deltas[:, 0].clone()
    for i, label in enumerate(statistics.labels):
        found = statistics.ratio(i)
        if found is None:
            continue
        moment = statistics.moments[label.name]
        effect = removal(moment, stacks[label.site], label.rank, zeta=zeta)
        deltas[i] = deltas.new_tensor([effect.delta_tangent, *effect.delta_normals])
        scores[i] = effect.isoscore
        shares[i] = efficiency(moment, found.tangent, label.rank)
    return Removals(scores, deltas, shares)
