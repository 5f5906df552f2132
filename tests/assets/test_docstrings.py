"""Docstrings as text: each once, in one order, never imported, and encoded without loss."""

from hashlib import sha256
from pathlib import Path

import pytest
import torch

from tl_tangent.assets import EncodedText, installed_docstrings
from tl_tangent.assets import docstrings as module
from tl_tangent.errors import TangentImportError, TangentValueError

CORE = '''"""Core module.

    Indented by four.
"""
raise RuntimeError("this module must not be imported")
class Outer:
    """An outer class."""
    def method(self):
        """
        A method.
            With an indented line.
        """
        def inner():
            """An inner function."""
async def later():
    """Said twice."""
def bare(): pass
'''
DOCUMENTS = {
    "Core module.\n\nIndented by four.\n\nAn outer class.\n\n"
    "A method.\n    With an indented line.\n\nAn inner function.\n\nSaid twice.",
    "Only here: ?\u4e2d.",  # a lone surrogate can't be encoded
}


def install(folder: Path, name: str, version: str, sources: dict[str, str]) -> None:
    """Lay a package out as pip does, with its record."""
    info = f"{name}-{version}.dist-info"
    record = [f"{name}/{file},," for file in sources]
    texts = {f"{name}/{file}": text for file, text in sources.items()}
    texts[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    texts[f"{info}/RECORD"] = "\n".join([*record, f"{name}/never_there.py,,"])
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages on the path, and an empty cache."""
    site = tmp_path / "site"
    core = {
        "core.py": CORE,
        "newer.py": '"""Of a later Python."""\nmatch = = 3\n',
        "tests/test_core.py": '"""A test."""',
        "notes.txt": '"""No source."""',
    }
    other = {"one.py": 'def f():\n    """Said twice."""\n    """No docstring."""'}
    other["two.py"] = '"""Only here: \\ud800\u4e2d."""\ndef g():\n    """Said twice."""'
    install(site, "tangent_fake_a", "1.0", core)
    install(site, "tangent_fake_b", "2.0", other)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("TL_TANGENT_CACHE", str(tmp_path / "cache"))
    return ["tangent_fake_b", "tangent_fake_a"]


def test_every_docstring_is_there_once_and_cleaned(packages):
    documents = module.read_documents(packages)
    assert len(documents) == 2 and set(documents) == DOCUMENTS


def test_the_order_is_that_of_the_checksums(packages):
    documents = module.read_documents(packages)
    assert documents == module.read_documents(reversed(packages))
    assert documents == sorted(documents, key=lambda d: sha256(d.encode()).hexdigest())


def test_tokens_decode_to_the_documents(packages):
    text = installed_docstrings(packages, progress=False)
    tokenizer = module.train_tokenizer(module.read_documents(packages))
    end = tokenizer.token_to_id(module.END)
    ends = [*text.starts[1:].tolist(), len(text.tokens)]
    pieces = [text.tokens[a:b].tolist() for a, b in zip(text.starts.tolist(), ends, strict=True)]
    assert all(piece[-1] == end and end not in piece[:-1] for piece in pieces)
    decoded = [tokenizer.decode(piece[:-1]) for piece in pieces]
    assert decoded == module.read_documents(packages)
    assert text.tokens.dtype == torch.int64 and int(text.tokens.max()) < text.vocabulary


def test_a_second_call_reads_the_cache(packages, monkeypatch):
    first = installed_docstrings(packages, progress=False)
    assert first.versions == {"tangent_fake_a": "1.0", "tangent_fake_b": "2.0"}
    assert (first.folder / module.TOKENIZER).is_file()

    def refuse(*_):
        raise AssertionError("built again")

    monkeypatch.setattr(module, "_build", refuse)
    second = installed_docstrings(reversed(packages), progress=False)
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.starts, second.starts)
    assert second.versions == first.versions and second.folder == first.folder
    with pytest.raises(AssertionError, match="built again"):  # fewer packages, another text
        installed_docstrings(packages[:1], progress=False)


def test_another_version_is_read_anew(packages, tmp_path, monkeypatch):
    before = installed_docstrings(packages[:1], progress=False)
    newer = tmp_path / "newer"
    install(newer, "tangent_fake_b", "2.1", {"one.py": '"""Something new."""'})
    monkeypatch.syspath_prepend(newer)
    after = installed_docstrings(packages[:1], progress=False)
    assert after.versions == {"tangent_fake_b": "2.1"} and after.folder != before.folder
    assert not torch.equal(before.tokens, after.tokens)


def test_two_builds_write_the_same_bytes(packages, tmp_path):
    versions = module._installed(packages)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        module._build(versions, tmp_path / name, progress=False)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 3
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_what_is_not_installed_is_left_out(packages):
    names = [packages[0], "tangent_fake_missing"]
    assert list(installed_docstrings(names, progress=False).versions) == packages[:1]
    with pytest.raises(TangentImportError, match="none of tangent_fake_missing is installed"):
        installed_docstrings(names[1:], progress=False)


def test_packages_without_docstrings_are_named(tmp_path, monkeypatch):
    install(tmp_path / "site", "tangent_fake_c", "1", {"empty.py": 'def f():\n    "  "\nx = 3'})
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("TL_TANGENT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(TangentImportError, match="tangent_fake_c: no docstrings"):
        installed_docstrings(["tangent_fake_c"], progress=False)


def test_the_default_packages_come_with_the_project():
    assert tuple(module._installed(module.PACKAGES)) == module.PACKAGES


def test_real_packages_are_read():
    documents = module.read_documents(["einops"])
    assert any(
        "einops.rearrange is a reader-friendly smart element reordering" in d for d in documents
    )


def test_any_bytes_survive_the_tokenizer():
    tokenizer = module.train_tokenizer(["a few words of text, a few words more"])
    strange = "tab\tnew\n  line, naïve 中文 \U0001f600 \x00"
    assert tokenizer.decode(tokenizer.encode(strange).ids) == strange


def test_the_split_holds_out_the_last_documents():
    text = EncodedText(torch.arange(100), torch.tensor([0, 10, 20, 70]), 100)
    train, held = text.split(0.5)
    assert train.tolist() == list(range(20)) and held.tolist() == list(range(20, 100))
    for share, last in ((0.05, 0), (1.0, 4)):
        with pytest.raises(TangentValueError, match=f"of 4 documents is {last};"):
            text.split(share)
