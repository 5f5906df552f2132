"""What an alignment test measures, read and checked before anything is written to its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.extractors import EXTRACTORS
from tl_tangent.geometry.rank import check_rank
from tl_tangent.hooks.gradients.objectives import Batch
from tl_tangent.hooks.gradients.weight import KINDS
from tl_tangent.studies.architecture import check_alike, outline
from tl_tangent.studies.batches import (
    batches_of,
    check_tokens,
    describe_batches,
    read_once,
    rows_in_common,
    vocabulary_of,
)
from tl_tangent.studies.checkpoints import Checkpoint, CheckpointSeries
from tl_tangent.studies.identity import describe_objective
from tl_tangent.studies.names import folder_name
from tl_tangent.studies.phases import By, Phase, check_phases, split_phases
from tl_tangent.studies.pieces import Options, chosen_weights


@dataclass(frozen=True, eq=False, repr=False)
class Prepared:
    """One series.

    Attributes:
        series: its checkpoints.
        phases: theirs.
        batches, fit: that gradients are measured on, and that Q_T is fitted on.
        told: what decides the numbers, JSON-able.
        facts: what is told beside that: ``rows`` of tokens, ``rows_in_fit`` that Q_T was fitted on
            too, and the size of the ``vocabulary``, None where it is only known of a loaded model.
    """

    series: CheckpointSeries
    phases: tuple[Phase, ...]
    batches: list[Batch]
    fit: list[Batch]
    told: dict[str, Any]
    facts: dict[str, Any]

    @property
    def early(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that Q_T is fitted at."""
        pairs = zip(self.series.checkpoints, self.phases, strict=True)
        return tuple(one for one, phase in pairs if phase == "early")


def prepare(
    many: Sequence[CheckpointSeries],
    batches: Any,
    fit_batches: Any,
    options: Options,
    *,
    boundary: float,
    by: By,
) -> list[Prepared]:
    """Read the batches of every series, split it into phases, and look whether the options fit it.

    Raises:
        TangentValueError: no series, two of one name, no batches, tokens that a model does not
            have, a phase without checkpoints, or options that do not fit the models.
        TangentFileError: models of different architectures in one series.
    """
    _check_names(many)
    measured = read_once(batches)
    fitted = measured if fit_batches is None or fit_batches is batches else read_once(fit_batches)
    found = []
    for one in many:
        check_alike(one.checkpoints)
        own = batches_of(measured, one, one.objective)
        fit = own if fitted is measured else batches_of(fitted, one)
        model = outline(one.checkpoints[0], one.objective)
        if model is not None:
            chosen_weights(model, options)
            check_tokens(own, model)
            check_tokens(fit, model)
        phases = split_phases(one.steps, boundary=boundary, by=by, total=one.total_steps)
        check_phases(phases, one.steps)
        rows, fitted_rows = rows_in_common(own, fit)
        facts = {
            "rows": rows,
            "rows_in_fit": fitted_rows,
            "vocabulary": None if model is None else vocabulary_of(model),
        }
        told = _described(one, phases, own, fit)
        found.append(Prepared(one, phases, own, fit, told, facts))
    return found


def check_options(options: Options, batches_per_piece: int | None) -> None:
    """Refuse options that no model takes.

    Raises:
        TangentValueError: naming what is accepted.
    """
    methods = [name for name in EXTRACTORS if name != "dictionary"]
    if options.method not in methods:
        raise TangentValueError(f"method {options.method!r} is not one of {', '.join(methods)}")
    check_rank(options.rank)
    unknown = [kind for kind in options.kinds or () if kind not in KINDS]
    if unknown:
        raise TangentValueError(f"kinds {unknown} are none of {', '.join(KINDS)}")
    if options.within not in (None, "token", "shuffled"):
        raise TangentValueError(f"within={options.within!r} is not None, 'token' or 'shuffled'")
    if not 0 <= options.zeta <= 1:
        raise TangentValueError(f"zeta={options.zeta} must be in [0, 1]")
    numbers = {
        "n_controls": options.n_controls,
        "threads": options.threads,
        "batches_per_piece": batches_per_piece,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise TangentValueError(f"{name}={value} must be 1 or more")
    try:
        torch.device(options.device or "cpu")
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TangentValueError(f"device={options.device!r} is none: {reason}") from error


def _check_names(many: Sequence[CheckpointSeries]) -> None:
    if not many:
        raise TangentValueError("there is no series of checkpoints: give at least one")
    names = [folder_name(one.name) for one in many]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TangentValueError(
            f"two series are called {twice[0]}: give each a name of its own, by "
            "dataclasses.replace(series, name=...)"
        )


def _described(
    series: CheckpointSeries, phases: Sequence[Phase], batches: list[Batch], fit: list[Batch]
) -> dict[str, Any]:
    """Return what decides the numbers of one series, JSON-able."""
    told = vars(series) | {
        "objective": describe_objective(series.objective),
        "checkpoints": [dict(vars(one)) for one in series.checkpoints],
        "phases": list(phases),
        "batches": describe_batches(batches),
        "fit_batches": describe_batches(fit),
    }
    return json.loads(json.dumps(told))
