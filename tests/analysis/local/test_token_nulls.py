"""The nulls around token types are calibrated: on Gaussian clouds, and with heavy tails"""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests.analysis.local.planted import SITE, D, a_model, planted, randn, rows_of
from tl_tangent.analysis.local.base_point import base_point
from tl_tangent.analysis.local.reading import flipped_square
from tl_tangent.geometry.curvature import fit_second_form
from tl_tangent.geometry.energy import upper_p_value


def test_p_values_are_uniform_on_gaussian_clouds():
    """Ten ranks, 24 types: the mean of p is 0.55 +- 0.059, and 4.8 +- 2.0 are at most 0.2."""
    model = a_model()
    types = range(10, 34)
    scale = torch.linspace(2, 0.3, D, dtype=torch.float64)
    own = {token: randn(84, D, seed=token) * scale for token in types}
    tokens = rows_of(dict.fromkeys(own, 84))
    with planted(model, tokens, own):
        found = tt.token_geometry(
            model, tokens, list(types), SITE, n_controls=9, slow_controls=0, dimension_points=0
        )
    frame = found.to_dataframe()
    assert (frame["n"] == 84).all()
    names = ("slope_p", "normal_slope_p_gaussian", "form_p_gaussian", "directions_p")
    for name in (*names, "form_p_flipped"):
        p = frame[name].astype(float)
        assert p.mean() == pytest.approx(0.55, abs=0.19), name
        assert 1 <= (p <= 0.2).sum() <= 11, name
    assert frame["form_p_permuted"].mean() > 0.4  # conservative: a tilted basis adds to this null
    assert not frame["visible"].any()  # p = 0.1 is the least
    assert "not visible beyond every null for any of 24 types" in found.headline()


def test_flipped_signs_hold_for_heavy_tails_where_permutations_do_not():
    """Student's t on 4 degrees of freedom, flat: 60 clouds, so 12 +- 3.1 have p of 0.2 or less."""
    stretch = torch.tensor([3.0, 3.0] + [0.3] * (D - 2)).double()
    flipped, permuted = [], []
    for seed in range(60):
        size = randn(400, 4, seed=1000 + seed).norm(dim=1, keepdim=True)
        x = randn(400, D, seed=seed) * stretch / size
        base, test = base_point(x[:200], 2), x[200:]
        fit = fit_second_form(test, base.point, base.tangent, permutations=9, seed=seed)
        signs = torch.Generator().manual_seed(seed)
        drawn = [flipped_square(test, base, signs) for _ in range(9)]
        flipped.append(upper_p_value(fit.raw_square, drawn))
        permuted.append(fit.p_value)
    assert 3 <= sum(p <= 0.2 for p in flipped) <= 22
    assert sum(flipped) / 60 == pytest.approx(0.55, abs=0.13)
    assert sum(p <= 0.2 for p in permuted) > 50
