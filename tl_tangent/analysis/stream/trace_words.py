"""What a residual trace says in words: its columns, and the sentence that sums it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tl_tangent.analysis.stream.massive import heaviest
from tl_tangent.analysis.stream.trace_rows import PARTS

if TYPE_CHECKING:
    import pandas as pd

    from tl_tangent.analysis.stream.trace_sums import Ledger

MEANING = {
    "energy": "mean over tokens of the squared norm of a part (tangent or normal)",
    "share": "energy of the part over that of both",
    "gain": "square root of the energy behind the layer over that in front of it",
    "cosine": "inner product of the part in front of and behind the layer, over both root energies",
    "kept": (
        "mean inner product of a part behind the layer with itself in front of it, over its energy "
        "in front: 1 for a pure copy, whatever is added at right angles"
    ),
    "gain_median, kept_median, share_median": (
        "median over tokens of each token's own gain, kept and share, which no few tokens of huge "
        "energy decide; the others are ratios of means, and they do"
    ),
    "interference": (
        "twice the mean inner product of a write with that part of the stream as it was before it: "
        "energies add up only with it; attention is written before the MLP also where both run in "
        "parallel"
    ),
    "written": "root energy of a write over that of the part in front of its layer",
    "subspace": (
        "as a writer, with a subspace a depth: what looking at the same stream in the next "
        "subspace moves from one part to the other"
    ),
    "mean": (
        "as a writer: the reference's mean is taken out of the stream, and with a subspace a depth "
        "it changes from depth to depth; what all tokens are written alike comes out again here"
    ),
    "control": (
        "the same around the same mean for matched random normals, mean and extremes; their "
        "tangent part is that of random directions at right angles to Q_T, a sample of the normal "
        "part; their normal part is all the rest, with Q_T in it: where Q_T holds much of the "
        "energy its gain is that of Q_T, and no yardstick for the normal part"
    ),
    "mechanical": (
        "a random write of energy e puts e * rank / d into any subspace; of the stream of a model, "
        "whose writes are far from random, only the difference to the controls says something"
    ),
}


def headline(ledger: Ledger, stream: pd.DataFrame, model: str | None) -> str:
    """State how both parts grow and what is kept of them, beside the controls.

    Medians over layers; the first and the last are left out where there are others, because they
    make a stream of embeddings and of logits.
    """
    layers = inner_layers(len(ledger.stream) - 1)
    inner = stream[stream["depth"].between(layers[0], layers[-1])]
    words = [_of_part(part, inner[inner["part"] == part]) for part in PARTS]
    over = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    kind = "" if len(layers) == 1 else ", medians"
    heavy = heaviest(ledger)
    return (
        f"{model}, {over}{kind}: {'; '.join(words)}. {heavy + '. ' if heavy else ''}"
        f"The ledger closes to {ledger.closing_error:.1e}."
    )


def inner_layers(n_layers: int) -> range:
    """The layers without the first and the last; all where there are no others."""
    return range(1, n_layers - 1) if n_layers > 2 else range(n_layers)


def _of_part(part: str, rows: pd.DataFrame) -> str:
    return (
        f"the {part} part has a gain of {_beside(rows, 'gain_median')} at the median token, "
        f"{_beside(rows, 'gain')} in pooled energy, and keeps {_beside(rows, 'kept_median')} of "
        "itself"
    )


def _beside(rows: pd.DataFrame, name: str) -> str:
    """The median over layers, with that of the controls' mean in brackets."""
    value = f"{rows[name].median():.2f}"
    control = f"control_{name}_mean"
    return f"{value} (control {rows[control].median():.2f})" if control in rows else value
