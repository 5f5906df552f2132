"""What is read off the second moments of gradients: IsoScore* without Q_T, and the upper bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.gradients.statistics import GradientStatistics
from tl_tangent.geometry.energy import upper_p_value
from tl_tangent.geometry.energy_bounds import efficiency
from tl_tangent.geometry.removal import ROUNDING, removal


@dataclass(frozen=True, eq=False, repr=False)
class Removals:
    """Of ``sum G^T G`` of each weight; NaN where the gradient is zero, or lies in Q_T altogether.

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
            "delta_normal": math.fsum(normals) / len(normals) if normals else math.nan,
            "delta_p_value": (
                upper_p_value(tangent, normals, rounding=ROUNDING)
                if normals and not math.isnan(tangent)
                else math.nan
            ),
        }


def removals_of(
    statistics: GradientStatistics, stacks: Mapping[str, Tensor], *, zeta: float = 0.0
) -> Removals | None:
    """Read the second moments of every weight; None where none were kept.

    Args:
        statistics: the sums.
        stacks: Q_T and its normals at each site, side by side.
        zeta: shrinkage of the second moments, towards the identity of their trace.
    """
    if not statistics.moments:
        return None
    shape = (len(statistics.labels), 1 + statistics.n_controls)
    deltas = torch.full(shape, torch.nan, dtype=torch.float64)
    scores, shares = deltas[:, 0].clone(), deltas[:, 0].clone()
    for i, label in enumerate(statistics.labels):
        found = statistics.ratio(i)
        if found is None:
            continue
        moment = statistics.moments[label.name]
        effect = removal(moment, stacks[label.site], label.rank, zeta=zeta, empty="nan")
        deltas[i] = deltas.new_tensor([effect.delta_tangent, *effect.delta_normals])
        scores[i] = effect.isoscore
        shares[i] = efficiency(moment, found.tangent, label.rank)
    return Removals(scores, deltas, shares)
