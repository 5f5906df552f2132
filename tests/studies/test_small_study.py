"""The embedded study: both runs, their records, and the alignment test, end to end."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch

from tests.studies.test_small_run import OPTIONS, random_text
from tl_tangent.studies import small_study as module
from tl_tangent.studies.checkpoints import Checkpoint, CheckpointSeries
from tl_tangent.studies.small_study import CONTROL, MAIN, small_study

SIZES = {"rank": 2, "n_controls": 3, "rows": 2, "batch": 1, "progress": False}
STEPS = replace(OPTIONS, steps=12, every=4, warmup=3)


def study(folder):
    return small_study(folder, STEPS, text=random_text(), **SIZES)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return study(tmp_path_factory.mktemp("study") / "a")


def test_both_runs_are_in_the_table_with_both_phases(found):
    table = found.alignment.table()
    assert list(table["model"]) == [MAIN, CONTROL]
    assert (table["checkpoints_early"] == 3).all()  # steps 0, 1, 2 of 0, 1, 2, 4, 8, 12
    assert (table["checkpoints_late"] == 3).all()
    wanted = {"energy_ratio", "pairing_ratio", "excess_pairing", "delta_tangent", "delta_normal"}
    columns = {f"{name}_{phase}" for name in wanted for phase in ("early", "late")}
    assert columns <= set(table.columns)
    assert table[sorted(columns)].notna().all(axis=None)


def test_gradients_were_recorded_in_every_step_once_there_was_a_proxy(found):
    for records in found.records.values():
        steps = [one.step for one in records.steps]
        assert steps == list(range(steps[0], STEPS.steps))
        assert records.conventions["fits"][-1] <= int(module.BOUNDARY * STEPS.steps)


def test_the_records_are_those_of_the_checkpoints(found):
    """At one step the recorder and the test see the same weights, and a like ratio of energies."""
    frame = found.records[MAIN].to_dataframe("step").set_index("step")
    measured = found.alignment.to_dataframe("checkpoint")
    later = measured[(measured["model"] == MAIN) & (measured["step"] == 8)]
    ratio = float(later["energy_ratio_exact"].iloc[0]) / float(frame.loc[8, "energy_ratio_exact"])
    assert 0.2 < ratio < 5  # other rows, and a Q_T of the checkpoints instead of the steps


def test_the_control_is_measured_on_shuffled_labels():
    rows = torch.arange(60).view(6, 10)
    of = module._batches(rows, 4, seed=0)
    plain, shuffled = (
        of(CheckpointSeries(name, (Checkpoint("x", 0),))) for name in (MAIN, CONTROL)
    )
    assert [batch.labels for batch in plain] == [None, None]
    for batch, own in zip(shuffled, plain, strict=True):
        assert torch.equal(batch.tokens, own.tokens)
        assert not torch.equal(batch.labels, own.tokens)
        assert torch.equal(batch.labels.flatten().sort()[0], own.tokens.flatten().sort()[0])


def test_it_writes_tables_and_pictures(found):
    folder = found.runs[MAIN].folder.parent
    names = {str(path.relative_to(folder)) for path in found.save(folder, "the command")}
    runs = {"trained/steps.png", "shuffled-labels/steps.png"}
    assert names == runs | {
        f"alignment/{name}" for name in ("table.csv", "checkpoints.csv", "curve.png", "align.json")
    }
    assert all((folder / name).stat().st_size > 500 for name in names)


def test_a_study_that_was_stopped_ends_as_an_undisturbed_one(found, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "alignment_test", stop)
        with pytest.raises(KeyboardInterrupt):
            study(tmp_path / "b")
    again = study(tmp_path / "b")
    pd.testing.assert_frame_equal(
        again.alignment.table(), found.alignment.table(), check_exact=True
    )
    assert "validation loss" in again.headline()
