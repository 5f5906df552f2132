"""What does dropping terms of the attention scores cost, beside a matched random subspace?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_tangent.analysis.attention.conventions import attention_conventions
from tl_tangent.analysis.attention.patterns import named_sets
from tl_tangent.analysis.attention.shares import controls_of
from tl_tangent.analysis.staged import StagedLoss
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.score_terms import GROUPS
from tl_tangent.hooks.attention.choose import choose
from tl_tangent.hooks.attention.split import Space
from tl_tangent.hooks.attention.terms import attention_terms
from tl_tangent.hooks.numbers import whole, wholes
from tl_tangent.hooks.positions import Positions

if TYPE_CHECKING:
    import pandas as pd

DROPPED: dict[str, tuple[str, ...]] = {
    name: GROUPS[name] for name in ("tangent", "cross", "normal", "linear")
}


def attention_term_losses(
    model: Any,
    eval_tokens: Int[Tensor, "row pos"],
    subspaces: Any,
    layers: int | Iterable[int] | None = None,
    *,
    drop: Mapping[str, Iterable[str] | str] | None = None,
    heads: int | Iterable[int] | None = None,
    n_controls: int = 5,
    positions: Positions | None = None,
    space: Space | None = None,
    seed: int = 0,
    any_model: bool = False,
    progress: bool = True,
) -> AttentionTermLosses:
    """Drop sets of terms of the scores of one layer after another, and measure the loss.

    The control of a set drops the same terms of a split by a matched random subspace: with a random
    Q there is next to nothing in the tangent terms and nearly everything in the normal ones.

    Args:
        model: a HookedTransformer or a TransformerBridge of a causal language model.
        eval_tokens: rows without padding.
        subspaces, layers, space, any_model: see :func:`split_attention_layers`.
        drop: sets of terms, by the name of the set; by default :data:`DROPPED`.
        heads: drop them in these query heads alone.
        positions: drop them in cells whose query and key both count; by default those that the
            subspace was fitted on. With ``"all"`` position 0, the key that much attention goes to,
            is in it.
        n_controls, seed: of the matched random normals; each layer draws from a seed of its own.
        progress: show a progress bar.

    Raises:
        TangentKeyError, TangentValueError, TangentRuntimeError: see :func:`attention_terms`; rows
            or a model of which there is no next-token loss; ``2 * rank > d``; no control at all.
    """
    sets = named_sets("drop", DROPPED if drop is None else drop)
    n_controls = whole("n_controls", n_controls, at_least=1)
    among = None if heads is None else wholes("heads", heads)
    chosen = choose(model, subspaces, layers, space=space, any_model=any_model)
    staged = StagedLoss(model, eval_tokens)
    rows = []
    total = len(chosen) * len(sets) * (n_controls + 1) + 1
    with tqdm(total=total, desc="dropping terms", unit="run", disable=not progress) as bar:
        baseline = staged.loss()
        bar.update()
        for one in sorted(chosen, key=lambda c: c.layer):
            staged.go_to(one.layer)
            controls = [c.subspace for c in controls_of(one, n_controls, seed)]

            def loss(subspace: Any, terms: tuple[str, ...], at: Any = one) -> float:
                options: dict[str, Any] = {"layers": at.layer, "space": at.space, "heads": among}
                options["positions"] = at.positions(positions)
                with attention_terms(model, subspace, drop=terms, any_model=True, **options):
                    found = staged.loss()
                bar.update()
                return found

            for name, terms in sets.items():
                dropped = loss(one.subspace, terms)
                others = [loss(control, terms) for control in controls]
                rows.append(_row(one.layer, name, baseline, dropped, others))
    conventions = {
        one.layer: attention_conventions(model, one, one.positions(positions))
        | {"n_controls": n_controls, "seed": seed, "heads": among, "tokens": eval_tokens.numel()}
        for one in chosen
    }
    return AttentionTermLosses(tuple(rows), sets, conventions)


def _row(
    layer: int, name: str, baseline: float, dropped: float, controls: list[float]
) -> dict[str, Any]:
    more = [value - baseline for value in controls]
    return {
        "layer": layer,
        "dropped": name,
        "loss": baseline,
        "loss_dropped": dropped,
        "increase": dropped - baseline,
        "control_increase_mean": sum(more) / len(more),
        "control_increase_min": min(more),
        "control_increase_max": max(more),
    }


@dataclass(frozen=True, eq=False, repr=False)
class AttentionTermLosses:
    """The next-token loss with sets of terms dropped, in nats a token.

    Attributes:
        rows: one a layer and set, with the increase over the model as it is and that of the
            controls.
        dropped: the terms of each set.
        conventions: by layer, how the numbers came about.
    """

    rows: tuple[Mapping[str, Any], ...]
    dropped: Mapping[str, tuple[str, ...]]
    conventions: Mapping[int, Mapping[str, Any]]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a layer and set of terms."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def headline(self) -> str:
        """State what each set costs on average, beside its control."""
        means = self.to_dataframe().groupby("dropped", sort=False).mean(numeric_only=True)
        parts = [
            f"{name} {row['increase']:+.3f} (control {row['control_increase_mean']:+.3f})"
            for name, row in means.iterrows()
        ]
        return (
            f"Dropping terms of the scores in one layer at a time, nats a token over "
            f"{means['loss'].iloc[0]:.3f}, mean over {len(self.conventions)} layers: "
            f"{', '.join(parts)}."
        )

    def __repr__(self) -> str:
        return f"AttentionTermLosses({len(self.rows)} rows): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.to_dataframe().round(4).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())
