"""Checkpoints are found by their names, sorted, loaded as they are, and told apart."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled

from tests import families
from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.studies.checkpoints import Checkpoint, CheckpointSeries
from tl_tangent.studies.hub import find_step, step_of

NAMES = {
    "step1000": 1000,  # Pythia
    "step1000-tokens4B": 1000,  # OLMo
    "stage1-step150-tokens1B": 150,  # OLMo 2
    "step-125000": 125000,  # SmolLM2
    "step-001000-2BT": 1000,  # FineWeb's ablation models
    "global_step5000": 5000,  # BLOOM
    "checkpoint-500": 500,  # the Trainer
}


def save(folder, seed, family="llama"):
    families.hf_model(family, seed=seed).save_pretrained(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three checkpoints of a tiny Llama, and things that are none."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    for seed, name in enumerate(("step-0", "checkpoint-1000", "step_20")):
        save(folder / name, seed)
    (folder / "step-7").mkdir()  # empty: the run was stopped while it wrote
    save(folder / "step-30-averaged", 9)
    (folder / "losses.csv").write_text("")
    return folder


def series(steps, **options) -> CheckpointSeries:
    return CheckpointSeries("made-up", tuple(Checkpoint("x", step) for step in steps), **options)


@pytest.mark.parametrize("name", NAMES)
def test_names_tell_their_steps(name):
    assert step_of(name) == NAMES[name]


def test_other_names_tell_none_and_other_patterns_can():
    assert find_step("main") is None and find_step("stepping") is None
    assert step_of("ba1500-fp32", r"ba(\d+)") == 1500
    with pytest.raises(TangentValueError, match="'main' tells no step.*pattern="):
        step_of("main")
    for pattern in ("step", "(step)", "step(", r"step(\d+)?$"):
        with pytest.raises(TangentValueError, match="gives no step|tells no step"):
            step_of("step", pattern)


def test_a_folder_is_read_in_the_order_of_the_steps(run):
    found = CheckpointSeries.from_folder(run, objective="causal")
    assert found.name == "tiny" and found.steps == (0, 20, 1000)
    assert [one.location.rpartition("/")[2] for one in found.checkpoints] == [
        "step-0",
        "step_20",
        "checkpoint-1000",
    ]


def test_a_training_folder_is_looked_into(run, tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "checkpoints").symlink_to(run)
    found = CheckpointSeries.from_folder(tmp_path / "training")
    assert found.name == "training" and found.steps == (0, 20, 1000)
    save(tmp_path / "training" / "step-5", 0)  # its own come first
    assert CheckpointSeries.from_folder(tmp_path / "training").steps == (5,)


def test_a_checkpoint_is_loaded_as_it_was_saved_here_and_in_another_process(run):
    checkpoint = CheckpointSeries.from_folder(run).checkpoints[1]
    model = pickle.loads(pickle.dumps(checkpoint)).load()
    saved = families.hf_model("llama", seed=2).state_dict()
    assert all(torch.equal(saved[name], found) for name, found in model.state_dict().items())
    assert not model.training and model.config._attn_implementation == "eager"
    low = Checkpoint(checkpoint.location, 20, dtype="bfloat16", attention="sdpa").load()
    assert low.dtype == torch.bfloat16 and low.config._attn_implementation == "sdpa"


def test_a_masked_model_is_loaded_with_its_head(tmp_path):
    save(tmp_path / "step-1", 0, "bert")
    model = Checkpoint(str(tmp_path / "step-1"), 1).load("masked")
    assert type(model).__name__ == "BertForMaskedLM"


def test_weights_that_would_be_drawn_at_random_are_an_error(tmp_path):
    families.hf_model("bert").bert.save_pretrained(tmp_path / "step-1")
    with pytest.raises(TangentFileError, match="no weights for 6 of .* drawn at random"):
        Checkpoint(str(tmp_path / "step-1"), 1).load("masked")


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(TangentFileError, match=r"step 3 \(.*gone@v1\) can't be loaded"):
        Checkpoint(str(tmp_path / "gone"), 3, "v1").load()
    with pytest.raises(TangentValueError, match="dtype 'int8'"):
        Checkpoint("x", 3, dtype="int8").load()
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(TangentFileError, match="no sub-folders step-N or checkpoint-N"):
            CheckpointSeries.from_folder(folder)


def listing(monkeypatch, branches, tags=()):
    def refs(repo):
        assert repo == "some/model"
        named = [[SimpleNamespace(name=name) for name in names] for names in (branches, tags)]
        return SimpleNamespace(branches=named[0], tags=named[1])

    monkeypatch.setattr(huggingface_hub, "list_repo_refs", refs)


def test_the_hub_is_asked_for_branches_and_tags(monkeypatch):
    listing(monkeypatch, ["main", "step64", "step8"], ["global_step512", "v1.0", "step8"])
    found = CheckpointSeries.from_hub("some/model", total_steps=600, dtype="bfloat16")
    assert found.name == "some/model" and found.steps == (8, 64, 512) and found.total_steps == 600
    assert found.checkpoints[2] == Checkpoint("some/model", 512, "global_step512", "bfloat16")
    assert str(found.checkpoints[0]) == "step 8 (some/model@step8)"


def test_two_runs_in_one_repository_are_told_apart_by_a_pattern(monkeypatch):
    listing(monkeypatch, ["stage1-step8", "stage2-step8", "stage1-step16"])
    with pytest.raises(TangentValueError, match="two checkpoints of one step, step 8 .*pattern="):
        CheckpointSeries.from_hub("some/model")
    found = CheckpointSeries.from_hub("some/model", pattern=r"^stage1-step(\d+)")
    assert [one.revision for one in found.checkpoints] == ["stage1-step8", "stage1-step16"]
    with pytest.raises(TangentFileError, match=r"none of the 3 revisions.*first stage1-step8"):
        CheckpointSeries.from_hub("some/model", pattern=r"^stage3-step(\d+)")


def test_offline_it_says_to_give_revisions(monkeypatch):
    def refuse(repo):
        raise OfflineModeIsEnabled("Cannot reach the hub: offline mode is enabled.")

    monkeypatch.setattr(huggingface_hub, "list_repo_refs", refuse)
    with pytest.raises(TangentFileError, match="offline mode.*give revisions=.*in the cache"):
        CheckpointSeries.from_hub("some/model")
    given = CheckpointSeries.from_hub("some/model", ["step2", "step1"])
    assert given.steps == (1, 2) and given.checkpoints[0].revision == "step1"
    with pytest.raises(TangentValueError, match="'main' tells no step"):
        CheckpointSeries.from_hub("some/model", ["main"])


def test_a_revision_in_the_cache_is_loaded_and_no_other(tmp_path, monkeypatch):
    repo = tmp_path / "models--some--model"
    for seed, revision in enumerate(("step1", "step2")):
        commit = str(seed) * 40
        save(repo / "snapshots" / commit, seed)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = CheckpointSeries.from_hub("some/model", ["step1", "step2"])
    for seed, one in enumerate(found.checkpoints):
        expected = families.hf_model("llama", seed=seed).lm_head.weight
        assert torch.equal(one.load().lm_head.weight, expected)
    with pytest.raises(TangentFileError, match="step 3 .*@step3"):
        Checkpoint("some/model", 3, "step3").load()


def test_paths_are_accepted_wherever_a_name_is(run):
    one = Checkpoint(run / "step-0", 0)
    assert one == Checkpoint(str(run / "step-0"), 0) and one.load() is not None
    assert CheckpointSeries(run, (one,)).name == str(run)
    assert CheckpointSeries.from_hub(Path("some/model"), ["step1"]).name == "some/model"


def test_a_series_is_thinned_to_a_regular_grid():
    pythia = series([0, *(2**i for i in range(10)), *range(1000, 144_000, 1000)])
    found = pythia.thinned(12)
    assert found.steps == tuple(range(0, 144_000, 13_000))
    assert found.note == (
        "12 of 154 checkpoints: the nearest to 12 evenly spaced steps from 0 to 143000"
    )
    crowded = series([0, 1, 2, 4, 100], total_steps=200).thinned(5)
    assert crowded.steps == (0, 4, 100) and "3 of 5 checkpoints" in crowded.note
    assert crowded.total_steps == 200
    assert series([0, 50, 90]).thinned(2).total_steps == 90  # the phases stay what they were
    with pytest.raises(TangentValueError, match="n=1"):
        pythia.thinned(1)


def test_a_series_needs_checkpoints_of_different_steps():
    assert series([5, 1, 3]).steps == (1, 3, 5)
    with pytest.raises(TangentValueError, match="no checkpoints"):
        series([])
    with pytest.raises(TangentValueError, match="two checkpoints of one step"):
        series([1, 2, 1])


def test_neighbours_with_the_same_weights_are_named(run, tmp_path):
    found = CheckpointSeries.from_folder(run)
    found.check_different()
    copy = Checkpoint(found.checkpoints[0].location, 10)
    doubled = CheckpointSeries("tiny", (*found.checkpoints, copy))
    with pytest.raises(TangentValueError, match=r"step 0 \(.*\) and step 10 \(.*the same weights"):
        doubled.check_different()


def test_fingerprints_that_are_not_known_yet_are_not_compared():
    some = series([1, 2, 3])
    some.check_different({1: "a", 3: "a"})
    some.check_different({})
    with pytest.raises(TangentValueError, match="step 2 .* and step 3"):
        some.check_different({2: "a", 3: "a"})
