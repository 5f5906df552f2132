"""From the ledger of the residual stream to tables, pooled or by class of token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.analysis.stream.followed import of_controls
from tl_tangent.errors import TangentValueError

if TYPE_CHECKING:
    import pandas as pd

    from tl_tangent.analysis.stream.trace_sums import Ledger

PARTS = ("tangent", "normal")
CLASSES = ("position", "token", "frequency")


Label = Callable[[int], str]


def stream_rows(
    ledger: Ledger, by: str | None, counts: Mapping[int, int] | None, label: Label | None
) -> pd.DataFrame:
    """One row a depth and part, and a class of tokens where ``by`` is given."""
    import pandas as pd

    rows = []
    for named, taken in classes(ledger, by, counts, label):
        table = _of_stream(_bases(ledger, "stream", taken), _bases(ledger, "copied", taken))
        for depth, part in product(range(len(ledger.stream)), range(len(PARTS))):
            row = {"depth": depth, "part": PARTS[part], **named}
            rows.append(row | _values(table, depth, part))
    return pd.DataFrame(rows)


def _bases(ledger: Ledger, name: str, taken: Tensor) -> Float[Tensor, "key part basis token"]:
    """One quantity of some tokens, of the subspace and then of its controls."""
    own, controls = getattr(ledger, name)[..., None, :], getattr(ledger, f"control_{name}")
    return torch.cat([own, controls], dim=-2)[..., taken].double()


def _of_stream(
    stream: Float[Tensor, "depth part basis token"],
    copied: Float[Tensor, "layer part basis token"],
) -> dict[str, Float[Tensor, "depth part basis"]]:
    """Energies, and what the layer behind makes of them (NaN behind the last one)."""
    energy, both = stream.mean(-1), copied.mean(-1)
    before, after = energy[:-1], energy[1:]
    return {
        "energy": energy,
        "gain": _of_layers((after / before).sqrt()),
        "cosine": _of_layers(both / (before * after).sqrt()),
        "kept": _of_layers(both / before),
        "share": energy / energy.sum(1, keepdim=True),
        "gain_median": _of_layers(_median((stream[1:] / stream[:-1]).sqrt())),
        "kept_median": _of_layers(_median(copied / stream[:-1])),
        "share_median": _median(stream / stream.sum(1, keepdim=True)),
    }


def _of_layers(x: Float[Tensor, "layer part basis"]) -> Float[Tensor, "depth part basis"]:
    return torch.cat([x, torch.full_like(x[:1], torch.nan)])


def _median(x: Float[Tensor, "*axes token"]) -> Float[Tensor, "*axes"]:
    """The median over tokens, the mean of both middle ones; 0 / 0 does not count."""
    return (x.nanmedian(-1).values - (-x).nanmedian(-1).values) / 2


def _values(table: Mapping[str, Tensor], key: int, part: int) -> dict[str, float]:
    """The columns of one row: of the subspace, then mean and extremes over its controls."""
    found = {name: values[key, part].tolist() for name, values in table.items()}
    row = {name: values[0] for name, values in found.items()}
    for name, values in found.items():
        row |= of_controls(name, values[1:])
    return row


def write_rows(
    ledger: Ledger, by: str | None, counts: Mapping[int, int] | None, label: Label | None
) -> pd.DataFrame:
    """One row a write and part, and a class of tokens where ``by`` is given."""
    import pandas as pd

    rows = []
    for named, taken in classes(ledger, by, counts, label):
        table = _of_writes(ledger, taken)
        for i, (writer, layer) in enumerate(zip(ledger.writers, ledger.layers, strict=True)):
            for part, name in enumerate(PARTS):
                row = {"layer": layer, "writer": writer.rpartition(".")[2], "part": name, **named}
                rows.append(row | _values(table, i, part))
    return pd.DataFrame(rows)


def _of_writes(ledger: Ledger, taken: Tensor) -> dict[str, Float[Tensor, "write part basis"]]:
    energy, carried, stream = (
        _bases(ledger, name, taken).mean(-1) for name in ("energy", "carried", "stream")
    )
    nothing = torch.full_like(stream[0], torch.nan)
    before = [nothing if layer is None else stream[layer] for layer in ledger.layers]
    written = (energy / torch.stack(before)).sqrt()
    return {"energy": energy, "interference": 2 * carried, "written": written}


def classes(
    ledger: Ledger, by: str | None, counts: Mapping[int, int] | None, label: Label | None = None
) -> Iterator[tuple[dict[str, Any], Bool[Tensor, " token"]]]:
    """The classes of tokens that rows are made for, with their label.

    Raises:
        TangentValueError: another class than position, token and frequency; token ids asked for
            where the model was not given any; a label for what is no token.
    """
    if label is not None and by != "token":
        raise TangentValueError(f"label names tokens, and by={by!r}. Pass by='token' with it.")
    if by is None:
        yield {}, torch.ones(ledger.n_tokens, dtype=torch.bool)
        return
    if by not in CLASSES:
        raise TangentValueError(f"by={by!r} is not one of {', '.join(map(repr, CLASSES))}.")
    if by != "position" and bool((ledger.ids < 0).any()):
        raise TangentValueError(
            f"by={by!r} needs token ids, and the model was given text or embeddings. Trace tokens."
        )
    values = ledger.position if by == "position" else ledger.ids
    if by == "frequency":
        values = _quartiles(ledger.ids, counts)
    for value in values.unique().tolist():
        taken = values == value
        named = {} if label is None else {"label": label(value)}
        yield {by: value, **named, "n_tokens": int(taken.sum())}, taken


def _quartiles(ids: Tensor, counts: Mapping[int, int] | None) -> Tensor:
    """The quartile of each token's count, 1 (rarest) to 4, so that each holds a like number."""
    if counts is None:
        _, inverse, found = ids.unique(return_inverse=True, return_counts=True)
        count = found[inverse]
    else:
        count = torch.tensor([counts.get(int(i), 0) for i in ids])
    edges = count.double().quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    return torch.bucketize(count.double(), edges) + 1
