"""The docstrings of the installed scientific packages, as encoded text: real English, offline.

The sources are read with ``ast`` and never imported. Reading and encoding them takes a while, so it
is done once for one set of package versions and kept in the user's cache.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from tl_tangent.assets.cache import build_once, cache_folder
from tl_tangent.errors import TangentImportError, TangentValueError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What the project depends on, itself or through scikit-learn and torch. Left out are torch and
# transformers: half of all the source to be read, and the text without them is long enough.
PACKAGES = (
    "einops",
    "jaxtyping",
    "matplotlib",
    "networkx",
    "numpy",
    "pandas",
    "safetensors",
    "scikit-learn",
    "scipy",
    "tqdm",
)
VOCABULARY = 2048
END = "<|endoftext|>"
TOKENIZER = "tokenizer.json"
_TOKENS, _VERSIONS, _FORMAT = "tokens.safetensors", "versions.json", 1
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_TESTS = {"test", "tests"}
_CHUNK = 64


@dataclass(frozen=True, eq=False, repr=False)
class EncodedText:
    """Documents as token ids, one behind the other.

    Attributes:
        tokens: every document, each followed by one end-of-text token.
        starts: where each document begins in ``tokens``.
        vocabulary: how many different ids there may be.
        folder: the folder of the tokenizer's ``tokenizer.json``; None where there is none.
        versions: the packages that were read, and their versions.
    """

    tokens: Int[Tensor, " token"]
    starts: Int[Tensor, " document"]
    vocabulary: int
    folder: Path | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"EncodedText({len(self.tokens)} tokens, {len(self.starts)} documents, "
            f"vocabulary {self.vocabulary}, from {', '.join(self.versions) or 'memory'})"
        )

    def split(self, held_out: float = 0.05) -> tuple[Int[Tensor, " fit"], Int[Tensor, " held"]]:
        """Return the tokens of the first documents and those of the last ``held_out`` of them.

        Raises:
            TangentValueError: one of the two would have no document.
        """
        last = round(len(self.starts) * held_out)
        if not 0 < last < len(self.starts):
            raise TangentValueError(
                f"held_out={held_out} of {len(self.starts)} documents is {last}; both parts need "
                "at least one document"
            )
        cut = int(self.starts[-last])
        return self.tokens[:cut], self.tokens[cut:]


def installed_docstrings(
    packages: Iterable[str] = PACKAGES, *, progress: bool = True
) -> EncodedText:
    """Return the docstrings of ``packages`` under a byte-level BPE of 2048 tokens trained on them.

    A document is what the docstrings of one module amount to; a docstring that occurs twice is kept
    where it first occurs, tests are not read. The documents come in the order of their checksums,
    so that the last ones are a sample of all packages. The same for the same versions of Python and
    of the packages. The first call takes about half a minute.

    Args:
        packages: names of distributions; those that are not installed are left out.
        progress: show progress bars on stderr while the sources are read and encoded.

    Raises:
        TangentImportError: none of the packages is installed, or they have no docstrings.
        TangentFileError: the cache folder cannot be written.
    """
    versions = _installed(packages)
    key = [_FORMAT, sys.version_info[:2], versions, version("tokenizers")]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = build_once(
        cache_folder("docstrings", name), lambda target: _build(versions, target, progress)
    )
    return _load(folder)


def _installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that is installed, in the order of their names."""
    found = {}
    names = sorted(set(packages))
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if not found:
        raise TangentImportError(
            f"none of {', '.join(names) or 'no packages'} is installed here, so there are no "
            "docstrings to read; install one of them, or name others"
        )
    return found


def _build(versions: Mapping[str, str], folder: Path, progress: bool) -> None:
    """Read, train, encode, and write the tokens, the tokenizer and the versions."""
    from safetensors.numpy import save_file

    documents = read_documents(versions, progress=progress)
    if not documents:
        raise TangentImportError(f"{', '.join(versions)}: no docstrings there; name other packages")
    tokenizer = train_tokenizer(documents)
    tokens, starts = encode_documents(tokenizer, documents, progress=progress)
    save_file({"tokens": tokens, "starts": starts}, folder / _TOKENS)
    tokenizer.save(str(folder / TOKENIZER))
    (folder / _VERSIONS).write_text(json.dumps(dict(versions)), encoding="utf-8")


def _load(folder: Path) -> EncodedText:
    from safetensors.numpy import load_file

    arrays = load_file(folder / _TOKENS)
    tokens, starts = (torch.from_numpy(arrays[k].astype(np.int64)) for k in ("tokens", "starts"))
    versions = json.loads((folder / _VERSIONS).read_text(encoding="utf-8"))
    return EncodedText(tokens, starts, VOCABULARY, folder, versions)


def read_documents(packages: Iterable[str], *, progress: bool = False) -> list[str]:
    """Return the docstrings of installed packages, a document a module, in a fixed order."""
    sources = [path for name in sorted(packages) for path in _sources(name)]
    bar = tqdm(sources, desc="reading docstrings", unit="file", disable=not progress)
    seen: set[str] = set()
    documents = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of the sources that are parsed
        for path in bar:
            new = [text for text in dict.fromkeys(module_docstrings(path)) if text not in seen]
            seen.update(new)
            documents += ["\n\n".join(new)] if new else []
    return sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())


def _sources(package: str) -> list[Path]:
    """Return the Python files of a package as its record lists them, tests left out."""
    listed = sorted(file for file in files(package) or [] if file.suffix == ".py")
    paths = [Path(str(file.locate())) for file in listed if not _TESTS & set(file.parts)]
    return [path for path in paths if path.is_file()]


def module_docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, in the order of the source.

    A file that this Python can't parse, written for a newer one, has none.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    yield from _docstrings(tree)


def _docstrings(node: _Documented) -> Iterator[str]:
    text = ast.get_docstring(node)  # cleaned as inspect.cleandoc does
    if text and text.strip():
        yield text.strip().encode("utf-8", "replace").decode("utf-8")  # no lone surrogates
    for child in node.body:
        if isinstance(child, _DEFINITIONS):
            yield from _docstrings(child)


def train_tokenizer(documents: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Return a byte-level BPE (Sennrich et al. 2016) of at most ``vocabulary`` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode_documents(
    tokenizer: Tokenizer, documents: list[str], *, progress: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids (uint16) of all documents, each with its end, and where each begins."""
    end = tokenizer.token_to_id(END)
    firsts = range(0, len(documents), _CHUNK)
    pieces = []
    for first in tqdm(firsts, desc="encoding docstrings", disable=not progress):
        chunk = tokenizer.encode_batch_fast(documents[first : first + _CHUNK])
        pieces += [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in chunk]
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    return np.concatenate(pieces), np.cumsum(lengths) - lengths
