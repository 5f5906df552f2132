"""How much of the anisotropy of activations leaves with Q_T, and with its matched normals."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.gradients.probe import normal_stack
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.linalg import exact_math
from tl_tangent.geometry.rank import Rank
from tl_tangent.geometry.removal import RemovalEffect, Space, removal
from tl_tangent.geometry.subspace_io import package_versions
from tl_tangent.hooks import compat
from tl_tangent.hooks.fit import collect, fit_subspaces, listed
from tl_tangent.hooks.positions import NOT_FIRST, PositionMask, Positions
from tl_tangent.hooks.sites import Site, Sites

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Target = Mapping[str, Tensor] | Literal["identity"] | None
WORDS = {
    "isoscore": "IsoScore* of the covariance (or second moment), divided by d - 1",
    "without_tangent": "of what is left when Q_T is projected out after shrinkage",
    "delta_tangent": "without_tangent - isoscore: positive where Q_T carries anisotropy",
    "delta_normal": "the same change when a matched normal is removed, mean over controls",
    "contrast": "delta_tangent - delta_normal",
    "p_value": "(1 + #{delta_N >= delta_T}) / (1 + n_controls)",
    "p_floor": "1 / (1 + n_controls), the smallest p-value that there is",
    "delta_leading": "the change when the covariance's own leading directions, as many as Q_T has, "
    "are removed. A Q_T that was fitted on the same rows by PCA is these directions: its "
    "contrast is then mechanical",
    "captured": "delta_tangent / delta_leading",
}


def removal_test(
    model: Any,
    batches: Any,
    subspaces: Mapping[str, TangentSubspace] | None = None,
    *,
    sites: Sites = "blocks.*.hook_resid_post",
    fit_batches: Any = None,
    rank: Rank = 8,
    method: str = "pca",
    positions: Positions = NOT_FIRST,
    centred: bool = True,
    n_controls: int = 20,
    zeta: float = 0.0,
    c0: Target = None,
    space: Space = "reduced",
    seed: int = 0,
    progress: bool = False,
) -> RemovalTest:
    """Measure IsoScore* of activations, whole, without Q_T, and without each matched normal.

    The covariance is streamed, shrunk, projected and then measured, in this order. That of
    gradients is tested by :func:`tl_tangent.gradient_energy` with ``moments=True``; any cloud by
    :func:`tl_tangent.geometry.cloud_removal`.

    Args:
        model: a HookedTransformer, a TransformerBridge, or any HookedRootModule.
        batches: what is measured; see :func:`tl_tangent.collect`.
        subspaces: Q_T at each site that is tested; by default fitted here, at ``sites``.
        sites: where Q_T is fitted, if it is not given.
        fit_batches: what it is fitted on, by default the same batches.
        rank, method: of that fit; see :func:`tl_tangent.fit_subspaces`.
        positions: which positions enter, in the fit and in what is measured.
        centred: measure the covariance, or else the second moment around zero.
        n_controls: B, matched random normals at each site.
        zeta: weight of the shrinkage target, in [0, 1].
        c0: that target: None for the identity with the trace of the covariance, "identity" for the
            plain one, or a matrix ``[d, d]`` for each site, such as a covariance that was pooled
            over checkpoints.
        space: "reduced" or "ambient"; see :class:`~tl_tangent.geometry.removal.RemovalEffect`.
        seed: of the normals and the fit.
        progress: show a progress bar.

    Raises:
        TangentKeyError: a site that the model does not have, or one without a target.
        TangentValueError: as :func:`~tl_tangent.geometry.removal.removal`; a subspace with a basis
            for each head; ``2 * rank > d``; no subspaces.
    """
    if not compat.is_hooked(model):
        raise TangentValueError(
            f"removal_test takes a model with hook points, and this is a {type(model).__name__}: "
            "wrap it by tl_tangent.TangentBridge.from_hf(model, tokenizer). For a matrix of "
            "activations there is tl_tangent.geometry.cloud_removal"
        )
    shared: dict[str, Any] = {"positions": positions, "seed": seed, "progress": progress}
    fitted_on = "given subspaces"
    if subspaces is None:
        fitted_on = "the same batches" if fit_batches is None else "fit_batches"
        batches = list(listed(batches))
        fit = batches if fit_batches is None else fit_batches
        subspaces = fit_subspaces(model, fit, sites, rank, method, per_head=False, **shared)
    if not subspaces:
        raise TangentValueError("there are no subspaces: give at least one, or None to fit them")
    fitters = collect(
        model,
        batches,
        list(subspaces),
        per_head=False,
        centering="global" if centred else "none",
        **shared,
    )
    effects, leading = {}, {}
    for site, subspace in subspaces.items():
        moment, target = fitters[site].covariance(), _target(c0, site)
        stacked = normal_stack(site, subspace, n_controls, seed)
        options: dict[str, Any] = {"zeta": zeta, "c0": target, "space": space}
        effects[site] = removal(moment, stacked, subspace.rank, **options)
        leading[site] = removal(moment, _leading(moment, subspace.rank), subspace.rank, **options)
    conventions = {
        "model": getattr(model.cfg, "model_name", None),
        "model_class": type(model).__name__,
        "subspaces": fitted_on,
        "positions": PositionMask(positions).description,
        "rows": {site: fitters[site].n_rows for site in effects},
        "moment": "covariance, ddof 1" if centred else "second moment around zero, ddof 0",
        "n_controls": n_controls,
        "zeta": zeta,
        "target": next(iter(effects.values())).target,
        "space": space,
        "seed": seed,
        "meaning": dict(WORDS),
        "versions": {**package_versions(), "python": sys.version.split()[0]},
    }
    return RemovalTest(effects, leading, SubspaceSet(subspaces), conventions)


@dataclass(frozen=True, eq=False, repr=False)
class RemovalTest:
    """IsoScores of activations with and without Q_T.

    Attributes:
        effects: by site.
        leading: the same where the covariance's own leading directions are removed.
        subspaces: Q_T at each site.
        conventions: how the numbers came about, JSON-able; ``meaning`` has the columns.
    """

    effects: Mapping[str, RemovalEffect]
    leading: Mapping[str, RemovalEffect]
    subspaces: SubspaceSet
    conventions: Mapping[str, Any]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a site."""
        import pandas as pd

        return pd.DataFrame([self._row(site) for site in self.effects])

    def _row(self, site: str) -> dict[str, Any]:
        effect, most = self.effects[site], self.leading[site].delta_tangent
        told: dict[str, Any] = {
            "site": site,
            "layer": Site(site, None).layer,
            "d": effect.d,
            "rank": effect.rank,
            "rows": self.conventions["rows"][site],
            "isoscore": effect.isoscore,
            "without_tangent": effect.without_tangent,
            "delta_tangent": effect.delta_tangent,
        }
        if effect.without_normals:
            told |= {
                "delta_normal": math.fsum(effect.delta_normals) / len(effect.delta_normals),
                "delta_normal_min": min(effect.delta_normals),
                "delta_normal_max": max(effect.delta_normals),
                "contrast": effect.contrast,
                "p_value": effect.p_value,
                "p_floor": effect.p_floor,
            }
        captured = effect.delta_tangent / most if most else math.nan
        return {**told, "delta_leading": most, "captured": captured}

    def headline(self) -> str:
        """State what leaves with Q_T, beside the controls and what is mechanical."""
        frame = self.to_dataframe()
        told = (
            f"Without Q_T IsoScore* goes from {frame['isoscore'].mean():.3f} to "
            f"{frame['without_tangent'].mean():.3f} on average over {len(frame)} sites"
        )
        if "delta_normal" in frame:
            reached = int((frame["p_value"] <= frame["p_floor"]).sum())
            told += (
                f" (change {frame['delta_tangent'].mean():+.3f}; without a matched normal "
                f"{frame['delta_normal'].mean():+.3f}; {reached} sites reach the floor p = "
                f"{frame['p_floor'].iloc[0]:.3g})"
            )
        told += (
            f". Removing the covariance's own leading directions would change it by "
            f"{frame['delta_leading'].mean():+.3f}"
        )
        if self.conventions["subspaces"] == "the same batches":
            told += "; Q_T was fitted on these very rows, so that most of its change is mechanical"
        return told + "."

    def plot(self) -> Figure:
        """Draw IsoScores before and after, with the band of the controls; a matplotlib figure."""
        from tl_tangent.views.removal_figure import draw_removal  # the one step up a floor

        return draw_removal(self.to_dataframe(), str(self.conventions["model"] or ""))

    def __repr__(self) -> str:
        return f"RemovalTest({self.conventions['model']}): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.to_dataframe().round(4).astype(object).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())


def _leading(moment: Float[Tensor, "d d"], rank: int) -> Float[Tensor, "d rank"]:
    with exact_math(moment.device):
        return torch.linalg.eigh(moment.double())[1][:, -rank:]


def _target(c0: Target, site: str) -> Tensor | Literal["identity"] | None:
    if not isinstance(c0, Mapping):
        return c0
    if site not in c0:
        raise TangentValueError(
            f"c0 has no shrinkage target for {site}; it has {', '.join(c0) or 'none'}"
        )
    return c0[site]
