"""Two objectives of one name are two, and a checkpoint that was overwritten is not the same."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tl_tangent.errors import TangentFileError
from tl_tangent.run_folder import RunFolder
from tl_tangent.studies.checkpoints import Checkpoint
from tl_tangent.studies.identity import END, check_unchanged, describe_objective, files_of

ROOT = Path(__file__).resolve().parents[2]


def scaled(factor, power=1):
    def loss(model, batch):
        return factor * model(batch) ** power

    return loss


def defined(text):
    names = {}
    exec(f"def loss(model, batch, scale=1):\n    return {text}", names)
    return names["loss"]


class Weighted:
    def __init__(self, weights):
        self.weights = weights

    def __call__(self, model, batch):
        return (self.weights * model(batch)).sum()

    def method(self, model, batch):
        return self(model, batch)


DIFFERENT = [
    "causal",
    "masked",
    defined("model(batch)"),
    defined("model(batch) * 2"),
    defined("model(batch) * 3"),
    defined("model.other(batch)"),
    defined("(lambda x: x + 1)(model(batch))"),
    defined("(lambda x: x + 2)(model(batch))"),
    scaled(1.0),
    scaled(2.0),
    scaled(scaled(1.0)),
    scaled(scaled(2.0)),
    scaled(torch.zeros(2000)),
    scaled(torch.zeros(2000).index_fill(0, torch.tensor([1000]), 1.0)),  # no repr shows the 1
    scaled(torch.nn.Linear(2, 2)),
    partial(scaled(1.0), power=1),
    partial(scaled(1.0), power=2),
    Weighted(1.0),
    Weighted(2.0),
    Weighted(1.0).method,
    Weighted(2.0).method,
]


def test_what_computes_something_else_has_another_name():
    told = [describe_objective(one) for one in DIFFERENT]
    assert len(set(told)) == len(told)
    assert told[:2] == ["causal", "masked"] and told[2].startswith("loss, code ")
    assert json.loads(json.dumps(told)) == told


def test_the_same_code_has_the_same_name():
    assert describe_objective(defined("model(batch)")) == describe_objective(
        defined("model(batch)")
    )
    for make in (scaled, Weighted, lambda x: Weighted(x).method, lambda x: scaled(object())):
        assert describe_objective(make(3.0)) == describe_objective(make(3.0))


def test_what_is_not_written_in_python_has_its_qualified_name():
    assert describe_objective(len) == "len" and describe_objective({}.get) == "dict.get"


def test_a_function_that_calls_itself_has_an_end():
    def loss(model, batch):
        return loss(model, batch)

    assert describe_objective(loss).startswith("test_a_function_that_calls_itself_has_an_end")


def test_a_name_is_the_same_in_another_process():
    """Sets have another order there, and objects another address."""
    text = "model(batch) in {'a', 'b', 'c', 'd', 'e'}"
    script = f"""if True:
        from tests.studies.test_identity import defined, describe_objective
        print(describe_objective(defined({text!r})))
    """
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == describe_objective(defined(text)), run.stderr


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a file of four times what is looked at, and one that no model is read from."""
    folder = tmp_path / "step-3"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(4 * END))
    (folder / "optimizer.pt").write_bytes(b"1")
    return Checkpoint(str(folder), 3)


def test_the_files_of_a_model_are_told_by_size_and_ends(checkpoint):
    first = files_of(checkpoint)
    assert list(first) == ["config.json", "model.safetensors"]
    assert first["model.safetensors"].startswith(f"{4 * END} bytes")
    file = Path(checkpoint.location) / "model.safetensors"
    seen = {first["model.safetensors"]}
    for place in (0, END - 1, 3 * END, 4 * END - 1):
        content = bytearray(4 * END)
        content[place] = 1
        file.write_bytes(content)
        seen.add(files_of(checkpoint)["model.safetensors"])
    file.write_bytes(bytes(4 * END + 1))
    seen.add(files_of(checkpoint)["model.safetensors"])
    file.write_bytes(bytes(10))
    seen.add(files_of(checkpoint)["model.safetensors"])
    assert len(seen) == 7
    assert files_of(Checkpoint("some/model", 3, "step3")) == {}


@pytest.mark.parametrize("change", ["overwrite", "add", "remove"])
def test_a_checkpoint_that_was_overwritten_is_named(checkpoint, tmp_path, change):
    folder = RunFolder(tmp_path / "out", {})
    noted = check_unchanged([checkpoint], folder)
    (Path(checkpoint.location) / "optimizer.pt").write_bytes(b"2")
    assert check_unchanged([checkpoint], folder) == noted
    file = Path(checkpoint.location) / "model.safetensors"
    if change == "overwrite":
        file.write_bytes(b"other")
    elif change == "add":
        file = file.with_name("pytorch_model.bin")
        file.write_bytes(b"more")
    else:
        file.unlink()
    with pytest.raises(TangentFileError, match=rf"step 3 .* has changed since .*{file.name}"):
        check_unchanged([checkpoint], folder)
