"""Gains from part to part of the residual stream, as a table, a picture and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tl_tangent.geometry.display import html_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MEANING = {
    "gain": (
        "||P_out J P_in||_F / sqrt(dim P_in) over all followed tokens at once: what becomes, in "
        "the target part, of a random change of unit energy in the source part; for 'data', of a "
        "change along each token's own part"
    ),
    "gain_se": "standard error over directions; NaN for one direction, 0 where all were tried",
    "aligned": (
        "trace of P_in P_out J P_in over dim P_in: what comes back along the change itself; 1 "
        "within a part of a pure copy, whatever is added at right angles"
    ),
    "copy": (
        "the gain of a pure copy along the same directions, ||P_out P_in||_F / sqrt(dim P_in) in "
        "the mean: 1 within a part and 0 between two for one subspace, else by the principal angles"
    ),
    "excess": "gain over copy, where a copy leaves anything",
    "through": (
        "derivatives run through the skip connections and these branches, norms and attention "
        "patterns included; what another branch writes stands still"
    ),
    "positions": (
        "followed tokens are changed, each on its own for 'random', and read; what reaches the "
        "others is not counted"
    ),
    "control": (
        "the same for matched random normals in place of the subspace, mean and extremes; their "
        "normal part is all but those random directions, with Q_T in it"
    ),
    "mechanical": (
        "a branch that adds anything at right angles to a change raises the gain within the part; "
        "one that spreads it at random puts rank / d of the energy into any subspace; behind a "
        "norm no branch sees a change along the whole stream, so that 'data' is close to a copy "
        "for the larger part; only the difference to the controls is of the subspace"
    ),
}


@dataclass(frozen=True, eq=False, repr=False)
class TransferGains:
    """Gains from part to part of the residual stream.

    Attributes:
        rows: one a stretch of layers and pair of parts, see :meth:`to_dataframe`.
        conventions: how the numbers came about, JSON-able.
    """

    rows: tuple[Mapping[str, Any], ...]
    conventions: Mapping[str, Any]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a start, stop, source and target part; columns as in
        ``conventions["meaning"]``."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def headline(self) -> str:
        """State the median gains over stretches, beside those of the copy and of the controls."""
        table = self.to_dataframe()
        words = []
        for (source, target), rows in table.groupby(["source", "target"], sort=False):
            control = ""
            if "control_gain_mean" in rows:
                control = f", control {rows['control_gain_mean'].median():.3f}"
            words.append(
                f"{source} to {target} {rows['gain'].median():.3f} (copy "
                f"{rows['copy'].median():.3f}{control})"
            )
        n = len(table[["start", "stop"]].drop_duplicates())
        by_layer = (table["stop"] - table["start"] == 1).all()
        if n == 1:
            start, stop = table[["start", "stop"]].iloc[0]
            over = f"Gain over layer {start}" if by_layer else f"Gain from depth {start} to {stop}"
        else:
            over = f"Median gain over {n} {'layers' if by_layer else 'stretches of layers'}"
        return f"{over} of {self.conventions['model']}: {'; '.join(words)}."

    def plot(self) -> Figure:
        """Draw the gains of all four pairs of parts, beside the copy and the controls."""
        from tl_tangent.views.transfer_figure import draw_transfers  # the one step up a floor

        return draw_transfers(self)

    def __repr__(self) -> str:
        return f"TransferGains({self.conventions['n_tokens']} tokens): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.to_dataframe().round(4).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())
