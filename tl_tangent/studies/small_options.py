"""How a small model is trained, and after which updates it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tl_tangent.errors import TangentValueError
from tl_tangent.studies.small_model import SmallShape


@dataclass(frozen=True)
class SmallRunOptions:
    """How to train.

    Attributes:
        shape: of the model.
        steps: updates of AdamW (Loshchilov and Hutter 2019).
        batch: rows of ``shape.n_ctx`` tokens in an update.
        learning_rate: at its peak; it rises linearly for ``warmup`` updates and falls linearly
            to 0.
        weight_decay: of AdamW, on every parameter.
        clip: the norm to which longer gradients are cut.
        every: a checkpoint at all multiples of it, beside 0, the powers of two below it, and the
            last step.
        validation_rows: how many rows of the last 5 % of the documents the loss is measured on.
        seed: of the weights, the order of the rows and the shuffled labels.
        control: "shuffled_labels" permutes the labels over all tokens of a batch, which leaves the
            frequency of every label and takes away what the context says of it (but that one in
            ``batch`` comes from the same row).
    """

    shape: SmallShape = field(default_factory=SmallShape)
    steps: int = 500
    batch: int = 32
    learning_rate: float = 4e-3
    warmup: int = 40
    weight_decay: float = 0.1
    clip: float = 1.0
    every: int = 50
    validation_rows: int = 128
    seed: int = 0
    control: Literal["shuffled_labels"] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.warmup < self.steps:
            raise TangentValueError(
                f"warmup={self.warmup} of steps={self.steps}: it must be above 0 and below the "
                "steps; take more steps, or a shorter warmup"
            )
        if min(self.batch, self.every, self.validation_rows) < 1:
            raise TangentValueError(
                f"batch={self.batch}, every={self.every} and validation_rows="
                f"{self.validation_rows} must be 1 or more"
            )
        if self.control not in (None, "shuffled_labels"):
            raise TangentValueError(
                f"control {self.control!r} is neither None nor 'shuffled_labels'"
            )

    @property
    def checkpoint_steps(self) -> tuple[int, ...]:
        """The numbers of updates after which there is a checkpoint, in order."""
        powers = (2**i for i in range(self.every.bit_length()))
        early = {0, self.steps} | {p for p in powers if p < min(self.every, self.steps)}
        return tuple(sorted(early | set(range(self.every, self.steps, self.every))))
