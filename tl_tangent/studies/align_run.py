"""The alignment test as the command line names it: checkpoints, a text, and where results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any, Literal

from tl_tangent.assets import language_reference, read_text, token_batches
from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.geometry.rank import Rank
from tl_tangent.hooks.gradients.objectives import Batch, mask_tokens
from tl_tangent.hooks.positions import Positions
from tl_tangent.studies.alignment import alignment_test
from tl_tangent.studies.alignment_result import AlignmentTest
from tl_tangent.studies.architecture import config_of
from tl_tangent.studies.checkpoints import Attention, Checkpoint, CheckpointSeries
from tl_tangent.studies.hub import STEP
from tl_tangent.studies.names import distinct_tails
from tl_tangent.studies.phases import By

Places = Sequence[str | PathLike[str]] | str | PathLike[str]


@dataclass(frozen=True)
class AlignOptions:
    """What to measure.

    Attributes:
        out: the folder of the results.
        folder: one folder with checkpoints, or several, one a model.
        hub: repositories with checkpoints, likewise.
        revisions, pattern: which of theirs; see
            :meth:`~tl_tangent.studies.checkpoints.CheckpointSeries.from_hub`.
        thin: keep as many checkpoints on a regular grid; None for all.
        total_steps: of the runs; None for their last checkpoint.
        objective: "causal" or "masked".
        tokenizer: name or folder of one; None for that of the last checkpoint.
        text: a UTF-8 file; None for the language reference of this Python.
        tokens: how many, rounded up to whole rows of ``seq_len``.
        batch: rows in a backward pass.
        workers: local processes; None for this one.
        dtype, attention: see :class:`~tl_tangent.studies.checkpoints.Checkpoint`.
        rank, method, positions, boundary, by, kinds, layers, controls, moments, zeta, within,
            batches_per_piece, device, threads, seed: see
            :func:`~tl_tangent.studies.alignment.alignment_test`.
        progress: show progress bars on stderr.
    """

    out: str | PathLike[str]
    folder: Places | None = None
    hub: Places | None = None
    revisions: tuple[str, ...] | None = None
    pattern: str = STEP
    thin: int | None = None
    total_steps: int | None = None
    objective: Literal["causal", "masked"] = "causal"
    tokenizer: str | PathLike[str] | None = None
    text: str | PathLike[str] | None = None
    tokens: int = 2048
    seq_len: int = 128
    batch: int = 4
    rank: Rank = 8
    method: str = "pca"
    positions: Positions = "not_first"
    boundary: float = 0.3
    by: By = "step"
    kinds: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    controls: int = 20
    moments: bool = True
    zeta: float = 0.0
    within: Literal["token", "shuffled"] | None = None
    workers: int | None = None
    batches_per_piece: int | None = None
    device: str | None = None
    dtype: str = "float32"
    attention: Attention = "eager"
    threads: int = 1
    seed: int = 0
    progress: bool = True


def run_align(options: AlignOptions, command: str | None = None) -> AlignmentTest:
    """Measure, or go on where an interrupted run of the same options stood, and write the results.

    Raises:
        TangentError: as :func:`~tl_tangent.studies.alignment.alignment_test`; or the options name
            checkpoints, a tokenizer or a text that can't be had.
    """
    series = series_of(options)
    text = language_reference() if options.text is None else read_text(options.text)
    found = alignment_test(
        series,
        lambda one: text_batches(one, text, options),
        rank=options.rank,
        method=options.method,
        positions=options.positions,
        boundary=options.boundary,
        by=options.by,
        kinds=options.kinds,
        layers=options.layers,
        n_controls=options.controls,
        moments=options.moments,
        zeta=options.zeta,
        within=options.within,
        seed=options.seed,
        out=options.out,
        executor=options.workers,
        batches_per_piece=options.batches_per_piece,
        device=options.device,
        threads=options.threads,
        progress=options.progress,
    )
    found.save(options.out, command)
    return found


def series_of(options: AlignOptions) -> list[CheckpointSeries]:
    """Return the series that the options name, folders first, which are called by their tails.

    Raises:
        TangentError: there are none, or as the constructors of a series.
    """
    if not options.folder and not options.hub:
        raise TangentValueError("no checkpoints are named: give --folder or --hub")
    how: dict[str, Any] = {
        "total_steps": options.total_steps,
        "objective": options.objective,
        "dtype": options.dtype,
        "attention": options.attention,
    }
    folders = _each(options.folder)
    found = [
        replace(CheckpointSeries.from_folder(path, **how), name=name)
        for path, name in zip(folders, distinct_tails(folders), strict=True)
    ]
    for repo in _each(options.hub):
        found.append(
            CheckpointSeries.from_hub(repo, options.revisions, pattern=options.pattern, **how)
        )
    return found if options.thin is None else [one.thinned(options.thin) for one in found]


def _each(places: Places | None) -> list[str]:
    """Return one place or several as a list."""
    if places is None:
        return []
    return [fspath(one) for one in ([places] if isinstance(places, str | PathLike) else places)]


def text_batches(series: CheckpointSeries, text: str, options: AlignOptions) -> list[Batch]:
    """Cut a text into batches by the tokenizer that is named, or that of the last checkpoint.

    A row begins with the token that the tokenizer itself begins a text with, if there is one. For a
    masked objective 15 % of the others are hidden, the same at every checkpoint.

    Raises:
        TangentFileError: there is no tokenizer.
        TangentValueError: rows longer than the model takes, a text that is too short, or a masked
            objective without a mask token.
    """
    tokenizer, context = _tokenizer(series.checkpoints[-1], options.tokenizer)
    if options.seq_len < 2 or (context and options.seq_len > context):
        raise TangentValueError(
            f"seq_len={options.seq_len}: {series.name} takes rows of 2 to {context} tokens"
        )
    special = tuple(tokenizer.all_special_ids)
    ids = tokenizer("a")["input_ids"]
    first = ids[0] if ids and ids[0] in special else None
    rows = token_batches(
        tokenizer, text, seq_len=options.seq_len, n_tokens=options.tokens, bos=first
    )
    if options.objective != "masked":
        return [Batch(some) for some in rows.split(options.batch)]
    if tokenizer.mask_token_id is None:
        raise TangentValueError(
            f"the tokenizer of {series.name} has no mask token, which a masked objective needs: "
            "name --objective causal, or another model"
        )
    return [
        mask_tokens(
            some,
            mask_token=tokenizer.mask_token_id,
            vocabulary=len(tokenizer),
            special=special,
            seed=options.seed + i,
        )
        for i, some in enumerate(rows.split(options.batch))
    ]


def _tokenizer(
    checkpoint: Checkpoint, name: str | PathLike[str] | None = None
) -> tuple[Any, int | None]:
    """Return the tokenizer, and how many positions the model has."""
    from transformers import AutoTokenizer

    context = getattr(config_of(checkpoint), "max_position_embeddings", None)
    place, revision = checkpoint.location, checkpoint.revision or "main"
    if name is not None:
        place, revision = fspath(name), "main"
    try:
        return AutoTokenizer.from_pretrained(place, revision=revision), context
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        whose = str(checkpoint) if name is None else place
        raise TangentFileError(
            f"{whose} has no tokenizer that can be loaded ({reason}): name one by --tokenizer, or "
            "save it with the last checkpoint"
        ) from error
