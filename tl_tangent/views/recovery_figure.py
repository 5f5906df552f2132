"""The picture of a recovery: how much of both parts is there again, depth by depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.views.stream_lines import COLOURS, MARKERS, draw_control, finish

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from tl_tangent.analysis.stream.part_recovery import PartRecovery

WHOLE, CENTRED = "coefficient", "coefficient_centred"
CAPTION = (
    "Coefficient: inner product with the clean run's part over its energy, 1 where all of it is "
    "there. Black: if later layers wrote what they\nwrite in the clean run; only what is above is "
    "repair. Grey: matched random normals in place of Q_T, mean and range."
)


def draw_recovery(recovery: PartRecovery) -> Figure:
    """Draw the coefficients of both parts by depth: whole, and of what differs between tokens.

    Rows are the removed part and the other one; in the left column the whole parts, in the right
    one without the mean of each over tokens. Nothing is shown and no display is needed.

    Args:
        recovery: from :func:`tl_tangent.part_recovery`.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(10, 7), layout="constrained")
    axes: Any = figure.subplots(2, 2, sharex=True, sharey="row")
    table = recovery.to_dataframe()
    for row, part in enumerate(sorted(PARTS, key=lambda one: one != recovery.conventions["part"])):
        chosen = table[table["part"] == part]
        for ax, name in zip(axes[row], (WHOLE, CENTRED), strict=True):
            _coefficient(ax, chosen, part, name)
            ax.set_title(_name(part, name, row == 0), loc="left", fontsize=10)
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.supxlabel(CAPTION, fontsize=7.5, ha="left", x=0.01)
    figure.suptitle(_title(recovery), fontsize=10)
    return figure


def _coefficient(ax: Any, rows: pd.DataFrame, part: str, name: str) -> None:
    unchanged = f"{name}_unchanged"
    draw_control(ax, rows, "depth", name)
    ax.plot(rows["depth"], rows[unchanged], color="black", linewidth=0.8, label="layers unchanged")
    looks = {"marker": MARKERS[part], "markersize": 3, "linewidth": 1.2}
    ax.plot(rows["depth"], rows[name], color=COLOURS[part], label="coefficient", **looks)
    for height in (0, 1):
        ax.axhline(height, color="0.6", linewidth=0.8, zorder=0)
    finish(ax, "depth (in front of the layer of that number)")


def _name(part: str, name: str, removed: bool) -> str:
    what = "whole" if name == WHOLE else "what differs between tokens"
    return f"{part} part{', removed' if removed else ''}: {what}"


def _title(recovery: PartRecovery) -> str:
    made = recovery.conventions
    return (
        f"{made['model']}: without the {made['part']} part in front of layer {made['depth']}\n"
        f"rank {made['rank']}, {made['reference']}; {made['n_tokens']} tokens"
    )
