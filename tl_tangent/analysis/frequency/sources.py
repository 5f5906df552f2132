"""Where the frequencies of tokens come from: the text at hand, a file of counts, or a word list."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.analysis.frequency.token_rows import token_batches
from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.hooks.fit import listed


def token_counts(batches: Any, n_types: int) -> Int[Tensor, " type"]:
    """Count the real tokens of batches, by id.

    Args:
        batches: token ids ``[batch, pos]``, or mappings with them under ``input`` and an
            ``attention_mask``.
        n_types: size of the vocabulary.

    Raises:
        TangentValueError: an id outside of the vocabulary, or a batch that holds no ids.
    """
    counts = torch.zeros(n_types, dtype=torch.int64)
    for _, tokens, real in token_batches(listed(batches)):
        flat = tokens.flatten() if real is None else tokens[real]
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < n_types:
            raise TangentValueError(
                f"token ids are in [0, {n_types}), got {int(flat.min())} to {int(flat.max())}"
            )
        counts += torch.bincount(flat, minlength=n_types)
    return counts


def read_counts(path: str | os.PathLike[str], tokenizer: Any) -> Float[Tensor, " type"]:
    """Read how frequent tokens or words are from a .json, .csv or .tsv file.

    JSON holds one mapping; a table holds a token id, token or word and then a number on every
    line, and may have a line of names first. Keys are read as :func:`word_frequencies` reads them.

    Raises:
        TangentFileError: no such file, or one that holds something else.
        TangentValueError: as :func:`word_frequencies`.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            table = {str(key): float(value) for key, value in json.loads(text).items()}
        else:
            table = _table(text, "," if path.suffix == ".csv" else "\t")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise TangentFileError(
            f"{path} holds no counts ({error}); accepted is a JSON mapping, or lines of a token or "
            "word, a tab (a comma in .csv), and a number"
        ) from error
    return word_frequencies(table, tokenizer)


def word_frequencies(table: Mapping[str, float], tokenizer: Any) -> Float[Tensor, " type"]:
    """Return a frequency for each token that a table of words tells of; NaN for all others.

    A word tells of the token that it is, and of the one that it is behind a space, where it is one
    token; both get its frequency. A key that is a number tells of the token of that id.

    Args:
        table: from a word (or token id) to its frequency, in any unit, as ``wordfreq`` has it.
        tokenizer: of the model.

    Raises:
        TangentValueError: none of the words is one token, or a frequency is negative or not finite.
    """
    found = torch.full((len(tokenizer),), math.nan, dtype=torch.float64)
    for word, frequency in table.items():
        if not 0 <= float(frequency) < math.inf:
            raise TangentValueError(f"the frequency of {word!r} is {frequency}: give 0 or more")
        for token in _tokens_of(str(word), tokenizer):
            found[token] = float(frequency)
    if bool(found.isnan().all()):
        raise TangentValueError(
            f"none of {len(table)} words is one token of this tokenizer: is it the model's own?"
        )
    return found


def _tokens_of(word: str, tokenizer: Any) -> Iterable[int]:
    if word.isdecimal() and int(word) < len(tokenizer):
        return [int(word)]
    spelled = (tokenizer.encode(form, add_special_tokens=False) for form in (word, f" {word}"))
    return {ids[0] for ids in spelled if len(ids) == 1} - {tokenizer.unk_token_id}


def _table(text: str, delimiter: str) -> dict[str, float]:
    rows = [row for row in csv.reader(text.splitlines(), delimiter=delimiter) if row]
    if rows and not _is_number(rows[0][1]):
        rows = rows[1:]
    return {row[0]: float(row[1]) for row in rows}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
