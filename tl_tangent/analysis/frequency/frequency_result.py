"""Token types against their frequency: a table by site, a table by type, a headline, a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_tangent.errors import TangentKeyError
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.frequency import (
    Correlation,
    FrequencyVariance,
    TypeStatistics,
    frequency_variance,
    pearson,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

WORDS = {
    "pearson": "of log frequency with the log distance of a type's occurrences to their centre "
    "(ddof 1), over types; _low and _high: 95 % by Fisher's z",
    "spearman": "the same of ranks",
    "exponent": "p of squared distance ~ frequency^p, with its standard error",
    "leave_one_out": "pearson with the distance to the centre of the other occurrences, which rare "
    "types make larger by itself",
    "norm": "pearson with the log norm of the centre",
    "naive_trap": "pearson with the distance divided by n in place of n - 1: too small for rare "
    "types. Shown as a warning, not as a result",
    "shuffled": "pearson where types are permuted among the tokens of each batch, and so all alike",
    "shuffled_naive_trap": "the same with the naive distance: what a wrong ddof fakes",
    "equal_n": "pearson over the same number of occurrences of each type",
    "static": "of embeddings: pearson with the log norm, and with the log distance to their mean",
}


@dataclass(frozen=True, eq=False, repr=False)
class SiteTypes:
    """Statistics of the types at one site.

    Attributes:
        every: of all occurrences.
        shuffled: of the same with types permuted; or None.
        equal: of equally many of each type; or None.
        complete: which types have as many.
    """

    every: TypeStatistics
    shuffled: TypeStatistics | None
    equal: TypeStatistics | None
    complete: Bool[Tensor, " type"] | None


@dataclass(frozen=True, eq=False, repr=False)
class StaticTypes:
    """One vector a token id: its norm, and its distance to the mean of all."""

    norm: Float[Tensor, " vocabulary"]
    distance: Float[Tensor, " vocabulary"]

    @classmethod
    def of(cls, matrix: Float[Tensor, "vocabulary d"]) -> StaticTypes:
        """Measure the rows of a matrix."""
        return cls(matrix.norm(dim=1), (matrix - matrix.mean(0)).norm(dim=1))


@dataclass(frozen=True, eq=False, repr=False)
class FrequencyDispersion:
    """How the spread of token types goes with their frequency.

    Attributes:
        sites: statistics of the types, by site.
        static: of the embedding and unembedding, by name; may be empty.
        ids: the token id of each type.
        frequencies: of every token id; NaN where unknown.
        tokenizer: of the model, or None.
        conventions: how the numbers came about, JSON-able; ``meaning`` has the columns.
    """

    sites: Mapping[str, SiteTypes]
    static: Mapping[str, StaticTypes]
    ids: Int[Tensor, " type"]
    frequencies: Float[Tensor, " vocabulary"]
    tokenizer: Any
    conventions: Mapping[str, Any]

    def variance(self, site: str, measure: Any = "dispersion") -> FrequencyVariance:
        """Return one correlation in full; see :func:`tl_tangent.geometry.frequency`.

        Raises:
            TangentKeyError: a site that was not measured.
            TangentValueError: fewer than 4 types with a known frequency.
        """
        return self._variance(self._site(site).every, measure)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a site, and one for each of the static embeddings.

        A site at which all occurrences of a type are alike, as an embedding, has no correlations.
        """
        import pandas as pd

        rows = [self._row(site) for site in self.sites]
        rows += [self._static_row(name) for name in self.static]
        return pd.DataFrame(rows)

    def types(self, site: str) -> pd.DataFrame:
        """Return one row a token type, the most frequent first.

        Raises:
            TangentKeyError: a site that was not measured.
        """
        import pandas as pd

        found = self._site(site).every
        frame = pd.DataFrame(
            {
                "id": self.ids.tolist(),
                "count": found.counts.tolist(),
                "frequency": self.frequencies[self.ids].tolist(),
                "dispersion": found.dispersion.sqrt().tolist(),
                "norm": found.centre_norm.tolist(),
            }
        )
        if self.tokenizer is not None:
            frame.insert(1, "token", [self.tokenizer.decode([one]) for one in self.ids.tolist()])
        return frame.sort_values("frequency", ascending=False, ignore_index=True)

    def headline(self) -> str:
        """State the correlation over sites, beside its nulls."""
        frame = self.to_dataframe()
        frame = frame[frame["pearson"].notna()]
        if frame.empty:
            return "All occurrences of a token type are alike at every site: there is no spread."
        told = (
            f"Log frequency and log spread of {int(frame['n_types'].max())} token types correlate "
            f"by {frame['pearson'].min():+.2f} to {frame['pearson'].max():+.2f} over {len(frame)} "
            f"sites (median {frame['pearson'].median():+.2f})"
        )
        if "shuffled" in frame:
            told += (
                f"; with shuffled types by {frame['shuffled'].median():+.2f}, and a spread divided "
                f"by n would make {frame['shuffled_naive_trap'].median():+.2f} of that"
            )
        if "equal_n" in frame and frame["equal_n"].notna().any():
            told += (
                f"; over {self.conventions['equal_n']} occurrences of each type by "
                f"{frame['equal_n'].median():+.2f}"
            )
        return told + "."

    def plot(self) -> Figure:
        """Draw the correlations over sites, beside their nulls; a matplotlib figure."""
        from tl_tangent.views.frequency_figure import draw_correlations  # the one step up a floor

        return draw_correlations(self.to_dataframe(), str(self.conventions["model"] or ""))

    def plot_site(self, site: str) -> Figure:
        """Draw frequency against spread, one point a type; a matplotlib figure."""
        from tl_tangent.views.frequency_figure import draw_types  # the one step up a floor

        return draw_types(self.types(site), f"{site}: {self.variance(site).pearson}")

    def __repr__(self) -> str:
        return f"FrequencyDispersion({self.conventions['model']}): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.to_dataframe().round(3).astype(object)
        records = rows.where(rows.notna(), None).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in records], self.headline())

    def _site(self, site: str) -> SiteTypes:
        if site not in self.sites:
            raise TangentKeyError(f"{site} was not measured; there are {', '.join(self.sites)}")
        return self.sites[site]

    def _variance(
        self, statistics: TypeStatistics, measure: Any, chosen: Tensor | None = None
    ) -> FrequencyVariance:
        known = self.frequencies[self.ids] > 0
        return frequency_variance(
            statistics,
            frequencies=self.frequencies[self.ids].nan_to_num(1.0),
            measure=measure,
            min_count=self.conventions["min_count"],
            chosen=known if chosen is None else known & chosen,
        )

    def _row(self, site: str) -> dict[str, Any]:
        found = self.sites[site]
        spreads = found.every.spreads[found.every.counts >= self.conventions["min_count"]]
        if len(spreads) and not bool(spreads.any()):
            return {"site": site, "n_types": 0, "pearson": math.nan}
        whole = self._variance(found.every, "dispersion")
        told: dict[str, Any] = {
            "site": site,
            "n_types": whole.n_types,
            "n_tokens": int(found.every.counts.sum()),
            **_told("pearson", whole.pearson),
            **_told("spearman", whole.spearman),
            "exponent": whole.exponent,
            "exponent_error": whole.exponent_error,
            "leave_one_out": self._variance(found.every, "leave_one_out").pearson.r,
            "norm": self._variance(found.every, "centre_norm").pearson.r,
            "naive_trap": self._variance(found.every, "naive").pearson.r,
        }
        if found.shuffled is not None:
            told |= _told("shuffled", self._variance(found.shuffled, "dispersion").pearson)
            told["shuffled_naive_trap"] = self._variance(found.shuffled, "naive").pearson.r
        if found.equal is not None and found.complete is not None and found.complete.sum() >= 4:
            equal = self._variance(found.equal, "dispersion", found.complete)
            told |= {**_told("equal_n", equal.pearson), "equal_n_types": equal.n_types}
        return told

    def _static_row(self, name: str) -> dict[str, Any]:
        one, known = self.static[name], self.frequencies > 0
        f = self.frequencies[known].log()
        found = {
            column: pearson(f, values[: len(known)][known].clamp(min=1e-300).log())
            for column, values in (("static_norm", one.norm), ("static_distance", one.distance))
        }
        told: dict[str, Any] = {"site": name, "n_types": int(known.sum())}
        for column, correlation in found.items():
            told |= _told(column, correlation)
        return told


def _told(name: str, found: Correlation) -> dict[str, float]:
    return {name: found.r, f"{name}_low": found.low, f"{name}_high": found.high}
