"""The pieces that a study is cut into: each reads one checkpoint and leaves one file."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tl_tangent.analysis.gradients.activations import ActivationMeter
from tl_tangent.analysis.gradients.meter import GradientMeter, Within
from tl_tangent.analysis.gradients.passes import check_trainable, measure_gradients
from tl_tangent.analysis.gradients.statistics import GradientStatistics
from tl_tangent.geometry import SubspaceSet
from tl_tangent.geometry.energy import check_room
from tl_tangent.geometry.extractors import SAMPLED
from tl_tangent.geometry.fitter_io import save_fitters
from tl_tangent.geometry.linalg import on_threads
from tl_tangent.geometry.rank import Rank
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.objectives import Batch, Objective
from tl_tangent.hooks.gradients.weight import Weights
from tl_tangent.hooks.positions import NOT_FIRST, Positions
from tl_tangent.loading import weights_fingerprint
from tl_tangent.studies.architecture import architecture_of, refuse_others
from tl_tangent.studies.batches import check_tokens, load_batches
from tl_tangent.studies.checkpoints import Checkpoint
from tl_tangent.studies.executors import leave_with_parent
from tl_tangent.studies.measured import measured_of

Stage = Literal["activations", "gradients", "checkpoint"]
Ranges = tuple[tuple[int, int], ...]
FIT, BATCHES, SUBSPACES = "fit.safetensors", "batches.safetensors", "subspaces.safetensors"


@dataclass(frozen=True)
class Options:
    """How every series is measured.

    Attributes:
        rank, method, positions: of the fit.
        kinds, layers: which weights; None for all.
        n_controls: matched normals at each site.
        moments: whether to keep second moments of gradients until a checkpoint is finished.
        zeta: shrinkage of those moments.
        within: see :func:`~tl_tangent.gradient_energy`.
        seed: of the fit and the normals.
        device: where models are put; None for a GPU if there is one.
        threads: of torch.
    """

    rank: Rank = 8
    method: str = "pca"
    positions: Positions = NOT_FIRST
    kinds: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    n_controls: int = 20
    moments: bool = True
    zeta: float = 0.0
    within: Within | None = None
    seed: int = 0
    device: str | None = None
    threads: int = 1


@dataclass(frozen=True)
class Plan:
    """What the pieces of one series have in common; it can be pickled.

    Attributes:
        folder: of the series, which every worker sees.
        objective: that the model was trained on.
        fit_ranges, ranges: how the batches to fit on, and those to measure, are cut.
        options: the rest.
    """

    folder: str
    objective: Objective
    fit_ranges: Ranges
    ranges: Ranges
    options: Options


@dataclass(frozen=True)
class Piece:
    """Some batches at one checkpoint, or all that was measured of it.

    Attributes:
        stage: "activations" gathers what Q_T is fitted on, "gradients" measures energies, and
            "checkpoint" adds those up and reads off their second moments.
        checkpoint: which one.
        batches: from where up to where.
        plan: the rest.
    """

    stage: Stage
    checkpoint: Checkpoint
    batches: tuple[int, int]
    plan: Plan

    @property
    def key(self) -> str:
        """What it is called in its folder."""
        return f"{self.stage}-{self.checkpoint.step:09d}-{self.batches[0]:05d}"

    @property
    def path(self) -> Path:
        """The file, or of a whole checkpoint the folder, that it leaves."""
        return Path(self.plan.folder) / self.key

    def __str__(self) -> str:
        start, stop = self.batches
        return f"{self.stage} of {self.checkpoint}, batches {start} to {stop - 1}"


def gradient_pieces(checkpoint: Checkpoint, plan: Plan) -> list[Piece]:
    """Return the pieces that make up one checkpoint, in the order in which they are added."""
    return [Piece("gradients", checkpoint, some, plan) for some in plan.ranges]


def run_piece(piece: Piece) -> dict[str, Any]:
    """Compute a piece and leave its file; returns what is to be noted of it, JSON-able.

    Raises:
        TangentError: the checkpoint can't be loaded, or its gradients can't be measured.
    """
    leave_with_parent()
    with on_threads(piece.plan.options.threads):
        return STAGES[piece.stage](piece)


def _activations(piece: Piece) -> dict[str, Any]:
    options = piece.plan.options
    model, weights, batches = _loaded(piece, FIT)
    meter = ActivationMeter(
        weights,
        positions=options.positions,
        centering="group",
        keep_sample=options.method in SAMPLED,
        seed=options.seed,
    )
    meter.take_in(model, batches, group=piece.checkpoint.step)
    _leave(piece.path, lambda path: save_fitters(path, meter.fitters))
    return {
        "fingerprint": weights_fingerprint(model),
        "architecture": architecture_of(model.config),
    }


def _gradients(piece: Piece) -> dict[str, Any]:
    plan, options = piece.plan, piece.plan.options
    model, weights, batches = _loaded(piece, BATCHES)
    subspaces = SubspaceSet.load(Path(plan.folder) / SUBSPACES)
    _check_model(piece.checkpoint, model, subspaces)
    meter = GradientMeter(
        weights,
        subspaces,
        n_controls=options.n_controls,
        seed=options.seed,
        moments=options.moments,
        within=options.within,
    )
    measure_gradients(model, meter, batches, plan.objective)
    _leave(piece.path, meter.statistics().save)
    return {"fingerprint": weights_fingerprint(model)}


def _check_model(checkpoint: Checkpoint, model: Any, subspaces: SubspaceSet) -> None:
    """Refuse another model than those that Q_T was fitted at."""
    fitted = next(iter(subspaces.values())).metadata
    if "architecture" in fitted:
        first = f"step {fitted['steps'][0]}, where Q_T was fitted"
        refuse_others(str(checkpoint), architecture_of(model.config), first, fitted["architecture"])


def _checkpoint(piece: Piece) -> dict[str, Any]:
    plan, options = piece.plan, piece.plan.options
    parts = gradient_pieces(piece.checkpoint, plan)
    subspaces = SubspaceSet.load(Path(plan.folder) / SUBSPACES)
    found = measured_of(
        piece.checkpoint.step,
        [GradientStatistics.load(part.path) for part in parts],
        subspaces,
        seed=options.seed,
        zeta=options.zeta,
    )
    _leave(piece.path, found.save)
    return {}


STAGES: dict[Stage, Callable[[Piece], dict[str, Any]]] = {
    "activations": _activations,
    "gradients": _gradients,
    "checkpoint": _checkpoint,
}


def _loaded(piece: Piece, batches: str) -> tuple[Any, Weights, list[Batch]]:
    """Load the model, find the weights that are looked at, and read the batches."""
    plan, options = piece.plan, piece.plan.options
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = piece.checkpoint.load(plan.objective, device)
    found = load_batches(Path(plan.folder) / batches, *piece.batches)
    check_tokens(found, model)
    return model, chosen_weights(model, options), found


def chosen_weights(model: Any, options: Options) -> Weights:
    """Find the weights of a model that are looked at.

    Raises:
        TangentValueError: kinds or layers that it does not have, frozen weights, or a rank that
            leaves no room for normals.
    """
    weights = find_weights(model).choose(options.kinds, options.layers)
    check_trainable(weights)
    if isinstance(options.rank, int):
        for weight in weights.weights:
            check_room(weight.d, options.rank)
    return weights


def _leave(target: Path, write: Callable[[Path], Any]) -> None:
    """Let a file or folder appear whole, in place of what another try has left."""
    scratch = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        write(scratch)
        discard(target)
        os.replace(scratch, target)
    finally:
        discard(scratch)


def discard(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
