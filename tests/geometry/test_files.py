"""Files come back as they were, and anything else that is offered is refused by name."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace, subspace_io


def make(*lead: int, **labels: object) -> TangentSubspace:
    torch.manual_seed(0)
    return TangentSubspace(
        torch.randn(*lead, 10, 3),
        torch.randn(*lead, 10),
        spectrum=torch.arange(10.0).flip(0).expand(*lead, 10),
        orthonormalize=True,
        **labels,
    )


@pytest.fixture
def subspace() -> TangentSubspace:
    return make(
        site="blocks.3.hook_resid_post",
        model="gpt2",
        method="pca",
        explained=0.625,
        positions={"from": 1},
        n_tokens=512,
        metadata={"note": "naïve", "nested": [1, None]},
    )


@pytest.fixture
def path(subspace: TangentSubspace, tmp_path: Path) -> Path:
    subspace.save(tmp_path / "subspace.safetensors")
    return tmp_path / "subspace.safetensors"


def test_round_trip_is_exact(subspace: TangentSubspace, path: Path) -> None:
    loaded = TangentSubspace.load(path, model="gpt2", d=10)
    for name in ("basis", "mean", "spectrum"):
        assert torch.equal(getattr(loaded, name), getattr(subspace, name))
        assert getattr(loaded, name).dtype == getattr(subspace, name).dtype
    for name in ("site", "model", "method", "explained", "positions", "n_tokens"):
        assert getattr(loaded, name) == getattr(subspace, name)
    assert dict(subspace.metadata).items() <= dict(loaded.metadata).items()
    assert loaded.metadata["versions"]["torch"] == torch.__version__


def test_round_trip_of_heads_and_float64(tmp_path: Path) -> None:
    heads = make(2, explained=[0.5, 0.25])
    heads = heads.replace(basis=heads.basis.double(), orthonormalize=True)
    heads.save(tmp_path / "new folder" / "heads.safetensors")
    loaded = TangentSubspace.load(tmp_path / "new folder" / "heads.safetensors")
    assert torch.equal(loaded.basis, heads.basis) and loaded.basis.dtype == torch.float64
    assert loaded.head_explained == (0.5, 0.25)


def test_header_is_plain_json(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    assert header["format"] == "tl_tangent.subspace"
    content = json.loads(header["content"])
    assert content["records"][0]["site"] == "blocks.3.hook_resid_post"
    assert set(content["versions"]) == {"tl-tangent", "torch", "transformer-lens"}


def test_set_round_trip_keeps_order_and_names(subspace: TangentSubspace, tmp_path: Path) -> None:
    sites = ["b", "a", "blocks.10.hook_out", "blocks.1.hook_out"]
    subspaces = SubspaceSet({site: subspace.replace(site=None) for site in sites})
    subspaces.save(tmp_path / "set.safetensors")
    loaded = SubspaceSet.load(tmp_path / "set.safetensors", model="gpt2", d=10)
    assert list(loaded) == sites
    assert all(torch.equal(loaded[site].basis, subspace.basis) for site in sites)
    with pytest.raises(TangentFileError, match=r"b in .*width d=10, but d=11"):
        SubspaceSet.load(tmp_path / "set.safetensors", d=11)


def test_saving_again_does_not_collect_versions(path: Path) -> None:
    first = TangentSubspace.load(path)
    first.save(path)
    assert TangentSubspace.load(path).metadata == first.metadata


@pytest.mark.parametrize(
    ("wanted", "says"),
    [({"model": "pythia"}, "'gpt2', not on 'pythia'"), ({"d": 11}, "d=10, but d=11")],
)
def test_another_model_or_width(path: Path, wanted: dict[str, object], says: str) -> None:
    with pytest.raises(TangentFileError, match=says):
        TangentSubspace.load(path, **wanted)


def test_kinds_are_not_confused(path: Path, subspace: TangentSubspace) -> None:
    with pytest.raises(TangentFileError, match=r"TangentSubspace, not a SubspaceSet"):
        SubspaceSet.load(path)
    SubspaceSet([subspace]).save(path)
    with pytest.raises(TangentFileError, match=r"load it with SubspaceSet\.load"):
        TangentSubspace.load(path)


def test_every_truncation_is_an_error(path: Path) -> None:
    whole = path.read_bytes()
    for length in [0, 1, 7, 8, 9, *range(20, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(TangentFileError):
            TangentSubspace.load(path)


def test_every_altered_byte_is_an_error(path: Path) -> None:
    whole = path.read_bytes()
    rng = random.Random(0)
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    places = [
        *range(8),
        *rng.sample(range(8, header), 150),
        *rng.sample(range(header, len(whole)), 50),
    ]
    for place in places:
        if whole[place : place + 1].isspace():
            continue  # padding, where another blank means the same
        altered = bytes([whole[place] ^ (1 << rng.randrange(8))])
        path.write_bytes(whole[:place] + altered + whole[place + 1 :])
        with pytest.raises(TangentFileError):
            TangentSubspace.load(path)


def test_foreign_files(path: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "weights.safetensors"
    save_file({"weight": torch.eye(3)}, foreign)
    with pytest.raises(TangentFileError, match=r"format None, not 'tl_tangent\.subspace'"):
        TangentSubspace.load(foreign)
    torch.save({"basis": torch.eye(3)}, foreign)
    with pytest.raises(TangentFileError, match="not a safetensors file"):
        TangentSubspace.load(foreign)
    with pytest.raises(TangentFileError):
        TangentSubspace.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no subspace file"):
        TangentSubspace.load(tmp_path / "missing.safetensors")


def test_later_format_versions(
    subspace: TangentSubspace, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(subspace_io, "FORMAT_VERSION", "2")
        subspace.save(path)
    with pytest.raises(TangentFileError, match=r"version '2', this package reads '1'"):
        TangentSubspace.load(path)


def test_valid_file_of_an_invalid_subspace(tmp_path: Path) -> None:
    record = subspace_io.Record({"basis": 2 * torch.eye(4, 2), "mean": torch.zeros(4)}, {})
    subspace_io.write_records(tmp_path / "x", [record], kind="TangentSubspace")
    with pytest.raises(TangentFileError, match="not orthonormal"):
        TangentSubspace.load(tmp_path / "x")


def test_a_failed_save_leaves_the_old_file(
    subspace: TangentSubspace, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = path.read_bytes()
    with pytest.raises(TangentValueError, match="JSON"):
        subspace.replace(metadata={"tensor": torch.ones(1)}).save(path)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(subspace_io.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        subspace.save(path)
    assert path.read_bytes() == old
    assert [file.name for file in path.parent.iterdir()] == [path.name]
