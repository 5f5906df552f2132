"""Overlaps of subspaces, and the picture of them beside their spectra."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tl_tangent.geometry import TangentSubspace


def axes(*columns: int, d: int = 6, **more) -> TangentSubspace:
    return TangentSubspace(torch.eye(d)[:, list(columns)], **more)


def a_set() -> tt.SubspaceSet:
    spectrum = torch.tensor([5.0, 3.0, 1.0, 0.5, 0.25, 0.0])
    return tt.SubspaceSet(
        {
            "blocks.0.hook_resid_post": axes(0, 1, spectrum=spectrum),
            "blocks.1.hook_resid_post": axes(1, 2, spectrum=spectrum),
            "blocks.2.hook_resid_post": axes(3, 4, 5),
        }
    )


def test_overlaps_count_shared_directions():
    found = a_set().overlaps()
    assert found.to_numpy().tolist() == [[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]]
    beside = a_set().overlaps({"later": axes(0)})
    assert beside.to_numpy().tolist() == [[1], [0], [0]]


def test_chance_is_the_mean_over_random_subspaces():
    generator = torch.Generator().manual_seed(0)
    first = axes(0, 1, 2, d=24)
    draws = [torch.linalg.qr(torch.randn(24, 2, generator=generator))[0] for _ in range(2000)]
    others = tt.SubspaceSet({str(i): TangentSubspace(draw) for i, draw in enumerate(draws)})
    found = tt.SubspaceSet({"a": first}).overlaps(others).to_numpy()
    assert abs(found.mean() - 3 / 24) < 4 * found.std() / 2000**0.5


def test_the_picture_has_spectra_with_their_rank_and_the_matrix():
    figure = a_set().plot()
    spectra, matrix = figure.axes[:2]
    lines = [line for line in spectra.lines if len(line.get_xdata()) > 1]
    assert [line.get_ydata()[0] for line in lines] == pytest.approx([5 / 9.75] * 2)
    dots = [line for line in spectra.lines if len(line.get_xdata()) == 1]
    assert [line.get_xdata()[0] for line in dots] == [2, 2]
    assert matrix.images[0].get_array().tolist() == a_set().overlaps().to_numpy().tolist()
    assert "chance 0.5" in matrix.get_title()


def test_what_does_not_compare_is_refused():
    with pytest.raises(tt.TangentValueError, match="compare where they have one width"):
        a_set().overlaps({"b": axes(0, d=5)})
    with pytest.raises(tt.TangentValueError, match="nothing to compare"):
        tt.SubspaceSet().overlaps()
