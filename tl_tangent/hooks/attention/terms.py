"""Drop or scale terms of the attention scores during a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_tangent.errors import TangentKeyError, TangentRuntimeError, TangentValueError
from tl_tangent.geometry.score_terms import POSITION, TERMS, capped, summed, term_names
from tl_tangent.hooks.attachment import current_run, noting_runs
from tl_tangent.hooks.attention.check import checked_error, spread_rows
from tl_tangent.hooks.attention.choose import Chosen, choose
from tl_tangent.hooks.attention.circuit import read_circuit
from tl_tangent.hooks.attention.observe import Observed, observing
from tl_tangent.hooks.attention.pass_over import Pass
from tl_tangent.hooks.attention.split import Space, split_sides
from tl_tangent.hooks.numbers import wholes
from tl_tangent.hooks.positions import PositionMask, Positions, Run

Names: TypeAlias = str | Iterable[str]
_OPEN = "_tangent_score_blocks"


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
    positions: Positions | None = None,
    space: Space | None = None,
    any_model: bool = False,
) -> Iterator[Any]:
    """Let only some terms of the attention scores act, for the length of a ``with`` block.

    Terms are named as in :func:`tl_tangent.split_attention_scores` ("tangent_normal" is a tangent
    query with a normal key), or by group: "tangent" (the v^T M v), "cross", "normal", "linear",
    "constant". Terms are taken from the run as it is, so edits in front of the attention act on
    them; the mask stays. A soft cap acts on the sum that is left. Gradients flow through; a
    backward pass that recomputes activations (checkpointing) belongs into the block too.
    Blocks can be nested, except behind a soft cap. Hooks of one's own that edit queries, keys or
    scores are refused, as the terms would not be those of the scores.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        subspaces: a set with a subspace for each layer, or one for all of them; by default those
            that are attached to ``model``.
        layers, space, any_model: see :func:`tl_tangent.split_attention_layers`.
        keep: drop every term but these. An additive position term stays.
        drop: drop these.
        factors: multiply these; every other term stays as it is.
        heads: only in these query heads.
        positions: only in cells whose query and key both count; by default those that the subspace
            was fitted on, so that the scores of and towards position 0 stay as they are (against
            which a term that is the same at every other key then shifts them).

    Yields:
        ``model``.

    Raises:
        TangentKeyError: a term, layer or head that does not exist.
        TangentValueError: not exactly one of ``keep``, ``drop`` and ``factors``, a factor that is
            not a finite number, or a model whose scores can't be split.
        TangentRuntimeError: the host shows its pattern in place of the scores, so that no edit of
            it has an effect; terms that do not add up to the scores; a pass on a key-value cache;
            or a layer that never ran in the block.
    """
    wanted = _factors(keep, drop, factors)
    chosen = choose(model, subspaces, layers, space=space, any_model=any_model)
    edits = {
        one.layer: _Edit(model, one, wanted, _heads(one, heads), one.positions(positions))
        for one in chosen
    }
    with (
        _counted(model),
        noting_runs(model),
        observing(model, sorted(edits), lambda observed: edits[observed.layer](observed)),
    ):
        yield model
    idle = [layer for layer, edit in edits.items() if not edit.fired]
    if idle:
        raise TangentRuntimeError(
            f"the attention of layer {idle[0]} never ran inside the block, so its terms were not "
            "changed. Run the model inside the block; under stop_at_layer, restrict layers=."
        )


@contextmanager
def _counted(model: Any) -> Iterator[None]:
    """Note on the model how many such blocks are open."""
    model.__dict__[_OPEN] = model.__dict__.get(_OPEN, 0) + 1
    try:
        yield
    finally:
        model.__dict__[_OPEN] -= 1
        if model.__dict__[_OPEN] == 0:
            del model.__dict__[_OPEN]


def _factors(
    keep: Names | None, drop: Names | None, factors: Mapping[str, float] | None
) -> dict[str, float]:
    """The factor of every term."""
    options = {"keep": keep, "drop": drop, "factors": factors}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise TangentValueError(
            f"exactly one of keep, drop and factors says what happens to the terms; given: "
            f"{', '.join(given) or 'none'}."
        )
    if factors is not None:
        return _scaled(factors)
    names = term_names(_listed(keep if keep is not None else drop))
    if not names:
        raise TangentValueError(f"{given[0]} names no term. Give one at least.")
    if keep is not None:
        return {name: float(name in (*names, POSITION)) for name in (*TERMS, POSITION)}
    return dict.fromkeys((*TERMS, POSITION), 1.0) | dict.fromkeys(names, 0.0)


def _scaled(factors: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(factors, Mapping) or not factors:
        raise TangentValueError(
            f"factors is {factors!r}; give a mapping from terms or groups to numbers."
        )
    found: dict[str, float] = {}
    for name, factor in factors.items():
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise TangentValueError(f"the factor of {name!r} is {factor!r}; it must be a number.")
        if not math.isfinite(factor):
            raise TangentValueError(f"the factor of {name!r} is {factor}; it must be finite.")
        for term in term_names(name):
            if term in found:
                raise TangentValueError(f"factors names {term!r} twice, alone and in a group.")
            found[term] = float(factor)
    return dict.fromkeys((*TERMS, POSITION), 1.0) | found


def _listed(names: Any) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names) if _many(names) else None
    if listed is None or not all(isinstance(name, str) for name in listed):
        raise TangentValueError(f"terms are named by strings; got {names!r}.")
    return listed


def _many(names: Any) -> bool:
    return isinstance(names, Iterable) and not isinstance(names, Tensor)


def _heads(chosen: Chosen, heads: int | Iterable[int] | None) -> list[int] | None:
    if heads is None:
        return None
    asked, n_heads = wholes("heads", heads), chosen.circuit.n_heads
    bad = [head for head in asked if not 0 <= head < n_heads]
    if bad:
        raise TangentKeyError(
            f"head {bad[0]} does not exist: layer {chosen.layer} has query heads 0 to "
            f"{n_heads - 1}."
        )
    return asked


@dataclass(repr=False)
class _Edit:
    """Changes the scores of one layer."""

    model: Any
    chosen: Chosen
    factors: Mapping[str, float]
    heads: list[int] | None
    positions: PositionMask
    fired: bool = field(default=False)

    def __call__(self, observed: Observed) -> Tensor | None:
        self.fired = True
        self._refuse(observed)
        if all(factor == 1.0 for factor in self.factors.values()):
            return None
        # weights are read in every pass: they may have changed since the block was entered
        now = replace(self.chosen, circuit=read_circuit(self.model, observed.layer))
        parts = split_sides(now.circuit, observed, now.subspace, now.space)
        self._check(now, observed, parts)
        scores = observed.scores
        changed = self._changed(now, observed, parts).to(scores.dtype)
        acts = self._cells(observed)[:, None].expand_as(scores)
        if self.heads is not None:
            among = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
            among[self.heads] = True
            acts = acts & among[:, None, None]
        return torch.where(acts, changed, scores)

    def _cells(self, observed: Observed) -> Bool[Tensor, "_ query key"]:
        run = current_run(self.model) or Run(length=observed.attn_input.shape[1])
        return Pass(run).cells(observed, self.positions)

    def _refuse(self, observed: Observed) -> None:
        if observed.scores_are_pattern:
            raise TangentRuntimeError(
                f"layer {observed.layer}: this host computes its attention elsewhere and only "
                "shows the pattern in hook_attn_scores, so an edit there changes nothing. Take a "
                "model whose attention is computed by TransformerLens."
            )
        if observed.position is None and self.factors[POSITION] != 1.0:
            raise TangentValueError(
                f"layer {observed.layer} adds no position term to its scores, so there is none to "
                "drop or scale."
            )

    def _check(self, now: Chosen, observed: Observed, parts: Any) -> None:
        """Scores that another open block has edited add up to something else, as they should."""
        if self.model.__dict__.get(_OPEN, 1) == 1:
            checked_error(now, observed, parts, spread_rows(observed))
        elif now.circuit.cap is not None:
            raise TangentRuntimeError(
                f"layer {observed.layer}: behind a soft cap two blocks of attention_terms do not "
                "add up. Name all terms in one."
            )

    def _changed(self, now: Chosen, observed: Observed, parts: Any) -> Tensor:
        """The scores with every term multiplied; without a cap, as a change of what is there."""
        cap, bias = now.circuit.cap, observed.position
        query, key = parts
        if cap is None:
            more = {name: factor - 1.0 for name, factor in self.factors.items()}
            changed, bias_factor = summed(query, key, more), more[POSITION]
            base: Tensor = observed.scores
        else:
            kept = summed(query, key, dict(self.factors))
            changed, bias_factor = None, self.factors[POSITION]
            base = torch.zeros_like(observed.scores) if kept is None else capped(kept, cap)
        if changed is not None:
            base = base + changed
        return base if bias is None or bias_factor == 0.0 else base + bias_factor * bias
