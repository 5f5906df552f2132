"""The cache: where it lies, and folders that are whole or absent."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tl_tangent.assets.cache import build_once, cache_folder, is_complete
from tl_tangent.errors import TangentFileError


def write_two(folder: Path) -> None:
    (folder / "a").write_text("one")
    (folder / "b").write_text("two")


def test_the_variable_wins_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("TL_TANGENT_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("x") == tmp_path / "mine" / "x"
    monkeypatch.delenv("TL_TANGENT_CACHE")
    assert cache_folder("x") == tmp_path / "xdg" / "tl_tangent" / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("x") == Path.home() / ".cache" / "tl_tangent" / "x"


def test_a_folder_is_built_once_and_nothing_else_stays(tmp_path):
    target = tmp_path / "deep" / "t"
    calls = []
    for _ in range(2):
        build_once(target, lambda folder: (calls.append(folder), write_two(folder)))
    assert len(calls) == 1 and is_complete(target)
    assert [path.name for path in target.parent.iterdir()] == ["t"]


def test_a_damaged_folder_is_built_again(tmp_path):
    target = build_once(tmp_path / "t", write_two)
    (target / "a").write_text("cut")
    (target / "b").write_text("t")
    assert not is_complete(target)
    assert is_complete(build_once(target, write_two))
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        write_two(folder)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        build_once(tmp_path / "t", fail)
    assert list(tmp_path.iterdir()) == []


def test_racing_builds_all_end_with_one_whole_folder(tmp_path):
    barrier = Barrier(4)

    def build(folder: Path) -> None:
        barrier.wait(timeout=30)  # all four find the target missing
        write_two(folder)

    with ThreadPoolExecutor(4) as pool:
        targets = list(pool.map(lambda _: build_once(tmp_path / "t", build), range(4)))
    assert set(targets) == {tmp_path / "t"} and is_complete(tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(TangentFileError, match="TL_TANGENT_CACHE"):
        build_once(tmp_path / "file" / "t", write_two)
