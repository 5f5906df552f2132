"""Whole numbers from callers: of Python, numpy and torch, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tl_tangent as tt
from tl_tangent.hooks.numbers import MOST_SEED, whole, whole_seed, wholes

THREES = [
    3,
    np.int64(3),
    np.uint8(3),
    np.array(3),
    torch.tensor(3),
    torch.tensor(3).to(torch.int16),
]
OTHERS: list[Any] = [3.0, "3", None, True, np.bool_(True), np.float64(3), torch.tensor(3.0)]
OTHERS += [torch.tensor(True), torch.tensor([3]), [3], 3j]


@pytest.mark.parametrize("given", THREES, ids=repr)
def test_every_kind_of_whole_number_is_one(given):
    for found in (whole("n", given, 0), whole("n", given, 3, 3), whole_seed(given)):
        assert type(found) is int and found == 3
    assert wholes("n", given) == [3]
    with pytest.raises(
        tt.TangentValueError, match=r"n is .*3.*; it must be a whole number from 4\."
    ):
        whole("n", given, 4)
    with pytest.raises(tt.TangentValueError, match=r"a whole number from 0 to 2\."):
        whole("n", given, 0, 2)


@pytest.mark.parametrize("given", OTHERS, ids=repr)
def test_nothing_else_is_one(given):
    with pytest.raises(tt.TangentValueError, match="n is .*; it must be a whole number from 0"):
        whole("n", given, 0)


@pytest.mark.parametrize(
    "given", [[2, 0, 2], (2, 0), np.array([2, 0]), torch.tensor([2, 0, 0]), {2: 1, 0: 1}]
)
def test_several_come_once_each_in_their_order(given):
    assert wholes("n", given) == [2, 0]


@pytest.mark.parametrize(
    "given",
    [*OTHERS[:8], [1, 2.0], "12", ["1"], torch.ones(2), np.array(1.5), [[1]], [True]],
    ids=repr,
)
def test_several_of_other_kinds_are_refused(given):
    with pytest.raises(tt.TangentValueError, match="n is .*give a whole number or several"):
        wholes("n", given)


@pytest.mark.parametrize("given", [[], torch.zeros(0), range(0)])
def test_none_at_all_are_refused(given):
    with pytest.raises(tt.TangentValueError, match="n names none"):
        wholes("n", given)


def test_seeds_are_those_of_torch():
    torch.Generator().manual_seed(whole_seed(MOST_SEED))
    for seed in (-1, MOST_SEED + 1):
        with pytest.raises(tt.TangentValueError, match="seed is .*from 0 to 9223372036854775807"):
            whole_seed(seed)
