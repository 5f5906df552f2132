"""From sums over cells to the shares of the terms, one row a head and term."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tl_tangent.geometry.score_moments import TermMoments

SHARES = ("square_share", "variance_share", "score_share")
MEANING = {
    "mean_square": "mean over the cells that count of the squared term (scores have no unit)",
    "square_share": "its share of the sum of mean squares over all terms",
    "variance_share": (
        "share of the sum over all terms of the variance over a query's keys: what is the same at "
        "every key, which the softmax can't see, is taken out first"
    ),
    "score_share": (
        "share of the variance of the score itself over a query's keys: cov(term, score) / "
        "var(score); signed, and the shares of all terms add up to 1"
    ),
    "cancelling": (
        "var(score) / sum over terms of var(term): below 1 where terms cancel, above 1 where they "
        "go together"
    ),
}


def term_rows(layer: int, moments: TermMoments) -> list[dict[str, Any]]:
    """Return the shares of every term in every head; NaN where a head's scores do not vary."""
    squares, spread = moments.squares, moments.spread
    square_share = squares / squares.sum(0)
    variance_share = spread / spread.sum(0)
    rows = [
        {
            "layer": layer,
            "head": head,
            "term": name,
            "mean_square": float(squares[i, head]) / max(moments.cells, 1),
            "square_share": float(square_share[i, head]),
            "variance_share": float(variance_share[i, head]),
        }
        for head in range(squares.shape[1])
        for i, name in enumerate(moments.names)
    ]
    return rows if moments.along is None else _with_signed(rows, moments.along, spread)


def _with_signed(rows: list[dict[str, Any]], along: Tensor, spread: Tensor) -> list[dict[str, Any]]:
    score_share = along / along.sum(0)
    cancelling = along.sum(0) / spread.sum(0)
    for row, share in zip(rows, score_share.T.flatten().tolist(), strict=True):
        row |= {"score_share": share, "cancelling": float(cancelling[row["head"]])}
    return rows
