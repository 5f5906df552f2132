"""What does cutting the tangent subspace cost, layer by layer, beside a matched random control?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor

from tl_tangent.analysis.conventions import conventions_of
from tl_tangent.analysis.site_fit import STATISTICS, fit_sites
from tl_tangent.analysis.site_losses import SiteLosses, ablate_sites
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.rank import Rank
from tl_tangent.hooks.positions import Positions
from tl_tangent.hooks.sites import Sites

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DOMINANT = 0.9


def layer_ablation(
    model: Any,
    fit_batches: Tensor | Iterable[Tensor],
    eval_tokens: Int[Tensor, "row pos"],
    sites: Sites = "blocks.*.hook_resid_post",
    *,
    rank: Rank = 8,
    method: str = "pca",
    n_controls: int = 5,
    positions: Positions = "not_first",
    layers: Iterable[int] | int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> LayerAblation:
    """Fit Q_T at each site, then cut it, matched random subspaces, and all but it, one by one.

    Args:
        model: a HookedTransformer or a TransformerBridge of a causal language model.
        fit_batches: tokens ``[batch, pos]`` to fit on, without padding, or several of them.
        eval_tokens: rows ``[row, pos]`` without padding to measure the loss on; other text.
        sites: names, patterns, or a predicate on names.
        rank, method: of Q_T, see :func:`tl_tangent.fit_subspaces`.
        n_controls: how many matched random normals each site is compared with.
        positions: which positions are fitted and ablated.
        layers: restrict to these; negative ones count from the end.
        seed: of the fit and of the controls.
        progress: show progress bars on stderr.

    Raises:
        TangentKeyError: a site that the model does not have.
        TangentValueError: a rank that the data can't give, or ``2 * rank > d``; rows or a model of
            which there is no next-token loss.
        TangentRuntimeError: a site that never fired.
    """
    batches = [fit_batches] if isinstance(fit_batches, Tensor) else list(fit_batches)
    shared: dict[str, Any] = {"n_controls": n_controls, "positions": positions, "seed": seed}
    fitted: dict[str, Any] = {"rank": rank, "method": method, "layers": layers, **shared}
    subspaces = fit_sites(model, batches, sites, progress=progress, **fitted)
    losses = ablate_sites(model, subspaces, eval_tokens, progress=progress, **shared)
    conventions = conventions_of(model, batches, eval_tokens, sites=sites, **fitted)
    return LayerAblation(subspaces, tuple(losses), conventions)


@dataclass(frozen=True, eq=False, repr=False)
class LayerAblation:
    """The loss at every site without Q_T, without matched random subspaces, and with Q_T alone.

    Attributes:
        subspaces: what was fitted; each keeps its covariance statistics in its metadata.
        losses: one entry a site, in the order of the layers.
        conventions: how the numbers came about, JSON-able.
    """

    subspaces: SubspaceSet
    losses: tuple[SiteLosses, ...]
    conventions: Mapping[str, Any]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a site; losses are in nats a token, shares and IsoScores in [0, 1]."""
        import pandas as pd

        return pd.DataFrame([_row(self.subspaces[item.site], item) for item in self.losses])

    def headline(self) -> str:
        """State the finding at the middle one of the sites, with its control."""
        item = self.losses[len(self.losses) // 2]
        row = item.row()
        return (
            f"Cutting the rank-{self.subspaces[item.site].rank} tangent subspace at {item.site} "
            f"raises the loss by {row['increase_tangent_ablated']:.3f} nats a token "
            f"({item.baseline:.3f} to {item.ablated:.3f}); cutting a matched random subspace there "
            f"raises it by {row['increase_control_ablated_mean']:.3f} (mean of "
            f"{len(item.controls)}, from {row['increase_control_ablated_min']:.3f} to "
            f"{row['increase_control_ablated_max']:.3f})."
        )

    def position_0_note(self) -> str | None:
        """Say why position 0 is left out, where with it one direction would be nearly all."""
        frame = self.to_dataframe()
        shares = frame["first_direction_share_with_position_0"]
        struck = frame[shares > DOMINANT]
        if struck.empty:
            return None
        worst = frame.loc[shares.idxmax()]
        with_it, without = worst[shares.name], worst["first_direction_share"]
        return (
            "With position 0 in the fit, its first direction alone would hold over "
            f"{DOMINANT:.0%} of the variance at {len(struck)} of {len(frame)} sites, first at "
            f"{struck['site'].iloc[0]}; {with_it:.2%} at {worst['site']}, against {without:.1%} "
            "there without it. Q_T would be one massive activation, which is why fits and "
            "ablations leave position 0 out by default."
        )

    def plot(self) -> Figure:
        """Draw losses, shares and IsoScores over the layers; a matplotlib figure."""
        from tl_tangent.views.layer_figure import draw_layers  # the one step up a floor

        return draw_layers(self.to_dataframe(), title=self.title())

    def title(self) -> str:
        """Return model, sites, rank and method in one line."""
        made = self.conventions
        sites = made["sites"] if isinstance(made["sites"], str) else ", ".join(made["sites"])
        return f"{made['model']}, {sites}, rank {made['rank']} ({made['method']})"

    def __repr__(self) -> str:
        return f"LayerAblation({self.title()}, {len(self.losses)} sites): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = [
            {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            for row in self.to_dataframe().to_dict("records")
        ]
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())


def _row(subspace: TangentSubspace, losses: SiteLosses) -> dict[str, Any]:
    return {
        "site": losses.site,
        "layer": losses.layer,
        "d": subspace.d,
        "rank": subspace.rank,
        **subspace.metadata[STATISTICS],
        **losses.row(),
    }
