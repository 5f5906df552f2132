"""TwoNN on a fixture, by hand, under its invariances, and on points that are no sample at all."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.dimension import two_nn

CUBE = torch.from_numpy(np.random.default_rng(0).random((1000, 5)))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestFixture:
    def test_both_conventions_of_the_fit_and_the_likelihood(self) -> None:
        found = two_nn(CUBE)
        assert found.fit == pytest.approx(4.817536, abs=5e-7)
        assert two_nn(CUBE, first=0).fit == pytest.approx(4.801791, abs=5e-7)
        assert found.mle == pytest.approx(4.810458, abs=5e-7)
        assert found.mle_error == pytest.approx(found.mle / math.sqrt(998))

    def test_three_points_by_hand(self) -> None:
        """On 0, 1, 3 the two distances of each are (1, 3), (1, 2), (2, 3)."""
        x = torch.tensor([[0.0], [1.0], [3.0]])
        log = [math.log(1.5), math.log(2), math.log(3)]
        found = two_nn(x, discard=0, first=0)
        assert found.mle == pytest.approx(2 / math.log(9), rel=1e-14)
        y = [0.0, -math.log(2 / 3), -math.log(1 / 3)]
        slope = sum(a * b for a, b in zip(log, y, strict=True)) / sum(a * a for a in log)
        assert found.fit == pytest.approx(slope, rel=1e-14)
        one = two_nn(x, discard=0.3).fit  # two of three ratios, F = 1/3 and 2/3
        y = [-math.log(2 / 3), -math.log(1 / 3)]
        assert one == pytest.approx(
            (log[0] * y[0] + log[1] * y[1]) / (log[0] ** 2 + log[1] ** 2), rel=1e-14
        )


class TestInvariance:
    def test_isometries_scale_and_order(self) -> None:
        found = two_nn(CUBE)
        turn = torch.linalg.qr(randn(9, 5))[0]
        for same in (CUBE @ turn.T + 3, 1e-6 * CUBE, CUBE.flip(0)):
            other = two_nn(same)
            assert other.mle == pytest.approx(found.mle, rel=1e-7)
            assert other.fit == pytest.approx(found.fit, rel=1e-7)

    def test_copies_count_once(self) -> None:
        copied = torch.cat([CUBE, CUBE[:50], CUBE[:10]])
        found, alone = two_nn(copied), two_nn(CUBE)
        assert (found.n, found.copies, alone.copies) == (1000, 60, 0)
        assert (found.mle, found.fit) == (alone.mle, alone.fit)

    def test_density_and_bending_do_not_matter(self) -> None:
        """A rolled up plane with a density that falls along it."""
        u = randn(2000, 2)
        angle = 6 + u[:, 0]
        roll = torch.stack([angle * angle.cos(), angle * angle.sin(), 5 * u[:, 1]], 1)
        found = two_nn(roll)
        assert found.mle == pytest.approx(2, abs=0.2)
        assert found.fit == pytest.approx(2, abs=0.2)

    def test_float32(self) -> None:
        assert two_nn(CUBE.float()).mle == pytest.approx(two_nn(CUBE).mle, rel=1e-3)


@pytest.mark.parametrize(("m", "low", "high"), [(2, 1.15, 1.65), (5, 0.85, 1.3)])
def test_spread_over_draws_beside_the_error(m: int, low: float, high: float) -> None:
    found = [two_nn(randn(500, m, seed=seed)) for seed in range(150)]
    spread = float(np.std([one.mle for one in found]))
    assert low < spread / np.mean([one.mle_error for one in found]) < high
    assert np.mean([one.mle for one in found]) == pytest.approx(m, rel=0.03)


class TestRefused:
    def test_too_few_distinct_rows(self) -> None:
        with pytest.raises(TangentValueError, match="3 distinct rows, and 2 of 9 are"):
            two_nn(randn(3, 2)[[0, 1] * 4 + [0]])

    def test_a_lattice(self) -> None:
        lattice = torch.cartesian_prod(*[torch.arange(4.0)] * 2)
        with pytest.raises(TangentValueError, match="all 16 rows .* as on a lattice"):
            two_nn(lattice)

    def test_distances_below_the_range_of_squares(self) -> None:
        with pytest.raises(TangentValueError, match="5 of 5 rows .* squares underflow"):
            two_nn(1e-180 * randn(5, 2))

    @pytest.mark.parametrize(
        ("discard", "first", "kept"), [(0.0, 1, 20), (-0.1, 1, 22), (0.95, 1, 1), (1.0, 0, 0)]
    )
    def test_nothing_to_fit(self, discard: float, first: int, kept: int) -> None:
        with pytest.raises(TangentValueError, match=f"discard={discard} keeps {kept} of 20"):
            two_nn(randn(20, 2), discard=discard, first=first)
