"""What share of the attention scores each term has, at every layer and head, without their maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.attention.conventions import attention_conventions
from tl_tangent.analysis.attention.term_rows import SHARES, term_rows
from tl_tangent.analysis.site_fit import matched_controls
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.score_moments import TermMoments, term_moments
from tl_tangent.geometry.score_terms import GROUPS, POSITION
from tl_tangent.hooks.attention.check import checked_error, spread_rows
from tl_tangent.hooks.attention.choose import Chosen, choose
from tl_tangent.hooks.attention.observe import Observed
from tl_tangent.hooks.attention.pass_over import Pass, pass_over
from tl_tangent.hooks.attention.split import Space, split_sides
from tl_tangent.hooks.fit import listed, shown
from tl_tangent.hooks.numbers import whole
from tl_tangent.hooks.positions import Positions

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def attention_term_shares(
    model: Any,
    batches: Any,
    subspaces: Any,
    layers: int | Iterable[int] | None = None,
    *,
    n_controls: int = 0,
    signed: bool = False,
    space: Space | None = None,
    positions: Positions | None = None,
    seed: int = 0,
    any_model: bool = False,
    progress: bool = False,
) -> AttentionTermShares:
    """Sum up the nine terms of the scores of every layer and head, in one pass a batch.

    No map of scores is kept, so that memory does not grow with the number of layers or batches. The
    sums are exact; see :mod:`tl_tangent.geometry.score_moments`. What the terms are is told in
    :func:`split_attention_scores`, what the shares are in the result's ``conventions["meaning"]``.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        batches: tokens ``[batch, pos]``, a mapping of keyword arguments with an ``input``, or an
            iterable of such batches.
        subspaces: a set with a subspace for each layer, or one subspace for all of them.
        layers: which; by default all that there is a subspace for.
        n_controls: how many matched random normals each subspace is compared with; each costs as
            much as the subspace itself.
        signed: also measure each term's signed share of the variance of the score itself, the only
            shares that add up to what the softmax sees; a fifth of a pass more.
        space, positions, any_model: see :func:`split_attention_scores`.
        seed: of the controls; each layer draws from a seed of its own.
        progress: show a progress bar.

    Raises:
        TangentKeyError, TangentValueError, TangentRuntimeError: see
            :func:`split_attention_scores`; and ``2 * rank > d`` where a control is asked for.
    """
    n_controls = whole("n_controls", n_controls, at_least=0)
    sums = {
        one.layer: _LayerSums(one, controls_of(one, n_controls, seed), signed)
        for one in choose(model, subspaces, layers, space=space, any_model=any_model)
    }

    def receive(observed: Observed, about: Pass) -> None:
        sums[observed.layer].add(observed, about, positions)

    for batch in shown(listed(batches), progress, "splitting scores"):
        pass_over(model, batch, sorted(sums), receive)
    return AttentionTermShares(
        tuple(sums[layer].result(model, positions, seed) for layer in sorted(sums))
    )


def controls_of(chosen: Chosen, n: int, seed: int) -> list[Chosen]:
    """Draw matched random normals of a layer's subspace, from a seed of the layer's own."""
    site = f"blocks.{chosen.layer}.attn"
    drawn = matched_controls(chosen.subspace.replace(site=site), n, seed) if n else []
    return [replace(chosen, subspace=subspace) for subspace in drawn]


class _LayerSums:
    """Gathers the moments of one layer over batches."""

    def __init__(self, chosen: Chosen, controls: list[Chosen], signed: bool) -> None:
        self.chosen = chosen
        self.controls = controls
        self.signed = signed
        self.moments: list[TermMoments] = []
        self.error: Tensor | None = None

    def add(self, observed: Observed, about: Pass, positions: Positions | None) -> None:
        cells = about.cells(observed, self.chosen.positions(positions))
        found = []
        for one in (self.chosen, *self.controls):
            parts = split_sides(one.circuit, observed, one.subspace, one.space)
            found.append(term_moments(*parts, cells, observed.position, along=self.signed))
            if one is self.chosen:
                error = checked_error(one, observed, parts, spread_rows(observed))
                self.error = error if self.error is None else torch.maximum(self.error, error)
        self.moments = (
            [a + b for a, b in zip(self.moments, found, strict=True)] if self.moments else found
        )

    def result(self, model: Any, positions: Positions | None, seed: int) -> LayerTermShares:
        if not self.moments or not bool(self.moments[0].spread.any()):
            raise TangentValueError(
                f"layer {self.chosen.layer}: no query counts that has 2 keys which count (or there "
                "was no batch), so no term can vary. Give longer rows, or other positions."
            )
        assert self.error is not None
        made = attention_conventions(model, self.chosen, self.chosen.positions(positions))
        made |= {"n_controls": len(self.controls), "seed": seed}
        return LayerTermShares(
            self.chosen.layer, self.moments[0], tuple(self.moments[1:]), self.error, made
        )


@dataclass(frozen=True, eq=False)
class LayerTermShares:
    """The sums over one layer's cells, for the subspace and for its controls.

    Attributes:
        layer: its number.
        moments: of the subspace.
        controls: of each matched random normal.
        error_by_head: how far the terms were from adding up to the model's own scores, over the
            largest score, at the queries where it was checked.
        conventions: how the numbers came about.
    """

    layer: int
    moments: TermMoments
    controls: tuple[TermMoments, ...]
    error_by_head: Float[Tensor, " head"]
    conventions: Mapping[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a head and term, with mean and extremes of the controls' shares."""
        rows = term_rows(self.layer, self.moments)
        others = [term_rows(self.layer, moments) for moments in self.controls]
        for i, row in enumerate(rows):
            for share in (name for name in SHARES if others and name in row):
                values = [other[i][share] for other in others]
                row[f"control_{share}_mean"] = sum(values) / len(values)
                row[f"control_{share}_min"] = min(values)
                row[f"control_{share}_max"] = max(values)
        return rows


@dataclass(frozen=True, eq=False, repr=False)
class AttentionTermShares:
    """The share of each term of the attention scores, by layer and head.

    Attributes:
        layers: one entry a layer, ascending.
    """

    layers: tuple[LayerTermShares, ...]

    @property
    def error(self) -> float:
        """The largest difference between terms and scores, over the largest score of the head."""
        return max(float(one.error_by_head.max()) for one in self.layers)

    @property
    def conventions(self) -> dict[int, Mapping[str, Any]]:
        """How the numbers of each layer came about."""
        return {one.layer: one.conventions for one in self.layers}

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a layer, head and term."""
        import pandas as pd

        return pd.DataFrame([row for one in self.layers for row in one.rows()])

    def by_layer(self, share: str = "variance_share", *, groups: bool = False) -> pd.DataFrame:
        """Return one row a layer with a column a term: the mean over heads of a share.

        Args:
            share: "square_share", "variance_share" or "score_share" (with ``signed=True``), or one
                of the controls' columns, such as "control_variance_share_mean".
            groups: a column a group of terms instead, with the sum of its terms.

        Raises:
            TangentValueError: a column that is not there.
        """
        import pandas as pd

        frame = self.to_dataframe()
        if not isinstance(share, str) or share not in frame or "share" not in share:
            numeric = [name for name in frame if "share" in name]
            hint = " Signed shares come with signed=True." if share == "score_share" else ""
            raise TangentValueError(
                f"there is no {share!r} here; there are {', '.join(numeric)}.{hint}"
            )
        means = frame.groupby(["layer", "term"], sort=False)[share].mean().unstack()
        if not groups:
            return means[list(self.layers[0].moments.names)]
        sets = {name: [term for term in terms if term in means] for name, terms in GROUPS.items()}
        if POSITION in means:
            sets[POSITION] = [POSITION]
        return pd.DataFrame({name: means[terms].sum(axis=1) for name, terms in sets.items()})

    def headline(self) -> str:
        """State the mean share of v^T M v, beside its control where there is one."""
        frame = self.to_dataframe()
        tangent = frame[frame["term"] == "tangent_tangent"]
        control = ""
        if "control_variance_share_mean" in frame:
            control = (
                f" (matched random subspaces {tangent['control_variance_share_mean'].mean():.2%})"
            )
        made = self.layers[0].conventions
        best = tangent.loc[tangent["variance_share"].idxmax()]
        return (
            f"Of the terms' variance over keys, v^T M v (rank {made['rank']}, {made['space']} "
            f"space) holds {tangent['variance_share'].mean():.1%}{control}, mean over "
            f"{len(tangent)} heads of {len(self.layers)} layers; most at layer "
            f"{int(best['layer'])}, head {int(best['head'])}: {best['variance_share']:.1%}. "
            f"Terms and scores agree to {self.error:.1e}."
        )

    def plot(self, share: str = "variance_share") -> Figure:
        """Draw the share of each group of terms over the layers, controls as dashed lines."""
        from tl_tangent.views.share_figure import draw_shares  # the one step up a floor

        return draw_shares(self, share)

    def __repr__(self) -> str:
        return f"AttentionTermShares({len(self.layers)} layers): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.by_layer().reset_index().round(4).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())
