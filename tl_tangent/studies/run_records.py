"""The folder of a training run that is recorded: what reaches the disk, and how it is taken up.

configuration.json             what is recorded
steps-000001.safetensors       the steps that were flushed together; later parts replace
subspaces-00000099.safetensors Q_T as it was fitted behind step 99
activations-00000119.safetensors  what the next fit adds to, as it stood behind step 119
notes.json                     restarts, overflows, and which activations there are
checkpoints/step-100           the model before the update of step 100
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tl_tangent.analysis.gradients.statistics import Label
from tl_tangent.errors import TangentFileError, TangentRuntimeError
from tl_tangent.geometry import SubspaceFitter, SubspaceSet
from tl_tangent.geometry.fitter_io import load_fitters, save_fitters
from tl_tangent.run_folder import CONFIGURATION, RunFolder
from tl_tangent.studies.gradient_run import GradientRun, Step, read_steps, write_steps

CHECKPOINTS, NOTES = "checkpoints", "notes.json"
STATES_KEPT = 2  # those with activations, which are large; the last checkpoint may be broken


@dataclass(frozen=True)
class State:
    """What a recorder knows between two steps.

    Attributes:
        step: the one that was recorded last.
        calls: how many were recorded.
        rows: whether there are activations that the next fit adds to.
    """

    step: int
    calls: int
    rows: bool


class Records:
    """Steps on their way to the disk.

    Args:
        out: the folder; None keeps everything in memory.
        flush_every: steps that are kept back at most.
        told: what the run is about, JSON-able; another run in the same folder is refused.
    """

    def __init__(
        self, out: str | os.PathLike[str] | None, flush_every: int, told: Mapping[str, Any]
    ) -> None:
        self._every = flush_every
        self._told = dict(told) if out is None else _named_as_begun(Path(out), told)
        self._folder = None if out is None else RunFolder(out, self._told)
        self._pending: dict[int, Step] = {}
        self._steps: dict[int, Step] = {}  # of a run in memory
        self._labels: tuple[Label, ...] = ()
        self._fits: list[int] = []
        notes = _read_notes(self._folder.path) if self._folder else _no_notes()
        self._overflows: list[int] = notes["overflows"]
        self._resumed: list[dict[str, Any]] = notes["resumed"]
        self._states = [State(**one) for one in notes["states"]]
        self._last = -1
        if self._folder is not None:
            self._take_up(self._folder.path)
        self._parts = self._next_part() - 1  # that are on disk

    def _take_up(self, folder: Path) -> None:
        """Note where an earlier run in this folder stood."""
        self._fits = fits_in(folder)
        earlier = _read_parts(folder, self._resumed)
        if earlier is not None:
            self._labels, steps = earlier
            self._last = max(steps, default=-1)
        ends = [state.step for state in self._states]
        self._last = max([self._last, *self._fits, *self._overflows, *ends])

    # Going on --------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """The last step that is known; -1 in a new folder."""
        return self._last

    def state_before(self, start: int) -> State | None:
        """Return what was known last between two steps before ``start``."""
        before = [state for state in self._states if state.step < start]
        return before[-1] if before else None

    def fit_before(self, start: int) -> int:
        """Return the step behind which Q_T was fitted last before ``start``; -1 for none."""
        return max((fit for fit in self._fits if fit < start), default=-1)

    def go_on(self, start: int, activations_until: int | None) -> None:
        """Note a restart, and forget what an earlier run knew of ``start`` and later.

        Args:
            start: the first step to come.
            activations_until: where some activations are missing, the last step that has them.
        """
        restart = {"step": start, "part": self._next_part(), "activations_until": activations_until}
        self._resumed.append(restart)
        self._overflows, _ = _split(self._overflows, start)
        self._keep_states([state for state in self._states if state.step < start])
        self._fits, later = _split(self._fits, start)
        if self._folder is not None:
            for fit in later:
                (self._folder.path / _fit_name(fit)).unlink(missing_ok=True)
        self._last = min(self._last, start - 1)

    def last_fit(self) -> SubspaceSet | None:
        """Return Q_T as it was fitted last."""
        if self._folder is None or not self._fits:
            return None
        return SubspaceSet.load(self._folder.path / _fit_name(self._fits[-1]))

    def activations(self, state: State) -> dict[str, SubspaceFitter] | None:
        """Return what the next fit adds to; None if that is nothing yet."""
        if self._folder is None or not state.rows:
            return None
        file = self._folder.path / _activations_name(state.step)
        try:
            return load_fitters(file)
        except (FileNotFoundError, TangentFileError) as error:
            raise TangentFileError(
                f"what the next fit adds to, as it stood behind step {state.step}, can't be read "
                f"({error}). Put {file.name} back, give a start of {state.step} or less, or begin "
                "a new run in another folder"
            ) from error

    # Recording -------------------------------------------------------------------------------

    def hold(self, labels: tuple[Label, ...]) -> None:
        """Note the weights, whose shares of the activations may have changed with a fit.

        Steps that wait are flushed: they were held against another Q_T.
        """
        names = [label.name for label in labels]
        if self._labels and [label.name for label in self._labels] != names:
            raise TangentRuntimeError(
                f"the records so far are of {len(self._labels)} weights, the model has "
                f"{len(names)} others: name another folder"
            )
        self.flush()
        self._labels = labels

    def add(self, step: Step) -> None:
        """Take one step, and put what has gathered on disk from time to time."""
        self._pending[step.step] = step
        self._last = max(self._last, step.step)
        if len(self._pending) >= self._every:
            self.flush()

    def overflowed(self, step: int) -> None:
        """Count a step whose gradients were not finite."""
        if step not in self._overflows:
            self._overflows.append(step)
        self._last = max(self._last, step)
        self._write_notes()

    def refitted(self, step: int, subspaces: SubspaceSet) -> None:
        """Note that Q_T was fitted behind a step, and keep it."""
        if self._folder is not None:
            self._folder.write(_fit_name(step), subspaces.save)
        self._fits.append(step)
        self._last = max(self._last, step)

    def keep(self, state: State, activations: Mapping[str, SubspaceFitter] | None) -> None:
        """Put all steps on disk, and what a restart behind ``state.step`` needs."""
        self.flush()
        if self._folder is None:
            return
        if activations is not None:
            name = _activations_name(state.step)
            self._folder.write(name, lambda path: save_fitters(path, activations))
        states = [one for one in self._states if one.step != state.step] + [state]
        large = [one for one in states if one.rows][-STATES_KEPT:]
        self._keep_states([one for one in states if one in large or not one.rows])

    def _keep_states(self, states: list[State]) -> None:
        dropped = {one.step for one in self._states} - {one.step for one in states}
        self._states = states
        self._write_notes()
        if self._folder is not None:
            for step in dropped:
                (self._folder.path / _activations_name(step)).unlink(missing_ok=True)

    def save_model(self, model: Any, step: int) -> None:
        """Save the model as it is in front of this step's update."""
        if self._folder is None:
            raise TangentRuntimeError("save_at needs a folder to save to: give out=")
        target = self._folder.path / CHECKPOINTS / f"step-{step}"
        scratch = target.with_name(f".{target.name}.part")
        shutil.rmtree(scratch, ignore_errors=True)
        getattr(model, "module", model).save_pretrained(scratch)
        shutil.rmtree(target, ignore_errors=True)  # of a future that a restart has undone
        scratch.rename(target)

    def flush(self) -> None:
        """Put the steps that wait on disk."""
        if not self._pending:
            return
        if self._folder is None:
            self._steps |= self._pending
        else:
            ordered = tuple(self._pending[step] for step in sorted(self._pending))
            name = _part_name(self._own_part())
            self._folder.write(name, lambda path: write_steps(path, self._labels, ordered, {}))
            self._parts += 1
        self._pending = {}  # what could not be written still waits

    def run(self) -> GradientRun:
        """Return all steps so far."""
        self.flush()
        if self._folder is not None and _parts(self._folder.path):
            return read_records(self._folder.path)
        ordered = tuple(self._steps[step] for step in sorted(self._steps))
        told = {"fits": self._fits, "overflows": self._overflows, "resumed": self._resumed}
        return GradientRun(self._labels, ordered, {**self._told, **told})

    def _own_part(self) -> int:
        """The number of the next part, if nobody else has written one here."""
        number = self._next_part()
        if number > self._parts + 1:
            raise TangentRuntimeError(
                f"another recorder has written part {number - 1} "
                "into this folder since this one was made: give each its own out=, and of several "
                "processes that train one model let one record"
            )
        return number

    def _next_part(self) -> int:
        if self._folder is None:
            return 0
        return max((_number(path) for path in _parts(self._folder.path)), default=0) + 1

    def _write_notes(self) -> None:
        if self._folder is None:
            return
        notes = {
            "overflows": self._overflows,
            "resumed": self._resumed,
            "states": [vars(state) for state in self._states],
        }
        self._folder.write_text(NOTES, json.dumps(notes, indent=2) + "\n")


# Reading ------------------------------------------------------------------------------------------


def read_records(folder: Path) -> GradientRun:
    """Read the folder of a recorder.

    Raises:
        TangentFileError: no records, or files that can't be read.
    """
    notes = _read_notes(folder)
    found = _read_parts(folder, notes["resumed"])
    if found is None:
        raise TangentFileError(
            f"{folder} holds no steps-*.safetensors of a GradientRecorder: name its out= folder, "
            "or a file that GradientRun.save wrote"
        )
    labels, steps = found
    told = _read_json(folder / CONFIGURATION)
    told |= {"fits": fits_in(folder)}
    told |= {name: notes[name] for name in ("overflows", "resumed")}
    return GradientRun(labels, tuple(steps[step] for step in sorted(steps)), told)


def _named_as_begun(folder: Path, told: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the first name of the model: one that is loaded from a checkpoint goes by its path."""
    file = folder / CONFIGURATION
    begun = _read_json(file) if file.exists() else told
    return {**told, "model": begun.get("model")}


def fits_in(folder: Path) -> list[int]:
    """The steps behind which Q_T was fitted, by the files that hold it."""
    return sorted(_number(path) for path in folder.glob("subspaces-*.safetensors"))


def _read_parts(
    folder: Path, resumed: list[dict[str, Any]]
) -> tuple[tuple[Label, ...], dict[int, Step]] | None:
    """Read all parts in the order in which they were written; None if there are none.

    A later part replaces the steps that it repeats, and a restart undoes those it begins before.
    """
    labels: tuple[Label, ...] | None = None
    steps: dict[int, Step] = {}
    restarts = list(resumed)
    for path in _parts(folder):
        while restarts and restarts[0]["part"] <= _number(path):
            start = restarts.pop(0)["step"]
            steps = {step: one for step, one in steps.items() if step < start}
        labels, some, _ = read_steps(path)
        steps |= {one.step: one for one in some}
    for restart in restarts:
        steps = {step: one for step, one in steps.items() if step < restart["step"]}
    return None if labels is None else (labels, steps)


def _read_notes(folder: Path) -> dict[str, Any]:
    file = folder / NOTES
    notes = _read_json(file) if file.exists() else _no_notes()
    try:
        [State(**one) for one in notes["states"]]
        [(one["step"], one["part"]) for one in notes["resumed"]]
        [step + 0 for step in notes["overflows"]]
    except (KeyError, TypeError) as error:
        raise TangentFileError(
            f"{file} does not tell the restarts, overflows and states of a GradientRecorder "
            f"({error!r}): put back a copy of it, or name another folder"
        ) from error
    return notes


def _no_notes() -> dict[str, Any]:
    return {"overflows": [], "resumed": [], "states": []}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise TangentFileError(
            f"{path} can't be read ({error}): name the folder of a GradientRecorder"
        ) from error


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("steps-*.safetensors"), key=_number)


def _number(path: Path) -> int:
    try:
        return int(path.stem.rpartition("-")[2])
    except ValueError as error:
        raise TangentFileError(
            f"{path} has a name that a GradientRecorder never gives, which ends in a number: move "
            "it out of this folder"
        ) from error


def _part_name(number: int) -> str:
    return f"steps-{number:06d}.safetensors"


def _fit_name(step: int) -> str:
    return f"subspaces-{step:08d}.safetensors"


def _activations_name(step: int) -> str:
    return f"activations-{step:08d}.safetensors"


def _split(steps: list[int], start: int) -> tuple[list[int], list[int]]:
    return [step for step in steps if step < start], [step for step in steps if step >= start]
