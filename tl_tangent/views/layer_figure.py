"""The picture of a layer ablation: what cutting costs, beside its control, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Okabe & Ito 2008: told apart by all common kinds of colour vision
TANGENT, CONTROL, KEPT, WHOLE = "#D55E00", "#0072B2", "#009E73", "#000000"
LOGARITHMIC = 30  # a range beyond this factor gets a logarithmic axis
LINEAR = 1e-2  # nats a token around zero in which that axis is linear
MAX_LABELS = 32


def draw_layers(frame: pd.DataFrame, title: str = "") -> Figure:
    """Draw the frame of a :class:`~tl_tangent.analysis.LayerAblation`, one point a site.

    Three panels over one axis of layers: the increase of the loss, shares of the variance, and
    IsoScore. Nothing is shown and no display is needed: call ``savefig``.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(10.5, 9), layout="constrained")
    panels: tuple[Callable[[Any, Any, Any], None], ...] = (_increases, _shares, _isoscores)
    axes = figure.subplots(3, 1, sharex=True, height_ratios=[5, 3, 3])
    at = range(len(frame))
    for panel, ax in zip(panels, axes, strict=True):
        panel(ax, at, frame)
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        ax.spines[["top", "right"]].set_visible(False)
    _label_sites(axes[-1], frame)
    figure.suptitle(title, fontsize=11)
    return figure


def _increases(ax: Any, at: Any, frame: Any) -> None:
    low, high = frame["increase_control_ablated_min"], frame["increase_control_ablated_max"]
    ax.plot(at, frame["increase_tangent_kept"], "^:", color=KEPT, label="only Q_T kept")
    ax.plot(at, frame["increase_tangent_ablated"], "o-", color=TANGENT, label="Q_T ablated")
    ax.plot(
        at,
        frame["increase_control_ablated_mean"],
        "s--",
        color=CONTROL,
        label="matched random ablated\n(mean, band from min to max)",
    )
    ax.fill_between(at, low, high, color=CONTROL, alpha=0.25, linewidth=0)
    _scale(ax, frame)
    ax.set_ylabel("loss increase\n(nats a token)")
    ax.set_title("What cutting costs", loc="left", fontsize=10)


def _scale(ax: Any, frame: Any) -> None:
    """A logarithmic axis where the increases span decades, linear around zero."""
    names = ("tangent_ablated", "control_ablated_mean", "tangent_kept")
    sizes = [abs(value) for name in names for value in frame[f"increase_{name}"]]
    if max(sizes) > LOGARITHMIC * max(min(sizes), LINEAR):
        ax.set_yscale("symlog", linthresh=LINEAR, linscale=1)
    ax.axhline(0, color="0.5", linewidth=0.8)


def _shares(ax: Any, at: Any, frame: Any) -> None:
    ax.plot(at, frame["variance_share"], "o-", color=TANGENT, label="in Q_T")
    ax.plot(at, frame["first_direction_share"], "-", color=WHOLE, label="in the first direction")
    ax.plot(at, frame["control_variance_share"], "s--", color=CONTROL, label="in a matched random")
    ax.plot(
        at,
        frame["first_direction_share_with_position_0"],
        "x:",
        color=WHOLE,
        label="in the first direction,\nwere position 0 in the fit",
    )
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel("share of the variance")


def _isoscores(ax: Any, at: Any, frame: Any) -> None:
    ax.plot(at, frame["isoscore_without_tangent"], "o-", color=TANGENT, label="without Q_T")
    ax.plot(at, frame["isoscore"], "-", color=WHOLE, label="whole")
    ax.plot(
        at,
        frame["isoscore_without_control"],
        "s--",
        color=CONTROL,
        label="without a matched random",
    )
    ax.set_ylim(bottom=0)
    ax.set_ylabel("IsoScore (reduced)")


def _label_sites(ax: Any, frame: Any) -> None:
    by_layer = frame["layer"].is_unique and frame["layer"].notna().all()
    labels = frame["layer" if by_layer else "site"].astype(str)
    step = -(-len(labels) // MAX_LABELS)
    ax.set_xticks(range(0, len(labels), step), labels[::step])
    ax.tick_params(axis="x", labelrotation=0 if by_layer else 90, labelsize=8)
    ax.set_xlabel("layer" if by_layer else "site")
