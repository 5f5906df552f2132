"""The picture of transfer gains: from part to part, beside the copy and the controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.views.stream_lines import COLOURS, MARKERS, clip_first, draw_control, finish

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from tl_tangent.analysis.stream.transfer_result import TransferGains

CAPTION = (
    "Gain: root of the mean energy that a random change of unit energy in the first part has in "
    "the second. Bars: two standard errors over directions.\nBlack: a pure copy. Grey: matched "
    "random normals, mean and range; their normal part is all but random directions, Q_T included."
)


def draw_transfers(gains: TransferGains) -> Figure:
    """Draw the gains of all four pairs of parts by where the change is made.

    Rows are the part that is changed, columns the one that is read. Stretches that share their end
    are told by their start, others by both. Nothing is shown and no display is needed.

    Args:
        gains: from :func:`tl_tangent.transfer_gains`.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(10, 7), layout="constrained")
    axes: Any = figure.subplots(2, 2)
    table = gains.to_dataframe()
    for row, source in enumerate(PARTS):
        for column, target in enumerate(PARTS):
            chosen = table[(table["source"] == source) & (table["target"] == target)]
            _pair(axes[row, column], chosen.reset_index(drop=True), target)
            axes[row, column].set_title(f"{source} to {target}", loc="left", fontsize=10)
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.supxlabel(CAPTION, fontsize=7.5, ha="left", x=0.01)
    figure.suptitle(_title(gains), fontsize=10)
    return figure


def _pair(ax: Any, rows: pd.DataFrame, target: str) -> None:
    by_start = rows["start"].is_unique
    rows = rows.assign(at=rows["start"] if by_start else rows.index, layer=rows["start"])
    draw_control(ax, rows, "at", "gain")
    ax.plot(rows["at"], rows["copy"], color="black", linewidth=0.8, label="copy")
    error = 2 * rows["gain_se"].fillna(0)
    looks = {"marker": MARKERS[target], "markersize": 3, "linewidth": 1.2}
    ax.errorbar(rows["at"], rows["gain"], error, color=COLOURS[target], label="gain", **looks)
    finish(ax, "layer" if by_start else "", whole=by_start)
    if by_start and (rows["stop"] - rows["start"] == 1).all():
        clip_first([ax], [rows], "gain", least=rows["copy"].min())
    elif by_start:
        ax.set_xlabel(f"changed at depth (read at {_stops(rows)})", fontsize=8)
    else:
        ax.set_xticks(rows["at"], rows["start"].astype(str) + " to " + rows["stop"].astype(str))


def _stops(rows: pd.DataFrame) -> str:
    stops = rows["stop"].unique()
    return str(stops[0]) if len(stops) == 1 else "several"


def _title(gains: TransferGains) -> str:
    made = gains.conventions
    return (
        f"{made['model']}: transfer gains, rank {made['rank']}, {made['reference']}, through "
        f"{made['through']}; {made['n_tokens']} tokens"
    )
