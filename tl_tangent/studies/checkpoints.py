"""The checkpoints of one training run, in a folder or on the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.hooks.gradients.objectives import Objective
from tl_tangent.loading import DTYPES, weights_fingerprint
from tl_tangent.studies.hf_auto import auto_class, no_bars
from tl_tangent.studies.hub import STEP, find_step, revisions_of, step_of

Attention = Literal["eager", "sdpa"]
CONFIG = "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """Where the weights of a model lie as they were after some updates; it can be pickled.

    Attributes:
        location: a folder, or the name of a repository on the hub.
        step: the updates made.
        revision: of the repository: a branch, tag or commit.
        dtype: that the weights are read in: "float32", "float64", "bfloat16" or "float16".
        attention: "eager" or "sdpa".
    """

    location: str
    step: int
    revision: str | None = None
    dtype: str = "float32"
    attention: Attention = "eager"

    def __post_init__(self) -> None:
        object.__setattr__(self, "location", os.fspath(self.location))

    def load(self, objective: Objective = "causal", device: str | torch.device = "cpu") -> Any:
        """Return the Hugging Face model, in evaluation mode.

        Args:
            objective: "masked" loads a masked language model, all else a causal one.
            device: where to.

        Raises:
            TangentFileError: there are no such weights, or some of the model's are not there.
            TangentValueError: another dtype.
        """
        if self.dtype not in DTYPES:
            raise TangentValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        try:
            with no_bars():
                model, found = auto_class(objective).from_pretrained(
                    self.location,
                    revision=self.revision or "main",
                    dtype=DTYPES[self.dtype],
                    attn_implementation=self.attention,
                    output_loading_info=True,
                )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise TangentFileError(
                f"{self} can't be loaded ({reason}); name a folder or a revision with the weights "
                "of a language model"
            ) from error
        missing = sorted(found["missing_keys"])
        if missing:
            raise TangentFileError(
                f"{self} has no weights for {len(missing)} of the parameters of a "
                f"{type(model).__name__}, first {missing[0]}: they would be drawn at random. Name "
                "the objective that the model was trained on, or another checkpoint."
            )
        return model.to(device).eval()

    def __str__(self) -> str:
        where = self.location if self.revision is None else f"{self.location}@{self.revision}"
        return f"step {self.step} ({where})"


@dataclass(frozen=True)
class CheckpointSeries:
    """The checkpoints of one run, in the order of their steps.

    Attributes:
        name: of the model, for people and for folders.
        checkpoints: sorted by step when the series is made.
        total_steps: of the whole run; None for the step of the last checkpoint.
        objective: what the model was trained on, "causal", "masked" or a function (see
            :func:`~tl_tangent.hooks.gradients.objectives.loss_of`), which other processes must be
            able to import by its name.
        note: how these checkpoints were chosen, where they are not all there are.

    Raises:
        TangentValueError: no checkpoints, or two of one step.
    """

    name: str
    checkpoints: tuple[Checkpoint, ...]
    total_steps: int | None = None
    objective: Objective = "causal"
    note: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", os.fspath(self.name))
        ordered = tuple(sorted(self.checkpoints, key=lambda one: one.step))
        if not ordered:
            raise TangentValueError(f"{self.name} has no checkpoints: give at least one")
        for one, two in pairwise(ordered):
            if one.step == two.step:
                raise TangentValueError(
                    f"{self.name} has two checkpoints of one step, {one} and {two}: keep one, or "
                    f"tell runs apart by pattern=, such as r'^stage1-{STEP}'"
                )
        object.__setattr__(self, "checkpoints", ordered)

    @classmethod
    def from_hub(
        cls,
        repo: str | PathLike[str],
        revisions: Iterable[str] | None = None,
        *,
        pattern: str = STEP,
        total_steps: int | None = None,
        objective: Objective = "causal",
        dtype: str = "float32",
        attention: Attention = "eager",
    ) -> CheckpointSeries:
        """Take revisions of a repository, whose names tell the steps.

        Args:
            repo: such as ``EleutherAI/pythia-160m``.
            revisions: which ones; by default all branches and tags that match ``pattern``.
            pattern: regular expression whose first group is the step. The default finds the numbers
                in "step1000", "step1000-tokens4B", "step-125000", "global_step5000" and
                "checkpoint-500".

        Raises:
            TangentFileError: the revisions can't be listed, say offline; or none matches.
            TangentValueError: a given revision that does not match; two of one step.
        """
        repo = os.fspath(repo)
        named = revisions_of(repo, pattern) if revisions is None else list(revisions)
        found = [Checkpoint(repo, step_of(name, pattern), name, dtype, attention) for name in named]
        return cls(repo, tuple(found), total_steps, objective)

    @classmethod
    def from_folder(
        cls,
        path: str | PathLike[str],
        *,
        total_steps: int | None = None,
        objective: Objective = "causal",
        dtype: str = "float32",
        attention: Attention = "eager",
    ) -> CheckpointSeries:
        """Take the sub-folders ``step-N`` or ``checkpoint-N``, as Hugging Face's Trainer writes.

        Where there are none, those in a sub-folder ``checkpoints``.

        Raises:
            TangentFileError: there are none with a model in them.
            TangentValueError: two of one step.
        """
        folder = Path(path).resolve()
        found = [
            Checkpoint(str(one), step, None, dtype, attention)
            for one, step in _steps_in(folder) or _steps_in(folder / "checkpoints")
        ]
        if not found:
            raise TangentFileError(
                f"{folder} has no sub-folders step-N or checkpoint-N with a {CONFIG}: name the "
                "folder that a training run wrote its checkpoints into"
            )
        return cls(folder.name, tuple(found), total_steps, objective)

    @property
    def steps(self) -> tuple[int, ...]:
        """The updates made before each checkpoint."""
        return tuple(one.step for one in self.checkpoints)

    def thinned(self, n: int) -> CheckpointSeries:
        """Keep those nearest to n evenly spaced steps from the first to the last.

        Where one checkpoint is the nearest twice, fewer than n are left; ``note`` says how many.

        Raises:
            TangentValueError: n below 2.
        """
        if n < 2:
            raise TangentValueError(f"a grid has 2 points or more, got n={n}")
        first, last = self.steps[0], self.steps[-1]
        grid = [first + (last - first) * i / (n - 1) for i in range(n)]
        kept = {min(self.checkpoints, key=lambda one: abs(one.step - at)) for at in grid}
        note = (
            f"{len(kept)} of {len(self.checkpoints)} checkpoints: the nearest to {n} evenly spaced "
            f"steps from {first} to {last}"
        )
        total = last if self.total_steps is None else self.total_steps
        return replace(self, checkpoints=tuple(kept), total_steps=total, note=note)

    def check_different(self, fingerprints: Mapping[int, str] | None = None) -> None:
        """Refuse neighbours with the same weights: one was stored twice, or a revision ignored.

        Args:
            fingerprints: by step, of :func:`~tl_tangent.loading.weights_fingerprint`, as far as
                they are known; by default every checkpoint is loaded, one after the other.

        Raises:
            TangentValueError: naming both.
        """
        if fingerprints is None:
            fingerprints = {
                one.step: weights_fingerprint(one.load(self.objective)) for one in self.checkpoints
            }
        for one, two in pairwise(self.checkpoints):
            known = fingerprints.get(one.step)
            if known is not None and known == fingerprints.get(two.step):
                raise TangentValueError(
                    f"{one} and {two} of {self.name} have the same weights, in every entry that "
                    "was sampled: look whether the revision is honoured and the right files were "
                    "stored. If training did stand still, leave one of them out."
                )


def _steps_in(folder: Path) -> list[tuple[Path, int]]:
    """Return the sub-folders that hold a model and are named after a step."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    named = [(one, find_step(one.name, f"^{STEP}$")) for one in inside if (one / CONFIG).is_file()]
    return [(one, step) for one, step in named if step is not None]
