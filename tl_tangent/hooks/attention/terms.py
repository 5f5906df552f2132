"""Drop or scale terms of the attention scores during a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tl_tangent.errors import TangentKeyError, TangentRuntimeError, TangentValueError
from tl_tangent.geometry.score_terms import POSITION, TERMS, capped, summed, term_names
from tl_tangent.hooks.attention.choose import Chosen, choose
from tl_tangent.hooks.attention.observe import Observed, observing
from tl_tangent.hooks.attention.split import Space, split_sides

Names: TypeAlias = str | Iterable[str]


@contextmanager
def attention_terms(
    model: Any,
    subspaces: Any = None,
    *,
    keep: Names | None = None,
    drop: Names | None = None,
    factors: Mapping[str, float] | None = None,
    layers: int | Iterable[int] | None = None,
    heads: int | Iterable[int] | None = None,
    space: Space | None = None,
    any_model: bool = False,
) -> Iterator[Any]:
    """Let only some terms of the attention scores act, for the length of a ``with`` block.

    Terms are named as in :func:`tl_tangent.split_attention_scores` ("tangent_normal" is a tangent
    query with a normal key), or by group: "tangent" (the v^T M v), "cross", "normal", "linear",
    "constant". Terms are taken from the run as it is, so edits in front of the attention act on
    them; the mask stays. A soft cap acts on the sum that is left. Gradients flow through.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        subspaces: a set with a subspace for each layer, or one for all of them; by default those
            that are attached to ``model``.
        layers, space, any_model: see :func:`tl_tangent.split_attention_layers`.
        keep: drop every term but these. An additive position term stays.
        drop: drop these.
        factors: multiply these; every other term stays as it is.
        heads: only in these query heads.

    Yields:
        ``model``.

    Raises:
        TangentKeyError: a term, layer or head that does not exist.
        TangentValueError: not exactly one of ``keep``, ``drop`` and ``factors``, a factor that is
            not a finite number, or a model whose scores can't be split.
        TangentRuntimeError: the host shows its pattern in place of the scores, so that no edit of
            it has an effect; a pass on a key-value cache; or a layer that never ran in the block.
    """
    wanted = _factors(keep, drop, factors)
    chosen = choose(model, subspaces, layers, space=space, any_model=any_model)
    edits = {one.layer: _Edit(one, wanted, _heads(one, heads)) for one in chosen}
    with observing(model, sorted(edits), lambda observed: edits[observed.layer](observed)):
        yield model
    idle = [layer for layer, edit in edits.items() if not edit.fired]
    if idle:
        raise TangentRuntimeError(
            f"the attention of layer {idle[0]} never ran inside the block, so its terms were not "
            "changed. Run the model inside the block; under stop_at_layer, restrict layers=."
        )


def _factors(
    keep: Names | None, drop: Names | None, factors: Mapping[str, float] | None
) -> dict[str, float]:
    """The factor of every term."""
    given = [name for name, x in (("keep", keep), ("drop", drop), ("factors", factors)) if x]
    if len(given) != 1:
        raise TangentValueError(
            f"exactly one of keep, drop and factors says what happens to the terms; given: "
            f"{', '.join(given) or 'none'}."
        )
    wanted = dict.fromkeys((*TERMS, POSITION), 1.0)
    if keep:
        kept = {*term_names(_listed(keep)), POSITION}
        return {name: float(name in kept) for name in wanted}
    if drop:
        return wanted | dict.fromkeys(term_names(_listed(drop)), 0.0)
    for name, factor in (factors or {}).items():
        if not torch.isfinite(torch.tensor(float(factor))):
            raise TangentValueError(f"the factor of {name!r} is {factor}; it must be finite.")
        wanted |= dict.fromkeys(term_names(name), float(factor))
    return wanted


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _heads(chosen: Chosen, heads: int | Iterable[int] | None) -> list[int] | None:
    if heads is None:
        return None
    asked = [heads] if isinstance(heads, int) else list(heads)
    n_heads = chosen.circuit.n_heads
    bad = [head for head in asked if not 0 <= head < n_heads]
    if bad or not asked:
        what = f"head {bad[0]} does not exist" if bad else "no head is named"
        raise TangentKeyError(f"{what}: layer {chosen.layer} has query heads 0 to {n_heads - 1}.")
    return asked


@dataclass
class _Edit:
    """Changes the scores of one layer."""

    chosen: Chosen
    factors: Mapping[str, float]
    heads: list[int] | None
    fired: bool = field(default=False)

    def __call__(self, observed: Observed) -> Tensor | None:
        self.fired = True
        if observed.scores_are_pattern:
            raise TangentRuntimeError(
                f"layer {observed.layer}: this host computes its attention elsewhere and only "
                "shows the pattern in hook_attn_scores, so an edit there changes nothing. Take a "
                "model whose attention is computed by TransformerLens."
            )
        if all(factor == 1.0 for factor in self.factors.values()):
            return None
        scores = observed.scores
        changed = self._changed(observed).to(scores.dtype)
        acts = observed.seen[:, None].expand_as(scores)
        if self.heads is not None:
            among = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
            among[self.heads] = True
            acts = acts & among[:, None, None]
        return torch.where(acts, changed, scores)

    def _changed(self, observed: Observed) -> Tensor:
        """The scores with every term multiplied; without a cap, as a change of what is there."""
        cap, bias = self.chosen.circuit.cap, observed.position
        parts = split_sides(self.chosen.circuit, observed, self.chosen.subspace, self.chosen.space)
        if cap is None:
            more = {name: factor - 1.0 for name, factor in self.factors.items()}
            changed, bias_factor = summed(*parts, more), more[POSITION]
            base: Tensor = observed.scores
        else:
            kept = summed(*parts, dict(self.factors))
            changed, bias_factor = None, self.factors[POSITION]
            base = torch.zeros_like(observed.scores) if kept is None else capped(kept, cap)
        if changed is not None:
            base = base + changed
        return base if bias is None or bias_factor == 0.0 else base + bias_factor * bias
