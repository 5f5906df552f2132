"""The pictures of local geometry: slopes by frequency, and dimension and entropy over layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

from tl_tangent.errors import TangentValueError
from tl_tangent.views.site_axis import label_sites

# Okabe & Ito 2008: told apart by all common kinds of colour vision
FOUND, CONTROL, OTHER, WHOLE = "#D55E00", "#0072B2", "#009E73", "#000000"
COLUMNS = 4
MARGIN = 1.3  # a factor on either side of the counts
NAMES = {
    "two_nn": "TwoNN",
    "levina_bickel": "Levina-Bickel",
    "local_pca": "local PCA",
    "gaussian": "of a Gaussian law",
    "neighbour": "by nearest neighbours",
    "negentropy": "distance from Gaussian",
}
DIMENSIONS = {"two_nn": ("o-", FOUND), "levina_bickel": ("s-", OTHER), "local_pca": ("^-", WHOLE)}


SLOPES = {
    "slope": (1, "order of normal over tangent part in t"),
    "normal_slope": (2, "order of the normal in the tangent part"),
}


def draw_slopes(frame: pd.DataFrame, title: str = "", measure: str = "slope") -> Figure:
    """Draw the frame of a :class:`~tl_tangent.TokenGeometry`: a panel a site, a point a type.

    The slope of the normal part with its interval over how often the type occurs, filled where
    curvature is visible beyond every null, and the range of the Gaussian clouds of each. Nothing is
    shown and no display is needed: call ``savefig``.

    Raises:
        TangentValueError: if ``measure`` is none of the slopes.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    if measure not in SLOPES:
        raise TangentValueError(f"measure is one of {', '.join(SLOPES)}, got {measure!r}")

    sites = list(dict.fromkeys(frame["site"]))
    wide = min(len(sites), COLUMNS)
    high = math.ceil(len(sites) / wide)
    figure = NewFigure(figsize=(1.5 + 3.4 * wide, 1 + 2.8 * high), layout="constrained")
    panels = figure.subplots(high, wide, sharex=True, sharey=True, squeeze=False).flatten()
    for ax, site in zip(panels, sites, strict=False):
        _slopes(ax, frame[(frame["site"] == site) & frame[measure].notna()], measure)
        ax.set_title(site, loc="left", fontsize=8)
        ax.set_xscale("log")
        _tidy(ax)
    # Not matplotlib's own limits: of one count on shared logarithmic axes they are no range at all.
    panels[0].set_xlim(frame["count"].min() / MARGIN, frame["count"].max() * MARGIN)
    for ax in panels[len(sites) :]:
        ax.set_visible(False)
    panels[0].legend(fontsize=7, frameon=False)
    figure.supxlabel("occurrences of the type", fontsize=9)
    figure.supylabel(SLOPES[measure][1], fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def _slopes(ax: Any, frame: Any, name: str) -> None:
    ax.axhline(
        SLOPES[name][0], color=OTHER, linewidth=0.8, linestyle="--", label="curved, no noise"
    )
    if f"control_{name}_mean" in frame:
        low, mean, high = (frame[f"control_{name}_{part}"] for part in ("min", "mean", "max"))
        around = [mean - low, high - mean]
        ax.errorbar(
            frame["count"],
            mean,
            around,
            fmt="_",
            color=CONTROL,
            linewidth=5,
            alpha=0.35,
            label="Gaussian clouds\n(mean, range)",
        )
    around = [frame[name] - frame[f"{name}_low"], frame[f"{name}_high"] - frame[name]]
    ax.errorbar(
        frame["count"], frame[name], around, fmt="o", color=FOUND, mfc="white", label="slope"
    )
    if "visible" in frame:
        seen = frame[frame["visible"].eq(True)]
        ax.plot(seen["count"], seen[name], "o", color=FOUND, zorder=5, label="beyond every null")


def draw_geometry(frame: pd.DataFrame, title: str = "") -> Figure:
    """Draw the frame of a :class:`~tl_tangent.LayerGeometry`, one point a site.

    Dimensions, entropies in Q_T at unit total variance, the distance from Gaussian, and IsoScore
    with the share of Q_T; dashed lines and bands are Gaussian clouds of the same covariance.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(9, 10), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    at = range(len(frame))
    for name, (style, colour) in DIMENSIONS.items():
        _with_controls(axes[0], at, frame, name, style, colour)
    axes[0].set_ylabel("intrinsic dimension")
    for name, style in (("gaussian", "o-"), ("neighbour", "s-")):
        colour = CONTROL if name == "gaussian" else FOUND
        axes[1].plot(at, frame[f"unit_{name}_entropy"], style, color=colour, label=NAMES[name])
    axes[1].set_ylabel("entropy in Q_T\n(nats, unit variance)")
    _with_controls(axes[2], at, frame, "negentropy", "o-", FOUND)
    axes[2].axhline(0, color="0.5", linewidth=0.8)
    axes[2].set_ylabel("Gaussian less\nneighbours' (nats)")
    axes[3].plot(at, frame["isoscore"], "o-", color=WHOLE, label="IsoScore")
    axes[3].plot(at, frame["tangent_share"], "s-", color=FOUND, label="share of Q_T")
    axes[3].set_ylim(bottom=0)
    for ax in axes:
        _tidy(ax)
        ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    label_sites(axes[-1], frame["site"])
    figure.suptitle(title, fontsize=11)
    return figure


def _with_controls(ax: Any, at: Any, frame: Any, name: str, style: str, colour: str) -> None:
    label = NAMES[name]
    ax.plot(at, frame[name], style, color=colour, label=label)
    if f"control_{name}_mean" in frame:
        low, mean, high = (frame[f"control_{name}_{part}"] for part in ("min", "mean", "max"))
        ax.plot(at, mean, "--", color=colour, label=f"{label}, Gaussian clouds")
        ax.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)


def _tidy(ax: Any) -> None:
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
