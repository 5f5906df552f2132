"""Text, and its cut into token rows: disjoint rows for fitting and for evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_tangent.errors import TangentFileError, TangentImportError, TangentValueError

_UNDERLINE = re.compile(r"^\s*([=*~^\"'-])\1{2,}\s*$")
_PROSE_END = (".", ":", ";", "?", "!")


def language_reference() -> str:
    """Return the language reference that the running CPython carries, as English prose.

    About 0.35 MB, the same for one CPython version. Topics come in alphabetical order. Many of them
    repeat each other (a fifth of the characters), so a paragraph is kept only where it first
    occurs: rows for evaluation would otherwise be in the rows for fitting too. Underlines, tables
    and grammar rules are dropped and hard-wrapped prose is joined; code examples stay.

    Raises:
        TangentImportError: this Python was packaged without ``pydoc_data``.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise TangentImportError(
            "this Python has no pydoc_data.topics (some distributions split it off); install the "
            "full standard library, or pass a text file of your own"
        ) from error
    paragraphs = (p for name in sorted(topics) for p in _paragraphs(topics[name]))
    return "\n\n".join(dict.fromkeys(paragraphs))


def _paragraphs(topic: str) -> Iterable[str]:
    for block in re.split(r"\n\s*\n", topic):
        lines = [line for line in block.splitlines() if not _UNDERLINE.match(line)]
        if any("::=" in line or line.lstrip().startswith(("+-", "| ")) for line in lines):
            continue
        block, raw = dedent("\n".join(lines)).strip(), "\n".join(lines)
        if block:
            yield " ".join(block.split()) if _is_prose(block, raw.startswith("  ")) else block


def _is_prose(block: str, indented: bool) -> bool:
    """Whether a block is hard-wrapped English: not nested, and a sentence if it was indented."""
    if "\n   " in block:
        return False
    letters = sum(c.isalpha() or c.isspace() for c in block)
    return not indented or (block.endswith(_PROSE_END) and letters > 0.8 * len(block))


def read_text(path: str | PathLike[str]) -> str:
    """Return the UTF-8 text of the file ``path``.

    Raises:
        TangentFileError: the file is missing, no file, not UTF-8, or holds only white space.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TangentFileError(
            f"{path} is not UTF-8 text (byte {error.start}: {error.reason}); convert it to UTF-8"
        ) from error
    except OSError as error:
        raise TangentFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise TangentFileError(f"{path} is empty ({path.stat().st_size} bytes of white space)")
    return text


def token_batches(
    encode: Any,
    text: str,
    *,
    seq_len: int,
    n_tokens: int | None = None,
    bos: int | None = None,
) -> Int[Tensor, "batch pos"]:
    """Cut ``text`` into non-overlapping rows of ``seq_len`` tokens.

    Args:
        encode: a Hugging Face tokenizer, a TransformerLens model (its ``to_tokens`` is used), or
            any function from text to token ids. Special tokens that they would add are left out.
        text: the text; it is read from its beginning and a last incomplete row is dropped.
        seq_len: tokens in a row, ``bos`` included.
        n_tokens: how many positions are wanted, rounded up to whole rows; all of the text if None.
        bos: a token id to stand at position 0 of every row. The default, none, is right for
            SmolLM2, whose pretraining had none (TransformerLens would prepend ``<|im_start|>``).

    Returns:
        token ids ``[batch, pos]`` with ``pos == seq_len``, on the CPU.

    Raises:
        TangentValueError: the text has fewer tokens than wanted, or a number is out of range.
    """
    body = seq_len if bos is None else seq_len - 1
    if body < 1 or (n_tokens is not None and n_tokens < 1):
        raise TangentValueError(
            f"seq_len={seq_len} and n_tokens={n_tokens} leave no text token in a row; a row needs "
            f"at least {seq_len - body + 1} positions and n_tokens at least 1"
        )
    rows = None if n_tokens is None else -(-n_tokens // seq_len)
    ids = _leading_tokens(_encoder(encode), text, None if rows is None else rows * body)
    found, wanted = ids.numel(), (rows or 1) * body
    if found < wanted:
        raise TangentValueError(
            f"the text has {found} tokens; {wanted} are needed for {rows or 1} rows of "
            f"{body} text tokens; pass a longer text, fewer tokens or a smaller seq_len"
        )
    rows = rows or found // body
    table = ids[: rows * body].reshape(rows, body)
    return table if bos is None else torch.cat([torch.full_like(table[:, :1], bos), table], dim=1)


def _leading_tokens(
    encode: Callable[[str], Int[Tensor, " pos"]], text: str, needed: int | None
) -> Int[Tensor, " pos"]:
    """Encode as much of ``text`` as ``needed`` tokens take (12 characters each are plenty)."""
    if needed is not None and len(text) > (limit := 12 * needed + 10_000):
        ids = encode(text[:limit])
        if ids.numel() > needed + 64:  # away from the cut, whose last word may be halved
            return ids[:needed]
    return encode(text)


def _encoder(encode: Any) -> Callable[[str], Int[Tensor, " pos"]]:
    if hasattr(encode, "to_tokens"):
        return lambda text: _flat(encode.to_tokens(text, prepend_bos=False, truncate=False))
    if hasattr(encode, "convert_ids_to_tokens"):
        knobs = {"add_special_tokens": False, "verbose": False}
        return lambda text: _flat(encode(text, **knobs)["input_ids"])
    if callable(encode):
        return lambda text: _flat(encode(text))
    raise TangentValueError(
        f"encode is a {type(encode).__name__}; a tokenizer, a TransformerLens model or a function "
        "from text to token ids is needed"
    )


def _flat(ids: Tensor | Sequence[int]) -> Int[Tensor, " pos"]:
    return torch.as_tensor(ids, dtype=torch.int64, device="cpu").reshape(-1)


def split_disjoint(
    tokens: Int[Tensor, "batch pos"], fit_rows: int, eval_rows: int, seed: int
) -> tuple[Int[Tensor, "fit pos"], Int[Tensor, "eval pos"]]:
    """Draw disjoint rows for fitting and for evaluation, the same for the same seed.

    The rows for evaluation do not depend on ``fit_rows``, so that fits of different sizes are
    evaluated on the same text.

    Args:
        tokens: rows as :func:`token_batches` cuts them, ``[batch, pos]``.
        fit_rows: how many rows to fit on.
        eval_rows: how many rows to evaluate on.
        seed: seeds a generator of its own; torch's global one is left alone.

    Returns:
        ``(fit [fit_rows, pos], evaluation [eval_rows, pos])``.

    Raises:
        TangentValueError: a number is below 1, or the rows do not suffice.
    """
    if fit_rows < 1 or eval_rows < 1:
        raise TangentValueError(
            f"fit_rows={fit_rows} and eval_rows={eval_rows}; both must be at least 1"
        )
    have, pos = tokens.shape
    if (need := fit_rows + eval_rows) > have:
        raise TangentValueError(
            f"the text has {have * pos} tokens ({have} rows of {pos}); {need * pos} are needed "
            f"({fit_rows} rows to fit and {eval_rows} to evaluate); pass a longer text"
        )
    order = torch.randperm(have, generator=torch.Generator().manual_seed(seed))
    return tokens[order[eval_rows:need]], tokens[order[:eval_rows]]
