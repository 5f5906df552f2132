"""The orders of the terms in the concentration radius, as values, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.power_law import (
    CROSS,
    NORMAL_NORM,
    SIZES,
    TANGENT_NORM,
    BinSizes,
    orders,
)

if TYPE_CHECKING:
    import pandas as pd

CURVED, FLAT = orders(normal=2), orders(normal=1)

MEANING = {
    "t": "||x - mean|| in the space of the subspace; bins of t hold equally many tokens",
    "size": (
        "root mean square of a term over all pairs of a query token and a key token of one bin, "
        "across rows, masked pairs and the token with itself too; each is rotated at its own "
        "position; cross is the sum tangent_normal + normal_tangent; additive positions are left "
        "out. tangent_norm and normal_norm are ||v|| and ||n||, over the tokens of a bin"
    ),
    "slope": (
        "of log(size) in log(root mean square of t) over the bins, by ordinary least squares. A "
        "term whose sides go as t^0 or t^1 has its order exactly, however wide the bins are; a "
        "side of t^2 adds a bias where bins differ in width, of second order in it"
    ),
    "slope_se": "its standard error from the scatter of the bins around the line",
    "expected_curved": "the order where ||v|| goes as t and ||n|| as t^2",
    "expected_flat": "the order where ||v|| and ||n|| both go as t",
    "mechanical": (
        "t is made of v and n: where one of them holds most of t, its own slope is near 1 whatever "
        "the geometry, and so are those of its terms near their orders. Where ||v|| is far from "
        "slope 1, tokens are not spread along Q_T around the mean, and neither theory applies"
    ),
    "residual": (
        "in residual space every part is divided by the scale of its token's norm, so that "
        "mean_mean need not have order 0, and orders are lowered where that scale grows with t"
    ),
}


@dataclass(frozen=True, eq=False)
class LayerTermOrders:
    """The sizes of one layer's terms in bins of t, for the subspace and for its controls.

    Attributes:
        layer: its number.
        sizes: of the subspace, with t and the number of tokens of each bin.
        controls: of each matched random normal, in the same bins.
        error_by_head: how far the terms were from adding up to the model's own scores, over the
            largest score, at the queries where it was checked.
        conventions: how the numbers came about.
    """

    layer: int
    sizes: BinSizes
    controls: tuple[BinSizes, ...]
    error_by_head: Float[Tensor, " head"]
    conventions: Mapping[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a head and term, with mean and extremes of the controls' slopes."""
        slopes, errors = self.sizes.slopes()
        others = [control.slopes().slope for control in self.controls]
        return [
            {
                "layer": self.layer,
                "head": head,
                "term": term,
                "slope": float(slopes[i, head]),
                "slope_se": float(errors[i, head]),
                "expected_curved": CURVED[term],
                "expected_flat": FLAT[term],
                **_of_controls([float(other[i, head]) for other in others]),
                **self._range(head),
            }
            for head in range(slopes.shape[1])
            for i, term in enumerate(SIZES)
        ]

    def _range(self, head: int) -> dict[str, Any]:
        counts = self.sizes.counts[head]
        t = self.sizes.t[head][counts > 0]
        return {
            "n_bins": len(t),
            "t_min": float(t[0]),
            "t_max": float(t[-1]),
            "n_tokens": int(counts.sum()),
        }


def _of_controls(slopes: list[float]) -> dict[str, float]:
    if not slopes:
        return {}
    return {
        "control_slope_mean": sum(slopes) / len(slopes),
        "control_slope_min": min(slopes),
        "control_slope_max": max(slopes),
    }


@dataclass(frozen=True, eq=False, repr=False)
class AttentionTermOrders:
    """The order in t of each term of the attention scores, by layer and head.

    Attributes:
        layers: one entry a layer, ascending; each has the sizes that the slopes are fitted to.
    """

    layers: tuple[LayerTermOrders, ...]

    @property
    def error(self) -> float:
        """The largest difference between terms and scores, over the largest score of the head."""
        return max(float(one.error_by_head.max()) for one in self.layers)

    @property
    def conventions(self) -> dict[int, Mapping[str, Any]]:
        """How the numbers of each layer came about."""
        return {one.layer: one.conventions for one in self.layers}

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a layer, head and term: its slope, and what the theories expect.

        ``t_min`` and ``t_max`` are the root mean squares of t in the first and in the last bin.
        """
        import pandas as pd

        return pd.DataFrame([row for one in self.layers for row in one.rows()])

    def by_layer(self, column: str = "slope") -> pd.DataFrame:
        """Return one row a layer with a column a term: the mean over heads of a column.

        Args:
            column: "slope", "slope_se" or, with controls, "control_slope_mean".

        Raises:
            TangentValueError: a column that is not there.
        """
        frame = self.to_dataframe()
        if column not in frame or "slope" not in column:
            known = ", ".join(name for name in frame if "slope" in name)
            raise TangentValueError(f"there is no {column!r} here; there are {known}.")
        table = frame.pivot_table(
            index="layer", columns="term", values=column, sort=False, dropna=False
        )
        return table[list(SIZES)]

    def headline(self) -> str:
        """State how both parts, the cross and the normal term grow, beside both theories."""
        frame = self.to_dataframe()
        made = self.layers[0].conventions
        said = "; ".join(_said(frame, term) for term in _HEADLINED)
        widest = (frame["t_max"] / frame["t_min"]).max()
        return (
            f"Mean slopes over {len(frame) // len(SIZES)} heads of {len(self.layers)} layers (rank "
            f"{made['rank']}, {made['space']} space), t over a factor of up to {widest:.3g}: "
            f"{said}. Terms and scores agree to {self.error:.1e}."
        )

    def __repr__(self) -> str:
        return f"AttentionTermOrders({len(self.layers)} layers): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.by_layer().reset_index().round(3).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())


_HEADLINED = (TANGENT_NORM, NORMAL_NORM, CROSS, "normal_normal")


def _said(frame: pd.DataFrame, term: str) -> str:
    rows = frame[frame["term"] == term]
    control = ""
    if "control_slope_mean" in rows:
        control = f", matched random subspaces {rows['control_slope_mean'].mean():.2f}"
    return f"{term} {rows['slope'].mean():.2f} (curved {CURVED[term]}, flat {FLAT[term]}{control})"
