"""Frequency against spread over checkpoints: each row is that of its model measured alone."""

from __future__ import annotations

import gc
import json
import weakref

import pandas as pd
import pytest
import torch

import tl_tangent as tt
from tests import families
from tl_tangent.studies.checkpoints import Checkpoint, CheckpointSeries

SITES = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
STATIC = ["embed.W_E", "unembed.W_U"]


def save(folder, seed, family="llama"):
    families.hf_model(family, seed=seed).save_pretrained(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    for seed, name in enumerate(("step-0", "step-20")):
        save(folder / name, seed)
    return folder


def batches(n: int = 4):
    return [families.tiny_tokens(batch=4, pos=16, seed=seed) for seed in range(n)]


def test_rows_are_those_of_each_model_measured_alone(run):
    series = CheckpointSeries.from_folder(run)
    frame = tt.frequency_over_checkpoints(series, batches(), SITES, equal_n=3, seed=1)
    assert frame["step"].tolist() == [0] * 4 + [20] * 4
    assert frame["site"].tolist() == (SITES + STATIC) * 2
    for seed, step in enumerate((0, 20)):
        model = families.bridge("llama", seed=seed)
        alone = tt.frequency_dispersion(model, batches(), SITES, equal_n=3, seed=1).to_dataframe()
        own = frame[frame["step"] == step].drop(columns="step").reset_index(drop=True)
        pd.testing.assert_frame_equal(own, alone, check_exact=False, rtol=1e-4)
    spread = frame.set_index(["step", "site"])["pearson"]
    assert spread[0, SITES[1]] != pytest.approx(spread[20, SITES[1]], abs=1e-3)


def test_static_embeddings_have_no_spread_and_a_norm_and_a_distance(run):
    series = CheckpointSeries.from_folder(run)
    frame = tt.frequency_over_checkpoints(series, batches(), SITES[0]).set_index(["step", "site"])
    counts = torch.bincount(torch.cat(batches()).flatten(), minlength=64).double()
    for seed, step in enumerate((0, 20)):
        embedding = families.hf_model("llama", seed=seed).get_input_embeddings().weight.double()
        row, known = frame.loc[step, "embed.W_E"], counts > 0
        for name, x in (
            ("static_norm", embedding),
            ("static_distance", embedding - embedding.mean(0)),
        ):
            logs = torch.stack([counts, x.norm(dim=1).detach()])[:, known].log()
            assert row[name] == pytest.approx(float(logs.corrcoef()[0, 1]), abs=1e-6)
        assert pd.isna(row["pearson"]) and pd.isna(row["leave_one_out"])
    bare = tt.frequency_over_checkpoints(series, batches(), SITES[0], static=False)
    assert bare["site"].tolist() == [SITES[0]] * 2


def test_one_model_is_alive_at_a_time(run, monkeypatch):
    load, seen, alive = Checkpoint.load, [], []

    def noted(self, *args):
        gc.collect()
        alive.append(sum(one() is not None for one in seen))
        model = load(self, *args)
        seen.append(weakref.ref(model))
        return model

    monkeypatch.setattr(Checkpoint, "load", noted)
    tt.frequency_over_checkpoints(CheckpointSeries.from_folder(run), batches(), SITES[0])
    assert alive == [0, 0] and not any(one() is not None for one in seen)


def test_batches_that_come_once_are_kept_and_conventions_are_told(run):
    series = CheckpointSeries.from_folder(run)
    once = tt.frequency_over_checkpoints(series, iter(batches()), SITES)
    pd.testing.assert_frame_equal(once, tt.frequency_over_checkpoints(series, batches(), SITES))
    told = once.attrs["conventions"]
    assert told["model"] == "tiny" and len(told["checkpoints"]) == 2
    assert "step 20" in told["checkpoints"][1] and "ddof" in told["meaning"]["pearson"]
    json.dumps(told)


def test_masked_models_are_loaded_as_such(tmp_path):
    save(tmp_path / "step-1", 0, "bert")
    series = CheckpointSeries.from_folder(tmp_path, objective="masked")
    frame = tt.frequency_over_checkpoints(series, batches(), SITES, static=False)
    assert frame["site"].tolist() == SITES and frame["pearson"].notna().all()


def test_what_it_refuses(run, tmp_path):
    save(tmp_path / "step-1", 0)
    save(tmp_path / "step-2", 0)
    with pytest.raises(tt.TangentValueError, match="step 1 .* and step 2 .* have the same weights"):
        tt.frequency_over_checkpoints(CheckpointSeries.from_folder(tmp_path), batches(), SITES)
    series = CheckpointSeries.from_folder(run)
    with pytest.raises(tt.TangentKeyError, match="hook_nowhere"):
        tt.frequency_over_checkpoints(series, batches(), "blocks.0.hook_nowhere")
    with pytest.raises(tt.TangentValueError, match="min_count is 1"):
        tt.frequency_over_checkpoints(series, batches(), SITES, min_count=1)
    lost = CheckpointSeries("lost", (Checkpoint(str(tmp_path / "none"), 5),))
    with pytest.raises(tt.TangentFileError, match="step 5"):
        tt.frequency_over_checkpoints(lost, batches(), SITES)
