"""The picture of a simulation: a cloud, its directions, IsoScore and gradients over t."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from tl_tangent.geometry.curvature import direction_density, projected_directions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tl_tangent.studies.simulation import Simulation

# Okabe & Ito 2008: told apart by all common kinds of colour vision
MEASURED, PREDICTED, SECOND = "#D55E00", "#0072B2", "#009E73"
POINTS, BINS = 2000, 36


def draw_simulation(simulation: Simulation, at: int = 0) -> Figure:
    """Draw four panels; a matplotlib figure, which needs no display: call ``savefig``.

    Args:
        simulation: from :func:`~tl_tangent.studies.simulation.simulate`.
        at: which concentration the cloud and its directions are of.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(10, 7.5), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    _cloud(axes[0], simulation, at)
    _directions(axes[1], simulation, at)
    _isoscore(axes[2], simulation)
    _gradients(axes[3], simulation)
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8, frameon=False)
    figure.suptitle(str(simulation.clouds[0].manifold), fontsize=11)
    return figure


def _cloud(ax: Any, simulation: Simulation, at: int) -> None:
    cloud = simulation.clouds[at]
    away = (cloud.x - cloud.mu)[:POINTS]
    first = away @ cloud.tangent[:, 0]
    codim = cloud.normal.shape[1]
    second = away @ cloud.normal[:, 0] if codim else away @ cloud.tangent[:, -1]
    ax.scatter(first, second, s=3, alpha=0.4, color=MEASURED, linewidths=0)
    ax.set_xlabel("a tangent direction")
    ax.set_ylabel("a normal direction" if codim else "another tangent direction")
    ax.set_title(f"the cloud at t = {simulation.rows[at]['t']:.3g}", loc="left", fontsize=10)


def _directions(ax: Any, simulation: Simulation, at: int) -> None:
    """The density of angles on a surface; elsewhere the attenuation curve."""
    cloud = simulation.clouds[at]
    if cloud.tangent.shape[1] == 2:
        _angles(ax, simulation, at)
    elif simulation.attenuation is not None:
        curve = simulation.attenuation
        ax.plot(curve.eta, curve.predicted, "-", color=PREDICTED, label="predicted")
        values, errors = zip(*curve.measured, strict=True)
        ax.errorbar(curve.eta, values, [2 * e for e in errors], fmt="o", color=MEASURED)
        ax.set_xlabel("moment ratio eta")
        ax.set_title("non-uniformity of directions", loc="left", fontsize=10)
    else:
        ax.text(0.5, 0.5, "the same curvature\nin all directions", ha="center", va="center")


def _angles(ax: Any, simulation: Simulation, at: int) -> None:
    cloud = simulation.clouds[at]
    u = projected_directions(cloud.x, cloud.mu, cloud.tangent)
    angle = torch.atan2(u[:, 1], u[:, 0])
    ax.hist(angle.numpy(), BINS, density=True, color=MEASURED, alpha=0.4, label="samples")
    grid = torch.linspace(-math.pi, math.pi, 200, dtype=torch.float64)
    around = torch.stack([grid.cos(), grid.sin()], 1)
    eta = simulation.rows[at]["eta"]
    predicted = direction_density(cloud.second_form, around, eta)
    ax.plot(grid, predicted, color=PREDICTED, label="predicted, to first order in eta")
    ax.axhline(1 / (2 * math.pi), color="0.5", linewidth=0.8)
    ax.set_xlabel("angle of the projected direction")
    ax.set_title(f"p(u) at eta = {eta:.3g}", loc="left", fontsize=10)


def _isoscore(ax: Any, simulation: Simulation) -> None:
    t = [row["t"] for row in simulation.rows]
    ax.plot(t, [row["isoscore"] for row in simulation.rows], "o-", color=MEASURED, label="cloud")
    ax.axhline(simulation.flat_isoscore, color="0.5", linestyle=":", label="flat and even")
    ax.set_xscale("log")
    ax.set_xlabel("t")
    ax.set_title("IsoScore", loc="left", fontsize=10)


def _gradients(ax: Any, simulation: Simulation) -> None:
    lines = (
        ("per_sample_ratio", MEASURED, "single gradients"),
        ("gradient_ratio", SECOND, f"their sum ({simulation.upstream} upstream)"),
    )
    t = [row["t"] for row in simulation.rows]
    for column, colour, label in lines:
        values = [row[column] for row in simulation.rows]
        ax.plot(t, values, "o-", color=colour, label=label)
    start = simulation.rows[0]["per_sample_ratio"]
    ax.plot(t, [start * one / t[0] for one in t], ":", color="0.5", label="t^1")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("t")
    ax.set_title("gradients: normal over tangent", loc="left", fontsize=10)
