"""Phases of training: known splits, the inclusive boundary, and what can not be split."""

from __future__ import annotations

import random

import pytest

from tl_tangent.errors import TangentValueError
from tl_tangent.studies.phases import check_phases, split_phases

PYTHIA = [0, *(2**i for i in range(10)), *range(1000, 144_000, 1000)]  # Biderman et al. 2023


def count(phases) -> tuple[int, int]:
    return phases.count("early"), phases.count("late")


def test_the_checkpoints_of_pythia():
    assert len(PYTHIA) == 154
    assert count(split_phases(PYTHIA)) == (53, 101)  # 11 up to step 512, 42 up to 42000
    assert count(split_phases(PYTHIA, by="index")) == (46, 108)


def test_the_boundary_is_inclusive():
    assert split_phases([0, 300, 301, 1000]) == ("early", "early", "late", "late")
    assert count(split_phases(range(10), by="index")) == (3, 7)


@pytest.mark.parametrize(("boundary", "n"), [(0.29, 100), (0.07, 100), (0.57, 100), (1 / 3, 3)])
def test_rounding_moves_no_checkpoint(boundary, n):
    """0.29 * 100 is 28.999999999999996 in floating point."""
    expected = round(boundary * n)
    assert count(split_phases(range(n), boundary=boundary, by="index"))[0] == expected
    assert count(split_phases(range(1, n + 1), boundary=boundary))[0] == expected


def test_phases_go_with_their_steps_in_any_order():
    shuffled = random.Random(0).sample(PYTHIA, len(PYTHIA))
    for by in ("step", "index"):
        straight = dict(zip(PYTHIA, split_phases(PYTHIA, by=by), strict=True))
        assert dict(zip(shuffled, split_phases(shuffled, by=by), strict=True)) == straight


def test_a_run_that_goes_on_after_its_last_checkpoint():
    assert split_phases([100, 200, 400]) == ("early", "late", "late")
    assert split_phases([100, 200, 400], total=1000) == ("early", "early", "late")
    assert split_phases([100, 200, 400], total=10_000) == ("early", "early", "early")
    assert split_phases([0], total=10) == ("early",)


@pytest.mark.parametrize(
    ("steps", "options", "message"),
    [
        ([1, 5, 5, 9], {}, r"\[5\] come twice"),
        ([], {}, "at least one"),
        ([0, -3], {}, r"got \[-3\]"),
        ([0], {}, "give total="),
        ([10, 20], {"total": 15}, "largest step is 20"),
        ([10, 20], {"boundary": 1.5}, "boundary=1.5"),
        ([10, 20], {"by": "tokens"}, "'tokens'"),
    ],
)
def test_what_can_not_be_split(steps, options, message):
    with pytest.raises(TangentValueError, match=message):
        split_phases(steps, **options)


def test_an_empty_phase_is_told_where_it_is_needed():
    alone = split_phases([1000])
    assert alone == ("late",)
    with pytest.raises(TangentValueError, match="no checkpoint is early: there are 1"):
        check_phases(alone, [1000])
    early = split_phases([1, 2], total=100)
    with pytest.raises(TangentValueError, match="no checkpoint is late.*from step 1 to 2"):
        check_phases(early, [1, 2])
    check_phases(early, [1, 2], needed=("early",))
    check_phases(split_phases(PYTHIA), PYTHIA)
