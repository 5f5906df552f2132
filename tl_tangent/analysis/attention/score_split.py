"""The terms of one layer's attention scores, as a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_tangent.analysis.attention.term_advantage import advantage_frame, term_advantage
from tl_tangent.analysis.attention.term_rows import term_rows
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.score_moments import TermMoments
from tl_tangent.geometry.score_terms import GROUPS, POSITION, TERMS, capped

if TYPE_CHECKING:
    import pandas as pd

    from tl_tangent.views.widgets import Widget


@dataclass(frozen=True, eq=False, repr=False)
class AttentionScoreSplit:
    """The terms of one layer's attention scores, and the model's own scores beside them.

    Attributes:
        layer: its number.
        terms: by name ``[batch, head, query, key]``, such as ``terms["tangent_normal"]`` (tangent
            query, normal key); with additive positions also ``terms["position"]``. Masked cells
            hold what the terms would be there.
        cap: c where the model's scores are ``c tanh(sum / c)``; None without a soft cap.
        seen: True at unmasked cells ``[batch, query, key]``.
        scores: the model's ``hook_attn_scores``, or its pattern where ``scores_are_pattern``.
        scores_are_pattern: whether the host shows the pattern under the name of the scores.
        moments: sums over the cells that count, from which the shares come.
        error_by_head: largest difference of ``total`` and ``scores`` over the largest score.
        conventions: how the numbers came about.
    """

    layer: int
    terms: Mapping[str, Float[Tensor, "batch head query key"]]
    cap: float | None
    seen: Bool[Tensor, "batch query key"]
    scores: Float[Tensor, "batch head query key"]
    scores_are_pattern: bool
    moments: TermMoments
    error_by_head: Float[Tensor, " head"]
    conventions: Mapping[str, Any]

    def sum_of(self, *names: str) -> Float[Tensor, "batch head query key"]:
        """Return the sum of some terms."""
        return torch.stack([self.terms[name] for name in names]).sum(0)

    @property
    def tangent(self) -> Float[Tensor, "batch head query key"]:
        """The v^T M v of the theory: tangent query, tangent key."""
        return self.terms["tangent_tangent"]

    @property
    def cross(self) -> Float[Tensor, "batch head query key"]:
        """Tangent with normal and normal with tangent."""
        return self.sum_of(*GROUPS["cross"])

    @property
    def normal(self) -> Float[Tensor, "batch head query key"]:
        """Normal query, normal key."""
        return self.terms["normal_normal"]

    @property
    def linear(self) -> Float[Tensor, "batch head query key"]:
        """The four terms with the mean (and the biases) on one side."""
        return self.sum_of(*GROUPS["linear"])

    @property
    def constant(self) -> Float[Tensor, "batch head query key"]:
        """The mean (and the biases) on both sides."""
        return self.terms["mean_mean"]

    @property
    def total(self) -> Float[Tensor, "batch head query key"]:
        """The scores that the terms make: their sum, capped, with positions; not masked."""
        total = capped(self.sum_of(*TERMS), self.cap)
        return total + self.terms[POSITION] if POSITION in self.terms else total

    @property
    def error(self) -> float:
        """The largest of ``error_by_head``."""
        return float(self.error_by_head.max())

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a head and term: its shares, see :func:`attention_term_shares`."""
        import pandas as pd

        return pd.DataFrame(term_rows(self.layer, self.moments))

    def advantage(self, keys: Int[Tensor, "batch query"]) -> pd.DataFrame:
        """Return what draws each query to a chosen key: one row a head and term.

        ``advantage`` is how much more the term gives to the chosen key than to the query's other
        keys, a mean over the queries that have one; ``share`` its share of their sum, which is the
        advantage of the score. Nearly all of a low-rank split is in its normal part, so compare
        with the same for ``subspace.random_normals(n, seed)``.

        Args:
            keys: the position of the chosen key of every query; -1 at queries that have none.

        Raises:
            TangentValueError: see ``term_advantage`` in this folder.
        """
        found = term_advantage(self.terms, self.seen, keys)
        return advantage_frame(self.layer, tuple(self.terms), found)

    def headline(self) -> str:
        """State what carries the scores of the layer, and how exact the split is."""
        if not bool(self.moments.spread.any()):
            return (
                f"Layer {self.layer}: no query that counts has 2 keys that count, so there are no "
                f"shares. The terms add up to the model's own to {self.error:.1e}."
            )
        frame = self.to_dataframe().groupby("term", sort=False)["variance_share"].mean()
        names = ("tangent_tangent", "tangent_normal", "normal_tangent", "normal_normal")
        shares = ", ".join(f"{name} {frame[name]:.1%}" for name in names)
        return (
            f"Layer {self.layer}, mean over {self.scores.shape[1]} heads of each term's share of "
            f"the terms' variance over keys: {shares}; the terms with the mean "
            f"{frame[[*GROUPS['linear'], 'mean_mean']].sum():.1%}. The terms add up to the model's "
            f"{'pattern' if self.scores_are_pattern else 'scores'} to {self.error:.1e}."
        )

    def show(
        self,
        tokens: Sequence[str] | None = None,
        heads: Iterable[int] | None = None,
        batch: int = 0,
        positions: slice | None = None,
    ) -> Widget:
        """Show the tangent, cross and normal maps of heads side by side, in a notebook.

        Arguments and errors are those of :func:`tl_tangent.views.attention_heads.show_terms`.
        """
        from tl_tangent.views.attention_heads import show_terms  # the one step up a floor

        return show_terms(self, tokens, heads=heads, batch=batch, positions=positions)

    def __repr__(self) -> str:
        shape = list(self.scores.shape)
        return f"AttentionScoreSplit(layer {self.layer}, {shape}): {self.headline()}"

    def _repr_html_(self) -> str:
        frame = (
            self.to_dataframe().groupby("term", sort=False).mean(numeric_only=True).reset_index()
        )
        rows = frame.drop(columns=["layer", "head"]).round(4).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())
