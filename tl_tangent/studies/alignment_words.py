"""What an alignment test says in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tl_tangent.analysis.gradients.meter import Within
from tl_tangent.studies.phases import PHASES

LOOK = (
    "look whether the text, the tokenizer and the objective are those of the training, and the "
    "checkpoints of one run"
)


GROUPS = {
    "token": "Paired among equal input tokens only,",
    "shuffled": "Paired in groups of the sizes of those of equal input tokens,",
}


def model_line(
    row: Mapping[str, Any], conventions: Mapping[str, Any], within: Within | None = None
) -> str:
    """Tell one model: the ratios, what of them is mechanical, and what they are measured on.

    Ratios are exact ones over the weights that have a pairing null, so that what is told
    multiplies: the lead of early is that of the null times that of the excess.

    Args:
        row: of the table by model.
        conventions: of the model.
        within: in which groups tokens are also paired at random.
    """
    early, late = (_ratio(row, phase) for phase in PHASES)
    one, other = (_count(row[f"checkpoints_{phase}"]) for phase in PHASES)
    told = (
        f"{row['model']}: Q_T holds early {early:.3g} ({one}) / late {late:.3g} ({other}) "
        "times the gradient energy that the directions beside it hold, per direction"
    )
    verb = "exceeds" if early > late else "does not exceed"
    lead = f"early {verb} late: a factor of {_over(early, late):.3g}"
    if "pairing_ratio_early" in row:
        told += f", of which paired at random {_both(row, 'pairing_ratio')}{_share(row)}"
        lead += f" = {_factors(row)}"
    beyond = ""
    if within is not None and "excess_within_token_early" in row:
        beyond = f" {GROUPS[within]} the excess is {_both(row, 'excess_within_token')}."
    p_values = _both(row, "p_value")
    return (
        f"{told}; {lead}.{beyond} p against matched normals: {p_values}. {_measured(conventions)}"
    )


def models_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Count the models in which early exceeds late."""
    early = sum(_ratio(row, "early") > _ratio(row, "late") for row in rows)
    told = f"Early exceeds late in {early} of {len(rows)} models"
    if "lead_excess_low" in rows[0]:
        clear = sum(row["lead_excess_low"] > 1 for row in rows)
        told += f", and in {clear} clearly so beyond what is mechanical"
    return f"{told}."


def _ratio(row: Mapping[str, Any], phase: str) -> float:
    exact = row.get(f"energy_ratio_exact_{phase}", math.nan)
    return row.get(f"energy_ratio_paired_{phase}", exact)


def _share(row: Mapping[str, Any]) -> str:
    """Say which weights it is about, where some have no null."""
    some, all_ = row["weights_paired"], row["weights"]
    return "" if some == all_ else f" (over the {some} of {all_} weights that have this null)"


def _factors(row: Mapping[str, Any]) -> str:
    """Take the lead of early apart."""
    null, excess = (
        _over(row[f"{name}_early"], row[f"{name}_late"])
        for name in ("pairing_ratio", "excess_pairing")
    )
    low, high = row["lead_excess_low"], row["lead_excess_high"]
    interval = f"95 % interval over weights: {low:.3g} to {high:.3g}"
    if math.isnan(low):
        interval = "too few weights for an interval"
    both = _both(row, "excess_pairing")
    return f"{null:.3g} of the null x {excess:.3g} of the excess ({both}; {interval})"


def _measured(conventions: Mapping[str, Any]) -> str:
    """Say how many tokens make one gradient, and whether Q_T has seen them."""
    batches, tokens = (conventions["batches"][name] for name in ("batches", "tokens"))
    average = " on average" if tokens % batches else ""
    rows, fitted = conventions["rows"], conventions["rows_in_fit"]
    fit = "on other tokens"
    if fitted:
        fit = f"on {fitted} of these {rows} rows too (partly in-sample)"
    if fitted == rows:
        fit = "on the same tokens (in-sample)"
    return f"One gradient is of {tokens / batches:.0f} tokens{average}; Q_T was fitted {fit}."


def _both(row: Mapping[str, Any], name: str) -> str:
    early, late = (row.get(f"{name}_{phase}", math.nan) for phase in PHASES)
    return f"{early:.3g} / {late:.3g}"


def _count(n: int) -> str:
    return f"{n} checkpoint{'s' * (n != 1)}"


def _over(a: float, b: float) -> float:
    return a / b if b else math.inf


def cautions(name: str, losses: Mapping[str, float], conventions: Mapping[str, Any]) -> list[str]:
    """Return what the losses of a model give reason to doubt.

    Args:
        name: of the model.
        losses: means over the checkpoints of either phase, in nats a predicted token.
        conventions: of the model.
    """
    found = []
    early, late = losses["early"], losses["late"]
    if late > early:
        found.append(
            f"the mean loss of {name} rises from {early:.3g} early to {late:.3g} late: {LOOK}"
        )
    n, known = conventions.get("vocabulary"), conventions["objective"] in ("causal", "masked")
    if n and known and late > (guess := math.log(n)):
        found.append(
            f"the mean loss of {name} late, {late:.3g} nats a token, is above the {guess:.3g} of a "
            f"blind guess among {n} token ids: {LOOK}"
        )
    return found
