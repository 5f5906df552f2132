"""Pictures of token frequency: correlations over sites, and types of one site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tl_tangent.views.site_axis import label_sites

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Okabe & Ito 2008: told apart by all common kinds of colour vision
MEASURED, NULL, EQUAL, TRAP = "#D55E00", "#0072B2", "#009E73", "0.6"
LINES = (
    ("pearson", "o-", MEASURED, "frequency and spread"),
    ("equal_n", "^-", EQUAL, "the same, equally many of each type"),
    ("shuffled", "s--", NULL, "shuffled types"),
    ("shuffled_naive_trap", ":", TRAP, "shuffled types, spread divided by n"),
)


def draw_correlations(frame: pd.DataFrame, title: str = "") -> Figure:
    """Draw the frame of a :class:`~tl_tangent.FrequencyDispersion`, one point a site.

    Bands are 95 % intervals. Nothing is shown and no display is needed: call ``savefig``.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(9, 4.5), layout="constrained")
    ax = figure.subplots()
    frame = frame[frame["pearson"].notna()]
    at = list(range(len(frame)))
    for column, style, colour, label in LINES:
        if column in frame:
            ax.plot(at, frame[column], style, color=colour, label=label, markersize=4)
        if f"{column}_low" in frame:
            low, high = frame[f"{column}_low"], frame[f"{column}_high"]
            ax.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.axhline(0, color="0.5", linewidth=0.8)
    label_sites(ax, frame["site"])
    ax.set_ylabel("Pearson, logarithms")
    ax.set_title(title, fontsize=11)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_types(types: pd.DataFrame, title: str = "") -> Figure:
    """Draw the types of one site, frequency against spread, on logarithmic axes."""
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(6.5, 5), layout="constrained")
    ax = figure.subplots()
    known = types[(types["frequency"] > 0) & (types["dispersion"] > 0)]
    ax.scatter(
        known["frequency"], known["dispersion"], s=5, alpha=0.3, color=MEASURED, linewidths=0
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("frequency of the token")
    ax.set_ylabel("root mean square distance to the type's centre")
    ax.set_title(title, fontsize=9)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    return figure
