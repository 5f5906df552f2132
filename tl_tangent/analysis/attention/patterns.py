"""The attention pattern that some of the terms alone would give, against the real one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.analysis.attention.conventions import attention_conventions
from tl_tangent.analysis.attention.shares import controls_of
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.score_terms import (
    GROUPS,
    KEY_CONSTANT,
    TERMS,
    capped,
    summed,
    term_names,
)
from tl_tangent.hooks.attention.check import checked_error, spread_rows
from tl_tangent.hooks.attention.choose import Chosen, choose
from tl_tangent.hooks.attention.observe import Observed
from tl_tangent.hooks.attention.pass_over import Pass, pass_over
from tl_tangent.hooks.attention.split import Space, split_sides
from tl_tangent.hooks.fit import listed, shown
from tl_tangent.hooks.numbers import whole
from tl_tangent.hooks.positions import PositionMask, Positions

if TYPE_CHECKING:
    import pandas as pd

# What is left of the scores, by name.
TERM_SETS: dict[str, tuple[str, ...]] = {
    "tangent": GROUPS["tangent"],
    "bilinear": (*GROUPS["tangent"], *GROUPS["cross"], *GROUPS["normal"]),
    "no_normal": tuple(name for name in TERMS if "normal" not in name),
    "no_tangent": tuple(name for name in TERMS if "tangent" not in name),
    "no_key_constant": tuple(name for name in TERMS if name not in KEY_CONSTANT),
}
UNIFORM = "uniform"


def attention_pattern_divergence(
    model: Any,
    batches: Any,
    subspaces: Any,
    layers: int | Iterable[int] | None = None,
    *,
    term_sets: Mapping[str, Iterable[str] | str] | None = None,
    n_controls: int = 0,
    space: Space | None = None,
    positions: Positions | None = None,
    seed: int = 0,
    any_model: bool = False,
    progress: bool = False,
) -> PatternDivergence:
    """Compare the pattern of every head with those that sets of terms alone would give.

    For each set, the sum of its terms (capped, with additive positions, masked as in the model)
    goes through the softmax; the divergence is ``KL(pattern || that)``, a mean over queries. Beside
    them stands "uniform", the pattern that knows nothing. One layer's maps are in memory at a time.

    Args:
        model, batches, subspaces, layers, n_controls, space, seed, any_model, progress: see
            :func:`attention_term_shares`.
        term_sets: which terms make a pattern, by the name of the set; by default :data:`TERM_SETS`.
        positions: which queries enter the means (they attend to every key that they see); by
            default those that the subspace was fitted on.

    Raises:
        TangentKeyError, TangentValueError, TangentRuntimeError: see
            :func:`attention_term_shares`; "uniform" as the name of a set.
    """
    sets = named_sets("term_sets", TERM_SETS if term_sets is None else term_sets)
    if UNIFORM in sets:
        raise TangentValueError(f"term_sets has {list(sets)}: 'uniform' stands beside them anyway.")
    whole("n_controls", n_controls, at_least=0)
    found = {
        one.layer: _LayerSums(one, controls_of(one, n_controls, seed), sets)
        for one in choose(model, subspaces, layers, space=space, any_model=any_model)
    }

    def receive(observed: Observed, about: Pass) -> None:
        layer = found[observed.layer]
        layer.add(observed, about, layer.chosen.positions(positions))

    for batch in shown(listed(batches), progress, "comparing patterns"):
        pass_over(model, batch, sorted(found), receive)
    rows = [row for layer in sorted(found) for row in found[layer].rows()]
    made = {
        layer: attention_conventions(model, one.chosen, one.chosen.positions(positions))
        for layer, one in sorted(found.items())
    }
    return PatternDivergence(tuple(rows), sets, made)


def named_sets(option: str, given: Any) -> dict[str, tuple[str, ...]]:
    """Return sets of terms by name, groups written out.

    Raises:
        TangentKeyError: a name that is no term and no group.
        TangentValueError: anything but a mapping from names to terms, or an empty one or set.
    """
    if not isinstance(given, Mapping) or not given:
        raise TangentValueError(
            f"{option} is {given!r}; give a mapping from a name to the terms of that set."
        )
    sets = {
        name: term_names([terms] if isinstance(terms, str) else list(terms))
        for name, terms in given.items()
    }
    empty = [name for name, terms in sets.items() if not terms]
    if empty:
        raise TangentValueError(f"the set {empty[0]!r} of {option} has no term.")
    return sets


class _LayerSums:
    """Adds up the divergences of one layer over batches."""

    def __init__(
        self, chosen: Chosen, controls: list[Chosen], sets: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.chosen = chosen
        self.controls = controls
        self.sets = sets
        self.sums: dict[tuple[str, int], Tensor] = {}
        self.queries = 0

    def add(self, observed: Observed, about: Pass, positions: PositionMask) -> None:
        seen = observed.seen
        asking = about.taken(observed, positions).expand(seen.shape[:2]) & (seen.sum(-1) > 1)
        self.queries += int(asking.sum())
        real = _log_pattern(observed.scores, observed, seen)
        self._add(UNIFORM, 0, real, torch.zeros_like(real), seen, asking)
        for i, one in enumerate((self.chosen, *self.controls)):
            parts = split_sides(one.circuit, observed, one.subspace, one.space)
            if i == 0:
                checked_error(one, observed, parts, spread_rows(observed))
            for name, terms in self.sets.items():
                left = summed(*parts, dict.fromkeys(terms, 1.0))
                scores = torch.zeros_like(real) if left is None else capped(left, one.circuit.cap)
                if observed.position is not None:
                    scores = scores + observed.position
                self._add(name, i, real, scores, seen, asking)

    def _add(
        self, name: str, which: int, real: Tensor, scores: Tensor, seen: Tensor, asking: Tensor
    ) -> None:
        other = torch.log_softmax(scores.masked_fill(~seen[:, None], -torch.inf), dim=-1)
        found = divergences(real, other, seen, asking)
        self.sums[name, which] = self.sums.get((name, which), torch.zeros_like(found)) + found

    def rows(self) -> list[dict[str, Any]]:
        if self.queries == 0:
            raise TangentValueError(
                f"layer {self.chosen.layer}: no query with 2 keys or more counts under these "
                "positions. Give longer rows, or other positions."
            )
        names = [UNIFORM, *self.sets]
        return [
            self._row(name, head) for head in range(self.chosen.circuit.n_heads) for name in names
        ]

    def _row(self, name: str, head: int) -> dict[str, Any]:
        kl, distance = (float(x) / self.queries for x in self.sums[name, 0][:, head])
        row = {
            "layer": self.chosen.layer,
            "head": head,
            "terms": name,
            "kl": kl,
            "total_variation": distance,
        }
        if self.controls and name != UNIFORM:
            others = [
                float(self.sums[name, i + 1][0, head]) / self.queries
                for i in range(len(self.controls))
            ]
            row |= {
                "control_kl_mean": sum(others) / len(others),
                "control_kl_min": min(others),
                "control_kl_max": max(others),
            }
        return row


def _log_pattern(scores: Tensor, observed: Observed, seen: Tensor) -> Float[Tensor, "b head q k"]:
    if observed.scores_are_pattern:
        return scores.clamp(min=torch.finfo(scores.dtype).tiny).log()
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.log_softmax(scores.masked_fill(~seen[:, None], -torch.inf), dim=-1)


def divergences(
    real: Float[Tensor, "batch head query key"],
    other: Float[Tensor, "batch head query key"],
    seen: Bool[Tensor, "batch query key"],
    asking: Bool[Tensor, "batch query"],
) -> Float[Tensor, "2 head"]:
    """Sum over queries KL(real || other), in nats, and the total variation distance, in [0, 1].

    Args:
        real, other: logarithms of two patterns.
        seen: cells that are not masked.
        asking: queries that count.
    """
    pattern = real.exp().masked_fill(~seen[:, None], 0.0)
    ratio = (real - other).masked_fill(~seen[:, None], 0.0)
    kl = (pattern * ratio).sum(-1)
    distance = (pattern - other.exp().masked_fill(~seen[:, None], 0.0)).abs().sum(-1) / 2
    counted = torch.stack([kl, distance]).double() * asking[:, None]
    return counted.sum(dim=(1, 3))


@dataclass(frozen=True, eq=False, repr=False)
class PatternDivergence:
    """How far patterns from some of the terms are from the real ones.

    Attributes:
        rows: one a layer, head and set of terms: ``kl`` in nats (of the real pattern from that of
            the terms), ``total_variation`` in [0, 1], both means over queries.
        term_sets: the terms of each set.
        conventions: by layer, how the numbers came about.
    """

    rows: tuple[Mapping[str, Any], ...]
    term_sets: Mapping[str, tuple[str, ...]]
    conventions: Mapping[int, Mapping[str, Any]]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a layer, head and set of terms."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def headline(self) -> str:
        """State how much of the pattern v^T M v alone gives, beside what a uniform one gives."""
        means = self.to_dataframe().groupby("terms", sort=False).mean(numeric_only=True)
        parts = [f"{name} {row['kl']:.3f}" for name, row in means.iterrows()]
        control = ""
        if "control_kl_mean" in means:
            control = (
                " (matched random subspaces: "
                + ", ".join(
                    f"{name} {row['control_kl_mean']:.3f}"
                    for name, row in means.drop(UNIFORM).iterrows()
                )
                + ")"
            )
        return (
            "KL of the real pattern from that of some terms alone, nats, mean over heads and "
            f"queries: {', '.join(parts)}{control}."
        )

    def __repr__(self) -> str:
        return f"PatternDivergence({len(self.conventions)} layers): {self.headline()}"

    def _repr_html_(self) -> str:
        frame = self.to_dataframe().drop(columns="head")
        table = frame.groupby(["layer", "terms"], sort=False).mean().round(4).reset_index()
        rows = [{str(k): v for k, v in row.items()} for row in table.to_dict("records")]
        return html_table(rows, self.headline())
