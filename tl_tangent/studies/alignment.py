"""Do gradients lie in Q_T more in early than in late training, beyond controls and mechanics?"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from tl_tangent.analysis.gradients.meter import Within
from tl_tangent.folder_lock import only_writer
from tl_tangent.geometry.rank import Rank
from tl_tangent.geometry.subspace_io import package_versions
from tl_tangent.hooks.gradients.weight import several
from tl_tangent.hooks.positions import NOT_FIRST, PositionMask, Positions
from tl_tangent.run_folder import RunFolder
from tl_tangent.studies.alignment_result import AlignmentTest, MeasuredSeries
from tl_tangent.studies.alignment_rows import CONVENTIONS, MEANING
from tl_tangent.studies.batches import save_batches
from tl_tangent.studies.checkpoints import CheckpointSeries
from tl_tangent.studies.executors import Runner
from tl_tangent.studies.identity import check_unchanged
from tl_tangent.studies.names import folder_name
from tl_tangent.studies.phases import By
from tl_tangent.studies.pieces import BATCHES, FIT, Options, Plan, Ranges
from tl_tangent.studies.prepared import check_options, prepare
from tl_tangent.studies.study import Study


def alignment_test(
    series: CheckpointSeries | Iterable[CheckpointSeries],
    batches: Any,
    *,
    fit_batches: Any = None,
    rank: Rank = 8,
    method: str = "pca",
    boundary: float = 0.3,
    by: By = "step",
    kinds: Iterable[str] | str | None = None,
    layers: Iterable[int] | int | None = None,
    n_controls: int = 20,
    moments: bool = True,
    zeta: float = 0.0,
    within: Within | None = None,
    positions: Positions = NOT_FIRST,
    seed: int = 0,
    out: str | PathLike[str] | None = None,
    executor: Any = None,
    batches_per_piece: int | None = None,
    device: str | None = None,
    threads: int = 1,
    progress: bool = False,
) -> AlignmentTest:
    """Measure the gradients of a run's checkpoints in a Q_T that is fitted on its early ones.

    Activations of the early checkpoints are pooled, as many rows of each, around the mean that they
    have at their checkpoint. Q_T is fitted to them once, at every site, and is then held fixed:
    gradients of early and late checkpoints are measured in it, in matched random normals, and under
    the nulls of :func:`~tl_tangent.analysis.gradients.gradient_energy.gradient_energy`. Their order
    and where they are computed does not change a bit of the result.

    Args:
        series: the checkpoints of one model, or of several.
        batches: as that function takes them, or a function from a series to them, where models read
            different tokens. One backward pass each, at every checkpoint; a generator is read once.
        fit_batches: what Q_T is fitted on, likewise; by default the same batches.
        rank, method, positions: of the fit; see :func:`tl_tangent.fit_subspaces`.
        boundary, by: which checkpoints are early; see
            :func:`~tl_tangent.studies.phases.split_phases`.
        kinds, layers: which weights; all by default.
        n_controls: matched random normals at each site; the smallest p-value is
            ``1 / (1 + n_controls)``.
        moments: also keep ``sum G^T G`` of a checkpoint until IsoScore* with and without Q_T is
            read off it (``8 d^2`` bytes a weight and piece).
        zeta: shrinkage of IsoScore*, towards the identity of the same trace.
        within: "token" also measures the null within input tokens; see
            :func:`~tl_tangent.gradient_energy`.
        seed: of the fit and the controls.
        out: a folder that keeps what is finished: the same call goes on from it. A cluster needs
            one that all of its workers see.
        executor: None for this process, a number of local processes (a script that asks for them
            needs ``if __name__ == "__main__":``), or an executor; see
            :class:`~tl_tangent.studies.executors.Runner`.
        batches_per_piece: how much a worker does at a time; all batches of a checkpoint by default.
        device: where models are put; a GPU by default if a worker has one.
        threads: of torch for each piece, here too. The last bits of sums depend on it.
        progress: show progress bars with the time that is left.

    Raises:
        TangentValueError: a phase without checkpoints, neighbouring checkpoints with the same
            weights, ``2 * rank > d``, token ids that a model does not have, or options that do not
            fit the models.
        TangentFileError: a checkpoint that can't be loaded, was overwritten since the study began
            or is another model than the first; or a folder that can't be used, holds a damaged file
            or is being written by another process.
        TangentRuntimeError: a loss or gradient that is not finite, or a worker lost three times.
    """
    many = [series] if isinstance(series, CheckpointSeries) else list(series)
    options = Options(
        rank=rank,
        method=method,
        positions=positions,
        kinds=several(kinds),
        layers=several(layers),
        n_controls=n_controls,
        moments=moments,
        zeta=zeta,
        within=within,
        seed=seed,
        device=device,
        threads=threads,
    )
    check_options(options, batches_per_piece)
    prepared = prepare(many, batches, fit_batches, options, boundary=boundary, by=by)
    settings = {
        **vars(options),
        "positions": PositionMask(positions).description,
        "boundary": boundary,
        "by": by,
        "batches_per_piece": batches_per_piece,
    }
    found = []
    with Runner(executor) as runner, _folder(out) as folder, only_writer(folder):
        RunFolder(folder, settings)
        for one in prepared:
            inside = RunFolder(folder / folder_name(one.series.name), one.told)
            files = check_unchanged(one.series.checkpoints, inside)
            save_batches(inside.path / BATCHES, one.batches)
            save_batches(inside.path / FIT, one.fit)
            fit_ranges, ranges = (
                _ranges(len(some), batches_per_piece) for some in (one.fit, one.batches)
            )
            study = Study(
                one.series,
                early=one.early,
                plan=Plan(str(inside.path), one.series.objective, fit_ranges, ranges, options),
                folder=inside,
                runner=runner,
                temporary=out is None,
                progress=progress,
            )
            facts = {**one.told, **one.facts, "files": files}
            found.append(MeasuredSeries(one.series.name, one.phases, *study.measure(), facts))
    conventions = {
        "settings": json.loads(json.dumps(settings)),
        "models": {one.name: dict(one.conventions) for one in found},
        **CONVENTIONS,
        "meaning": dict(MEANING),
        "versions": {**package_versions(), "python": sys.version.split()[0]},
    }
    return AlignmentTest(tuple(found), conventions)


@contextmanager
def _folder(out: str | PathLike[str] | None) -> Iterator[Path]:
    """Yield the folder of the results, or one that is gone afterwards."""
    if out is not None:
        yield Path(out).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tl_tangent-") as path:
        yield Path(path)


def _ranges(n: int, size: int | None) -> Ranges:
    size = size or n
    return tuple((start, min(start + size, n)) for start in range(0, n, size))
