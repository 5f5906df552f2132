"""Which token types are looked at: named ones, or some by how often they occur."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tl_tangent.analysis.local.occurrences import Corpus
from tl_tangent.errors import TangentValueError
from tl_tangent.hooks.numbers import whole

RULES = ("frequent", "rare", "bands", "spread")


def chosen_types(
    model: Any, corpus: Corpus, tokens: Any, n_types: int, fewest: int
) -> tuple[int, ...]:
    """Return token ids, the most frequent first where a rule chose them.

    Args:
        model: whose tokenizer turns strings into ids.
        corpus: what is counted.
        tokens: an id, a string of one token, several of these, or a rule.
        n_types: how many a rule takes.
        fewest: occurrences that each must have.

    Raises:
        TangentValueError: a string that is not one token, an id that is no number; a type with
            fewer occurrences; fewer types than a rule is to take.
    """
    if isinstance(tokens, str) and tokens in RULES:
        return _by_rule(corpus, tokens, whole("n_types", n_types, at_least=1), fewest)
    several = not isinstance(tokens, str) and (
        isinstance(tokens, Iterable) and getattr(tokens, "ndim", 1) != 0
    )
    ids = tuple(dict.fromkeys(_id(model, one) for one in (tokens if several else [tokens])))
    if not ids:
        raise TangentValueError(f"tokens names none: give ids, strings, or {_accepted()}")
    for token in ids:
        _check_count(corpus, token, fewest)
    return ids


def text_of(model: Any, token: int) -> str | None:
    """Return the text of a token; None without a tokenizer."""
    tokenizer = getattr(model, "tokenizer", None)
    return None if tokenizer is None else str(tokenizer.decode([token]))


def _by_rule(corpus: Corpus, rule: str, n_types: int, fewest: int) -> tuple[int, ...]:
    order = corpus.counts.argsort(descending=True, stable=True)
    able = order[corpus.counts[order] >= fewest].tolist()
    if len(able) < n_types:
        raise TangentValueError(
            f"{len(able)} token types have the {fewest} occurrences that the fit needs, and "
            f"n_types={n_types} are to be taken: give more text, or take fewer types or a lower "
            "rank"
        )
    if rule == "frequent":
        return tuple(able[:n_types])
    if rule == "rare":
        return tuple(able[-n_types:])
    if rule == "bands":
        rare = n_types // 2
        return tuple(able[: n_types - rare] + able[len(able) - rare :])
    places = torch.linspace(0, len(able) - 1, n_types, dtype=torch.float64).round().long()
    return tuple(able[place] for place in places.tolist())


def _id(model: Any, token: Any) -> int:
    if not isinstance(token, str):
        return whole("a token", token, at_least=0)
    if getattr(model, "tokenizer", None) is None:
        raise TangentValueError(
            f"this model has no tokenizer to find {token!r} with: give token ids, or {_accepted()}"
        )
    ids = model.to_tokens(token, prepend_bos=False)[0].tolist()
    if len(ids) != 1:
        pieces = [text_of(model, one) for one in ids]
        raise TangentValueError(f"{token!r} is {len(ids)} tokens, {pieces}: give one of them")
    return int(ids[0])


def _check_count(corpus: Corpus, token: int, fewest: int) -> None:
    n = corpus.count(token)
    if not n:
        raise TangentValueError(
            f"token {token} never occurs at the chosen positions of these batches: give text that "
            "has it, or another token"
        )
    if n < fewest:
        raise TangentValueError(
            f"token {token} occurs {n} times, and the fit needs {fewest}, half of them to be "
            "tested on: give more text, or take a lower rank"
        )


def _accepted() -> str:
    return " or ".join(repr(rule) for rule in RULES)
