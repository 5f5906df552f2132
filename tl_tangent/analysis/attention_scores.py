"""The attention scores of a layer, split into v^T M v and the eight other terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_tangent.analysis.attention_conventions import attention_conventions
from tl_tangent.analysis.term_advantage import advantage_frame
from tl_tangent.analysis.term_rows import term_rows
from tl_tangent.errors import TangentRuntimeError
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.score_moments import TermMoments, term_moments
from tl_tangent.geometry.score_terms import (
    GROUPS,
    POSITION,
    TERMS,
    SideParts,
    capped,
    scores,
    term_maps,
)
from tl_tangent.hooks.attention.choose import Chosen, choose
from tl_tangent.hooks.attention.observe import Observed
from tl_tangent.hooks.attention.pass_over import Pass, pass_over, with_mask
from tl_tangent.hooks.attention.split import Space, projection_error, split_sides
from tl_tangent.hooks.positions import PositionMask, Positions

if TYPE_CHECKING:
    import pandas as pd

    from tl_tangent.views.widgets import Widget

CHECKED_QUERIES = 16
# by bytes a number: what the host's own arithmetic leaves in its scores, with room
_TOLERANCE = {1: 0.3, 2: 0.1, 4: 5e-3, 8: 1e-5}


def split_attention_scores(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str | list[str],
    layer: int,
    subspace: Any,
    *,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    space: Space | None = None,
    positions: Positions | None = None,
    any_model: bool = False,
) -> AttentionScoreSplit:
    """Split the attention scores of a layer into the nine terms of a mean, tangent and normal part.

    With what W_Q and W_K read written as ``mean + v + n``, a score is the sum over both sides of
    nine bilinear terms, of which ``v_i^T M v_j`` (M = W_Q R_i^T R_j W_K^T times the scale) is one.
    Rotations, biases and the scales of norms (frozen at each token's own) are the model's; biases
    go with the mean. Additive positions (ALiBi) are a tenth term; a soft cap acts on the sum.

    Args:
        model: a HookedTransformer or a TransformerBridge, processed or not.
        tokens: what the model takes.
        layer: which; negative ones count from the end.
        subspace: a :class:`~tl_tangent.TangentSubspace` at the layer's ``attn.hook_in`` or
            ``hook_resid_pre``, or with a basis a query head ``[head, d_model, rank]``; or a set or
            mapping that has one.
        attention_mask: 1 at real tokens, 0 at padding.
        space: "input" (what W_Q and W_K read) or "residual" (in front of the norm), where the site
            of the subspace does not say so.
        positions: which queries and keys enter the shares, not the terms; by default those that the
            subspace was fitted on.
        any_model: accept a subspace that was fitted on a model of another name.

    Returns:
        Terms ``[batch, head, query, key]`` and how far their sum is from the model's own scores.

    Raises:
        TangentKeyError, TangentValueError: a layer, a subspace or an architecture that can't be.
        TangentRuntimeError: the terms do not add up to the model's scores, because something edits
            queries or keys or because the model computes its scores in some other way.
    """
    batch = with_mask(tokens, attention_mask)
    options: dict[str, Any] = {"space": space, "any_model": any_model}
    (found,) = split_attention_layers(
        model, batch, subspace, [layer], positions=positions, **options
    ).values()
    return found


def split_attention_layers(
    model: Any,
    batch: Any,
    subspaces: Any,
    layers: int | Iterable[int] | None = None,
    *,
    space: Space | None = None,
    positions: Positions | None = None,
    any_model: bool = False,
) -> dict[int, AttentionScoreSplit]:
    """Split the scores of several layers in one pass: :func:`split_attention_scores` by layer.

    All terms are kept, nine maps of scores a layer; where only their shares are wanted,
    :func:`attention_term_shares` keeps none.

    Args:
        model, space, positions, any_model: see :func:`split_attention_scores`.
        batch: what the model takes, or a mapping of keyword arguments with an ``input``, such as
            ``{"input": tokens, "attention_mask": mask}``.
        subspaces: a set with a subspace for each layer, or one subspace for all of them.
        layers: which; by default all that there is a subspace for.
    """
    chosen = {
        one.layer: one for one in choose(model, subspaces, layers, space=space, any_model=any_model)
    }
    found: dict[int, AttentionScoreSplit] = {}

    def receive(observed: Observed, about: Pass) -> None:
        one = chosen[observed.layer]
        mask = position_mask(one, positions)
        parts = split_sides(one.circuit, observed, one.subspace, one.space)
        cells = about.cells(observed, mask)
        found[observed.layer] = AttentionScoreSplit(
            layer=observed.layer,
            terms=_terms(parts, observed),
            cap=one.circuit.cap,
            seen=observed.seen,
            scores=observed.scores.detach(),
            scores_are_pattern=observed.scores_are_pattern,
            moments=term_moments(*parts, cells, observed.position),
            error_by_head=checked_error(one, observed, parts),
            conventions=attention_conventions(model, one, mask),
        )

    pass_over(model, batch, sorted(chosen), receive)
    return dict(sorted(found.items()))


def position_mask(chosen: Chosen, positions: Positions | None) -> PositionMask:
    """Return the rule that was given, or else the one that the subspace was fitted by."""
    if positions is None:
        fitted = chosen.subspace.positions
        positions = "not_first" if fitted in (None, "custom") else fitted
    return PositionMask(positions)


def _terms(parts: tuple[SideParts, SideParts], observed: Observed) -> dict[str, Tensor]:
    terms = term_maps(*parts)
    if observed.position is not None:
        some = next(iter(terms.values()))
        terms[POSITION] = observed.position.to(some.dtype).expand_as(some)
    return terms


def rebuilt(
    chosen: Chosen, observed: Observed, parts: tuple[SideParts, SideParts], rows: slice
) -> Float[Tensor, "batch head query key"]:
    """Return the scores of some queries from the parts: capped, with positions, not masked."""
    query, key = (side.total for side in parts)
    total = capped(scores(query[:, :, rows], key), chosen.circuit.cap)
    return total if observed.position is None else total + observed.position[..., rows, :]


def spread_rows(observed: Observed) -> slice:
    """Return some queries spread over a pass, the last one among them, to check the sum at."""
    n = observed.scores.shape[-2]
    step = max(1, n // CHECKED_QUERIES)
    return slice((n - 1) % step, None, step)


def checked_error(
    chosen: Chosen,
    observed: Observed,
    parts: tuple[SideParts, SideParts],
    rows: slice = slice(None),
) -> Float[Tensor, " head"]:
    """Compare the sum of the terms with what the model computed, and refuse a real difference.

    Returns:
        For each head the largest difference over unmasked cells, over the head's largest score;
        where the host shows the pattern in place of the scores, the largest difference of patterns.
    """
    total = rebuilt(chosen, observed, parts, rows)
    seen = observed.seen[:, None, rows].expand_as(total)
    model = observed.scores[:, :, rows].to(total.dtype)
    if observed.scores_are_pattern:
        total = torch.softmax(total.masked_fill(~seen, -torch.inf), dim=-1).nan_to_num(0.0)
        largest = torch.ones(total.shape[1], dtype=total.dtype, device=total.device)
    else:
        largest = model.masked_fill(~seen, 0.0).abs().amax(dim=(0, 2, 3))
    error = (total - model).masked_fill(~seen, 0.0).abs().amax(dim=(0, 2, 3))
    error = error / largest.clamp(min=torch.finfo(total.dtype).tiny)
    projected = projection_error(chosen.circuit, observed, rows)
    _refuse_difference(chosen, error, projected, observed.attn_input.dtype)
    return error


def _refuse_difference(chosen: Chosen, error: Tensor, projected: float, dtype: torch.dtype) -> None:
    accepted, circuit = _TOLERANCE[dtype.itemsize], chosen.circuit
    if not projected <= accepted:
        raise TangentRuntimeError(
            f"layer {circuit.layer}: hook_q and hook_k are not the projections of attn.hook_in "
            f"(largest difference {projected:.1e} of the largest entry, accepted {accepted:.0e}). "
            "Take off the hook or the ablation that edits queries or keys."
        )
    if bool((error <= accepted).all()):
        return
    clips = " The model clips queries and keys, and some were clipped." if circuit.clips else ""
    raise TangentRuntimeError(
        f"layer {circuit.layer}, head {int(error.argmax())}: the terms add up to something else "
        f"than the model's own scores (largest difference {float(error.max()):.1e} of the largest "
        f"score, accepted {accepted:.0e}).{clips} Either a hook edits queries, keys or scores, or "
        f"the {circuit.kind} of this model computes them in a way that is not known here."
    )


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
        """Return what draws each query to a chosen key, by head and term.

        See :func:`tl_tangent.analysis.term_advantage.term_advantage`.
        """
        return advantage_frame(self, keys)

    def headline(self) -> str:
        """State what carries the scores of the layer, and how exact the split is."""
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
