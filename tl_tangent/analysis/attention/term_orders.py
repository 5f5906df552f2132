"""How the terms of the attention scores grow with the distance t of the tokens from their mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.attention.conventions import attention_conventions
from tl_tangent.analysis.attention.order_results import (
    MEANING,
    AttentionTermOrders,
    LayerTermOrders,
)
from tl_tangent.analysis.attention.shares import controls_of
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.power_law import (
    BinMoments,
    bin_moments,
    different_bins,
    quantile_edges,
)
from tl_tangent.hooks.attention.check import checked_error, spread_rows
from tl_tangent.hooks.attention.choose import Chosen, choose
from tl_tangent.hooks.attention.observe import Observed
from tl_tangent.hooks.attention.pass_over import Pass, pass_over
from tl_tangent.hooks.attention.split import Space, source_of, split_sides
from tl_tangent.hooks.fit import listed, shown
from tl_tangent.hooks.positions import Positions

if TYPE_CHECKING:
    pass

MIN_BINS, MIN_TOKENS = 3, 8  # tokens a bin


def attention_term_orders(
    model: Any,
    batches: Any,
    subspaces: Any,
    layers: int | Iterable[int] | None = None,
    *,
    n_bins: int = 8,
    n_controls: int = 0,
    space: Space | None = None,
    positions: Positions | None = None,
    seed: int = 0,
    any_model: bool = False,
    progress: bool = False,
) -> AttentionTermOrders:
    """Fit the order in t of every term of the scores: the slope of its log size in log t.

    With ``x = mean + v + n`` and ``t = ||x - mean||``, tokens near their centre on a curved
    manifold with tangent space Q_T have ``||v|| ~ t`` and ``||n|| ~ t^2``: the manifold is a graph
    over its tangent space whose height starts with a quadratic form. So mean_mean has order 0,
    mean_tangent 1, mean_normal and tangent_tangent 2, tangent_normal + normal_tangent 3 and
    normal_normal 4. In a flat cloud with noise around it, where ``||n|| ~ t`` too, they are 0, 1,
    1, 2, 2 and 2.

    Part of this is mechanical. As t is computed from v and n, the slope of ``||v||`` is near 1
    wherever v dominates, and that of ``||n||`` wherever n does; the terms follow. What speaks for
    curvature is a normal part that grows like t^2 *while* the tangent part grows like t, beside
    controls that do not; where the share of v in t changes with t, ``||n||`` alone says nothing.

    Two passes a batch: the first gathers t, the second the second moments of the parts of queries
    and keys in each bin, from which sizes over all pairs of tokens follow without maps of scores.
    Memory: ``8 * n_bins * d_head^2`` float64 numbers a head, layer and subspace.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        batches: tokens ``[batch, pos]``, a mapping of keyword arguments with an ``input``, or an
            iterable of such batches.
        subspaces: a set with a subspace for each layer, or one subspace for all of them.
        layers: which; by default all that there is a subspace for.
        n_bins: how many bins of t, 3 or more; each holds 8 tokens at least.
        n_controls: how many matched random normals each subspace is compared with; each costs as
            much as the subspace itself.
        space, positions, any_model: see :func:`split_attention_scores`.
        seed: of the controls; each layer draws from a seed of its own.
        progress: show progress bars.

    Raises:
        TangentKeyError, TangentValueError, TangentRuntimeError: see
            :func:`split_attention_scores`; and too few bins, too few tokens for them, a t that is
            the same at (nearly) all tokens, or ``2 * rank > d`` where a control is asked for.
    """
    if n_bins < MIN_BINS or n_controls < 0:
        raise TangentValueError(
            f"n_bins={n_bins} and n_controls={n_controls}: a slope needs {MIN_BINS} bins or more, "
            "and the number of controls is 0 or more."
        )
    found = {
        one.layer: _LayerOrders(one, controls_of(one, n_controls, seed), positions, n_bins)
        for one in choose(model, subspaces, layers, space=space, any_model=any_model)
    }
    kept = list(listed(batches))
    for batch in shown(kept, progress, "measuring t"):
        pass_over(
            model, batch, sorted(found), lambda seen, run: found[seen.layer].measure(seen, run)
        )
    for one in found.values():
        one.cut()
    for batch in shown(kept, progress, "splitting scores"):
        pass_over(model, batch, sorted(found), lambda seen, run: found[seen.layer].add(seen, run))
    return AttentionTermOrders(tuple(found[n].result(model, seed) for n in sorted(found)))


class _LayerOrders:
    """Gathers one layer: first t of all tokens, then the moments in bins of it."""

    def __init__(
        self, chosen: Chosen, controls: list[Chosen], positions: Positions | None, n_bins: int
    ) -> None:
        self.chosen = chosen
        self.subjects = [chosen, *controls]
        self.positions = chosen.positions(positions)
        self.n_bins = n_bins
        self.radii: list[Float[Tensor, "group token"]] = []
        self.edges: Tensor | None = None
        self.sums: list[BinMoments] = []
        self.error: Tensor | None = None

    def measure(self, observed: Observed, about: Pass) -> None:
        taken = about.taken(observed, self.positions)
        self.radii.append(_norms(self.chosen, observed, taken)[0])

    def cut(self) -> None:
        """Cut t into bins.

        Raises:
            TangentValueError: fewer tokens than the bins take, or too few values of t.
        """
        t = torch.cat(self.radii, dim=-1) if self.radii else torch.empty(1, 0)
        needed = self.n_bins * MIN_TOKENS
        if t.shape[-1] < needed:
            raise TangentValueError(
                f"layer {self.chosen.layer}: {t.shape[-1]} tokens count, and {self.n_bins} bins "
                f"need {needed} ({MIN_TOKENS} each). Give more tokens or a smaller n_bins."
            )
        different = different_bins(t, self.n_bins)
        if different < MIN_BINS:
            raise TangentValueError(
                f"layer {self.chosen.layer}: t = ||x - mean|| goes from {float(t.min()):.6g} to "
                f"{float(t.max()):.6g}, and {self.n_bins} bins of it have {different} different t, "
                f"where a slope needs {MIN_BINS}. Give tokens whose activations differ more."
            )
        self.edges, self.radii = quantile_edges(t, self.n_bins), []

    def add(self, observed: Observed, about: Pass) -> None:
        assert self.edges is not None
        taken = about.taken(observed, self.positions)
        found = []
        for one in self.subjects:
            parts = split_sides(one.circuit, observed, one.subspace, one.space)
            norms = _norms(one, observed, taken)
            found.append(bin_moments(*parts, taken, norms, self.edges))
            if one is self.chosen:
                error = checked_error(one, observed, parts, spread_rows(observed))
                self.error = error if self.error is None else torch.maximum(self.error, error)
        self.sums = [a + b for a, b in zip(self.sums, found, strict=True)] if self.sums else found

    def result(self, model: Any, seed: int) -> LayerTermOrders:
        assert self.error is not None
        made = attention_conventions(model, self.chosen, self.positions)
        meaning = {name: made["meaning"][name] for name in ("split", "space")} | MEANING
        made |= {"n_bins": self.n_bins, "n_controls": len(self.subjects) - 1, "seed": seed}
        own, *controls = (sums.sizes() for sums in self.sums)
        return LayerTermOrders(
            self.chosen.layer, own, tuple(controls), self.error, made | {"meaning": meaning}
        )


def _norms(chosen: Chosen, observed: Observed, taken: Tensor) -> Float[Tensor, "three group token"]:
    """Return ``||x - mean||``, ``||v||`` and ``||n||`` of the tokens that count, in float64."""
    source, subspace = source_of(chosen.circuit, observed, chosen.space), chosen.subspace
    x = source.x[taken.expand(source.x.shape[:2])]
    if subspace.heads is not None:
        x = x[:, None].expand(-1, subspace.heads, -1)
    _, mean = subspace.on(x.device, x.dtype)  # t from the mean alone: controls fill the same bins
    norms = torch.stack([part.double().norm(dim=-1) for part in (x - mean, *subspace.split(x))])
    return norms[:, None] if subspace.heads is None else norms.mT
