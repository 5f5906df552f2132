"""The partition function's evenness: exact clouds, a plain loop, and what changes it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.partition import partition_isotropy


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_cross_polytope_is_even() -> None:
    axes = torch.eye(4, dtype=torch.float64)
    assert float(partition_isotropy(torch.cat([axes, -axes]))) == pytest.approx(1, abs=1e-14)


def test_a_line() -> None:
    """Z = 2 cosh 1 + 2 cosh 0.5 + 1 along it, and 5 across."""
    line = torch.zeros(5, 3, dtype=torch.float64)
    line[:, 0] = torch.tensor([-1, -0.5, 0, 0.5, 1])
    expected = 5 / (2 * math.cosh(1) + 2 * math.cosh(0.5) + 1)
    assert float(partition_isotropy(line)) == pytest.approx(expected, abs=1e-14)
    assert expected == pytest.approx(0.7884677819, abs=1e-10)


def test_both_signs_of_an_eigenvector_count() -> None:
    """All rows on one side: Z falls below n only against the eigenvector."""
    rows = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    expected = (math.exp(-1) + math.exp(-2)) / (math.exp(1) + math.exp(2))
    for same in (rows, -rows):
        assert float(partition_isotropy(same)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("shape", [(30, 4), (3, 6)])
def test_equals_a_loop_over_eigenvectors(shape: tuple[int, int]) -> None:
    w = randn(*shape) + 0.3
    vectors = torch.linalg.svd(w, full_matrices=True)[2]
    z = [float((sign * w @ c).exp().sum()) for c in vectors for sign in (-1, 1)]
    assert float(partition_isotropy(w)) == pytest.approx(min(z) / max(z), rel=1e-12)


def test_rotation_and_order_do_not_matter_but_scale_does() -> None:
    w = randn(50, 4) * torch.arange(1, 5)
    turn = torch.linalg.qr(randn(4, 4, seed=1))[0]
    value = float(partition_isotropy(w))
    assert float(partition_isotropy((w @ turn).flip(0))) == pytest.approx(value, rel=1e-10)
    assert float(partition_isotropy(2 * w)) < value / 2


def test_long_rows_do_not_overflow() -> None:
    """exp(2000) is above the range of float64, and exp(-4000) below it."""
    axes = 2000 * torch.eye(3)
    found = partition_isotropy(torch.cat([axes, -axes]))
    assert found.dtype == torch.float64 and float(found) == 1
    assert float(partition_isotropy(axes)) == 0


def test_refusals() -> None:
    with pytest.raises(TangentValueError, match="1 NaN or infinite"):
        partition_isotropy(torch.tensor([[1.0, math.nan]]))
    with pytest.raises(TangentValueError, match="n, d >= 1"):
        partition_isotropy(torch.zeros(0, 3))
