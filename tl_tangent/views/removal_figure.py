"""The picture of a removal test: IsoScore* before and after, beside its controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Okabe & Ito 2008: told apart by all common kinds of colour vision
TANGENT, CONTROL, LEADING, WHOLE = "#D55E00", "#0072B2", "#009E73", "#000000"
MAX_LABELS = 32


def draw_removal(frame: pd.DataFrame, title: str = "") -> Figure:
    """Draw the frame of a :class:`~tl_tangent.RemovalTest`, one point a site.

    Above the scores themselves, below their change when a subspace is removed, with the band of the
    matched normals. Nothing is shown and no display is needed: call ``savefig``.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(9, 6.5), layout="constrained")
    scores, changes = figure.subplots(2, 1, sharex=True)
    at = range(len(frame))
    scores.plot(at, frame["isoscore"], "o-", color=WHOLE, label="whole")
    scores.plot(at, frame["without_tangent"], "o-", color=TANGENT, label="without Q_T")
    scores.set_ylabel("IsoScore*")
    _changes(changes, at, frame)
    for ax in (scores, changes):
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    shown = range(0, len(frame), max(1, -(-len(frame) // MAX_LABELS)))
    changes.set_xticks(list(shown), [frame["site"].iloc[i] for i in shown], rotation=90, fontsize=7)
    figure.suptitle(title, fontsize=11)
    return figure


def _changes(ax: Any, at: Any, frame: Any) -> None:
    ax.plot(at, frame["delta_leading"], "^:", color=LEADING, label="its own leading directions")
    ax.plot(at, frame["delta_tangent"], "o-", color=TANGENT, label="Q_T")
    if "delta_normal" in frame:
        ax.plot(
            at, frame["delta_normal"], "s--", color=CONTROL, label="a matched normal\n(mean, band)"
        )
        low, high = frame["delta_normal_min"], frame["delta_normal_max"]
        ax.fill_between(at, low, high, color=CONTROL, alpha=0.25, linewidth=0)
    ax.axhline(0, color="0.5", linewidth=0.8)
    ax.set_ylabel("change when removed")
