"""A series is of one model: another one is refused, by its configuration or when it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import transformers

from tests import families
from tests.studies.runs import SMALL, tokens, write_run
from tl_tangent.errors import TangentFileError
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.studies.alignment import alignment_test
from tl_tangent.studies.architecture import architecture_of, check_alike, outline
from tl_tangent.studies.checkpoints import Checkpoint, CheckpointSeries


@dataclass(frozen=True)
class Revision(Checkpoint):
    """A checkpoint whose files nobody sees before it is loaded, as on the hub."""

    folder: str = ""

    def load(self, objective="causal", device="cpu"):
        return Checkpoint(self.folder, self.step).load(objective, device)


def wider(folder, seed=3):
    """Save a Llama of twice the width."""
    config = families.hf_model("llama").config.to_dict() | {"hidden_size": 64, "head_dim": 8}
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.save_pretrained(folder)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs" / "tiny", (0, 1, 10, 40))


def as_revisions(series: CheckpointSeries) -> CheckpointSeries:
    found = tuple(
        Revision("some/model", one.step, f"step{one.step}", folder=one.location)
        for one in series.checkpoints
    )
    return replace(series, checkpoints=found)


@pytest.mark.parametrize("step", [1, 40])
def test_a_wider_model_in_a_folder_is_refused_before_anything_is_measured(run, tmp_path, step):
    wider(run / f"step-{step}")
    series = CheckpointSeries.from_folder(run)
    message = rf"step {step} \(.*another model than step 0 \(.*hidden_size 64 and not 32"
    with pytest.raises(TangentFileError, match=message):
        alignment_test(series, tokens(1), **SMALL, out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("**/*.*"))


@pytest.mark.parametrize("step", [1, 40])
def test_one_that_is_only_seen_when_it_is_loaded_is_refused_then(run, tmp_path, step):
    """An early one before Q_T is fitted, a late one before its gradients are held against it."""
    wider(run / f"step-{step}")
    series = as_revisions(CheckpointSeries.from_folder(run))
    message = rf"step {step} \(some/model@step{step}\) is another model than step 0.* 64 and not 32"
    for _ in range(2):  # and the same command says so again
        with pytest.raises(TangentFileError, match=message):
            alignment_test(series, tokens(1), **SMALL, out=tmp_path / "out")
    assert (tmp_path / "out" / "tiny" / "subspaces.safetensors").exists() == (step == 40)


def test_another_kind_of_model_of_the_same_width_is_refused(run):
    families.hf_model("gpt2").save_pretrained(run / "step-10")
    with pytest.raises(TangentFileError, match="model_type gpt2 and not llama"):
        check_alike(CheckpointSeries.from_folder(run).checkpoints)


def test_a_longer_context_is_the_same_model(run):
    """Runs are continued with another rotary base and more positions."""
    model = families.hf_model("llama", seed=4)
    model.config.max_position_embeddings *= 2
    model.save_pretrained(run / "step-40")
    check_alike(CheckpointSeries.from_folder(run).checkpoints)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "bloom", "bert"])
def test_an_outline_has_the_weights_of_the_model_and_no_memory(tmp_path, family):
    model = families.hf_model(family)
    model.save_pretrained(tmp_path)
    before = torch.random.get_rng_state()
    found = outline(Checkpoint(str(tmp_path), 0), "masked" if family == "bert" else "causal")
    assert torch.equal(before, torch.random.get_rng_state())
    assert {one.device.type for one in found.parameters()} == {"meta"}
    wanted = [(one.name, one.d) for one in find_weights(model).weights]
    assert [(one.name, one.d) for one in find_weights(found).weights] == wanted
    assert outline(Checkpoint(str(tmp_path / "gone"), 0)) is None


def test_sizes_have_one_name_in_all_families():
    for family in ("llama", "gpt2", "bert"):
        found = architecture_of(families.hf_model(family).config)
        assert found["hidden_size"] == families.D_MODEL and found["vocab_size"] == families.D_VOCAB
        assert found["num_hidden_layers"] == families.N_LAYERS
