"""The geometry of layers as a table, correlations, a sentence and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.local.site_geometry import SiteGeometry
from tl_tangent.analysis.local.token_words import rank_correlation
from tl_tangent.analysis.stream.followed import of_controls
from tl_tangent.geometry import SubspaceSet
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.frequency import Correlation
from tl_tangent.hooks.sites import Site

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

CORRELATED = (
    "spectral_entropy",
    "tangent_share",
    "gaussian_entropy",
    "neighbour_entropy",
    "negentropy",
    "unit_gaussian_entropy",
    "unit_neighbour_entropy",
    "two_nn",
    "levina_bickel",
    "local_pca",
)
MEANING = {
    "rows": "tokens in the covariance, all at the chosen positions",
    "n, copies": (
        "distinct vectors of the uniform sample that neighbours and entropies come from, of the "
        "same tokens at every site, and those left out as exact copies"
    ),
    "isoscore": "(PR - 1) / (d - 1) of the covariance",
    "participation_ratio, effective_rank": "(tr C)^2 / |C|^2; exp of the spectral entropy",
    "spectral_entropy": "-sum p ln p over the shares p of the eigenvalues: no units, at most ln d",
    "tangent_share": (
        "share of the trace of the covariance in Q_T; one that was fitted on the same tokens by "
        "PCA holds the most that its rank can"
    ),
    "total_variance": "trace of the covariance, in the square of the model's unit",
    "gaussian_entropy": (
        "of the sample's coordinates in Q_T, in nats: ln det(2 pi e C) / 2 less its bias; the most "
        "that this covariance allows"
    ),
    "neighbour_entropy": "of the same coordinates whatever their law, by k-th neighbours",
    "negentropy": (
        "gaussian less neighbour entropy, how far from Gaussian; the neighbours' estimate is "
        "biased in many dimensions, so that control_negentropy, of Gaussian clouds, is not 0 either"
    ),
    "unit_": (
        "the entropy where the site is scaled to a total variance of 1. An entropy depends on the "
        "unit (rank times ln c for a factor c), and the stream grows with depth: compare layers by "
        "these"
    ),
    "two_nn, levina_bickel, local_pca": (
        "intrinsic dimension: from 2 neighbours, from k (inverse of the mean inverse), and the "
        "mean number of directions that hold 95 % of the variance of 3k neighbours, which is at "
        "most 3k"
    ),
    "control_": (
        "mean and extremes over Gaussian clouds with exactly the mean and covariance of the "
        "sample: what the covariance alone gives"
    ),
    "correlations": (
        "Spearman's of a column with the IsoScore over sites. Layers are not independent: each "
        "adds to the last, so that intervals are too narrow, and a common trend over depth alone "
        "correlates any two columns. The participation ratio is the IsoScore on another scale and "
        "is left out"
    ),
}


@dataclass(frozen=True, eq=False, repr=False)
class LayerGeometry:
    """Dimension, entropy and isotropy of the activations of a model, by site.

    Attributes:
        sites: what was measured.
        subspaces: Q_T at each site.
        conventions: how the numbers came about, JSON-able; ``meaning`` has the columns.
    """

    sites: Mapping[str, SiteGeometry]
    subspaces: SubspaceSet
    conventions: Mapping[str, Any]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a site."""
        import pandas as pd

        return pd.DataFrame([_row(site, found) for site, found in self.sites.items()])

    def correlations(self) -> dict[str, Correlation]:
        """Return Spearman's correlation of each column with IsoScore over sites.

        Empty for fewer than 4 sites; constant columns are left out. Read the note on them in
        ``conventions["meaning"]["correlations"]``.
        """
        frame = self.to_dataframe()
        found = {name: rank_correlation(frame[name], frame["isoscore"]) for name in CORRELATED}
        return {name: one for name, one in found.items() if one is not None}

    def headline(self) -> str:
        """State dimensions and entropies beside those that the covariance gives."""
        frame, told = self.to_dataframe(), []
        for name, label in (("levina_bickel", "Levina-Bickel"), ("two_nn", "TwoNN")):
            told.append(f"{label} dimension {_beside(frame, name)}")
        told.append(f"distance from Gaussian in Q_T {_beside(frame, 'negentropy')} nats")
        correlated = self.correlations()
        with_score = "; with IsoScore over layers, which are not independent: " + ", ".join(
            f"{name} {correlated[name].r:+.2f}"
            for name in ("levina_bickel", "unit_neighbour_entropy")
            if name in correlated
        )
        return (
            f"Medians over {len(frame)} sites: {', '.join(told)}; IsoScore "
            f"{frame['isoscore'].median():.3f}{with_score if correlated else ''}."
        )

    def plot(self) -> Figure:
        """Draw dimensions, entropies and IsoScore over layers, with those of Gaussian clouds."""
        from tl_tangent.views.local_figure import draw_geometry  # the one step up a floor

        return draw_geometry(self.to_dataframe(), str(self.conventions["model"] or ""))

    def __repr__(self) -> str:
        return f"LayerGeometry({self.conventions['model']}): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.to_dataframe().round(4).astype(object).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())


def _beside(frame: pd.DataFrame, name: str) -> str:
    value, control = f"{frame[name].median():.2f}", f"control_{name}_mean"
    if control not in frame:
        return value
    return f"{value} (Gaussian clouds of the same covariance {frame[control].median():.2f})"


def _row(site: str, found: SiteGeometry) -> dict[str, Any]:
    shift, entropies = found.unit_shift, (found.gaussian, found.neighbour)
    row: dict[str, Any] = {
        "site": site,
        "layer": Site(site, None).layer,
        "d": found.d,
        "rank": found.rank,
        "rows": found.rows,
        "n": found.dimension.n,
        "copies": found.copies,
        "isoscore": found.isoscore,
        "participation_ratio": found.participation_ratio,
        "effective_rank": found.effective_rank,
        "spectral_entropy": math.log(found.effective_rank),
        "total_variance": found.total_variance,
        "tangent_share": found.tangent_share,
    }
    for name, entropy in zip(("gaussian", "neighbour"), entropies, strict=True):
        row[f"{name}_entropy"] = entropy.nats
        row[f"{name}_entropy_error"] = entropy.error
        row[f"unit_{name}_entropy"] = entropy.nats + shift
    row["negentropy"] = found.negentropy
    gaps = [found.gaussian.nats - nats for nats in found.neighbour_controls]
    row |= of_controls("negentropy", gaps)
    errors = {
        "two_nn": found.dimension.two_nn.mle_error,
        "levina_bickel": found.dimension.levina_bickel.inverse_mean_error,
    }
    for name, value in found.dimension.values.items():
        row[name] = value
        if name in errors:
            row[f"{name}_error"] = errors[name]
        row |= of_controls(name, found.dimension.controls[name])
    return row
