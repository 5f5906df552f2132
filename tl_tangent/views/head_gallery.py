"""Attention heads as thumbnails of a page; the one that is pressed is drawn large."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int16
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.score_terms import GROUPS
from tl_tangent.views.attention_heads import NEGATIVE, POSITIVE, SHOWN, position_labels
from tl_tangent.views.widgets import MAX_CELLS, script_json

if TYPE_CHECKING:
    from tl_tangent.analysis.attention.score_split import AttentionScoreSplit

SATURATED = 0.99  # of the cells of a head that are seen
LEVELS = 32767  # of 16 bits: finer than the four digits of any other view


@dataclass(frozen=True, eq=False, repr=False)
class HeadGallery:
    """The tangent, cross and normal terms of many heads.

    One view of circuitsvis with all of these would hang the browser, so a page holds a picture of
    every head, and 16-bit numbers from which the browser draws the one that is asked for.

    Attributes:
        heads: in their order.
        tokens: a label a position.
        heading, caption: in plain text.
    """

    heads: tuple[Head, ...]
    tokens: tuple[str, ...]
    heading: str
    caption: str

    @classmethod
    def of(
        cls,
        splits: Iterable[AttentionScoreSplit],
        tokens: Sequence[str] | None = None,
        batch: int = 0,
    ) -> HeadGallery:
        """Take all heads of some layers, at one row of the batch.

        Args:
            splits: from :func:`tl_tangent.split_attention_scores` or ``split_attention_layers``.
            tokens: a label for each position of the row; None for the numbers of the positions.
            batch: which row.

        Raises:
            TangentValueError: no splits, splits of rows of different length, a row that is not
                there, other than one label a position, or a row too long for one view.
        """
        splits = list(splits)
        lengths = sorted({split.seen.shape[-1] for split in splits})
        if len(lengths) != 1:
            raise TangentValueError(
                f"a gallery is of layers of one run, got rows of {lengths or 'no'} positions"
            )
        if len(SHOWN) * lengths[0] ** 2 > MAX_CELLS:
            raise TangentValueError(
                f"a head over {lengths[0]} positions has {len(SHOWN) * lengths[0] ** 2} cells and "
                f"{MAX_CELLS} is the most that a browser draws at once: split a shorter row"
            )
        rows = splits[0].seen.shape[0]
        if not 0 <= batch < rows:
            raise TangentValueError(f"batch={batch} is no row of these splits: they have {rows}")
        heads = tuple(
            Head.of(split, head, batch) for split in splits for head in range(split.scores.shape[1])
        )
        made = splits[0].conventions
        layers = ", ".join(str(split.layer) for split in splits)
        return cls(
            heads,
            tuple(position_labels(tokens, lengths[0])),
            heading=f"Attention heads of layers {layers}: tangent, cross and normal terms of the "
            f"scores (rank {made['rank']}, {made['space']} space), row {batch} of the batch",
            caption="Three maps a head on one scale: v^T M v, the two cross terms, n^T M n; "
            "queries down, keys across; blue is negative, orange positive, in full colour from the "
            "number beside the head's name, which one of 100 cells exceeds. Press a head to see it "
            "large, with its tokens. What the mean and the biases give is left out.",
        )

    def to_html(self, name: str) -> str:
        """Return thumbnails and a place for the large view, inside of a page that has the script.

        Args:
            name: of this gallery in the page.
        """
        thumbnails = "\n".join(head.thumbnail(name, i) for i, head in enumerate(self.heads))
        data = {
            "tokens": list(self.tokens),
            "names": list(SHOWN),
            "negative": NEGATIVE,
            "positive": POSITIVE,
            "levels": LEVELS,
            "heads": [head.told() for head in self.heads],
        }
        return (
            f"<p>{escape(self.caption)}</p>\n"
            f'<div class="tl-gallery" id="{name}">\n{thumbnails}\n</div>\n'
            f'<div class="tl-large" id="{name}-large" tabindex="-1" aria-live="polite"></div>\n'
            f'<script type="application/json" id="{name}-data">{script_json(data)}</script>'
        )

    def __repr__(self) -> str:
        return f"HeadGallery({len(self.heads)} heads of {len(self.tokens)} positions)"


@dataclass(frozen=True, eq=False)
class Head:
    """One head: its maps as 16-bit numbers, and their scale.

    Attributes:
        layer, head: which.
        maps: times ``scale / LEVELS`` the terms, 0 at masked cells.
        scale: the largest absolute term.
        shade: where colours saturate: one large term would leave all others white.
        causal: whether nothing above the diagonal is seen.
    """

    layer: int
    head: int
    maps: Int16[np.ndarray, "map query key"]
    scale: float
    shade: float
    causal: bool

    @classmethod
    def of(cls, split: AttentionScoreSplit, head: int, batch: int) -> Head:
        seen = split.seen[batch].cpu()
        maps = torch.stack([_sum(split, name)[batch, head] for name in SHOWN]).detach().cpu()
        maps = maps.double().masked_fill(~seen, 0.0)
        scale = float(maps.abs().max())
        if not np.isfinite(scale):
            raise TangentValueError(
                f"layer {split.layer} head {head} has terms that are NaN or infinite, which have "
                "no colour"
            )
        levels = (maps / (scale or 1.0) * LEVELS).round().to(torch.int16).numpy()
        cells = maps.abs()[:, seen]
        shade = float(cells.quantile(SATURATED)) if cells.numel() else 0.0
        return cls(split.layer, head, levels, scale, shade, not bool(seen.triu(1).any()))

    @property
    def name(self) -> str:
        return f"L{self.layer}H{self.head}"

    def told(self) -> dict[str, Any]:
        """What the browser needs to draw it large."""
        return {
            "name": self.name,
            "scale": self.scale,
            "shade": float(f"{self.shade or self.scale or 1:.4g}"),
            "causal": self.causal,
            "maps": base64.b64encode(self.maps.astype("<i2").tobytes()).decode(),
        }

    def thumbnail(self, gallery: str, index: int) -> str:
        """A button with a picture of the three maps side by side."""
        said = f"Layer {self.layer}, head {self.head}: tangent, cross and normal terms"
        return (
            f'<button type="button" data-gallery="{gallery}" data-head="{index}" '
            f'aria-pressed="false"><img alt="{said}" src="{self._picture()}">'
            f"<span>{self.name} &middot; ±{self.shade:.3g}</span></button>"
        )

    def _picture(self) -> str:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.image import imsave

        colours = LinearSegmentedColormap.from_list("terms", [NEGATIVE, "#ffffff", POSITIVE])
        gap = np.zeros((self.maps.shape[1], 2), dtype=np.int16)
        side_by_side = np.concatenate([self.maps[0], gap, self.maps[1], gap, self.maps[2]], axis=1)
        most = LEVELS * (self.shade / self.scale if self.shade else 1.0)
        stream = io.BytesIO()
        imsave(stream, side_by_side, cmap=colours, vmin=-most, vmax=most, format="png")
        return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _sum(split: AttentionScoreSplit, group: str) -> Float[Tensor, "batch head query key"]:
    return split.sum_of(*GROUPS[group])
