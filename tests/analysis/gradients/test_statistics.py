"""Sums on disk are the sums in memory, and only sums of the same kind add up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

import tl_tangent as tt
from tests.analysis.gradients.cases import RANK, B, batches, measure, measured
from tl_tangent.analysis.gradients.removals import removals_of
from tl_tangent.analysis.gradients.rows import weight_rows
from tl_tangent.analysis.gradients.statistics import GradientStatistics, empty
from tl_tangent.geometry import SubspaceSet
from tl_tangent.geometry.token_energies import KINDS


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two float64 tensors agree in every bit, those of NaN included."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.int64), other.view(torch.int64))


def assert_same(one: GradientStatistics, other: GradientStatistics) -> None:
    assert one.labels == other.labels
    assert same_bits(one.energies, other.energies)
    assert same_bits(one.totals, other.totals)
    assert set(one.moments) == set(other.moments)
    assert all(same_bits(x, other.moments[name]) for name, x in one.moments.items())
    for count in ("n_batches", "n_tokens", "loss"):
        assert getattr(one, count) == getattr(other, count)


@pytest.mark.parametrize("spec", [("hf", "llama"), ("hf", "gpt2")], ids=["llama", "gpt2"])
def test_what_is_loaded_is_what_was_saved(spec, tmp_path):
    """Bit by bit, with moments, and with the NaN of what was not measured (GPT-2's embeddings)."""
    statistics = measured(*spec).statistics
    assert bool(statistics.totals[:, :-1].isnan().any()) == (spec[1] == "gpt2")
    statistics.save(tmp_path / "a.safetensors")
    assert_same(GradientStatistics.load(tmp_path / "a.safetensors"), statistics)


def test_a_table_can_be_made_of_what_was_loaded(tmp_path):
    result = measured()
    result.statistics.save(str(tmp_path / "a"))
    loaded = GradientStatistics.load(str(tmp_path / "a"))
    tables = [
        weight_rows(one, removals_of(one, result.stacks)) for one in (loaded, result.statistics)
    ]
    assert tables[0] == tables[1]


def test_a_merged_piece_is_saved_and_loaded(tmp_path):
    data = batches(2)
    first = measure(None, data[:1], measured().subspaces, moments=True).statistics
    second = measure(None, data[1:], measured().subspaces, moments=True).statistics
    paths = [tmp_path / name for name in "ab"]
    for piece, path in zip((first, second), paths, strict=True):
        piece.save(path)
    merged = GradientStatistics.load(paths[0]) + GradientStatistics.load(paths[1])
    assert_same(merged, first + second)
    merged.save(tmp_path / "c")
    assert_same(GradientStatistics.load(tmp_path / "c"), merged)


def test_addition_is_of_sums():
    one = measured().statistics
    twice = one + one
    assert same_bits(twice.energies, 2 * one.energies)
    assert same_bits(twice.totals, 2 * one.totals)
    assert all(same_bits(twice.moments[name], 2 * x) for name, x in one.moments.items())
    assert (twice.n_batches, twice.n_tokens, twice.loss) == (4, 72, 2 * one.loss)


def test_nothing_is_neutral():
    one = measure().statistics
    assert_same(empty(one.labels, B) + one, one)
    assert_same(one + empty(one.labels, B), one)


def other_statistics(change: str) -> GradientStatistics:
    options = {
        "weights": {"kinds": ("q",)},
        "rank": {"rank": RANK - 1},
        "controls": {"n_controls": B + 1},
        "subspaces": {"fit_batches": batches(3)},
        "seed": {"seed": 1},
        "unexplained subspaces": {"subspaces": turned()},
        "moments": {"moments": True},
    }
    return measure(**options[change]).statistics


def turned() -> SubspaceSet:
    """Other subspaces than those of the fit, of which no share of the variance is told either."""
    return measure().subspaces.random_normals(1, 5)[0]


CHANGES = ["weights", "rank", "controls", "subspaces", "seed", "unexplained subspaces", "moments"]


@pytest.mark.parametrize("change", CHANGES)
def test_other_sums_do_not_add_up(change):
    one, other = measure().statistics, other_statistics(change)
    told = "keeps second moments" if change == "moments" else "only statistics of the same weights"
    for pair in ((one, other), (other, one)):
        with pytest.raises(tt.TangentValueError, match=told):
            pair[0] + pair[1]


def test_ratios_of_what_was_not_measured_or_is_zero():
    statistics = measured("hf", "gpt2").statistics
    row = [label.kind for label in statistics.labels].index("tied")
    assert statistics.ratio(row) is not None
    assert statistics.ratio(row, "pairing") is None
    zero = empty(statistics.labels, B)
    assert all(zero.ratio(row, kind) is None for kind in KINDS)


# Files ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "a.safetensors"
    measured().statistics.save(path)
    return path


@pytest.mark.parametrize("kept", [0, 1, 7, 100, 0.5, 0.999])
def test_a_truncated_file_is_told(saved, kept):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(tt.TangentFileError, match=rf"{saved} can't be read .*measure it again"):
        GradientStatistics.load(saved)


def test_a_foreign_file_is_told(saved, tmp_path):
    save_file({"energies": torch.ones(2)}, str(saved))
    with pytest.raises(tt.TangentFileError, match="holds something else, not tl_tangent.gradient"):
        GradientStatistics.load(saved)
    measured().subspaces.save(saved)
    with pytest.raises(tt.TangentFileError, match="not tl_tangent.gradient_statistics.2"):
        GradientStatistics.load(saved)
    saved.write_text("name,energy\n")
    with pytest.raises(tt.TangentFileError, match="can't be read"):
        GradientStatistics.load(saved)
    with pytest.raises(tt.TangentFileError, match="can't be read"):
        GradientStatistics.load(tmp_path / "nowhere")
    with pytest.raises(tt.TangentFileError, match="can't be read"):
        GradientStatistics.load(tmp_path)


def test_labels_are_frozen():
    label = measured().statistics.labels[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        label.rank = 3
