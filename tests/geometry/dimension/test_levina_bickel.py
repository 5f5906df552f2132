"""The likelihood of k neighbours: its Gamma law, its three averages, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.dimension import distinct_rows, levina_bickel, nearest_neighbours


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ball(n: int, m: int, seed: int) -> torch.Tensor:
    """n points even in the unit ball, and its centre."""
    x = randn(n, m, seed=seed)
    radii = torch.rand(n, generator=torch.Generator().manual_seed(seed + 1)).double() ** (1 / m)
    return torch.cat([torch.zeros(1, m), x / x.norm(dim=1, keepdim=True) * radii[:, None]]).double()


def test_sums_have_the_gamma_law() -> None:
    k, m, sums = 6, 3, []
    for seed in range(400):
        x = ball(20, m, 2 * seed)
        at = int((distinct_rows(x) == 0).all(1).nonzero())
        sums.append((k - 2) / float(levina_bickel(x, k).local[at]))
    assert stats.kstest(sums, stats.gamma(k - 1, scale=1 / m).cdf).pvalue > 0.01
    assert np.mean([(k - 2) / s for s in sums]) == pytest.approx(m, rel=0.08)  # unbiased
    assert np.mean([(k - 1) / s for s in sums]) > 1.15 * m  # the maximum of the likelihood is not
    assert np.mean(sums) / (k - 1) == pytest.approx(1 / m, rel=0.06)


def test_averages_are_those_of_the_distances() -> None:
    x, k = randn(60, 3), 7
    distances = nearest_neighbours(distinct_rows(x), k).distances
    sums = (distances[:, -1:] / distances[:, :-1]).log().sum(1)
    found = levina_bickel(x, k)
    assert torch.allclose(found.local, 5 / sums)
    assert found.mean == pytest.approx(float((5 / sums).mean()))
    assert found.mean_of_mle == pytest.approx(float((6 / sums).mean()))
    assert found.inverse_mean == pytest.approx(1 / float((sums / 6).mean()))
    assert found.inverse_mean_error == pytest.approx(found.inverse_mean / (60 * 6) ** 0.5)


def test_divisors_differ_by_an_eighth_at_10() -> None:
    found = levina_bickel(randn(80, 2), 10)
    assert found.mean_of_mle / found.mean == pytest.approx(9 / 8, rel=1e-12)
    assert found.mean >= 8 / 9 * found.inverse_mean  # Jensen


@pytest.mark.parametrize("m", [1, 2, 4])
def test_dimension_of_a_turned_cloud(m: int) -> None:
    turn = torch.linalg.qr(randn(8, m, seed=1))[0]
    x = randn(1500, m) @ turn.T
    found = levina_bickel(x, 8)
    assert found.inverse_mean == pytest.approx(m, rel=0.06)
    assert found.mean == pytest.approx(m, rel=0.06)
    assert levina_bickel(-1e4 * x, 8).mean == pytest.approx(found.mean, rel=1e-6)


def test_copies_count_once() -> None:
    x = randn(50, 2)
    found, alone = levina_bickel(torch.cat([x, x[:9]]), 5), levina_bickel(x, 5)
    assert (found.n, found.copies) == (50, 9)
    assert torch.equal(found.local, alone.local)


def test_prints() -> None:
    shown = str(levina_bickel(randn(50, 2), 5))
    assert "from 5 neighbours" in shown and "50 local estimates" in shown


def test_refused() -> None:
    with pytest.raises(TangentValueError, match="k of 3 or more, got k=2"):
        levina_bickel(randn(9, 2), 2)
    with pytest.raises(TangentValueError, match="from 1 to 8 neighbours, got k=9"):
        levina_bickel(randn(9, 2), 9)
    centre_of_a_square = torch.tensor([[0.0, 0], [1, 1], [1, -1], [-1, 1], [-1, -1]])
    with pytest.raises(TangentValueError, match="1 of 5 rows have their 4 .* use a larger k"):
        levina_bickel(centre_of_a_square, 4)
