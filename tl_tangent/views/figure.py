"""A figure that a notebook shows, without pyplot and its global state."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A matplotlib figure that is its picture where it is the last value of a cell.

    Jupyter draws a bare ``Figure`` only after pyplot was imported, and shows its size in words
    before.
    """

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png")
        return stream.getvalue()
