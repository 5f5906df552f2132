"""The picture of a residual trace: who writes, what is carried, and how both parts travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.stream.trace_rows import PARTS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from tl_tangent.analysis.stream.residual_trace import ResidualTrace

# Okabe & Ito 2008: told apart by all common kinds of colour vision; carried is a tint of written
COLOURS = {"tangent": "#D55E00", "normal": "#0072B2"}
TINTS = {"tangent": "#F3C9A8", "normal": "#A9CFE8"}
MARKERS = {"tangent": "o", "normal": "s"}
SPANS = 10  # a range beyond this factor gets a logarithmic axis
DECADES = 4  # below the largest that the colours tell apart
MAX_LABELS = 16

CAPTION = (
    "Middle: the energy behind a layer = carried (the energy in front of it) + written (squared "
    "norm of what the layer changes in the part)\n"
    "+ interference (twice the inner product of that change with the part in front, negative where "
    "the layer writes against it); bars add up to the line at 1.\n"
    "Right below: pale is what lies along the part in front (kept² × its energy), full what is new "
    "at right angles to it."
)
CONTROLS = " Dashed: matched random normals, mean and range."


def draw_ledger(trace: ResidualTrace) -> Figure:
    """Draw the ledger of the residual stream by layer, the tangent part left, the normal right.

    Above, each writer's root energy over that of the part in front of its layer, on one logarithmic
    colour scale. In the middle, the energy behind each layer, over itself, as the sum of what was
    carried, what was written, and their signed interference: with f the change of a part v in one
    layer, ``||v + f||^2 = ||v||^2 + ||f||^2 + 2 <v, f>``. Below: the energies, the gains beside
    those of the controls, and the flow, which is the share of each part in the energy of the
    stream, split by Pythagoras into what lies along the part in front and what does not. Energies
    are means over tokens of squared norms, in the units of the activations. Nothing is shown and no
    display is needed: call ``savefig``.

    Args:
        trace: from :func:`tl_tangent.trace_residual`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    thirds: Any = figure.subfigures(3, 1, height_ratios=[_height(trace), 5, 6])
    above, middle, below = thirds
    _writers(above, trace)
    _stacks(middle, trace)
    energies, gains, flow = below.subplots(1, 3)
    stream = trace.stream()
    _energies(energies, stream)
    _gains(gains, stream)
    _flow(flow, trace)
    caption = CAPTION + (CONTROLS if trace.conventions["n_controls"] else "")
    below.supxlabel(caption, fontsize=7.5, ha="left", x=0.01)
    figure.suptitle(_title(trace), fontsize=11)
    return figure


def pieces(trace: ResidualTrace, part: str) -> pd.DataFrame:
    """Return one row a layer with the three energies that add up to the one behind it.

    Columns ``carried``, ``written`` and ``interference``, as in :func:`draw_ledger`, ``behind``,
    their sum, and ``along``, the energy behind the layer that lies along the part in front of it.
    """
    import pandas as pd

    stream = trace.stream()
    rows = stream[stream["part"] == part].set_index("depth")
    front, kept = rows["energy"][:-1], rows["kept"][:-1]
    behind = rows["energy"].shift(-1)[:-1]
    interference = 2 * (kept - 1) * front
    return pd.DataFrame(
        {
            "carried": front,
            "written": (behind - front - interference).clip(lower=0),  # what rounding leaves of 0
            "interference": interference,
            "behind": behind,
            "along": kept**2 * front,
        }
    ).rename_axis("layer")


def _height(trace: ResidualTrace) -> float:
    return min(2.2 + 0.3 * len(_written(trace, PARTS[0])), 6)


# Who writes ---------------------------------------------------------------------------------------


def _written(trace: ResidualTrace, part: str) -> pd.DataFrame:
    """Root energy over what was carried: a row a writer in order, a column a layer."""
    writes = trace.writes()
    inner = writes[(writes["part"] == part) & writes["layer"].notna()]
    table = inner.pivot(index="writer", columns="layer", values="written")
    return table.loc[inner["writer"].unique()]


def _writers(figure: Any, trace: ResidualTrace) -> None:
    import numpy as np

    tables = {part: _written(trace, part) for part in PARTS}
    norm = _log_scale(tables)
    axes = figure.subplots(1, 2, sharey=True)
    for ax, (part, table) in zip(axes, tables.items(), strict=True):
        shown = np.ma.masked_less_equal(np.ma.masked_invalid(table.to_numpy()), 0)
        image = ax.imshow(shown, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
        ax.set_facecolor("0.85")  # where nothing was written
        ax.set_title(f"written to the {part} part", loc="left", fontsize=10)
        _label_layers(ax, [int(layer) for layer in table.columns])
    step = -(-len(table) // MAX_LABELS)
    axes[0].set_yticks(range(0, len(table), step), table.index[::step])
    bar = figure.colorbar(image, ax=axes, pad=0.01, extend="min")
    bar.set_label("root energy over\nthat in front", fontsize=8)
    bar.ax.tick_params(labelsize=8)


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


def _label_layers(ax: Any, layers: list[int]) -> None:
    step = -(-len(layers) // MAX_LABELS)
    ax.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    ax.tick_params(axis="both", labelsize=8)
    ax.set_xlabel("layer", fontsize=8)


# What is carried ----------------------------------------------------------------------------------


def _stacks(figure: Any, trace: ResidualTrace) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    largest = 0.0
    for ax, part in zip(axes, PARTS, strict=True):
        table = pieces(trace, part)
        shares = table[["carried", "written", "interference"]].div(table["behind"], axis=0)
        largest = max(largest, float(shares.abs().max(axis=None)))
        _stack(ax, shares, part)
        ax.set_title(f"{part}: energy behind each layer", loc="left", fontsize=10)
        ax.legend(fontsize=7, frameon=False, ncols=4, loc="lower left", borderpad=0.1)
        ax.margins(x=0.01)
        _label_layers(ax, list(shares.index))
        _plain(ax)
    if largest > SPANS:
        axes[0].set_yscale("symlog", linthresh=1)
    axes[0].set_ylabel("share of the energy\nbehind the layer", fontsize=8)
    axes[0].margins(y=0.15)  # room for the legends


def _stack(ax: Any, shares: pd.DataFrame, part: str) -> None:
    """Bars upwards from 0; a negative interference goes downwards from there."""
    at, top = range(len(shares)), shares["carried"] + shares["written"]
    ax.bar(at, shares["carried"], 0.85, color=TINTS[part], label="carried")
    ax.bar(at, shares["written"], 0.85, shares["carried"], color=COLOURS[part], label="written")
    looks = {"facecolor": "white", "edgecolor": "0.2", "hatch": "//////", "linewidth": 0.5}
    bottom = top.where(shares["interference"] > 0, 0.0)
    ax.bar(at, shares["interference"], 0.85, bottom, label="interference", **looks)
    ax.axhline(1, color="black", linewidth=0.8, linestyle=":", label="sum")
    ax.axhline(0, color="black", linewidth=0.8)


def _plain(ax: Any) -> None:
    ax.grid(alpha=0.25, axis="y")
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


# How both travel ----------------------------------------------------------------------------------


def _energies(ax: Any, stream: pd.DataFrame) -> None:
    _lines(ax, stream, "energy")
    ax.set_title("energy at each depth", loc="left", fontsize=10)
    ax.set_xlabel("depth (in front of the layer of that number)", fontsize=8)
    ax.legend(fontsize=7, frameon=False)


def _gains(ax: Any, stream: pd.DataFrame) -> None:
    _lines(ax, stream[stream["gain"].notna()], "gain")
    ax.axhline(1, color="0.4", linewidth=0.8)
    ax.set_title("gain of each layer (root energy)", loc="left", fontsize=10)
    ax.set_xlabel("layer", fontsize=8)


def _lines(ax: Any, stream: pd.DataFrame, name: str) -> None:
    """A line a part, its controls dashed in a band, on a logarithmic axis where that spans much."""
    for part, rows in stream.groupby("part", sort=False):
        colour, at = COLOURS[str(part)], rows["depth"]
        looks = {"marker": MARKERS[str(part)], "markersize": 3, "linewidth": 1.2}
        ax.plot(at, rows[name], color=colour, label=part, **looks)
        if f"control_{name}_mean" in rows:
            ax.plot(at, rows[f"control_{name}_mean"], "--", color=colour, linewidth=1)
            low, high = rows[f"control_{name}_min"], rows[f"control_{name}_max"]
            ax.fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)
    positive = stream[name][stream[name] > 0]
    if len(positive) and positive.max() > SPANS * positive.min():
        ax.set_yscale("log")
    _plain(ax)


def _flow(ax: Any, trace: ResidualTrace) -> None:
    """Both parts' shares of the stream: tangent from below, normal from above, the new between."""
    tables = {part: pieces(trace, part) for part in PARTS}
    whole = sum(table["behind"] for table in tables.values())
    layers = list(whole.index)
    bottom = 0 * whole
    for part in PARTS:
        along = tables[part]["along"] / whole
        new = tables[part]["behind"] / whole - along
        order = (along, TINTS[part]), (new, COLOURS[part])
        for height, colour in order if part == PARTS[0] else reversed(order):
            ax.bar(range(len(layers)), height, bottom=bottom, width=1, color=colour, linewidth=0)
            bottom = bottom + height
    ax.set_ylim(0, 1)
    ax.margins(x=0)
    ax.set_title("flow: share of the stream's energy", loc="left", fontsize=10)
    _label_layers(ax, layers)
    _plain(ax)


def _title(trace: ResidualTrace) -> str:
    made = trace.conventions
    return (
        f"{made['model']}: residual stream, rank {made['rank']}, {made['reference']}; "
        f"{trace.ledger.n_tokens} tokens, closes to {trace.closing_error:.1e}"
    )
