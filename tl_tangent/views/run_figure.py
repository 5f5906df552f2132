"""A training run: energy ratios of gradients and activations, their coupling, and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDES = {"input": ("#0072B2", "input side"), "output": ("#D55E00", "output side")}
LINES = (
    ("energy_ratio_exact", "-", "gradients"),
    ("pairing_ratio", "--", "gradients, paired at random"),
    ("activation_ratio", ":", "activations"),
)
PALE = 0.35  # of what was held against a Q_T that still moved


def draw_run(frame: pd.DataFrame, conventions: Mapping[str, Any]) -> Figure:
    """Draw ``GradientRun.to_dataframe("side")`` over steps; a matplotlib figure."""
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(8, 7.5), layout="constrained")
    ratios, coupling, loss = figure.subplots(3, 1, sharex=True, height_ratios=(4, 2, 1.5))
    frozen = _frozen_from(conventions)
    for side, (colour, name) in SIDES.items():
        part = frame[frame["side"] == side]
        for column, style, what in LINES:
            _line(ratios, part, column, frozen, style, colour, f"{name}: {what}")
        _line(coupling, part, "coupling", frozen, "-", colour, name)
    coupling.axhline(1, color="0.6", linewidth=0.8)
    coupling.axhline(2, color="0.6", linewidth=0.8, linestyle=":")
    coupling.set_ylabel("coupling\nlog ratio of gradients /\nof activations", fontsize=9)
    _finish(ratios, conventions)
    named = ratios.get_legend_handles_labels()
    figure.legend(*named, fontsize=8, loc="outside lower center", ncols=2)
    curve = frame.drop_duplicates("step")
    loss.plot(curve["step"], curve["loss"], color="0.3")
    loss.set_ylabel("loss (nats)")
    loss.set_xlabel("step")
    return figure


def _frozen_from(conventions: Mapping[str, Any]) -> float:
    """The step behind which Q_T stays what it is."""
    freeze_at, fits = conventions.get("freeze_at"), conventions["fits"]
    if conventions["proxy"] == "frozen":
        return -1.0
    reached = freeze_at is not None and bool(fits) and max(fits) >= freeze_at
    return float(max(fits)) if reached else float("inf")


def _line(
    axes: Axes,
    part: pd.DataFrame,
    column: str,
    frozen: float,
    style: str,
    colour: str,
    label: str,
) -> None:
    """Draw one column, pale where Q_T still moved."""
    if column not in part or not part[column].notna().any():
        return
    shown = part.dropna(subset=[column])
    moving, still = shown[shown["step"] <= frozen], shown[shown["step"] > frozen]
    alpha = PALE if len(still) else 1.0
    if len(moving):
        named = "_nolegend_" if len(still) else label
        axes.plot(moving["step"], moving[column], style, color=colour, alpha=alpha, label=named)
    if len(still):
        axes.plot(still["step"], still[column], style, color=colour, label=label)


def _finish(axes: Axes, conventions: Mapping[str, Any]) -> None:
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylabel("energy in Q_T / in an average normal")
    for step in conventions["fits"]:
        axes.axvline(step, color="0.85", linewidth=0.8, zorder=0)
    fitted = "" if conventions["proxy"] == "frozen" else "; grey lines: Q_T fitted"
    pale = ", pale before it stays" if conventions["proxy"] == "early" else ""
    axes.set_title(
        f"{conventions['model'] or conventions['model_class']}: proxy {conventions['proxy']}, rank "
        f"{conventions['rank']}{fitted}{pale}",
        fontsize=10,
    )
