"""The table of gradient energies: one row a weight, or one a group of weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tl_tangent.analysis.gradients.removals import Removals
from tl_tangent.analysis.gradients.statistics import GradientStatistics, Label
from tl_tangent.geometry.energy import EnergyRatio

WORDS = {
    "energy": "sum over batches of ||G||^2, squared units of loss per unit of weight",
    "fraction": "f_T, the share of that energy in Q_T",
    "energy_ratio": "energy in Q_T over the mean energy in the matched normals",
    "energy_ratio_exact": "f_T / (1 - f_T) * (d - rank) / rank: the same in the limit of many "
    "normals",
    "p_value": "(1 + #{E_N >= E_T}) / (1 + n_controls)",
    "p_value_mean": "mean of p_value over weights; no p-value itself",
    "p_floor": "1 / (1 + n_controls), the smallest p-value that there is",
    "pairing_ratio": "energy_ratio_exact expected when inputs and output gradients of a batch are "
    "paired at random: what they give without the tie between the two",
    "excess_pairing": "energy_ratio_exact / pairing_ratio; about 1 where all is mechanical. A tie "
    "between inputs and output gradients adds up over the tokens of a batch more than what is "
    "mechanical: an excess grows with the number of tokens in one gradient",
    "within_token_ratio": "the same when they are paired at random among the tokens with the same "
    "input id only: what the token that is read gives, whatever its context",
    "excess_within_token": "energy_ratio_exact / within_token_ratio",
    "sign_flip_ratio": "energy_ratio_exact expected under random signs of the tokens' gradients",
    "excess_sign_flip": "energy_ratio_exact / sign_flip_ratio",
    "activation_ratio": "energy_ratio_exact of the variance that Q_T was fitted to, of the model "
    "and tokens of the fit",
    "excess_activations": "energy_ratio_exact / activation_ratio",
    "mean_part": "||(sum g) mu^T||^2 / ||G||^2, the part that no pairing changes: mu is the mean "
    "of a batch's inputs, on the output side of its output gradients. It may exceed 1: parts "
    "interfere",
    "energy_ratio_centred": "energy_ratio_exact of G - (sum g) mu^T",
    "excess_centred": "energy_ratio_centred over that of the vectors around mu, which a random "
    "pairing gives it",
    "efficiency": "energy in Q_T over the most that any subspace of its rank holds of G^T G",
    "isoscore": "of sum G^T G, uncentred, divided by d - 1",
    "delta_tangent": "IsoScore* without Q_T (reduced: divided by d - rank - 1) minus isoscore",
    "delta_normal": "the same without a matched normal, mean over controls",
    "delta_p_value": "(1 + #{delta_N >= delta_T}) / (1 + n_controls)",
    "delta_p_value_mean": "mean of delta_p_value over weights; no p-value itself",
}
P_VALUES = ("p_value", "delta_p_value")
NULLS = {"pairing": "pairing", "within_pairing": "within_token", "sign_flip": "sign_flip"}
COLUMNS = ("weight", "kind", "layer", "side", "weights", "d", "rank", *WORDS)  # in this order
MEANS = "geometric mean over weights of ratios, arithmetic mean of the rest"


def weight_rows(
    statistics: GradientStatistics, removals: Removals | None = None
) -> list[dict[str, Any]]:
    """Return one row a weight, with the columns of :data:`WORDS` that were measured."""
    rows = [_row(statistics, row, label) for row, label in enumerate(statistics.labels)]
    if removals is None:
        return rows
    return [row | removals.row(i) if row["energy"] > 0 else row for i, row in enumerate(rows)]


def _row(statistics: GradientStatistics, row: int, label: Label) -> dict[str, Any]:
    told = {
        "weight": label.name,
        "kind": label.kind,
        "layer": label.layer,
        "side": label.side,
        "d": label.d,
        "rank": label.rank,
    }
    found = statistics.ratio(row)
    if found is None:  # the gradient is zero: nothing can be said of its directions
        return {**told, "energy": 0.0}
    return {**told, **_energies(found), **_mechanical(statistics, row, label, found)}


def _energies(found: EnergyRatio) -> dict[str, Any]:
    told: dict[str, Any] = {"energy": found.total, "fraction": found.fraction}
    if found.normals:
        told["energy_ratio"] = found.ratio
    told["energy_ratio_exact"] = found.exact_ratio
    if found.normals:
        told |= {"p_value": found.p_value, "p_floor": found.p_floor}
    return told


def _mechanical(
    statistics: GradientStatistics, row: int, label: Label, found: EnergyRatio
) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for kind, name in NULLS.items():
        null = statistics.ratio(row, kind)
        if null is not None:
            told[f"{name}_ratio"] = null.exact_ratio
            told[f"excess_{name}"] = found.exact_excess(null)
    if label.activation_share is not None and 0 < label.activation_share < 1:
        own = EnergyRatio(label.activation_share, (), 1.0, label.d, label.rank)
        told["activation_ratio"] = own.exact_ratio
        if label.side == "input":  # on the output side they are no part of the gradient
            told["excess_activations"] = found.exact_excess(own)
    mean, centred = statistics.ratio(row, "mean_part"), statistics.ratio(row, "centred_gradient")
    if mean is not None and centred is not None:
        told["mean_part"] = mean.total / found.total
        told["energy_ratio_centred"] = centred.exact_ratio
        around = statistics.ratio(row, "centred_activations")
        if around is not None:
            told["excess_centred"] = centred.exact_excess(around)
    return told


RATIOS = (
    "energy",
    "energy_ratio",
    "energy_ratio_exact",
    "pairing_ratio",
    "excess_pairing",
    "within_token_ratio",
    "excess_within_token",
    "sign_flip_ratio",
    "excess_sign_flip",
    "activation_ratio",
    "excess_activations",
    "energy_ratio_centred",
    "excess_centred",
)
PLAIN = (
    "fraction",
    "p_value",
    "mean_part",
    "efficiency",
    "isoscore",
    "delta_tangent",
    "delta_normal",
    "delta_p_value",
)


def grouped_rows(rows: Iterable[Mapping[str, Any]], by: str) -> list[dict[str, Any]]:
    """Return one row for each value of a column, in order of appearance (see :data:`MEANS`)."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)
    return [{by: value, "weights": len(group), **_means(group)} for value, group in groups.items()]


def _means(group: list[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for names, mean in ((RATIOS, geometric_mean), (PLAIN, _mean)):
        for name in names:
            values = [float(row[name]) for row in group if row.get(name) is not None]
            known = [value for value in values if not math.isnan(value)]
            if known:
                found[name if name not in P_VALUES else f"{name}_mean"] = mean(known)
    return found


def geometric_mean(values: list[float]) -> float:
    """Return ``exp(mean(log v))``: 0 where a value is 0, inf where one is inf."""
    if min(values) <= 0:
        return 0.0 if math.inf not in values else math.nan
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
