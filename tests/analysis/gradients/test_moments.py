"""Second moments of gradients hold their energies; efficiency and removal are those of dense C."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_tangent as tt
from tests.analysis.gradients.cases import (
    IDS,
    MODELS,
    RANK,
    B,
    assert_close,
    bases,
    batches,
    measure,
    measured,
)


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_moments_hold_the_energies(spec):
    """tr C = ||G||^2 and tr Q^T C Q = ||G Q||^2, C symmetric."""
    result = measured(*spec)
    statistics = result.statistics
    assert set(statistics.moments) == {label.name for label in statistics.labels}
    for row, label in enumerate(statistics.labels):
        moment = statistics.moments[label.name]
        assert torch.equal(moment, moment.T)
        assert_close(moment.trace(), statistics.totals[row, 0])
        found = [(q * (moment @ q)).sum() for q in bases(result, label.site)]
        assert_close(torch.stack(found), statistics.energies[row, 0])


def test_without_moments_there_are_none():
    result = measure()
    assert not result.statistics.moments
    assert not {"efficiency", "isoscore", "delta_tangent"} & set(result.to_dataframe())


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_efficiency_is_the_share_of_the_best_subspace(spec):
    result = measured(*spec)
    frame = result.to_dataframe().set_index("weight")
    for row, label in enumerate(result.statistics.labels):
        best = torch.linalg.eigvalsh(result.statistics.moments[label.name])[-RANK:].sum()
        expected = float(result.statistics.energies[row, 0, 0] / best)
        assert frame.loc[label.name, "efficiency"] == pytest.approx(expected, rel=1e-6)
        assert 0 < expected < 1


@pytest.mark.parametrize("kind", ["q", "in", "out", "unembed"])
def test_leading_directions_of_the_gradient_are_fully_efficient(kind):
    result = measure(kinds=(kind,), moments=True, nulls=False)
    best = {
        label.site: tt.TangentSubspace(
            torch.linalg.eigh(result.statistics.moments[label.name])[1][:, -RANK:]
        )
        for label in result.statistics.labels
    }
    again = measure(None, batches(), best, kinds=(kind,), moments=True, nulls=False)
    assert again.to_dataframe()["efficiency"].min() > 1 - 1e-6  # Q_T is float32
    assert (again.to_dataframe()["p_value"] == 1 / (1 + B)).all()


def test_removal_is_that_of_a_dense_projection():
    """IsoScore of Z^T C Z, with Z a basis of what is left, minus that of C."""
    result = measured()
    frame = result.to_dataframe().set_index("weight")

    def isoscore(moment):
        values = torch.linalg.eigvalsh(moment)
        return (float(values.sum() ** 2 / values.square().sum()) - 1) / (len(values) - 1)

    for label in result.statistics.labels:
        moment, told = result.statistics.moments[label.name], frame.loc[label.name]
        deltas = []
        for q in bases(result, label.site):
            left = torch.linalg.svd(q, full_matrices=True)[0][:, RANK:]
            deltas.append(isoscore(left.T @ moment @ left) - isoscore(moment))
        tangent, *normals = deltas
        assert told["isoscore"] == pytest.approx(isoscore(moment), abs=1e-9)
        assert told["delta_tangent"] == pytest.approx(tangent, abs=1e-6)
        assert told["delta_normal"] == pytest.approx(np.mean(normals), abs=1e-6)
        assert told["delta_p_value"] == (1 + sum(x >= tangent for x in normals)) / (1 + B)
