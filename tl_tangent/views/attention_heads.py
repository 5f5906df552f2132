"""The tangent, cross and normal parts of attention scores side by side, in a notebook."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from math import isqrt
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentKeyError, TangentValueError
from tl_tangent.geometry.score_terms import GROUPS
from tl_tangent.views.widgets import MAX_CELLS, Widget

if TYPE_CHECKING:
    from tl_tangent.analysis.attention.score_split import AttentionScoreSplit

SHOWN = ("tangent", "cross", "normal")
# Okabe & Ito 2008: told apart by all common kinds of colour vision
NEGATIVE, POSITIVE = "#0072B2", "#D55E00"


def show_terms(
    split: AttentionScoreSplit,
    tokens: Sequence[str] | None,
    heads: Iterable[int] | int | None = None,
    batch: int = 0,
    *,
    positions: slice | None = None,
) -> Widget:
    """Show three maps a head on one scale: v^T M v, the two cross terms, and n^T M n.

    Where that is more than :data:`~tl_tangent.views.widgets.MAX_CELLS` cells, the first heads that
    fit are shown, and of a single head the first positions; a note, and a warning, says what was
    left out.

    Args:
        split: of one layer, from :func:`tl_tangent.split_attention_scores`.
        tokens: a label for each position of the row, such as ``model.to_str_tokens(row)``; None for
            the numbers of the positions.
        heads: which heads, in this order; by default all.
        batch: which row of the batch.
        positions: which stretch of the row, such as ``slice(100, 200)``; by default all of it.

    Returns:
        A widget with maps ``[3 * head, query, key]``, 0 at masked cells; scores have no unit.

    Raises:
        TangentKeyError: a head that the layer does not have.
        TangentValueError: a row that is not there, other than one label a position, no heads, or a
            stretch without positions; a value that is not finite.
    """
    at = _stretch(split, positions)
    labels = position_labels(tokens, split.seen.shape[-1])
    asked = _heads(split, heads)
    _check_row(split, batch)
    chosen, fitted = _fitting(asked, at)
    maps = _maps(split, batch, chosen, fitted)
    scale = float(maps.abs().max()) or 1.0  # a range of 0 would have no colours
    causal = not bool(split.seen[batch, fitted, fitted].triu(1).any())
    return Widget(
        "AttentionHeads",
        {
            "attention": maps,
            "attentionHeadNames": [f"L{split.layer}H{h} {name}" for h in chosen for name in SHOWN],
            "tokens": labels[fitted],
            "minValue": -scale,
            "maxValue": scale,
            "negativeColor": NEGATIVE,
            "positiveColor": POSITIVE,
            "maskUpperTri": causal,
        },
        heading=_heading(split, scale),
        caption=_caption(split, batch),
        note=_note(asked, chosen, at, fitted),
    )


def _maps(
    split: AttentionScoreSplit, batch: int, heads: list[int], at: slice
) -> Float[Tensor, "map query key"]:
    """Stack the maps of head after head, masked cells 0."""
    groups = [
        torch.stack([split.terms[term][batch, heads, at, at] for term in GROUPS[group]]).sum(0)
        for group in SHOWN
    ]
    maps = torch.stack(groups, dim=1).flatten(0, 1)
    return maps.masked_fill(~split.seen[batch, at, at], 0.0)


def _fitting(heads: list[int], at: slice) -> tuple[list[int], slice]:
    """Return the first heads that fit into a view, and of a single one the first positions."""
    most = isqrt(MAX_CELLS // len(SHOWN))
    fitted = slice(at.start, min(at.stop, at.start + most))
    cells = len(SHOWN) * (fitted.stop - fitted.start) ** 2
    return heads[: max(1, MAX_CELLS // cells)], fitted


def _stretch(split: AttentionScoreSplit, positions: slice | None) -> slice:
    n = split.seen.shape[-1]
    start, stop, step = (positions or slice(None)).indices(n)
    if step != 1 or stop <= start:
        raise TangentValueError(
            f"positions={positions} is no stretch of a row of {n} positions. Give a slice of one "
            f"or more of them without a step, such as slice(0, {n})."
        )
    return slice(start, stop)


def _heads(split: AttentionScoreSplit, heads: Iterable[int] | int | None) -> list[int]:
    n = split.scores.shape[1]
    asked = range(n) if heads is None else [heads] if isinstance(heads, int) else heads
    found = [int(head) for head in asked]
    for head in found:
        if not 0 <= head < n:
            raise TangentKeyError(
                f"head {head} of layer {split.layer} does not exist: it has heads 0 to {n - 1}."
            )
    if not found:
        raise TangentValueError(f"no head is named: there are 0 to {n - 1}, or None for all.")
    return found


def _check_row(split: AttentionScoreSplit, batch: int) -> None:
    n = split.seen.shape[0]
    if not 0 <= batch < n:
        raise TangentValueError(f"batch={batch} is not a row of this split: it has 0 to {n - 1}.")


def position_labels(tokens: Sequence[str] | None, n: int) -> list[str]:
    """Return one visible label a position, or the numbers of the positions."""
    if tokens is None:
        return [str(i) for i in range(n)]
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise TangentValueError(
            f"tokens is a {type(tokens).__name__} that is not one string a position. Accepted: a "
            "list of strings, such as model.to_str_tokens(row), or None."
        )
    if len(tokens) != n:
        raise TangentValueError(
            f"there are {len(tokens)} tokens and the row has {n} positions. Give one label a "
            "position, padding and a prepended BOS included."
        )
    return [_visible(token) for token in tokens]


def _visible(token: str) -> str:
    """The widget strips spaces: a token of nothing else is shown as Python writes it."""
    return token if token.strip() else repr(token).replace(" ", "·")


def _heading(split: AttentionScoreSplit, scale: float) -> str:
    made = split.conventions
    model = f"{made['model']}, " if made["model"] else ""
    bases = "one Q_T a head, " if made["per_head"] else ""
    return (
        f"{model}layer {split.layer}: tangent, cross and normal terms of the attention scores "
        f"(rank {made['rank']}, {bases}{made['space']} space), on a scale from {-scale:.4g} to "
        f"{scale:.4g}; error of the split {split.error:.1e}"
    )


def _caption(split: AttentionScoreSplit, batch: int) -> str:
    what = "pattern" if split.scores_are_pattern else "scores"
    capped = "" if split.cap is None else f" They are shown before the soft cap at {split.cap:g}."
    return (
        f"Row {batch} of the batch. tangent: v^T M v; cross: tangent query with normal key plus "
        "normal query with tangent key; normal: n^T M n; the terms with the mean and the biases "
        f"are left out.{capped} One scale for all maps: blue is negative, orange positive, white "
        f"0; masked cells are white or grey. All terms together add up to the model's {what} to "
        "the error of the split, relative to a head's largest."
    )


def _note(asked: list[int], heads: list[int], at: slice, fitted: slice) -> str:
    """Say what did not fit and how to see it; empty where all of it fits."""
    missing, ways = [], []
    if left := asked[len(heads) :]:
        missing.append(f"{len(heads)} of {len(asked)} heads")
        ways.append(f"heads={left}")
    if fitted.stop < at.stop:
        missing.append(
            f"positions {fitted.start} to {fitted.stop - 1} of {at.start} to {at.stop - 1}"
        )
        ways.append(f"positions=slice({fitted.stop}, {at.stop})")
    if not missing:
        return ""
    note = (
        f"Only {' and '.join(missing)} are shown: a view of more than {MAX_CELLS} cells hangs the "
        f"browser. For the others pass {' or '.join(ways)} to split.show. The whole maps are the "
        "tensors split.tangent, split.cross and split.normal."
    )
    warnings.warn(note, stacklevel=4)
    return note
