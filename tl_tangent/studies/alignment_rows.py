"""From measured checkpoints to the rows of tables: by checkpoint, and by phase of training.

A ratio is taken at every weight of every checkpoint, and the geometric mean over both is told: no
checkpoint counts for more because its gradients are longer, and neither does a weight. Two other
orders are told beside it, in which energies are summed over the checkpoints of a phase first, as
they are or each divided by the total of its checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
RATIOS = ("energy_ratio", "energy_ratio_exact", "pairing_ratio", "excess_pairing")
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
    "p_value of a phase": "(1 + #{N >= T}) / (1 + n_controls), T the mean over weights and "
    "checkpoints of the logarithm of the energy in Q_T, N of that in the normals of one draw",
    "delta_p_value of a phase": "the same of the mean change of IsoScore*",
    "lead_excess": "excess_pairing early over late, geometric mean over the weights that have both",
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
    for name, normalised in (("pooled", False), ("normalised", True)):
        ratios = [_summed(found, i, normalised=normalised) for i in weights]
        told[f"energy_ratio_{name}"] = geometric_mean([x.ratio for x in ratios if x is not None])
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
    logs = [_log_excess(phase, weights) for phase in (early, late)]
    pairs = [one for one in zip(*logs, strict=True) if None not in one]
    if not pairs:
        return {}
    leads = np.array([before - after for before, after in pairs])
    told = {"lead_excess": float(np.exp(leads.mean()))}
    if len(leads) < FEWEST:
        return {**told, "lead_excess_low": math.nan, "lead_excess_high": math.nan}
    drawn = np.random.default_rng(0).choice(leads, (DRAWS, len(leads))).mean(1)
    low, high = np.exp(np.quantile(drawn, [0.025, 0.975])).tolist()
    return {**told, "lead_excess_low": low, "lead_excess_high": high}


def _log_excess(
    checkpoints: Iterable[MeasuredCheckpoint], weights: Sequence[int]
) -> list[float | None]:
    """Return the mean over checkpoints of the logarithm of each weight's excess."""
    ordered = sorted(checkpoints, key=lambda one: one.step)
    found: list[float | None] = []
    for i in weights:
        values = [one.rows[i].get("excess_pairing", math.nan) for one in ordered]
        known = [math.log(value) for value in values if 0 < value < math.inf]
        found.append(math.fsum(known) / len(known) if known else None)
    return found


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
