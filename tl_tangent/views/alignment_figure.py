"""The picture of an alignment test: ratios over steps, those of the nulls, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.gradients.meter import Within

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Okabe & Ito 2008: told apart by all common kinds of colour vision
MEASURED, NULL, WITHIN, WHOLE = "#D55E00", "#0072B2", "#009E73", "#000000"
PAIRED = {
    "token": "paired among equal input tokens",
    "shuffled": "paired in groups of their sizes",
    None: "paired in groups",
}
CAPTION = (
    "Geometric means over weights, of energy in Q_T over that in all directions beside it (per "
    "direction).\nNulls: the same activations and output gradients, paired at random. Early "
    "checkpoints are shaded."
)


def draw_alignment(frame: pd.DataFrame, within: Within | None = None) -> Figure:
    """Draw the curves of an alignment test, one column a model.

    Above the exact energy ratio beside that of the pairing null, and of the null within groups of
    tokens where it was measured; in the middle the excess over either, below the loss. Steps are on
    a logarithmic axis that is linear up to the first positive one, so that step 0 has a place.
    Nothing is shown and no display is needed: call ``savefig``.

    Args:
        frame: one row a checkpoint, from ``AlignmentTest.to_dataframe("checkpoint")``.
        within: which groups those are.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    models = list(dict.fromkeys(frame["model"]))
    figure = NewFigure(figsize=(2 + 4.2 * len(models), 7.5), layout="constrained")
    grid = figure.subplots(
        3, len(models), sharex="col", sharey="row", squeeze=False, height_ratios=[5, 4, 3]
    )
    for column, model in enumerate(models):
        rows = frame[frame["model"] == model].sort_values("step")
        _ratios(grid[0, column], rows, within)
        _excess(grid[1, column], rows)
        grid[2, column].plot(rows["step"], rows["loss"], "o-", color=WHOLE, markersize=3)
        grid[0, column].set_title(model, fontsize=10)
        grid[2, column].set_xlabel("step")
        for ax in grid[:, column]:
            _over_steps(ax, rows)
    labels = ("energy ratio", "measured over\nnull", "loss\n(nats a token)")
    for ax, label in zip(grid[:, 0], labels, strict=True):
        ax.set_ylabel(label)
    grid[0, 0].legend(fontsize=8, frameon=False)
    figure.supxlabel(CAPTION, fontsize=7.5, ha="left", x=0.01)
    return figure


def _ratios(ax: Any, rows: Any, within: Within | None) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    steps = rows["step"]
    ax.plot(steps, rows["energy_ratio_exact"], "o-", color=MEASURED, markersize=3, label="measured")
    _nulls(ax, rows, ("pairing_ratio", "within_token_ratio"), ("paired at random", PAIRED[within]))
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.axhline(1, color="0.5", linewidth=0.8)


def _excess(ax: Any, rows: Any) -> None:
    _nulls(ax, rows, ("excess_pairing", "excess_within_token"))
    ax.axhline(1, color="0.5", linewidth=0.8)


def _nulls(ax: Any, rows: Any, names: Sequence[str], labels: Sequence[str] = ("", "")) -> None:
    """Draw a line for the pairing null and for that within groups, as far as they are there."""
    lines = zip(names, labels, (NULL, WITHIN), ("s--", "^:"), strict=True)
    for name, label, colour, line in lines:
        if name in rows:
            ax.plot(rows["step"], rows[name], line, color=colour, markersize=3, label=label)


def _over_steps(ax: Any, rows: Any) -> None:
    """Scale the axis of steps, and shade the early ones."""
    positive = rows["step"][rows["step"] > 0]
    ax.set_xscale("symlog", linthresh=float(positive.min()) if len(positive) else 1.0)
    ax.set_xlim(left=min(0.0, float(rows["step"].min())))
    early, late = (rows["step"][rows["phase"] == phase] for phase in ("early", "late"))
    between = float(early.max() + late.min()) / 2
    ax.axvspan(float(early.min()), between, color="0.5", alpha=0.15, linewidth=0)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
