"""The early and the late phase of a training run, told by its checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from tl_tangent.errors import TangentValueError

Phase = Literal["early", "late"]
PHASES: tuple[Phase, ...] = ("early", "late")
By = Literal["step", "index"]


def split_phases(
    steps: Sequence[int], *, boundary: float = 0.3, by: By = "step", total: int | None = None
) -> tuple[Phase, ...]:
    """Return the phase of every checkpoint, in the order in which the steps are given.

    Args:
        steps: of the checkpoints, in any order.
        boundary: the share of the run that is early, inclusive.
        by: "step": early where ``step / total <= boundary``; "index": the first
            ``floor(boundary * n)`` of the n checkpoints. The two differ where checkpoints are not
            evenly spaced.
        total: the steps of the whole run; the largest of ``steps`` by default.

    Raises:
        TangentValueError: no steps, negative ones or one that comes twice, a total below the
            largest, or a boundary outside of [0, 1]. A phase may be empty; see
            :func:`check_phases`.
    """
    _check(steps, boundary, by)
    if by == "index":
        order = {step: place for place, step in enumerate(sorted(steps), start=1)}
        shares = [order[step] / len(steps) for step in steps]
    else:
        last = max(steps)
        end = last if total is None else total
        if end < last or end == 0:
            raise TangentValueError(
                f"total={total} and the largest step is {last}: give total=, the steps of the "
                "whole run, which are 1 or more"
            )
        shares = [step / end for step in steps]
    return tuple("early" if share <= boundary else "late" for share in shares)


def _check(steps: Sequence[int], boundary: float, by: str) -> None:
    if by not in ("step", "index"):
        raise TangentValueError(f"by is 'step' or 'index', got {by!r}")
    if not 0 <= boundary <= 1:
        raise TangentValueError(f"boundary={boundary} is no share of a run, in [0, 1]")
    wrong = [step for step in steps if step < 0]
    if not steps or wrong:
        raise TangentValueError(f"steps are 0 or more and there is at least one, got {wrong}")
    twice = sorted(step for step, count in Counter(steps).items() if count > 1)
    if twice:
        raise TangentValueError(f"steps {twice} come twice: keep one checkpoint of each")


def check_phases(
    phases: Sequence[Phase], steps: Sequence[int], needed: Sequence[Phase] = PHASES
) -> None:
    """Refuse a split in which a phase that is needed has no checkpoint.

    Raises:
        TangentValueError: naming it.
    """
    for phase in needed:
        if phase not in phases:
            raise TangentValueError(
                f"no checkpoint is {phase}: there are {len(steps)}, from step {min(steps)} to "
                f"{max(steps)}. Add some, move boundary=, split by='index', or give total=, the "
                "steps of the whole run."
            )
