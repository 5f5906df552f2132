"""How both parts travel: what each layer does to them, their energies, and the flow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.views.stream_lines import (
    COLOURS,
    MARKERS,
    SPANS,
    TINTS,
    clip_first,
    draw_control,
    finish,
    label_layers,
)

if TYPE_CHECKING:
    import pandas as pd

    from tl_tangent.analysis.stream.trace_result import ResidualTrace


def pieces(trace: ResidualTrace, part: str) -> pd.DataFrame:
    """Return one row a layer with the four energies that add up to the one behind it.

    Columns ``carried``, ``frame`` (what the next subspace and mean change, with its interference),
    ``written`` and ``interference``, as in :func:`draw_ledger`, ``behind``, their sum, and
    ``along``, the energy behind the layer that lies along the part in front of it.
    """
    import pandas as pd

    stream, writes = trace.stream(), trace.writes()
    rows = stream[stream["part"] == part].set_index("depth")
    writes = writes[(writes["part"] == part) & writes["layer"].notna()].astype({"layer": int})
    moves = writes["writer"].isin(("subspace", "mean"))
    change = writes.assign(frame=writes["energy"] + writes["interference"])
    front, layers = rows["energy"][:-1], rows.index[:-1]
    written = change[~moves].groupby("layer")[["energy", "interference"]].sum()
    frame = change[moves].groupby("layer")["frame"].sum().reindex(layers, fill_value=0.0)
    return pd.DataFrame(
        {
            "carried": front,
            "frame": frame,
            "written": written["energy"],
            "interference": written["interference"],
            "behind": rows["energy"].shift(-1)[:-1],
            "along": rows["kept"][:-1] ** 2 * front,
        }
    ).rename_axis("layer")


def draw_layers(figure: Any, stream: pd.DataFrame) -> None:
    """What layers do to each part: its gain and what is kept, of the median token and pooled."""
    axes = figure.subplots(1, 4)
    inner = stream[stream["gain"].notna()].assign(layer=stream["depth"])
    tables = [inner[inner["part"] == part] for part in PARTS]
    for i, (name, title) in enumerate((("gain", "gain"), ("kept", "kept"))):
        pair = [axes[i], axes[i + 2]]
        for ax, part, table in zip(pair, PARTS, tables, strict=True):
            draw_control(ax, table, "depth", f"{name}_median")
            looks = {"color": COLOURS[part], "marker": MARKERS[part], "markersize": 2.5}
            ax.plot(table["depth"], table[name], ":", color=COLOURS[part], label="pooled")
            median = table[f"{name}_median"]
            ax.plot(table["depth"], median, linewidth=1.2, label="median token", **looks)
            ax.axhline(1, color="0.6", linewidth=0.8, zorder=0)
            ax.set_title(f"{part}: {title} by layer", loc="left", fontsize=10)
            finish(ax, "layer")
        clip_first(pair, tables, f"{name}_median", name)
    axes[0].legend(fontsize=7, frameon=False)


def draw_energies(ax: Any, stream: pd.DataFrame) -> None:
    for part, rows in stream.groupby("part", sort=False):
        draw_control(ax, rows, "depth", "energy", "" if part == PARTS[0] else "matched random")
        looks = {"color": COLOURS[str(part)], "marker": MARKERS[str(part)], "markersize": 3}
        ax.plot(rows["depth"], rows["energy"], linewidth=1.2, label=part, **looks)
    positive = stream["energy"][stream["energy"] > 0]
    if len(positive) and positive.max() > SPANS * positive.min():
        ax.set_yscale("log")
    ax.set_title("energy at each depth", loc="left", fontsize=10)
    finish(ax, "depth (in front of the layer of that number)")
    ax.legend(fontsize=7, frameon=False)


def draw_flow(ax: Any, trace: ResidualTrace) -> None:
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
    label_layers(ax, layers)
    finish(ax, "layer", whole=False)
