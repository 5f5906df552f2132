"""The records of a training run: on disk while it runs, and as a value afterwards."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from tl_tangent.analysis.gradients.rows import geometric_mean
from tl_tangent.analysis.gradients.statistics import GradientStatistics, Label, read_tensors
from tl_tangent.errors import TangentFileError, TangentRuntimeError
from tl_tangent.geometry import SubspaceFitter, SubspaceSet
from tl_tangent.geometry.energy import EnergyRatio
from tl_tangent.geometry.fitter_io import load_fitters, save_fitters
from tl_tangent.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FORMAT = "tl_tangent.gradient_run.2"
CHECKPOINTS, ACTIVATIONS = "checkpoints", "activations.safetensors"


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """What was recorded at one step.

    Attributes:
        step: its number.
        loss: as the loop gave it.
        energies: in Q_T and its normals; the kinds that were not measured are NaN.
        totals: in all directions.
        shares: by site, where activations were looked at: their energy around their mean in Q_T and
            in all directions.
    """

    step: int
    loss: float | None
    energies: Float[Tensor, "weight kind basis"]
    totals: Float[Tensor, "weight kind"]
    shares: Mapping[str, Float[Tensor, " column"]]


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
        self._folder = None if out is None else RunFolder(out, dict(told))
        self._every, self._told = flush_every, dict(told)
        self._pending: list[Step] = []
        self._steps: dict[int, Step] = {}
        self._labels: tuple[Label, ...] = ()
        self._fits: list[int] = []
        self._overflows: list[int] = []
        if self._folder is not None:
            self._take_up(self._folder.path)

    def _take_up(self, folder: Path) -> None:
        """Go on where an earlier run in this folder stood."""
        if not _parts(folder):
            return
        earlier = GradientRun.load(folder)
        self._labels = earlier.labels
        self._steps = {one.step: one for one in earlier.steps}
        self._fits = list(earlier.conventions["fits"])
        self._overflows = list(earlier.conventions["overflows"])

    def hold(self, labels: tuple[Label, ...]) -> None:
        """Note the weights, whose shares of the activations may have changed with a fit."""
        names = [label.name for label in labels]
        if self._labels and [label.name for label in self._labels] != names:
            raise TangentRuntimeError(
                f"the records so far are of {len(self._labels)} weights, the model has "
                f"{len(names)} others: name another folder"
            )
        self._labels = labels

    def add(self, step: Step) -> None:
        """Take one step, and put what has gathered on disk from time to time."""
        self._pending.append(step)
        if len(self._pending) >= self._every:
            self.flush()

    def overflowed(self, step: int) -> None:
        """Count a step whose gradients were not finite."""
        self._overflows.append(step)

    def last_fit(self) -> SubspaceSet | None:
        """Return Q_T as an earlier run in the same folder fitted it last."""
        if self._folder is None or not self._fits:
            return None
        return SubspaceSet.load(self._folder.path / _fit_name(max(self._fits)))

    @property
    def last_fit_step(self) -> int:
        """The step behind which Q_T was fitted last; -1 before that."""
        return max(self._fits, default=-1)

    def last_activations(self) -> dict[str, SubspaceFitter] | None:
        """Return what an earlier run in the same folder fitted last."""
        if self._folder is None or not (self._folder.path / ACTIVATIONS).exists():
            return None
        return load_fitters(self._folder.path / ACTIVATIONS)

    def refitted(
        self,
        step: int,
        subspaces: SubspaceSet,
        activations: Mapping[str, SubspaceFitter] | None = None,
    ) -> None:
        """Note that Q_T was fitted behind a step, and keep it.

        Args:
            step: its number.
            subspaces: Q_T.
            activations: what the next fit adds to, kept for a restart until the next one.
        """
        self._fits.append(step)
        if self._folder is None:
            return
        self._folder.write(_fit_name(step), subspaces.save)
        if activations is None:
            (self._folder.path / ACTIVATIONS).unlink(missing_ok=True)
        else:
            self._folder.write(ACTIVATIONS, lambda path: save_fitters(path, activations))

    def save_model(self, model: Any, step: int) -> None:
        """Save the model as it is in front of this step's update."""
        if self._folder is None:
            raise TangentRuntimeError("save_at needs a folder to save to: give out=")
        target = self._folder.path / CHECKPOINTS / f"step-{step}"
        if not target.exists():
            scratch = target.with_name(f".{target.name}.part")
            getattr(model, "module", model).save_pretrained(scratch)
            scratch.rename(target)

    def flush(self) -> None:
        """Put everything on disk."""
        if not self._pending:
            return
        gathered, self._pending = self._pending, []
        self._steps |= {one.step: one for one in gathered}
        if self._folder is not None:
            first, last = gathered[0].step, gathered[-1].step
            part = self._made(gathered)
            self._folder.write(f"steps-{first:08d}-{last:08d}.safetensors", part.save)

    def run(self) -> GradientRun:
        """Return all steps that were flushed."""
        return self._made([self._steps[step] for step in sorted(self._steps)])

    def _made(self, steps: list[Step]) -> GradientRun:
        told = {**self._told, "fits": self._fits, "overflows": self._overflows}
        return GradientRun(self._labels, tuple(steps), told)


def _fit_name(step: int) -> str:
    return f"subspaces-{step:08d}.safetensors"


@dataclass(frozen=True, eq=False, repr=False)
class GradientRun:
    """Gradient energies at the steps of a training.

    Attributes:
        labels: the weights.
        steps: in order.
        conventions: how they came about; ``fits`` are the steps behind which Q_T was fitted,
            ``overflows`` those whose gradients were not finite.
    """

    labels: tuple[Label, ...]
    steps: tuple[Step, ...]
    conventions: Mapping[str, Any]

    def to_dataframe(self, by: str = "kind") -> pd.DataFrame:
        """Return one row a step and weight, or (geometric means over weights) a step and kind.

        Columns: ``step``, ``loss``, ``energy`` (squared gradient units), ``energy_ratio`` and
        ``energy_ratio_exact`` as in :meth:`tl_tangent.GradientEnergy.to_dataframe`,
        ``activation_ratio``: the exact ratio of the activations of the same step where they were
        looked at, ``coupling``: the logarithm of the gradients' over that of the activations', and
        with nulls ``pairing_ratio``. A coupling of 1 is what activations without a mean give
        whose pairing with the output gradients is random (a mean adds its own part); a linear map
        that learns from a mean square error begins with 2, and falls as it learns (see
        :mod:`tl_tangent.geometry.gradient_flow`).

        Args:
            by: "weight", "kind", "side", or "step" for all weights together.
        """
        import pandas as pd

        rows = [row for step in self.steps for row in self._rows(step)]
        frame = pd.DataFrame(rows)
        if by == "weight" or frame.empty:
            return _with_coupling(frame)
        groups = ["step"] if by == "step" else ["step", by]
        ratios = [name for name in RATIOS if name in frame]
        found = frame.groupby(groups, sort=False)[ratios].agg(_geometric)
        found.insert(0, "loss", frame.groupby(groups, sort=False)["loss"].first())
        return _with_coupling(found.reset_index())

    def _rows(self, step: Step) -> list[dict[str, Any]]:
        found = []
        statistics = GradientStatistics(self.labels, step.energies, step.totals)
        for row, label in enumerate(self.labels):
            told: dict[str, Any] = {
                "step": step.step,
                "loss": step.loss,
                "weight": label.name,
                "kind": label.kind,
                "layer": label.layer,
                "side": label.side,
            }
            found.append(told | _ratios(step, statistics, row))
        return found

    def plot(self) -> Figure:
        """Draw ratios over steps, those of activations and the loss beside; a matplotlib figure."""
        from tl_tangent.views.run_figure import draw_run  # the one step up a floor

        return draw_run(self.to_dataframe("side"), self.conventions)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file."""
        tensors = {
            "energies": torch.stack([one.energies for one in self.steps]),
            "totals": torch.stack([one.totals for one in self.steps]),
        }
        for one in self.steps:
            tensors |= {f"{one.step}:{site}": share for site, share in one.shares.items()}
        told = {
            "format": FORMAT,
            "labels": json.dumps([asdict(label) for label in self.labels]),
            "steps": json.dumps([[one.step, one.loss] for one in self.steps]),
            "conventions": json.dumps(dict(self.conventions)),
        }
        save_file(tensors, str(path), metadata=told)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> GradientRun:
        """Read the folder of a recorder; later parts replace the steps that they repeat.

        Raises:
            TangentFileError: a foreign file, or no records at all.
        """
        files = _parts(Path(folder))
        if not files:
            raise TangentFileError(f"{folder} holds no steps-*.safetensors of a GradientRecorder")
        parts = [_read_part(path) for path in files]
        steps = {one.step: one for part in parts for one in part.steps}
        ordered = tuple(steps[step] for step in sorted(steps))
        return cls(parts[-1].labels, ordered, parts[-1].conventions)

    def __repr__(self) -> str:
        last = f", last step {self.steps[-1].step}" if self.steps else ""
        return (
            f"GradientRun({self.conventions['model']}: {len(self.steps)} steps of "
            f"{len(self.labels)} weights{last}, proxy {self.conventions['proxy']})"
        )


RATIOS = ("energy", "energy_ratio", "energy_ratio_exact", "activation_ratio", "pairing_ratio")


def _ratios(step: Step, statistics: GradientStatistics, row: int) -> dict[str, float]:
    found, label = statistics.ratio(row), statistics.labels[row]
    if found is None:
        return {"energy": 0.0}
    told = {"energy": found.total, "energy_ratio_exact": found.exact_ratio}
    if found.normals:
        told["energy_ratio"] = found.ratio
    null = statistics.ratio(row, "pairing")
    if null is not None:
        told["pairing_ratio"] = null.exact_ratio
    share = step.shares.get(label.site)
    if share is not None and float(share[-1]) > 0:
        own = EnergyRatio.of(share[:-1], share[-1], d=label.d, rank=label.rank)
        told["activation_ratio"] = own.exact_ratio
    return told


def _with_coupling(frame: pd.DataFrame) -> pd.DataFrame:
    if "activation_ratio" not in frame:
        return frame
    gradients, activations = np.log(frame["energy_ratio_exact"]), np.log(frame["activation_ratio"])
    return frame.assign(coupling=gradients / activations.where(activations != 0))


def _parts(folder: Path) -> list[Path]:
    """The files of a run, the last written last."""
    return sorted(folder.glob("steps-*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def _geometric(values: Any) -> float:
    known = [float(value) for value in values if not math.isnan(value)]
    return geometric_mean(known) if known else math.nan


def _read_part(path: Path) -> GradientRun:
    told, tensors = read_tensors(path, FORMAT)
    labels = tuple(Label(**one) for one in json.loads(told["labels"]))
    shares: dict[int, dict[str, Tensor]] = {}
    for name, one in tensors.items():
        step, mark, site = name.partition(":")
        if mark:
            shares.setdefault(int(step), {})[site] = one
    steps = tuple(
        Step(step, loss, energies, totals, shares.get(step, {}))
        for (step, loss), energies, totals in zip(
            json.loads(told["steps"]), tensors["energies"], tensors["totals"], strict=True
        )
    )
    return GradientRun(labels, steps, json.loads(told["conventions"]))
