"""The followed tokens as a strip, coloured by how much of each one's energy is normal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks.numbers import whole
from tl_tangent.views.widgets import MAX_CELLS, Widget

if TYPE_CHECKING:
    from tl_tangent.analysis.stream.trace_result import ResidualTrace

# Okabe & Ito 2008: told apart by all common kinds of colour vision
NEGATIVE, POSITIVE = "#D55E00", "#0072B2"
READING = (
    "All followed tokens in their order, row after row: padding and the positions that were not "
    "followed are left out."
)


def show_tokens(
    trace: ResidualTrace,
    label: Callable[[int], str],
    depth: int,
    *,
    tokens: slice | None = None,
) -> Widget:
    """Colour each followed token by the share of its energy that is normal, at one depth.

    The share is ``||n||^2 / ||x - mean||^2``, between 0 and 1 without a unit, and 0 where the
    stream is the mean itself; white is 0 and the full colour the largest that is shown.

    Args:
        trace: of tokens, from :func:`tl_tangent.trace_residual`.
        label: from a token id to what is shown of it, such as ``model.tokenizer.decode``. It is
            asked with the ids that were traced, so that no label can land on another token.
        depth: in front of this layer; the number of layers for behind the last.
        tokens: which stretch of the followed tokens, such as ``slice(127, 254)``; by default all,
            or the first :data:`~tl_tangent.views.widgets.MAX_CELLS` with a note.

    Returns:
        A strip with one value a token.

    Raises:
        TangentValueError: a depth that is not there, a stretch without tokens, labels that are no
            strings; a trace of text or embeddings, which has no token ids.
    """
    at, fitted = _stretch(trace, tokens)
    depth = _depth(trace, "depth", depth)
    values = _share(trace, depth)[fitted]
    largest = float(values.abs().max()) or 1.0  # a range of 0 would have no colours
    return Widget(
        "ColoredTokens",
        _strip(trace, label, fitted, values, largest),
        heading=(
            f"{_place(trace, depth)}: share of each token's energy that is normal, on a scale from "
            f"0 to {largest:.4g}; here from {float(values.min()):.4g}"
        ),
        caption=f"||n||^2 / ||x - mean||^2; white is 0, full blue the largest. {READING}",
        note=_note(at, fitted),
    )


def show_token_changes(
    trace: ResidualTrace,
    label: Callable[[int], str],
    depth: int,
    later: int,
    *,
    tokens: slice | None = None,
) -> Widget:
    """Colour each followed token by how its normal share changes from one depth to a later one.

    The value is the share at ``later`` minus that at ``depth``, between -1 and 1 without a unit, on
    a scale that is centred on 0. Arguments and errors are otherwise those of :func:`show_tokens`.
    """
    at, fitted = _stretch(trace, tokens)
    depth, later = _depth(trace, "depth", depth), _depth(trace, "later", later)
    values = (_share(trace, later) - _share(trace, depth))[fitted]
    largest = float(values.abs().max()) or 1.0
    return Widget(
        "ColoredTokens",
        _strip(trace, label, fitted, values, largest),
        heading=(
            f"{_place(trace, depth)} to {_where(trace, later)}: change of the share of each "
            f"token's energy that is normal, on a scale from {-largest:.4g} to {largest:.4g}"
        ),
        caption=f"White is no change, blue more normal, orange more tangent. {READING}",
        note=_note(at, fitted),
    )


def _depth(trace: ResidualTrace, name: str, depth: int) -> int:
    """A depth of the trace: 0 in front of the first layer, the number of layers behind the last."""
    return whole(name, depth, at_least=0, at_most=len(trace.ledger.stream) - 1)


def _share(trace: ResidualTrace, depth: int) -> Float[Tensor, " token"]:
    tangent, normal = trace.ledger.stream[depth].double()
    whole = tangent + normal
    return torch.where(whole == 0, torch.zeros_like(whole), normal / whole)


def _strip(
    trace: ResidualTrace,
    label: Callable[[int], str],
    at: slice,
    values: Float[Tensor, " token"],
    largest: float,
) -> dict[str, Any]:
    return {
        "tokens": _labels(trace, label, at),
        "values": values,
        "minValue": -largest,
        "maxValue": largest,
        "negativeColor": NEGATIVE,
        "positiveColor": POSITIVE,
    }


def _labels(trace: ResidualTrace, label: Callable[[int], str], at: slice) -> list[str]:
    ids = trace.ledger.ids[at].tolist()
    if min(ids) < 0:
        raise TangentValueError(
            "this trace has no token ids, because the model was given text or embeddings. Trace "
            "tokens, such as model.to_tokens(text)."
        )
    if not callable(label):
        raise TangentValueError(
            f"label is a {type(label).__name__}; it takes a function from a token id to a string, "
            "such as model.tokenizer.decode."
        )
    known = {i: label(i) for i in dict.fromkeys(ids)}
    for i, text in known.items():
        if not isinstance(text, str):
            raise TangentValueError(
                f"label({i}) is a {type(text).__name__}, not a string. Give a function such as "
                "model.tokenizer.decode."
            )
    return [known[i] or "''" for i in ids]  # an empty one would not be seen


def _stretch(trace: ResidualTrace, tokens: slice | None) -> tuple[slice, slice]:
    """Return what was asked for, and the first of it that fits into a view."""
    n = trace.ledger.n_tokens
    start, stop, step = (tokens or slice(None)).indices(n)
    if step != 1 or stop <= start:
        raise TangentValueError(
            f"tokens={tokens} is no stretch of the {n} tokens of this trace. Give a slice of one "
            f"or more of them without a step, such as slice(0, {n})."
        )
    return slice(start, stop), slice(start, min(stop, start + MAX_CELLS))


def _place(trace: ResidualTrace, depth: int) -> str:
    made = trace.conventions
    model = f"{made['model']}, " if made["model"] else ""
    return f"{model}rank {made['rank']}, {_where(trace, depth)}"


def _where(trace: ResidualTrace, depth: int) -> str:
    last = len(trace.ledger.stream) - 1
    return f"behind layer {last - 1}" if depth == last else f"in front of layer {depth}"


def _note(at: slice, fitted: slice) -> str:
    """Say what did not fit and how to see it; empty where all of it fits."""
    if fitted.stop == at.stop:
        return ""
    return (
        f"Only tokens {fitted.start} to {fitted.stop - 1} of {at.start} to {at.stop - 1} are "
        f"shown: a view of more than {MAX_CELLS} hangs the browser. For the others pass "
        f"tokens=slice({fitted.stop}, {at.stop}). All shares come from trace.ledger.stream."
    )
