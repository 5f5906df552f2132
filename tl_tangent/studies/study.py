"""One series of checkpoints, measured piece by piece in a folder from which it can go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tl_tangent.analysis.gradients.activations import fit_each
from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.geometry import SubspaceSet
from tl_tangent.geometry.fitter_io import merge_fitters
from tl_tangent.geometry.linalg import on_threads
from tl_tangent.hooks.positions import PositionMask
from tl_tangent.run_folder import RunFolder
from tl_tangent.studies.architecture import refuse_others
from tl_tangent.studies.checkpoints import Checkpoint, CheckpointSeries
from tl_tangent.studies.executors import Runner
from tl_tangent.studies.measured import MeasuredCheckpoint
from tl_tangent.studies.pieces import (
    STAGES,
    SUBSPACES,
    Piece,
    Plan,
    discard,
    gradient_pieces,
    run_piece,
)


@dataclass(frozen=True, eq=False)
class Study:
    """Measures a series: Q_T is fitted at its early checkpoints, then gradients at all of them.

    Attributes:
        series: the checkpoints.
        early: those that Q_T is fitted at.
        plan: of the pieces.
        folder: where they lie.
        runner: that computes them.
        temporary: whether the folder will be gone.
        progress: show progress bars.
    """

    series: CheckpointSeries
    early: tuple[Checkpoint, ...]
    plan: Plan
    folder: RunFolder
    runner: Runner
    temporary: bool = False
    progress: bool = False

    def measure(self) -> tuple[SubspaceSet, tuple[MeasuredCheckpoint, ...]]:
        """Return Q_T at every site, and what was measured of each checkpoint.

        Raises:
            TangentError: a checkpoint that can't be loaded or measured, or one that has the weights
                of its neighbour.
            TangentFileError: two checkpoints have different weights to measure.
            TangentRuntimeError: the worker of a piece was lost three times.
        """
        for stage in STAGES:  # what was half written when a process was killed
            for scratch in self.folder.path.glob(f".*{stage}-*"):
                discard(scratch)
        notes = _Notes(self.series, self.folder)
        self._fit(notes)
        self._measure(notes)
        subspaces = SubspaceSet.load(self.folder.path / SUBSPACES)
        found = [
            MeasuredCheckpoint.load(self._whole(one).path, one.step)
            for one in self.series.checkpoints
        ]
        self._check_labels(found)
        return subspaces, tuple(found)

    def _check_labels(self, found: Sequence[MeasuredCheckpoint]) -> None:
        """Refuse checkpoints whose files are about different weights or subspaces."""
        for one, measured in zip(self.series.checkpoints, found, strict=True):
            if measured.statistics.labels != found[0].statistics.labels:
                first = self.series.checkpoints[0]
                raise TangentFileError(
                    f"what was measured of {first} and of {one} is not about the same weights and "
                    f"subspaces: look whether both are of one model, delete {self.folder.path} and "
                    "start again"
                )

    def _fit(self, notes: _Notes) -> None:
        """Fit Q_T to the activations of the early checkpoints, and freeze it in a file."""
        pieces = [
            Piece("activations", one, some, self.plan)
            for one in self.early
            for some in self.plan.fit_ranges
        ]
        if not (self.folder.path / SUBSPACES).exists():

            def receive(piece: Piece, outcome: dict[str, Any]) -> Iterable[Piece]:
                notes.add(piece, outcome)
                return ()

            missing = [piece for piece in pieces if not notes.has(piece)]
            self._run(missing, receive, "activations", len(missing))
            with on_threads(self.plan.options.threads):
                fitted = self._fitted([piece.path for piece in pieces], notes.architecture)
                fitted.save(self.folder.path / SUBSPACES)
        for piece in pieces:
            discard(piece.path)

    def _fitted(self, paths: Sequence[Path], architecture: dict[str, Any] | None) -> SubspaceSet:
        options = self.plan.options
        told: dict[str, Any] = {"steps": [one.step for one in self.early]}
        if architecture is not None:
            told["architecture"] = architecture
        return fit_each(
            merge_fitters(paths),
            options.rank,
            options.method,
            positions=PositionMask(options.positions),
            model=self.series.name,
            metadata=told,
        )

    def _measure(self, notes: _Notes) -> None:
        """Measure what is missing; a checkpoint's pieces are added up when the last is there."""

        def receive(piece: Piece, outcome: dict[str, Any]) -> Iterable[Piece]:
            notes.add(piece, outcome)
            if piece.stage == "checkpoint":
                self._discard_parts(piece.checkpoint)
                return ()
            left = self._left(piece.checkpoint, notes)
            return () if left else [self._whole(piece.checkpoint)]

        pieces: list[Piece] = []
        total = 0
        for one in self.series.checkpoints:
            if notes.has(self._whole(one)):
                self._discard_parts(one)
                continue
            left = self._left(one, notes)
            pieces += left or [self._whole(one)]
            total += len(left) + 1
        self._run(pieces, receive, "gradients", total)

    def _left(self, checkpoint: Checkpoint, notes: _Notes) -> list[Piece]:
        """Return the pieces of a checkpoint that are not finished."""
        parts = gradient_pieces(checkpoint, self.plan)
        return [part for part in parts if not notes.has(part)]

    def _whole(self, checkpoint: Checkpoint) -> Piece:
        return Piece("checkpoint", checkpoint, (0, self.plan.ranges[-1][1]), self.plan)

    def _discard_parts(self, checkpoint: Checkpoint) -> None:
        for part in gradient_pieces(checkpoint, self.plan):
            discard(part.path)

    def _run(self, pieces: list[Piece], receive: Any, label: str, total: int) -> None:
        self.runner.run(
            run_piece,
            pieces,
            receive,
            total=total,
            label=f"{self.series.name}: {label}",
            kept=None if self.temporary else self.folder.path,
            progress=self.progress and bool(pieces),
        )


class _Notes:
    """Which pieces are finished, which weights they saw, and of what architecture.

    Raises:
        TangentValueError: two neighbours have the same weights.
        TangentFileError: a line of the folder is damaged.
    """

    architecture: dict[str, Any] | None = None

    def __init__(self, series: CheckpointSeries, folder: RunFolder) -> None:
        self._series, self._folder = series, folder
        self._done: set[str] = set()
        self._fingerprints: dict[int, str] = {}
        for note in folder.finished("piece", "step"):
            self._done.add(note["piece"])
            if "fingerprint" in note:
                self._fingerprints[note["step"]] = note["fingerprint"]
            self._meet(f"step {note['step']}", note)
        series.check_different(self._fingerprints)

    def has(self, piece: Piece) -> bool:
        """Whether a piece is finished, and what it left is still there."""
        return piece.key in self._done and piece.path.exists()

    def add(self, piece: Piece, outcome: dict[str, Any]) -> None:
        """Put a finished piece on disk.

        Raises:
            TangentValueError: its weights are those of a neighbour, or not those that an earlier
                piece of the same checkpoint saw.
            TangentFileError: it is another model than the first.
        """
        step, seen = piece.checkpoint.step, outcome.get("fingerprint")
        known = self._fingerprints.get(step, seen)
        if seen is not None and seen != known:
            raise TangentValueError(
                f"{piece.checkpoint} has changed since other pieces of it were measured: delete "
                f"{self._folder.path} and start again"
            )
        self._meet(str(piece.checkpoint), outcome)
        self._folder.finish({"piece": piece.key, "step": step, **outcome})
        self._done.add(piece.key)
        if seen is not None:
            self._fingerprints[step] = seen
            self._series.check_different(self._fingerprints)

    def _meet(self, name: str, outcome: dict[str, Any]) -> None:
        """Compare the model that a piece saw with the first one."""
        if "architecture" not in outcome:
            return
        if self.architecture is None:
            self._first, self.architecture = name, outcome["architecture"]
        refuse_others(name, outcome["architecture"], self._first, self.architecture)
