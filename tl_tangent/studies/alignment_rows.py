"""From measured checkpoints to the rows of tables: by checkpoint, and by phase of training.

A ratio is taken at every weight of every checkpoint, and the geometric mean over both is told: no
checkpoint counts for more because its gradients are longer, and neither does a weight. Two other
orders are told beside it, in which energies are summed over the checkpoints of a phase first, as
they are or each divided by the total of its checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.gradients.rows import WORDS, geometric_mean
from tl_tangent.analysis.gradients.statistics import Label
from tl_tangent.geometry.energy import ROUNDING, EnergyRatio, upper_p_value
from tl_tangent.geometry.removal import ROUNDING as SCORE_ROUNDING
from tl_tangent.studies.measured import MeasuredCheckpoint

Group = Literal["model", "kind", "side", "layer", "weight"]
GROUPS: tuple[Group, ...] = ("model", "kind", "side", "layer", "weight")
RATIOS = (
    "energy_ratio",
    "energy_ratio_exact",
    "pairing_ratio",
    "excess_pairing",
    "within_token_ratio",
    "excess_within_token",
    "excess_centred",
)
FEWEST, DRAWS = 5, 2000  # weights that an interval over them takes, and its bootstrap draws
MEANING = {
    **WORDS,
    "loss": "mean over batches of their mean loss, in nats a predicted token",
    "pairs": "pairs of a weight and a checkpoint that count; a gradient of zero has no ratio",
    "energy_ratio_pooled": "energies summed over the checkpoints of the phase, then their ratio; "
    "geometric mean over weights. Checkpoints with long gradients dominate",
    "energy_ratio_normalised": "the same after each energy is divided by the total energy of its "
    "weight at its checkpoint",
    "pairing_ratio, excess_pairing": "over the weights that have both; a matrix that embeds and "
    "unembeds, and position embeddings, have neither",
    "energy_ratio_paired, weights_paired": "energy_ratio_exact over the weights that have a "
    "pairing_ratio: pairing_ratio times excess_pairing; and how many these are",
    "p_value of a phase": "(1 + #{N >= T}) / (1 + n_controls), T the mean over weights and "
    "checkpoints of the logarithm of the energy in Q_T, N of that in the normals of one draw",
    "delta_p_value of a phase": "the same of the mean change of IsoScore*",
    "lead_excess": "excess_pairing early over late, geometric mean over the weights that have both",
    "energy_ratio_steps, excess_steps, lead_excess_steps": "geometric means in which a checkpoint "
    "weighs as many steps as it stands for, half of those to either neighbour in its phase; where "
    "checkpoints are dense at the start, the others are mostly about the start",
    "lead_excess_low, lead_excess_high": "95 % bootstrap interval over weights (of five or more). "
    "Weights share activations, and neither other seeds nor another text are in it",
    "phases": "geometric mean over weights and checkpoints of ratios, mean of delta_tangent and "
    "delta_normal; checkpoints count alike",
}
CONVENTIONS = {
    "subspaces": "Q_T is fitted once, to the activations of the early checkpoints, as many rows of "
    "each, every row taken from the mean of its checkpoint; then it is frozen",
    "normals": "random orthonormal bases of the rank of Q_T in its orthogonal complement, the same "
    "at all checkpoints",
    "gradients": "of the mean loss of a batch in evaluation mode, over all real tokens, at the "
    "weights as they were stored; energies are summed over batches",
    "aggregation": "one ratio a weight and checkpoint, geometric mean over both; pooled and "
    "normalised beside it",
}


def checkpoint_rows(measured: MeasuredCheckpoint) -> list[dict[str, Any]]:
    """Return one row a weight of a checkpoint: step, loss, and what is told of gradients."""
    told = {"step": measured.step, "loss": measured.loss}
    return [{**told, **row} for row in measured.rows]


def phase_summary(
    checkpoints: Iterable[MeasuredCheckpoint], weights: Sequence[int]
) -> dict[str, float]:
    """Return what is told of some weights over the checkpoints of a phase.

    Args:
        checkpoints: of the phase, of one series; their order does not matter.
        weights: rows of their statistics.
    """
    found = sorted(checkpoints, key=lambda one: one.step)
    rows = [
        (one, i, row)
        for one in found
        for i, row in enumerate(one.rows)
        if i in weights and row["energy"] > 0
    ]
    told: dict[str, float] = {"pairs": len(rows)}
    if not rows:
        return told
    for name in RATIOS:
        values = [float(row[name]) for _, _, row in rows if name in row]
        if values:
            told[name] = geometric_mean(values)
    paired = [row["energy_ratio_exact"] for _, _, row in rows if "pairing_ratio" in row]
    if paired:
        told["energy_ratio_paired"] = geometric_mean(paired)
    for name, normalised in (("pooled", False), ("normalised", True)):
        ratios = [_summed(found, i, normalised=normalised) for i in weights]
        told[f"energy_ratio_{name}"] = geometric_mean([x.ratio for x in ratios if x is not None])
    told |= _over_steps(found, weights)
    logarithms = torch.stack([one.statistics.energies[i, 0] for one, i, _ in rows]).log()
    told["p_value"] = _p_value(logarithms, ROUNDING)
    return told | _deltas([one.removals.deltas[i] for one, i, _ in rows if one.removals])


def excess_lead(
    early: Iterable[MeasuredCheckpoint], late: Iterable[MeasuredCheckpoint], weights: Sequence[int]
) -> dict[str, float]:
    """Return how far the excess over random pairing is larger early than late, with an interval.

    Args:
        early, late: the checkpoints of either phase.
        weights: rows of their statistics.
    """
    phases = [sorted(phase, key=lambda one: one.step) for phase in (early, late)]
    alike = [[1.0] * len(phase) for phase in phases]
    stands = [steps_of([one.step for one in phase]) for phase in phases]
    return {
        **_lead(phases, alike, weights, "lead_excess"),
        **_lead(phases, stands, weights, "lead_excess_steps"),
    }


def steps_of(steps: Sequence[int]) -> list[float]:
    """Return how many steps each of some checkpoints in order stands for; 1 of a single one."""
    if len(steps) < 2:
        return [1.0] * len(steps)
    gaps = [0, *(b - a for a, b in pairwise(steps)), 0]
    return [(before + after) / 2 for before, after in pairwise(gaps)]


def _lead(
    phases: Sequence[Sequence[MeasuredCheckpoint]],
    stands: Sequence[Sequence[float]],
    weights: Sequence[int],
    name: str,
) -> dict[str, float]:
    early, late = (
        [_mean_log(phase, own, i, "excess_pairing") for i in weights]
        for phase, own in zip(phases, stands, strict=True)
    )
    leads = np.array(
        [a - b for a, b in zip(early, late, strict=True) if a is not None and b is not None]
    )
    if not len(leads):
        return {}
    told = {name: float(np.exp(leads.mean()))}
    if len(leads) < FEWEST:
        return {**told, f"{name}_low": math.nan, f"{name}_high": math.nan}
    drawn = np.random.default_rng(0).choice(leads, (DRAWS, len(leads))).mean(1)
    low, high = np.exp(np.quantile(drawn, [0.025, 0.975])).tolist()
    return {**told, f"{name}_low": low, f"{name}_high": high}


def _mean_log(
    checkpoints: Sequence[MeasuredCheckpoint], stands: Sequence[float], weight: int, name: str
) -> float | None:
    """Return the mean over checkpoints of the logarithm of a ratio; None where there is none."""
    pairs = [
        (share, math.log(value))
        for one, share in zip(checkpoints, stands, strict=True)
        if 0 < (value := one.rows[weight].get(name, math.nan)) < math.inf
    ]
    whole = math.fsum(share for share, _ in pairs)
    return math.fsum(share * log for share, log in pairs) / whole if whole else None


def _over_steps(
    checkpoints: Sequence[MeasuredCheckpoint], weights: Sequence[int]
) -> dict[str, float]:
    stands = steps_of([one.step for one in checkpoints])
    told = {}
    for name, short in (("energy_ratio_exact", "energy_ratio"), ("excess_pairing", "excess")):
        logs = [_mean_log(checkpoints, stands, i, name) for i in weights]
        known = [one for one in logs if one is not None]
        if known:
            told[f"{short}_steps"] = math.exp(math.fsum(known) / len(known))
    return told


def _deltas(deltas: Sequence[Float[Tensor, " basis"]]) -> dict[str, float]:
    known = [one for one in deltas if not bool(one.isnan().any())]
    if not known:
        return {}
    tangent, *normals = _means(torch.stack(known))
    return {
        "delta_tangent": tangent,
        "delta_normal": math.fsum(normals) / len(normals),
        "delta_p_value": upper_p_value(tangent, normals, rounding=SCORE_ROUNDING),
    }


def _p_value(values: Float[Tensor, "pair basis"], rounding: float) -> float:
    tangent, *normals = _means(values)
    return upper_p_value(tangent, normals, rounding=rounding)


def _means(values: Float[Tensor, "pair basis"]) -> list[float]:
    """Return the mean of each column, the same for any order of the rows."""
    return [math.fsum(column) / len(column) for column in values.T.tolist()]


def _summed(
    checkpoints: Sequence[MeasuredCheckpoint], weight: int, *, normalised: bool
) -> EnergyRatio | None:
    """Sum the energies of one weight over checkpoints; None where all of them are zero."""
    label: Label = checkpoints[0].statistics.labels[weight]
    energies, total = torch.zeros_like(checkpoints[0].statistics.energies[weight, 0]), 0.0
    for one in checkpoints:
        own = float(one.statistics.totals[weight, 0])
        if own > 0:
            unit = own if normalised else 1.0
            energies = energies + one.statistics.energies[weight, 0] / unit
            total += own / unit
    if total == 0:
        return None
    return EnergyRatio.of(energies, total, d=label.d, rank=label.rank)


def weights_by(labels: Sequence[Label], by: Group) -> Mapping[Any, list[int]]:
    """Return the weights of each kind, side or layer, in order of appearance; "model": of all."""
    groups: dict[Any, list[int]] = {}
    for i, label in enumerate(labels):
        values = {"model": None, "weight": label.name, **vars(label)}
        groups.setdefault(values[by], []).append(i)
    return groups
