"""From the ledger of the residual stream to tables, pooled or by class of token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_tangent.analysis.stream.followed import of_controls
from tl_tangent.errors import TangentValueError

if TYPE_CHECKING:
    import pandas as pd

    from tl_tangent.analysis.stream.trace_sums import Ledger

PARTS = ("tangent", "normal")
CLASSES = ("position", "token", "frequency")


def stream_rows(ledger: Ledger, by: str | None, counts: Mapping[int, int] | None) -> pd.DataFrame:
    """One row a depth and part, and a class of tokens where ``by`` is given."""
    import pandas as pd

    rows = []
    for label, taken in classes(ledger, by, counts):
        stream = ledger.stream[..., taken].double().mean(-1)
        copied = ledger.copied[..., taken].double().mean(-1)
        for depth in range(len(stream)):
            for part, name in enumerate(PARTS):
                row: dict[str, Any] = {"depth": depth, "part": name, **label}
                row |= _of_stream(stream[:, part], copied[:, part], depth)
                row["share"] = float(stream[depth, part] / stream[depth].sum())
                if not label:
                    row |= _stream_controls(ledger, depth, part)
                rows.append(row)
    return pd.DataFrame(rows)


def _of_stream(energy: Tensor, copied: Tensor, depth: int) -> dict[str, float]:
    """Energy at a depth, and what the layer behind it makes of it; NaN behind the last."""
    row = {"energy": float(energy[depth])}
    if depth == len(copied):
        return row | dict.fromkeys(("gain", "cosine", "kept"), float("nan"))
    before, after, both = energy[depth], energy[depth + 1], copied[depth]
    return row | {
        "gain": float((after / before).sqrt()),
        "cosine": float(both / (before * after).sqrt()),
        "kept": float(both / before),
    }


def _stream_controls(ledger: Ledger, depth: int, part: int) -> dict[str, float]:
    n_controls = ledger.control_stream.shape[-1]
    if n_controls == 0:
        return {}
    energy, copied = ledger.control_stream[:, part], ledger.control_copied[:, part]
    found = [_of_stream(energy[:, i], copied[:, i], depth) for i in range(n_controls)]
    return _spread(found)


def _spread(found: list[dict[str, float]]) -> dict[str, float]:
    """Mean and extremes over the controls of every quantity."""
    row: dict[str, float] = {}
    for name in found[0]:
        row |= of_controls(name, [one[name] for one in found])
    return row


def write_rows(ledger: Ledger, by: str | None, counts: Mapping[int, int] | None) -> pd.DataFrame:
    """One row a write and part, and a class of tokens where ``by`` is given."""
    import pandas as pd

    rows = []
    for label, taken in classes(ledger, by, counts):
        energy = ledger.energy[..., taken].double().mean(-1)
        carried = ledger.carried[..., taken].double().mean(-1)
        stream = ledger.stream[..., taken].double().mean(-1)
        for i, (writer, layer) in enumerate(zip(ledger.writers, ledger.layers, strict=True)):
            for part, name in enumerate(PARTS):
                row: dict[str, Any] = {"layer": layer, "writer": writer.rpartition(".")[2]}
                row |= {"part": name, **label}
                before = None if layer is None else stream[layer, part]
                row |= _of_write(energy[i, part], carried[i, part], before)
                if not label:
                    row |= _write_controls(ledger, i, part, layer)
                rows.append(row)
    return pd.DataFrame(rows)


def _of_write(energy: Tensor, carried: Tensor, before: Tensor | None) -> dict[str, float]:
    written = float("nan") if before is None else float((energy / before).sqrt())
    return {"energy": float(energy), "interference": 2 * float(carried), "written": written}


def _write_controls(ledger: Ledger, i: int, part: int, layer: int | None) -> dict[str, float]:
    n_controls = ledger.control_energy.shape[-1]
    if n_controls == 0:
        return {}
    found = [
        _of_write(
            ledger.control_energy[i, part, c],
            ledger.control_carried[i, part, c],
            None if layer is None else ledger.control_stream[layer, part, c],
        )
        for c in range(n_controls)
    ]
    return _spread(found)


def classes(
    ledger: Ledger, by: str | None, counts: Mapping[int, int] | None
) -> Iterator[tuple[dict[str, Any], Bool[Tensor, " token"]]]:
    """The classes of tokens that rows are made for, with their label.

    Raises:
        TangentValueError: another class than position, token and frequency; or token ids asked for
            where the model was not given any.
    """
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
        yield {by: value, "n_tokens": int(taken.sum())}, taken


def _quartiles(ids: Tensor, counts: Mapping[int, int] | None) -> Tensor:
    """The quartile of each token's count, 1 (rarest) to 4, so that each holds a like number."""
    if counts is None:
        _, inverse, found = ids.unique(return_inverse=True, return_counts=True)
        count = found[inverse]
    else:
        count = torch.tensor([counts.get(int(i), 0) for i in ids])
    edges = count.double().quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    return torch.bucketize(count.double(), edges) + 1
