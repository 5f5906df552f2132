"""An axis of sites: layers by number where that tells them apart, names where it does not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LABELS = 32


def label_sites(ax: Axes, sites: Iterable[str]) -> None:
    """Name the places 0, 1, ... of the horizontal axis by sites, as many as can be read."""
    names, what = site_labels(sites)
    shown = range(0, len(names), max(1, -(-len(names) // MAX_LABELS)))
    rotation, size = (0, 8) if what else (90, 7)
    ax.set_xticks(list(shown), [names[i] for i in shown], rotation=rotation, fontsize=size)
    ax.set_xlabel(what)


def site_labels(sites: Iterable[str]) -> tuple[list[str], str]:
    """Return what tells sites apart, and the name of an axis of them, where that is the layer."""
    names = [str(site) for site in sites]
    parts = [re.fullmatch(r"blocks\.(\d+)\.(.+)", name) for name in names]
    layers = [part for part in parts if part is not None]
    kinds = {part[2] for part in layers}
    if len(kinds) != 1 or len(layers) < len(names):
        return names, ""
    return [part[1] for part in layers], f"layer (blocks.*.{kinds.pop()})"
