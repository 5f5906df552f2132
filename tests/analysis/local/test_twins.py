"""Gaussian twins: exact moments, uniform frames, and ranks that are uniform in any dimension"""

from __future__ import annotations

import math

import pytest
import torch

from tests.analysis.local.planted import randn
from tl_tangent.analysis.local.twins import gaussian_twins, seed_of, uniform_frame


@pytest.mark.parametrize("n, d", [(50, 4), (12, 30), (5, 4), (4, 4)])
def test_twins_have_the_mean_and_covariance_to_rounding(n, d):
    x = 5 + randn(n, d) @ randn(d, d, seed=1)
    for twin in gaussian_twins(x, 3, seed=0):
        torch.testing.assert_close(twin.mean(0), x.mean(0))
        torch.testing.assert_close(twin.T.cov(), x.T.cov())
        assert not torch.allclose(twin, x, atol=0.1)


def test_a_flat_cloud_has_twins_in_its_own_space():
    plane = randn(2, 6, seed=1)
    x = randn(40, 2) @ plane
    (twin,) = gaussian_twins(x, 1, seed=0)
    outside = torch.linalg.svd(plane)[2][2:]
    assert float((twin @ outside.T).abs().max()) < 1e-12


def test_seeds():
    x = randn(20, 3)
    one, two, same = ([*gaussian_twins(x, 2, seed)] for seed in (0, 1, 0))
    assert torch.equal(torch.stack(one), torch.stack(same))
    assert not torch.allclose(one[0], two[0]) and not torch.allclose(one[0], one[1])
    assert seed_of(0, "a") == seed_of(0, "a") != seed_of(1, "a")
    assert seed_of(0, "a") != seed_of(0, "b") and 0 <= seed_of(0, "a") < 2**63


def test_frames_are_uniform_at_right_angles_to_the_ones():
    """An entry has the mean 0 and the variance (1 - 1/n) / (n - 1) = 1/n; no sign is preferred."""
    generator = torch.Generator().manual_seed(0)
    frames = torch.stack([uniform_frame(5, 4, generator) for _ in range(2000)])
    torch.testing.assert_close(frames.mT @ frames, torch.eye(4).double().expand(2000, 4, 4))
    assert float(frames.sum(1).abs().max()) < 1e-10
    spread = math.sqrt(1 / 5 / 2000)
    assert float(frames.mean(0).abs().max()) < 4 * spread
    assert float((frames.square().mean(0) - 1 / 5).abs().max()) < 4 * spread


@pytest.mark.parametrize("n, d", [(30, 3), (12, 25)])
def test_the_rank_among_twins_is_uniform_for_a_gaussian_cloud(n, d):
    """Over 400 clouds, with more dimensions than points too: each of 5 ranks 80 +- 8 times."""
    ranks = torch.zeros(5)
    scale = torch.linspace(1, 5, d, dtype=torch.float64)
    for seed in range(400):
        x = randn(n, d, seed=seed) * scale
        own, *drawn = (
            float((y - y.mean(0)).norm(dim=1).max()) for y in (x, *gaussian_twins(x, 4, seed))
        )
        ranks[sum(one >= own for one in drawn)] += 1
    assert float(((ranks - 80).square() / 80).sum()) < 18.5  # chi2 on 4: 0.1 %
