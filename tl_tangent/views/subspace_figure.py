"""Subspaces: how their spectra fall behind the rank, and how far they are the same at two sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tl_tangent.views.site_axis import MAX_LABELS, label_sites, site_labels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tl_tangent.geometry import TangentSubspace

SHOWN = 128  # eigenvalues of a spectrum


def draw_subspaces(
    subspaces: Mapping[str, TangentSubspace], overlaps: pd.DataFrame, chance: float
) -> Figure:
    """Draw spectra, each with a mark at the rank, and the matrix of overlaps.

    Args:
        subspaces: by site; those without a spectrum have no line.
        overlaps: of :meth:`tl_tangent.SubspaceSet.overlaps`.
        chance: what random subspaces give on average.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    figure = NewFigure(figsize=(12, 5), layout="constrained")
    spectra, matrix = figure.subplots(1, 2)
    _spectra(spectra, subspaces)
    image = matrix.imshow(overlaps.to_numpy(), vmin=0, vmax=1, cmap="cividis")
    _label(matrix, list(overlaps.columns), list(overlaps.index))
    matrix.set_title(f"mean squared cosine of the principal angles (chance {chance:.2g})", size=10)
    figure.colorbar(image, ax=matrix, shrink=0.8)
    return figure


def _spectra(ax: Axes, subspaces: Mapping[str, TangentSubspace]) -> None:
    from matplotlib import colormaps

    colours = colormaps["cividis"](np.linspace(0, 0.9, max(1, len(subspaces))))
    for colour, (site, subspace) in zip(colours, subspaces.items(), strict=True):
        if subspace.spectrum is None or subspace.spectrum.ndim > 1:
            continue
        share = (subspace.spectrum / subspace.spectrum.sum()).clamp(min=0).tolist()[:SHOWN]
        ax.plot(range(1, len(share) + 1), share, color=colour, linewidth=1, label=site)
        ax.plot(subspace.rank, share[min(subspace.rank, len(share)) - 1], "o", color=colour, ms=4)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("direction (a dot stands at the rank)")
    ax.set_ylabel("share of the variance")
    ax.set_title("spectra at the sites, the first dark", size=10)
    ax.grid(alpha=0.25)


def _label(ax: Axes, columns: list[str], rows: list[str]) -> None:
    label_sites(ax, columns)
    names, _ = site_labels(rows)
    shown = range(0, len(names), max(1, -(-len(names) // MAX_LABELS)))
    ax.set_yticks(list(shown), [names[i] for i in shown], fontsize=7)
