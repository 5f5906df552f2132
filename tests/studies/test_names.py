"""Models are called by as little of their paths as tells them apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tl_tangent.studies.names import distinct_tails, folder_name


@pytest.mark.parametrize(
    ("paths", "tails"),
    [
        (["runs/a"], ["a"]),
        (["runs/a", "runs/b/"], ["a", "b"]),
        (["a/checkpoints", "b/checkpoints"], ["a/checkpoints", "b/checkpoints"]),
        (["x/a/c", "y/a/c", "z"], ["x/a/c", "y/a/c", "z"]),
        (["x/c", "y/x/c"], [f"{Path.cwd().name}/x/c", "y/x/c"]),
        (["a/../b", "c"], ["b", "c"]),
        ([], []),
    ],
)
def test_tails(paths, tails):
    assert distinct_tails(paths) == tails
    assert distinct_tails([Path(path) for path in paths]) == tails


def test_a_path_that_comes_twice_is_not_told_apart():
    one, two = distinct_tails(["runs/a", "runs/a"])
    assert one == two


def test_names_are_names_of_folders():
    assert folder_name("EleutherAI/pythia-160m") == "EleutherAI-pythia-160m"
    assert folder_name("..") == "model"
