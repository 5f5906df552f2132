"""The whole test on a training run that fits in minutes: train, record, and hold it against Q_T.

A small language model is trained on the docstrings of the installed packages, once as it should be
and once with shuffled labels, which leave nothing to be learned from the context. Gradients are
recorded at every step of both; afterwards their checkpoints go through the alignment test.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tl_tangent.assets.docstrings import EncodedText, installed_docstrings
from tl_tangent.errors import TangentValueError
from tl_tangent.folder_lock import only_writer
from tl_tangent.hooks.gradients.objectives import Batch
from tl_tangent.studies.alignment import alignment_test
from tl_tangent.studies.alignment_result import AlignmentTest
from tl_tangent.studies.checkpoints import CheckpointSeries
from tl_tangent.studies.gradient_run import GradientRun
from tl_tangent.studies.recorder import GradientRecorder
from tl_tangent.studies.small_options import SmallRunOptions
from tl_tangent.studies.small_run import CHECKPOINTS, SmallRun, run_rows, train_small

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAIN, CONTROL = "trained", "shuffled labels"
BOUNDARY = 0.3


@dataclass(frozen=True, eq=False, repr=False)
class SmallStudy:
    """Both runs, what was recorded while they trained, and the alignment test of their checkpoints.

    Attributes:
        runs: by name; each with its loss curve and the losses of n-grams.
        records: by name.
        alignment: of both.
    """

    runs: dict[str, SmallRun]
    records: dict[str, GradientRun]
    alignment: AlignmentTest

    def headline(self) -> str:
        """State how far the model got, and what the test says."""
        run = self.runs[MAIN]
        loss = float(run.losses["validation_loss"].dropna().iloc[-1])
        side = "below" if loss < run.baselines.bigram else "above"
        return (
            f"After {run.options.steps} steps the validation loss is {loss:.2f} nats a token, "
            f"{side} the bigrams' {run.baselines.bigram:.2f} (unigrams "
            f"{run.baselines.unigram:.2f}). {self.alignment.headline()}"
        )

    def save(self, out: str | os.PathLike[str], command: str | None = None) -> list[Path]:
        """Write the test's tables and curve into ``alignment``, and a picture into each run.

        Raises:
            TangentError: as :meth:`AlignmentTest.save`.
        """
        written = self.alignment.save(Path(out) / "alignment", command)
        for name, records in self.records.items():
            picture = self.runs[name].folder / "steps.png"
            records.plot().savefig(picture, dpi=130)
            written.append(picture)
        return written

    def plot(self) -> Figure:
        """Draw energy ratios over the checkpoints of both runs; a matplotlib figure."""
        return self.alignment.plot()


def small_study(
    out: str | os.PathLike[str],
    options: SmallRunOptions | None = None,
    *,
    text: EncodedText | None = None,
    rank: int = 8,
    n_controls: int = 20,
    rows: int = 64,
    batch: int = 16,
    executor: Any = None,
    progress: bool = True,
) -> SmallStudy:
    """Train both runs, or go on where they stood, and test them.

    Args:
        out: folder of everything: ``trained`` and ``shuffled-labels`` with checkpoints and records,
            and ``alignment``.
        options: of the runs; their ``control`` is set here.
        text: what to train on; the docstrings of the installed packages if None.
        rank, n_controls: see :func:`~tl_tangent.alignment_test`.
        rows, batch: validation rows that gradients are measured on at every checkpoint, and how
            many of them make one gradient. Q_T is fitted on as many others.
        executor: of the test; see :func:`~tl_tangent.alignment_test`.
        progress: show progress bars on stderr.

    Raises:
        TangentValueError: more rows than there are.
        TangentFileError: another process writes into the folder.
        TangentError: as the parts that it is made of.
    """
    folder, options = Path(out), options or SmallRunOptions()
    text = text or installed_docstrings(progress=progress)
    wanted = {
        MAIN: replace(options, control=None),
        CONTROL: replace(options, control="shuffled_labels"),
    }
    runs: dict[str, SmallRun] = {}
    records: dict[str, GradientRun] = {}
    with only_writer(folder):
        for name, own in wanted.items():
            place = folder / name.replace(" ", "-")
            runs[name], records[name] = _trained(place, own, text, rank, n_controls, progress)
        series = [
            replace(CheckpointSeries.from_folder(run.folder / CHECKPOINTS), name=name)
            for name, run in runs.items()
        ]
        _, validation = run_rows(text, options)
        if 2 * rows > len(validation):
            raise TangentValueError(
                f"rows={rows} to measure and as many others to fit on are more than the "
                f"{len(validation)} validation rows: ask for fewer, or raise validation_rows"
            )
        alignment = alignment_test(
            series,
            _batches(validation[:rows, :-1], batch, options.seed),
            fit_batches=list(validation[rows : 2 * rows, :-1].split(batch)),
            rank=rank,
            n_controls=n_controls,
            boundary=BOUNDARY,
            within="token",
            out=folder / "alignment",
            executor=executor,
            threads=torch.get_num_threads(),
            progress=progress,
        )
    return SmallStudy(runs, records, alignment)


def _trained(
    folder: Path,
    options: SmallRunOptions,
    text: EncodedText,
    rank: int,
    n_controls: int,
    progress: bool,
) -> tuple[SmallRun, GradientRun]:
    """Train one run with a recorder on it, whose Q_T follows through the early phase."""
    with ExitStack() as stack:
        recorders: list[GradientRecorder] = []

        def begin(model: Any, step: int) -> None:
            recorder = GradientRecorder(
                model,
                out=folder / "records",
                start=step,
                proxy="early",
                freeze_at=int(BOUNDARY * options.steps),
                rank=rank,
                n_controls=n_controls,
                refit_every=options.every,
                activations_every=5,
            )
            recorders.append(stack.enter_context(recorder))

        run = train_small(
            folder,
            options,
            text=text,
            on_start=begin,
            on_step=lambda _, step, loss: recorders[0].record(step, loss),
            on_keep=lambda: recorders[0].flush() if recorders else None,
            progress=progress,
        )
    return run, GradientRun.load(folder / "records")


def _batches(rows: Tensor, size: int, seed: int) -> Callable[[CheckpointSeries], list[Batch]]:
    """The batches of a series; the control's labels are shuffled as they were in training."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(part.numel(), generator=generator) for part in rows.split(size)]

    def of(series: CheckpointSeries) -> list[Batch]:
        parts = rows.split(size)
        if series.name != CONTROL:
            return [Batch(part) for part in parts]
        return [
            Batch(part, labels=part.flatten()[order].view(part.shape))
            for part, order in zip(parts, orders, strict=True)
        ]

    return of
