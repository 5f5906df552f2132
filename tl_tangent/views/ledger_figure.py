"""The picture of a residual trace: who writes, what is carried, and how both parts travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.stream.massive import heaviest
from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.views.ledger_travel import draw_energies, draw_flow, draw_layers, pieces
from tl_tangent.views.stream_lines import COLOURS, MAX_LABELS, SPANS, TINTS, finish, label_layers

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from tl_tangent.analysis.stream.trace_result import ResidualTrace

FRAME = "#CC79A7"  # Okabe & Ito 2008 too
DECADES = 4  # below the largest that the colours tell apart

CAPTION = (
    "Second row: energy behind a layer = carried (that in front) + frame (what the next depth's "
    "subspace and mean change, nothing with one for all)\n+ written (squared norms of the layer's "
    "writes) + interference (twice the inner products of the writes with the part and each other); "
    "the sum is 1.\nThird row: full lines are the median token, dotted ones pooled energies. Flow: "
    "pale lies along the part in front (kept² × its energy), full is new."
)
FRAMES = (
    "\nIn the rows subspace and mean no layer writes: the same stream is looked at in the next "
    "depth's subspace, and around its mean."
)
CONTROLS = (
    "\nGrey: matched random normals, mean and range; those of the normal part are all but random "
    "directions, Q_T included."
)


def draw_ledger(trace: ResidualTrace) -> Figure:
    """Draw the ledger of the residual stream by layer, the tangent part left, the normal right.

    First row: each writer's root energy over that of the part in front of its layer, on one
    logarithmic colour scale. Second row: the energy behind each layer, over itself, as the sum of
    :func:`~tl_tangent.views.ledger_travel.pieces`. Third row: gain and kept of every layer, of the
    median token (full) and of pooled energies (dotted), beside the controls; the first layer's are
    noted where they are of another size. Below: the energies, and the flow, which is the share of
    each part in the energy of the stream, split by Pythagoras into what lies along the part in
    front and what does not. Energies are means over tokens of squared norms, in the units of the
    activations. Nothing is shown and no display is needed: call ``savefig``.

    Args:
        trace: from :func:`tl_tangent.trace_residual`.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(10.5, 11), layout="constrained")
    heights = [_height(trace), 4.5, 4, 5]
    rows: Any = figure.subfigures(4, 1, height_ratios=heights)
    _writers(rows[0], trace)
    _stacks(rows[1], trace)
    stream = trace.stream()
    draw_layers(rows[2], stream)
    energies, flow = rows[3].subplots(1, 2)
    draw_energies(energies, stream)
    draw_flow(flow, trace)
    rows[3].supxlabel(_caption(trace), fontsize=7.5, ha="left", x=0.01)
    figure.suptitle(_title(trace), fontsize=11)
    return figure


def _height(trace: ResidualTrace) -> float:
    return min(2.2 + 0.3 * len(_written(trace, PARTS[0])), 6)


# Who writes ---------------------------------------------------------------------------------------


def _written(trace: ResidualTrace, part: str) -> pd.DataFrame:
    """Root energy over what was carried: a row a writer in order, a column a layer."""
    writes = trace.writes()
    inner = writes[(writes["part"] == part) & writes["layer"].notna()]
    table = inner.pivot(index="writer", columns="layer", values="written")
    every = writes[writes["layer"].notna()].groupby("writer")["energy"].max()
    wrote = [writer for writer in inner["writer"].unique() if every[writer] > 0]
    return table.loc[wrote or table.index]  # such as no bias of the attention


def _writers(figure: Any, trace: ResidualTrace) -> None:
    import numpy as np
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    tables = {part: _written(trace, part) for part in PARTS}
    norm = _log_scale(tables)
    axes = figure.subplots(1, 2, sharey=True)
    for ax, (part, table) in zip(axes, tables.items(), strict=True):
        shown = np.ma.masked_less_equal(np.ma.masked_invalid(table.to_numpy()), 0)
        image = ax.imshow(shown, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
        ax.set_facecolor("0.85")  # where nothing was written
        ax.set_title(f"written to the {part} part", loc="left", fontsize=10)
        label_layers(ax, [int(layer) for layer in table.columns])
    step = -(-len(table) // MAX_LABELS)
    axes[0].set_yticks(range(0, len(table), step), table.index[::step])
    bar = figure.colorbar(image, ax=axes, pad=0.01, extend="min")
    bar.set_label("root energy over\nthat in front", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    subs = (1, 2, 5) if norm.vmax < SPANS * norm.vmin else (1,)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=subs, numticks=5))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())


def _log_scale(tables: Mapping[str, pd.DataFrame]) -> Any:
    """One scale for both parts, from the data; zeros and rounding do not stretch it."""
    import numpy as np
    from matplotlib.colors import LogNorm

    values = np.concatenate([table.to_numpy().ravel() for table in tables.values()])
    there = values[np.isfinite(values) & (values > 0)]
    if not len(there):
        return LogNorm(0.1, 1.0)
    largest = float(there.max())
    smallest = max(float(there.min()), largest * 10.0**-DECADES)
    return LogNorm(min(smallest, 0.1 * largest), largest)


# What is carried ----------------------------------------------------------------------------------


def _stacks(figure: Any, trace: ResidualTrace) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    largest = 0.0
    for ax, part in zip(axes, PARTS, strict=True):
        table = pieces(trace, part)
        shares = table[["carried", "frame", "written", "interference"]]
        shares = shares.div(table["behind"], axis=0)
        largest = max(largest, float(shares.abs().max(axis=None)))
        _stack(ax, shares, part)
        ax.set_title(f"{part}: energy behind each layer", loc="left", fontsize=10)
        ax.legend(fontsize=7, frameon=False, ncols=5, loc="lower left", borderpad=0.1)
        ax.margins(x=0.01)
        label_layers(ax, list(shares.index))
        finish(ax, "layer", whole=False)
    if largest > SPANS:
        axes[0].set_yscale("symlog", linthresh=1)
    axes[0].set_ylabel("share of the energy\nbehind the layer", fontsize=8)
    axes[0].margins(y=0.15)  # room for the legends


def _stack(ax: Any, shares: pd.DataFrame, part: str) -> None:
    """Bars upwards from 0; what is negative goes downwards from there."""
    looks: dict[str, dict[str, Any]] = {
        "carried": {"color": TINTS[part]},
        "frame": {"color": FRAME},
        "written": {"color": COLOURS[part]},
        "interference": {
            "facecolor": "white",
            "edgecolor": "0.2",
            "hatch": "//////",
            "linewidth": 0.5,
        },
    }
    top, bottom = 0 * shares["carried"], 0 * shares["carried"]
    for name, look in looks.items():
        height = shares[name]
        if name == "frame" and not height.any():
            continue
        ax.bar(range(len(shares)), height, 0.85, top.where(height > 0, bottom), label=name, **look)
        top, bottom = top + height.clip(lower=0), bottom + height.clip(upper=0)
    ax.axhline(1, color="black", linewidth=0.8, linestyle=":", label="sum")
    ax.axhline(0, color="black", linewidth=0.8)


def _title(trace: ResidualTrace) -> str:
    made = trace.conventions
    return (
        f"{made['model']}: residual stream, rank {made['rank']}, {made['reference']}; "
        f"{trace.ledger.n_tokens} tokens, closes to {trace.closing_error:.1e}"
    )


def _caption(trace: ResidualTrace) -> str:
    said = CAPTION + (FRAMES if _moves(trace) else "")
    said += CONTROLS if trace.conventions["n_controls"] else ""
    heavy = heaviest(trace.ledger)
    return f"{said}\n{heavy}." if heavy else said


def _moves(trace: ResidualTrace) -> bool:
    return any(writer.endswith(".subspace") for writer in trace.writers)
