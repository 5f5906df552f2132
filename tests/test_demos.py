"""Notebooks: the executed form is that of the source, without errors, and has something to see."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "demos").glob("*.py"))


def builder():
    """scripts/notebooks.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["notebooks"] = module
    spec.loader.exec_module(module)
    return module


def test_there_are_six():
    assert [source.name[0] for source in SOURCES] == list("123456")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_executed_form_is_that_of_its_source(source):
    made = builder()
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert made.cells_of(notebook) == made.cells_of(made.notebook_of(source))
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    assert all(one["output_type"] != "error" for one in outputs)
    assert any("image/png" in one.get("data", {}) for one in outputs)
    assert "pip install" in notebook.cells[0]["source"]
    assert source.with_suffix(".ipynb").stat().st_size < 1_000_000
    assert any("assert" in cell["source"] for cell in notebook.cells)
