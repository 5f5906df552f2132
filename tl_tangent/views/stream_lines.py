"""Lines by layer or depth beside those of their controls, for the pictures of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

# Okabe & Ito 2008: told apart by all common kinds of colour vision; carried is a tint of written
COLOURS = {"tangent": "#D55E00", "normal": "#0072B2"}
TINTS = {"tangent": "#F3C9A8", "normal": "#A9CFE8"}
MARKERS = {"tangent": "o", "normal": "s"}
CONTROL = "0.35"
MAX_LABELS = 16
FEW = 3  # layers, of which the first is no exception
SPANS = 10  # a range beyond this factor gets a logarithmic axis


def draw_control(
    ax: Any, rows: pd.DataFrame, at: str, name: str, label: str = "matched random"
) -> None:
    """The controls of one quantity: their mean dashed, in a band of their extremes.

    The band has an edge, so that it is seen where the controls are all alike.
    """
    if f"control_{name}_mean" not in rows:
        return
    where = rows[at]
    low, high = rows[f"control_{name}_min"], rows[f"control_{name}_max"]
    ax.fill_between(
        where, low, high, facecolor=CONTROL, edgecolor=CONTROL, alpha=0.3, linewidth=2.5, zorder=1
    )
    looks = {"color": CONTROL, "linewidth": 1, "zorder": 1.5}
    ax.plot(where, rows[f"control_{name}_mean"], "--", label=label, **looks)


def drawn_range(rows: pd.DataFrame, *names: str) -> tuple[float, float]:
    """Smallest and largest number of some quantities and of their controls."""
    ends = [f"control_{name}_{end}" for name in names for end in ("min", "max")]
    values = rows[[*names, *(end for end in ends if end in rows)]].to_numpy(dtype=float)
    return float(values.min()), float(values.max())


def clip_first(
    axes: list[Any], tables: list[pd.DataFrame], *names: str, least: float = 1.0
) -> None:
    """Give axes one range, that of all layers but the first and a number that is always in.

    What the first layer makes of the embeddings is of another size than all that follows: it is
    noted where it does not fit. Tables have a column ``layer``; a second name is pooled energy.
    """
    later = [table.iloc[1:] if len(table) > FEW else table for table in tables]
    ends = [drawn_range(rows, *names) for rows in later]
    low, high = min(least, *(low for low, _ in ends)), max(least, *(high for _, high in ends))
    pad = 0.08 * (high - low) or 0.1
    for ax, table in zip(axes, tables, strict=True):
        first = table.iloc[0]
        outside = [n for n in names if not low - pad <= first[n] <= high + pad]
        if outside:
            pooled = f" (pooled {first[names[1]]:.3g})" if len(names) > 1 else ""
            said = f"layer {first['layer']:.0f}: {first[names[0]]:.3g}{pooled}"
            ax.annotate(
                said,
                (0.02, 0.02),
                xycoords="axes fraction",
                fontsize=7,
                color="0.3",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
            )
        ax.set_ylim(low - pad, high + pad)


def finish(ax: Any, label: str, *, whole: bool = True) -> None:
    """A plain axis over whole numbers of layers."""
    from matplotlib.ticker import MaxNLocator

    if whole:
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        ax.set_xlabel(label, fontsize=8)
    ax.grid(alpha=0.25, axis="y")
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def label_layers(ax: Any, layers: list[int]) -> None:
    """Name bars or cells by their layers."""
    step = -(-len(layers) // MAX_LABELS)
    ax.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    ax.tick_params(axis="both", labelsize=8)
    ax.set_xlabel("layer", fontsize=8)
