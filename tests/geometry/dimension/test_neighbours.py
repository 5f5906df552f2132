"""Neighbour distances against brute force, where inner products would lose them, and in blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.dimension import (
    distinct_rows,
    gaussian_entropy_of,
    levina_bickel,
    nearest_neighbours,
    neighbour_entropy,
    neighbours,
    two_nn,
)
from tl_tangent.geometry.dimension.neighbours import _among_all, _nearest


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_are_those_of_brute_force() -> None:
    x = randn(40, 3)
    gaps = np.linalg.norm(x.numpy()[:, None] - x.numpy()[None], axis=-1)
    np.fill_diagonal(gaps, np.inf)
    found = nearest_neighbours(x, 5)
    np.testing.assert_allclose(found.distances.numpy(), np.sort(gaps)[:, :5], rtol=1e-14)
    np.testing.assert_array_equal(found.rows.numpy(), gaps.argsort()[:, :5])


def test_near_neighbours_far_from_the_origin_keep_their_digits() -> None:
    """At 2^20 with steps of 2^-20 squares of norms and of distances are 80 bits apart."""
    x = 2.0**20 + 2.0**-20 * torch.arange(6, dtype=torch.float64)[:, None].expand(6, 4)
    found = nearest_neighbours(x, 2)
    step = 2 * 2.0**-20
    expected = torch.tensor([[1, 2], [1, 1], [1, 1], [1, 1], [1, 1], [1, 2]]) * step
    assert torch.equal(found.distances, expected.double())
    by_products = torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist")
    assert float((by_products[0, 1] - step).abs()) > 0.5 * step


def test_blocks_do_not_matter_and_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, whole, sizes, nearest = randn(50, 3), nearest_neighbours(randn(50, 3), 4), [], _nearest

    def spy(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(given[2]))
        return nearest(*given)

    monkeypatch.setattr(neighbours, "_nearest", spy)
    for chunk_bytes, rows in ((1, 1), (8 * 50 * 7, 7)):
        sizes.clear()
        found = nearest_neighbours(x, 4, chunk_bytes=chunk_bytes)
        assert max(sizes) == rows and sum(sizes) == 50
        assert torch.equal(found.distances, whole.distances)
        assert torch.equal(found.rows, whole.rows)


@pytest.mark.parametrize(("apart", "among_all"), [(0.0, 0), (1e7, 60)])
def test_rows_whose_products_round_too_much_are_held_against_all_others(
    apart: float, among_all: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tight clusters far apart: the centre is near neither, and products tell nothing."""
    x = 1e-3 * randn(60, 4) + apart * (torch.arange(60) % 2)[:, None]
    held: list[int] = []

    def spy(x: torch.Tensor, block: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        held.append(len(block))
        return _among_all(x, block, k)

    monkeypatch.setattr(neighbours, "_among_all", spy)
    found = nearest_neighbours(x, 5)
    gaps = np.linalg.norm(x.numpy()[:, None] - x.numpy()[None], axis=-1)
    np.fill_diagonal(gaps, np.inf)
    np.testing.assert_array_equal(found.rows.numpy(), gaps.argsort()[:, :5])
    assert sum(held) == among_all


def test_a_copy_is_a_neighbour_at_distance_0_and_a_row_is_none_of_its_own() -> None:
    x = randn(6, 3)[[0, 1, 2, 3, 4, 5, 2]]
    found = nearest_neighbours(x, 6)
    assert not (found.rows == torch.arange(7)[:, None]).any()
    assert (found.distances[:, 0] == 0).nonzero().flatten().tolist() == [2, 6]
    assert (found.rows[2, 0], found.rows[6, 0]) == (6, 2)


def test_distinct_rows_takes_copies_once() -> None:
    x = randn(5, 3)
    found = distinct_rows(x[[4, 0, 1, 0, 2, 3, 4, 0]])
    assert sorted(found.tolist()) == sorted(x.tolist())
    near = x + torch.tensor([0, 0, 1e-15])
    assert len(distinct_rows(torch.cat([x, near]))) > 5  # near is not equal


def test_float32_is_measured_in_float64_and_without_gradients() -> None:
    x = randn(9, 3).float().requires_grad_()
    found = nearest_neighbours(x, 2).distances
    assert found.dtype == torch.float64 and not found.requires_grad
    assert torch.equal(found, nearest_neighbours(x.detach().double(), 2).distances)


@pytest.mark.parametrize("k", [0, 5])
def test_k_is_out_of_range(k: int) -> None:
    with pytest.raises(TangentValueError, match=f"5 rows have from 1 to 4 neighbours, got k={k}"):
        nearest_neighbours(randn(5, 2), k)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_entries_are_not_finite(bad: float) -> None:
    x = randn(5, 2)
    x[3, 1] = bad
    for function in (distinct_rows, lambda y: nearest_neighbours(y, 2)):
        with pytest.raises(TangentValueError, match="x has 1 NaN or infinite entries out of 10"):
            function(x)


@pytest.mark.parametrize("shape", [(50,), (1, 50, 3), (50, 0)])
def test_a_cloud_of_another_shape(shape: tuple[int, ...]) -> None:
    for function in (
        distinct_rows,
        two_nn,
        levina_bickel,
        neighbour_entropy,
        gaussian_entropy_of,
        lambda y: nearest_neighbours(y, 2),
    ):
        with pytest.raises((TangentValueError, TypeCheckError)):
            function(randn(*shape))
