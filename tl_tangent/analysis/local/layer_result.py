"""The geometry of layers as a table, correlations, a sentence and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tl_tangent.analysis.local.site_geometry import SiteGeometry
from tl_tangent.analysis.stream.followed import of_controls
from tl_tangent.geometry import SubspaceSet
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.frequency import pearson, spearman
from tl_tangent.hooks.sites import Site

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FEWEST = 4  # sites of a correlation
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
COLUMNS = [
    "column",
    "n",
    *(f"{kind}{end}" for kind in ("pearson", "spearman") for end in ("", "_low", "_high")),
]
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
        "biased in many dimensions, so that control_negentropy, of Gaussian clouds, is not 0 "
        "either: its mean with the opposite sign is the bias of neighbour_entropy for a Gaussian "
        "law"
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
        "Pearson's and Spearman's of a column with the IsoScore over n sites, with 95 % intervals "
        "by Fisher's z. Layers are not independent: each adds to the last, so that intervals are "
        "too narrow, and a common trend over depth alone correlates any two columns. The "
        "participation ratio is the IsoScore on another scale and is left out"
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

    def correlations(self) -> pd.DataFrame:
        """Return one row a column: its correlations with IsoScore over sites, with intervals.

        Layers are not independent, and the intervals take them as if they were: read the note in
        ``conventions["meaning"]["correlations"]``. Columns that are constant are left out, and
        below 4 sites all of them.
        """
        import pandas as pd

        frame = self.to_dataframe()
        several = len(frame) >= FEWEST and frame["isoscore"].nunique() > 1
        varied = [name for name in CORRELATED if several and frame[name].nunique() > 1]
        return pd.DataFrame([_correlated(name, frame) for name in varied], columns=COLUMNS)

    def headline(self) -> str:
        """State dimensions and entropies beside those that the covariance gives."""
        frame, told = self.to_dataframe(), []
        for name, label in (("levina_bickel", "Levina-Bickel"), ("two_nn", "TwoNN")):
            told.append(f"{label} dimension {_beside(frame, name)}")
        told.append(f"distance from Gaussian in Q_T {_beside(frame, 'negentropy')} nats")
        return (
            f"Medians over {len(frame)} sites: {', '.join(told)}; IsoScore "
            f"{frame['isoscore'].median():.3f}{_with_score(self.correlations())}."
        )

    def plot(self) -> Figure:
        """Draw dimensions, entropies and IsoScore over layers, with those of Gaussian clouds."""
        from tl_tangent.views.local_figure import draw_geometry  # the one step up a floor

        return draw_geometry(self.to_dataframe(), str(self.conventions["model"] or ""))

    def __repr__(self) -> str:
        return f"LayerGeometry({self.conventions['model']}): {self.headline()}"

    def _repr_html_(self) -> str:
        tables = [(self.to_dataframe(), self.headline())]
        correlated = self.correlations()
        if len(correlated):
            note = "Correlations with IsoScore over sites, which are not independent."
            tables.append((correlated, note))
        return "".join(_html(frame, caption) for frame, caption in tables)


def _html(frame: pd.DataFrame, caption: str) -> str:
    rows = frame.round(4).astype(object)
    records = rows.where(rows.notna(), None).to_dict("records")
    return html_table([{str(k): v for k, v in row.items()} for row in records], caption)


def _correlated(name: str, frame: pd.DataFrame) -> dict[str, Any]:
    column, score = (torch.tensor(frame[one].to_numpy(float)) for one in (name, "isoscore"))
    row: dict[str, Any] = {"column": name, "n": len(frame)}
    for one in (pearson(column, score), spearman(column, score)):
        row |= {one.kind: one.r, f"{one.kind}_low": one.low, f"{one.kind}_high": one.high}
    return row


def _with_score(correlated: pd.DataFrame) -> str:
    told = [
        f"{row['column']} {row['spearman']:+.2f}"
        for row in correlated.to_dict("records")
        if row["column"] in ("levina_bickel", "unit_neighbour_entropy")
    ]
    if not told:
        return ""
    return f"; with IsoScore over layers, which are not independent, Spearman's {', '.join(told)}"


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
