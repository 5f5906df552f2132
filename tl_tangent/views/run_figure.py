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


def draw_run(frame: pd.DataFrame, conventions: Mapping[str, Any]) -> Figure:
    """Draw ``GradientRun.to_dataframe("side")`` over steps; a matplotlib figure."""
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(8, 7), layout="constrained")
    ratios, coupling, loss = figure.subplots(3, 1, sharex=True, height_ratios=(4, 2, 1.5))
    for side, (colour, name) in SIDES.items():
        part = frame[frame["side"] == side]
        for column, line, what in LINES:
            if column in part and part[column].notna().any():
                shown = part.dropna(subset=[column])
                ratios.plot(
                    shown["step"], shown[column], line, color=colour, label=f"{name}: {what}"
                )
        if "coupling" in part:
            shown = part.dropna(subset=["coupling"])
            coupling.plot(shown["step"], shown["coupling"], color=colour)
    coupling.axhline(1, color="0.6", linewidth=0.8)
    coupling.axhline(2, color="0.6", linewidth=0.8, linestyle=":")
    coupling.set_ylabel("coupling")
    _finish(ratios, conventions)
    curve = frame.drop_duplicates("step")
    loss.plot(curve["step"], curve["loss"], color="0.3")
    loss.set_ylabel("loss (nats)")
    loss.set_xlabel("step")
    return figure


def _finish(axes: Axes, conventions: Mapping[str, Any]) -> None:
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylabel("energy in Q_T / in an average normal")
    for step in conventions["fits"]:
        axes.axvline(step, color="0.85", linewidth=0.8, zorder=0)
    axes.set_title(
        f"{conventions['model'] or conventions['model_class']}: proxy {conventions['proxy']}, rank "
        f"{conventions['rank']}; grey lines: Q_T fitted",
        fontsize=10,
    )
    axes.legend(fontsize=8)
