"""Gradient energies at the steps of a training, as a value, a table and a file."""

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
from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.geometry.energy import EnergyRatio
from tl_tangent.geometry.token_energies import KINDS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FORMAT = "tl_tangent.gradient_run.3"
RATIOS = ("energy", "energy_ratio", "energy_ratio_exact", "activation_ratio", "pairing_ratio")


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """What was recorded at one step.

    Attributes:
        step: its number.
        loss: as the loop gave it.
        energies: in Q_T and its normals; one kind, that of the gradient, where no nulls were
            measured, else all :data:`~tl_tangent.geometry.token_energies.KINDS`.
        totals: in all directions.
        shares: by site, where activations were looked at: their energy around their mean in Q_T and
            in all directions.
    """

    step: int
    loss: float | None
    energies: Float[Tensor, "weight kind basis"]
    totals: Float[Tensor, "weight kind"]
    shares: Mapping[str, Float[Tensor, " column"]]

    def statistics(self, labels: tuple[Label, ...]) -> GradientStatistics:
        """Return the energies with all kinds, NaN where a kind was not measured."""
        missing = len(KINDS) - self.totals.shape[1]
        energies = torch.nn.functional.pad(self.energies, (0, 0, 0, missing), value=math.nan)
        totals = torch.nn.functional.pad(self.totals, (0, missing), value=math.nan)
        return GradientStatistics(labels, energies, totals)


@dataclass(frozen=True, eq=False, repr=False)
class GradientRun:
    """Gradient energies at the steps of a training.

    Attributes:
        labels: the weights.
        steps: in order.
        conventions: how they came about. ``fits`` are the steps behind which Q_T was fitted,
            ``overflows`` those whose gradients were not finite, ``resumed`` the restarts; one whose
            ``activations_until`` is a step and not null misses the activations from there on in
            the fit that followed it.
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
        with nulls ``pairing_ratio`` and ``excess_pairing``, the exact ratio over it. A coupling of
        1 is what activations without a mean give whose pairing with the output gradients is random
        (a mean adds its own part); a linear map that learns from a mean square error begins with 2,
        and falls as it learns (see :mod:`tl_tangent.geometry.gradient_flow`).

        Args:
            by: "weight", "kind", "side", or "step" for all weights together.

        Raises:
            TangentValueError: another ``by``.
        """
        if by not in ("weight", "kind", "side", "step"):
            raise TangentValueError(f"by is 'weight', 'kind', 'side' or 'step', got {by!r}")
        import pandas as pd

        rows = [row for step in self.steps for row in self._rows(step)]
        frame = pd.DataFrame(rows)
        if by == "weight" or frame.empty:
            return _with_quotients(frame)
        groups = ["step"] if by == "step" else ["step", by]
        ratios = [name for name in RATIOS if name in frame]
        found = frame.groupby(groups, sort=False)[ratios].agg(_geometric)
        found.insert(0, "loss", frame.groupby(groups, sort=False)["loss"].first())
        return _with_quotients(found.reset_index())

    def _rows(self, step: Step) -> list[dict[str, Any]]:
        found = []
        statistics = step.statistics(self.labels)
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
        """Draw ratios over steps, those of activations and the loss beside; a matplotlib figure.

        Raises:
            TangentRuntimeError: nothing was recorded.
        """
        from tl_tangent.views.run_figure import draw_run  # the one step up a floor

        if not self.steps:
            raise TangentRuntimeError(
                "nothing was recorded, so there is nothing to draw: a proxy that is fitted on the "
                "way records from its second step on, and a step with gradients that are not "
                f"finite is left out (steps left out: {self.conventions.get('overflows', [])})"
            )
        return draw_run(self.to_dataframe("side"), self.conventions)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, which :meth:`load` reads."""
        write_steps(Path(path), self.labels, self.steps, self.conventions)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GradientRun:
        """Read what :meth:`save` wrote, or the folder of a recorder.

        Raises:
            TangentFileError: a missing or foreign file, or no records at all.
        """
        if Path(path).is_file():
            labels, steps, told = read_steps(Path(path))
            return cls(labels, steps, told)
        from tl_tangent.studies.run_records import read_records

        return read_records(Path(path))

    def __repr__(self) -> str:
        about = self.conventions["model"] or self.conventions["model_class"]
        steps = f"{len(self.steps)} steps"
        if self.steps:
            steps += f", {self.steps[0].step} to {self.steps[-1].step}"
        overflows = self.conventions.get("overflows", [])
        left_out = f", {len(overflows)} left out for overflows" if overflows else ""
        return (
            f"GradientRun({about}: {steps}{left_out}, of {len(self.labels)} weights, "
            f"proxy {self.conventions['proxy']})"
        )


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


def _with_quotients(frame: pd.DataFrame) -> pd.DataFrame:
    if "pairing_ratio" in frame:
        frame = frame.assign(excess_pairing=frame["energy_ratio_exact"] / frame["pairing_ratio"])
    if "activation_ratio" in frame:
        gradients = np.log(frame["energy_ratio_exact"])
        activations = np.log(frame["activation_ratio"])
        frame = frame.assign(coupling=gradients / activations.where(activations != 0))
    return frame


def _geometric(values: Any) -> float:
    known = [float(value) for value in values if not math.isnan(value)]
    return geometric_mean(known) if known else math.nan


# Files --------------------------------------------------------------------------------------------


def write_steps(
    path: Path, labels: tuple[Label, ...], steps: tuple[Step, ...], told: Mapping[str, Any]
) -> None:
    """Write steps to one safetensors file."""
    tensors = {f"{one.step}:energies": one.energies.contiguous() for one in steps}
    tensors |= {f"{one.step}:totals": one.totals.contiguous() for one in steps}
    for one in steps:
        tensors |= {f"{one.step}:shares:{site}": share for site, share in one.shares.items()}
    metadata = {
        "format": FORMAT,
        "labels": json.dumps([asdict(label) for label in labels]),
        "steps": json.dumps([[one.step, one.loss] for one in steps]),
        "conventions": json.dumps(dict(told)),
    }
    save_file(tensors, str(path), metadata=metadata)


def read_steps(path: Path) -> tuple[tuple[Label, ...], tuple[Step, ...], dict[str, Any]]:
    """Read what :func:`write_steps` wrote.

    Raises:
        TangentFileError: a missing, truncated or foreign file.
    """
    told, tensors = read_tensors(path, FORMAT)
    shares: dict[int, dict[str, Tensor]] = {}
    for name, one in tensors.items():
        step, what, *site = name.split(":", 2)
        if what == "shares":
            shares.setdefault(int(step), {})[site[0]] = one
    steps = tuple(
        Step(
            step,
            loss,
            tensors[f"{step}:energies"],
            tensors[f"{step}:totals"],
            shares.get(step, {}),
        )
        for step, loss in json.loads(told["steps"])
    )
    labels = tuple(Label(**one) for one in json.loads(told["labels"]))
    return labels, steps, json.loads(told["conventions"])
