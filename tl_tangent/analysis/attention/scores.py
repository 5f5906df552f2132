"""The attention scores of a layer, split into v^T M v and the eight other terms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_tangent.analysis.attention.conventions import attention_conventions
from tl_tangent.analysis.attention.score_split import AttentionScoreSplit
from tl_tangent.geometry.score_moments import term_moments
from tl_tangent.geometry.score_terms import POSITION, SideParts, term_maps
from tl_tangent.hooks.attention.check import checked_error
from tl_tangent.hooks.attention.choose import choose
from tl_tangent.hooks.attention.observe import Observed
from tl_tangent.hooks.attention.pass_over import Pass, pass_over, with_mask
from tl_tangent.hooks.attention.split import Space, split_sides
from tl_tangent.hooks.positions import Positions


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
        mask = one.positions(positions)
        parts = split_sides(one.circuit, observed, one.subspace, one.space)
        cells = about.cells(observed, mask)
        found[observed.layer] = AttentionScoreSplit(
            layer=observed.layer,
            terms=_terms(parts, observed),
            cap=one.circuit.cap,
            seen=observed.seen,
            scores=observed.scores.detach().clone(),
            scores_are_pattern=observed.scores_are_pattern,
            moments=term_moments(*parts, cells, observed.position),
            error_by_head=checked_error(one, observed, parts),
            conventions=attention_conventions(model, one, mask),
        )

    pass_over(model, batch, sorted(chosen), receive)
    return dict(sorted(found.items()))


def _terms(parts: tuple[SideParts, SideParts], observed: Observed) -> dict[str, Tensor]:
    terms = term_maps(*parts)
    if observed.position is not None:
        some = next(iter(terms.values()))
        terms[POSITION] = observed.position.to(some.dtype, copy=True).expand_as(some)
    return terms
