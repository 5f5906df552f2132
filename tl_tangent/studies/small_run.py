"""A small training run on the docstrings of the installed packages, with its checkpoints.

Everything that is drawn, the weights, the order of the rows and the shuffled labels, is a function
of the seed and the step. A run that was stopped goes on from its last checkpoint, and ends bit for
bit where an undisturbed one does if torch uses the same number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from tl_tangent.assets.cache import build_once
from tl_tangent.assets.docstrings import EncodedText, installed_docstrings
from tl_tangent.errors import TangentValueError
from tl_tangent.run_folder import RunFolder
from tl_tangent.studies.ngrams import NgramLosses, ngram_losses
from tl_tangent.studies.small_model import save_small, small_tokenizer
from tl_tangent.studies.small_options import SmallRunOptions
from tl_tangent.studies.small_state import OnStart, OnStep, SmallState, mean_loss

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedTokenizerFast

STATE, LOSSES, CHECKPOINTS = "training.safetensors", "losses.csv", "checkpoints"


@dataclass(frozen=True, eq=False, repr=False)
class SmallRun:
    """A finished run.

    Attributes:
        folder: of the run; ``losses.csv`` is in it.
        options: how it was trained.
        losses: a row a step with the columns step (updates made), tokens (seen until then),
            train_loss (of the next batch, with its labels shuffled where they are) and
            validation_loss (at checkpoints, never shuffled), in nats a token.
        baselines: the losses of n-grams of the training text on the same validation rows.
    """

    folder: Path
    options: SmallRunOptions
    losses: pd.DataFrame
    baselines: NgramLosses

    def __repr__(self) -> str:
        return (
            f"SmallRun({self.options.steps} updates in {str(self.folder)!r}, validation loss "
            f"{self.losses.validation_loss.iloc[-1]:.3f}, bigrams {self.baselines.bigram:.3f}, "
            f"unigrams {self.baselines.unigram:.3f} nats)"
        )

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folder of every checkpoint by its updates; ``from_pretrained`` reads it."""
        return {step: _checkpoint(self.folder, step) for step in self.options.checkpoint_steps}


def train_small(
    folder: str | PathLike[str],
    options: SmallRunOptions | None = None,
    *,
    text: EncodedText | None = None,
    on_start: OnStart | None = None,
    on_step: OnStep | None = None,
    on_keep: Callable[[], None] | None = None,
    progress: bool = True,
) -> SmallRun:
    """Train, or go on where a run of the same options stood, and return the finished run.

    Args:
        folder: of the run; checkpoints go into ``checkpoints/step-N``.
        options: how to train; the defaults if None.
        text: what to train on; the docstrings of the installed packages if None.
        on_start: called with the model and the updates made so far, in front of the next one.
        on_step: called with the model, the updates made so far and the loss when the gradients of
            the next update are there, not yet clipped. A run that goes on repeats the steps after
            its last checkpoint, and calls it for them again.
        on_keep: called when a checkpoint is about to be kept, from which the run can go on.
        progress: show progress bars on stderr.

    Raises:
        TangentValueError: the folder holds a run of other options or of another text; the text is
            too short; options out of range.
        TangentFileError: the folder can't be written.
        TangentRuntimeError: the loss is no longer finite.
    """
    options = options or SmallRunOptions()
    text = text or installed_docstrings(progress=progress)
    train, validation = run_rows(text, options)
    state = SmallState(options)
    run = RunFolder(folder, {**asdict(options), "text": _described(text)})
    state.resume(run.path / STATE)
    tokenizer = small_tokenizer(text.folder) if text.folder else None
    if on_start is not None and state.step < options.steps:
        on_start(state.model, state.step)
    bar = tqdm(total=options.steps, initial=state.step, desc="training", disable=not progress)
    with bar:
        for step in range(state.step, options.steps + 1):
            if step in options.checkpoint_steps and step not in state.validation_loss:
                state.validation_loss[step] = mean_loss(state.model, validation)
                if on_keep is not None:
                    on_keep()
                _keep(run, state, tokenizer)
            if step < options.steps:
                state.update(*training_batch(train, step, options), on_step)
                bar.update()
    baselines = ngram_losses(train, validation, text.vocabulary)
    return SmallRun(run.path, options, state.losses(), baselines)


def _keep(run: RunFolder, state: SmallState, tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Write the checkpoint, the losses and, last, the state from which the run can go on."""
    target = _checkpoint(run.path, state.step)
    build_once(target, lambda path: save_small(state.model, path, tokenizer))
    run.write(LOSSES, lambda path: state.losses().to_csv(path, index=False))
    run.write(STATE, state.save)


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / CHECKPOINTS / f"step-{step}"


def _described(text: EncodedText) -> dict[str, Any]:
    checksum = hashlib.sha256(text.tokens.numpy().tobytes()).hexdigest()
    return {"sha256": checksum, "versions": dict(text.versions)}


def run_rows(
    text: EncodedText, options: SmallRunOptions
) -> tuple[Int[Tensor, "train pos"], Int[Tensor, "validation pos"]]:
    """Return the rows to train on and those to validate on, each ``n_ctx + 1`` tokens long.

    The last token of a row is only ever a label. Rows to validate on are evenly spaced in the last
    5 % of the documents.

    Raises:
        TangentValueError: the text is too short, or has more token ids than the model.
    """
    if text.vocabulary > options.shape.vocabulary:
        raise TangentValueError(
            f"the text has {text.vocabulary} token ids and the model {options.shape.vocabulary}; "
            "give its shape as large a vocabulary"
        )
    length = options.shape.n_ctx + 1
    train, held = (part[: len(part) // length * length].view(-1, length) for part in text.split())
    if len(train) < options.batch or len(held) < options.validation_rows:
        raise TangentValueError(
            f"the text has {len(train)} rows of {length} tokens to train on and {len(held)} to "
            f"validate on; batch={options.batch} and validation_rows={options.validation_rows} "
            "are wanted: pass a longer text, or ask for fewer rows"
        )
    spaced = torch.arange(options.validation_rows) * len(held) // options.validation_rows
    return train, held[spaced]


def training_batch(
    rows: Int[Tensor, "train pos"], step: int, options: SmallRunOptions
) -> tuple[Int[Tensor, "batch query"], Int[Tensor, "batch query"]]:
    """Return the inputs of the update after ``step`` others, and the labels of every position."""
    epoch, place = divmod(step, len(rows) // options.batch)
    order = np.random.default_rng([options.seed, epoch]).permutation(len(rows))
    chosen = rows[order[place * options.batch : (place + 1) * options.batch]]
    inputs, labels = chosen[:, :-1], chosen[:, 1:]
    if options.control == "shuffled_labels":
        draw = np.random.default_rng([options.seed, step, 1]).permutation(labels.numel())
        labels = labels.flatten()[draw].view(labels.shape)
    return inputs, labels
