"""What an alignment test found: tables by phase and by checkpoint, a headline and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tl_tangent.analysis.gradients.rows import grouped_rows
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import SubspaceSet
from tl_tangent.geometry.display import html_table
from tl_tangent.run_folder import RunFolder
from tl_tangent.studies.alignment_rows import (
    GROUPS,
    Group,
    checkpoint_rows,
    excess_lead,
    phase_summary,
    weights_by,
)
from tl_tangent.studies.alignment_words import cautions, model_line, models_line
from tl_tangent.studies.measured import MeasuredCheckpoint
from tl_tangent.studies.phases import PHASES, Phase

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

By = Literal["weight", "checkpoint", "kind", "layer", "side"]
BY: tuple[By, ...] = ("weight", "checkpoint", "kind", "layer", "side")
FILES = TABLE, CHECKPOINTS, PICTURE, REPORT = (
    "table.csv",
    "checkpoints.csv",
    "curve.png",
    "align.json",
)


@dataclass(frozen=True, eq=False, repr=False)
class MeasuredSeries:
    """One model.

    Attributes:
        name: of the model.
        phases: of its checkpoints.
        subspaces: Q_T at every site.
        checkpoints: what was measured of each, in the order of their steps.
        conventions: which checkpoints and batches, JSON-able.
    """

    name: str
    phases: tuple[Phase, ...]
    subspaces: SubspaceSet
    checkpoints: tuple[MeasuredCheckpoint, ...]
    conventions: Mapping[str, Any]

    def of_phase(self, phase: Phase) -> list[MeasuredCheckpoint]:
        """Return the checkpoints of a phase."""
        pairs = zip(self.checkpoints, self.phases, strict=True)
        return [checkpoint for checkpoint, own in pairs if own == phase]

    @property
    def losses(self) -> dict[str, float]:
        """The mean loss of the checkpoints of either phase."""
        found = {phase: [one.loss for one in self.of_phase(phase)] for phase in PHASES}
        return {phase: math.fsum(values) / len(values) for phase, values in found.items()}

    def table(self, by: Group = "model") -> list[dict[str, Any]]:
        """Return one row a group of weights, early and late side by side."""
        groups = weights_by(self.checkpoints[0].statistics.labels, by)
        return [self._table_row(by, value, weights) for value, weights in groups.items()]

    def _is_paired(self, weight: int) -> bool:
        """Whether a weight has the null of random pairing."""
        return any("pairing_ratio" in one.rows[weight] for one in self.checkpoints)

    def _table_row(self, by: Group, value: Any, weights: list[int]) -> dict[str, Any]:
        found = {phase: phase_summary(self.of_phase(phase), weights) for phase in PHASES}
        names = dict.fromkeys(name for phase in PHASES for name in found[phase])
        return {
            "model": self.name,
            **({} if by == "model" else {by: value}),
            "weights": len(weights),
            "weights_paired": sum(self._is_paired(i) for i in weights),
            **{f"checkpoints_{phase}": len(self.of_phase(phase)) for phase in PHASES},
            **{
                f"{name}_{phase}": found[phase].get(name, math.nan)
                for name in names
                for phase in PHASES
            },
            **excess_lead(self.of_phase("early"), self.of_phase("late"), weights),
        }


@dataclass(frozen=True, eq=False, repr=False)
class AlignmentTest:
    """What was found, for one model or several.

    Attributes:
        models: each with its checkpoints.
        conventions: how the numbers came about, JSON-able; ``meaning`` has the columns.
    """

    models: tuple[MeasuredSeries, ...]
    conventions: Mapping[str, Any]

    @property
    def checkpoints(self) -> pd.DataFrame:
        """One row a checkpoint and weight."""
        return self.to_dataframe()

    def to_dataframe(self, by: By = "weight") -> pd.DataFrame:
        """Return one row a checkpoint and weight, or a checkpoint and kind, layer or side.

        "checkpoint" gives one row a checkpoint. Of several weights the geometric mean of ratios is
        told, and the mean of the rest.

        Raises:
            TangentValueError: another ``by``.
        """
        import pandas as pd

        if by not in BY:
            raise TangentValueError(f"by is one of {', '.join(BY)}, got {by!r}")
        rows = []
        for model in self.models:
            for phase, one in zip(model.phases, model.checkpoints, strict=True):
                told = {"model": model.name, "step": one.step, "phase": phase, "loss": one.loss}
                own = checkpoint_rows(one)
                found = (
                    own if by == "weight" else grouped_rows(own, {"checkpoint": "step"}.get(by, by))
                )
                rows += [told | row for row in found]
        return pd.DataFrame(rows)

    def table(self, by: Group = "model") -> pd.DataFrame:
        """Return one row a model, with early and late columns; or one a model and kind, and so on.

        Raises:
            TangentValueError: another ``by``.
        """
        import pandas as pd

        if by not in GROUPS:
            raise TangentValueError(f"by is one of {', '.join(GROUPS)}, got {by!r}")
        return pd.DataFrame([row for model in self.models for row in model.table(by)])

    def headline(self) -> str:
        """State whether early exceeds late, and how much of that is mechanical."""
        rows = [{str(k): v for k, v in row.items()} for row in self.table().to_dict("records")]
        pairs = zip(rows, self.models, strict=True)
        within = self.conventions["settings"]["within"]
        lines = [model_line(row, model.conventions, within) for row, model in pairs]
        return "\n".join([models_line(rows), *lines] if len(rows) > 1 else lines)

    def cautions(self) -> list[str]:
        """Return what the losses give reason to doubt: one that rises, or is that of a guess."""
        return [
            told
            for model in self.models
            for told in cautions(model.name, model.losses, model.conventions)
        ]

    def plot(self) -> Figure:
        """Draw the ratios, what is mechanical of them, and the loss, over the steps."""
        from tl_tangent.views.alignment_figure import draw_alignment  # the one step up a floor

        within = self.conventions["settings"]["within"]
        return draw_alignment(self.to_dataframe("checkpoint"), within)

    def save(self, folder: str | PathLike[str], command: str | None = None) -> list[Path]:
        """Write table.csv (by model, kind and side), checkpoints.csv, curve.png and align.json.

        Raises:
            TangentValueError: the folder holds a test of other settings.
            TangentFileError: it can't be written.
        """
        import pandas as pd

        out = RunFolder(folder, self.conventions["settings"])
        parts = [self.table(by) for by in ("model", "kind", "side")]
        table = pd.concat(parts, ignore_index=True)
        ahead = [name for name in ("model", "kind", "side") if name in table]
        table = table[[*ahead, *(name for name in table if name not in ahead)]]
        told = {
            "command": command,
            "headline": self.headline(),
            "cautions": self.cautions(),
            "files": {"table": TABLE, "checkpoints": CHECKPOINTS, "picture": PICTURE},
            "conventions": self.conventions,
        }
        return [
            out.write(TABLE, lambda path: table.to_csv(path, index=False)),
            out.write(CHECKPOINTS, lambda path: self.checkpoints.to_csv(path, index=False)),
            out.write(PICTURE, lambda path: self.plot().savefig(path, dpi=130, format="png")),
            out.write_text(REPORT, json.dumps(told, indent=2) + "\n"),
        ]

    def __repr__(self) -> str:
        return f"AlignmentTest of {', '.join(one.name for one in self.models)}: {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.table().round(4).astype(object).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())
