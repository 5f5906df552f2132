"""Do the gradients of a model lie in its tangent subspaces, beyond controls and mechanics?"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tl_tangent.analysis.gradients.activations import fit_at_weights, name_of
from tl_tangent.analysis.gradients.meter import GradientMeter, Within
from tl_tangent.analysis.gradients.passes import check_trainable, measure_gradients
from tl_tangent.analysis.gradients.removals import Removals, removals_of
from tl_tangent.analysis.gradients.rows import (
    COLUMNS,
    MEANS,
    WORDS,
    geometric_mean,
    grouped_rows,
    weight_rows,
)
from tl_tangent.analysis.gradients.statistics import GradientStatistics
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.rank import Rank
from tl_tangent.geometry.subspace_io import package_versions
from tl_tangent.hooks.fit import listed, shown
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.objectives import Batch, Objective
from tl_tangent.hooks.positions import NOT_FIRST, PositionMask, Positions

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

By = Literal["weight", "kind", "layer", "side"]


@torch.inference_mode(False)
def gradient_energy(
    model: Any,
    batches: Any,
    subspaces: Mapping[str, TangentSubspace] | None = None,
    *,
    fit_batches: Any = None,
    rank: Rank = 8,
    method: str = "pca",
    positions: Positions = NOT_FIRST,
    objective: Objective = "causal",
    kinds: Iterable[str] | str | None = None,
    layers: Iterable[int] | int | None = None,
    n_controls: int = 20,
    nulls: bool = True,
    within: Within | None = None,
    moments: bool = False,
    zeta: float = 0.0,
    seed: int = 0,
    progress: bool = False,
) -> GradientEnergy:
    """Measure the weight gradients of a loss in Q_T, in matched normals, and under three nulls.

    Of reading weights (Q, K, V, gate, in, unembedding) the input side is compared, with what they
    read; of writing ones (O, out, embeddings) the output side, with the residual stream behind
    their block. Energies are summed over batches, ``sum_b ||G_b Q||^2``.

    Args:
        model: a Hugging Face model, a TransformerBridge or a HookedTransformer, unfolded. It is put
            in evaluation mode meanwhile, and left as it was.
        batches: tokens ``[batch, pos]``, or mappings with ``input_ids`` (and ``attention_mask``,
            ``labels``); one backward pass each.
        subspaces: Q_T at the site of every weight; by default fitted here.
        fit_batches: what they are fitted on, by default the same batches.
        rank, method, positions: of that fit; see :func:`tl_tangent.fit_subspaces`. Gradients always
            are those of all real tokens.
        objective: see :func:`~tl_tangent.hooks.gradients.objectives.loss_of`.
        kinds, layers: which weights; all by default.
        n_controls: B, matched random normals at each site.
        nulls: also measure what is mechanical (see :mod:`tl_tangent.geometry.energy_nulls`).
        within: "token": also measure the null that pairs inputs and output gradients at random
            among the tokens with the same input id only; "shuffled": the same among groups of the
            same sizes with random members, as a control of it. Costs about one matrix product a
            weight.
        moments: also keep ``sum G^T G`` (8 d^2 bytes a weight), for the removal test on IsoScore*
            and for the upper bound.
        zeta: shrinkage of IsoScore*, towards the identity of the same trace.
        seed: of the controls and the fit.
        progress: show a progress bar.

    Raises:
        TangentValueError: folded norms, frozen or quantized weights, an unknown architecture, or
            ``2 * rank > d``.
        TangentKeyError: a site without a subspace.
        TangentRuntimeError: a loss or gradient that is not finite.
    """
    if not 0 <= zeta <= 1:
        raise TangentValueError(f"zeta is in [0, 1], got {zeta}")
    weights = find_weights(model).choose(kinds, layers)
    check_trainable(weights)
    data = [Batch.of(one) for one in listed(batches)]
    if not data:
        raise TangentValueError("there are no batches: give at least one tensor of tokens")
    fitted_on = "given subspaces"
    if subspaces is None:
        own = fit_batches is None
        fit = data if own else [Batch.of(one) for one in listed(fit_batches)]
        fitted_on = "the same batches" if own else "fit_batches"
        subspaces = fit_at_weights(
            model, weights, fit, rank, method, positions=positions, seed=seed
        )
    meter = GradientMeter(
        weights,
        subspaces,
        n_controls=n_controls,
        seed=seed,
        nulls=nulls,
        moments=moments,
        within=within,
    )
    measure_gradients(model, meter, shown(data, progress, "gradients"), objective)
    chosen = {weight.site for weight in weights.weights}
    conventions = {
        "model": name_of(model),
        "model_class": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "objective": objective if isinstance(objective, str) else "a function of the caller",
        "batches": len(data),
        "tokens": meter.n_tokens,
        "mean_loss": meter.loss / max(meter.n_batches, 1),
        "subspaces": fitted_on,
        "fit_positions": PositionMask(positions).description
        if fitted_on != "given subspaces"
        else sorted({str(subspaces[site].positions) for site in chosen}),
        "gradient_positions": "all real tokens",
        "n_controls": n_controls,
        "within": within,
        "tokens_of_a_gradient": meter.n_tokens / max(meter.n_batches, 1),
        "zeta": zeta,
        "seed": seed,
        "not_measured": list(weights.left_out),
        "groups": MEANS,
        "meaning": dict(WORDS),
        "versions": {**package_versions(), "python": sys.version.split()[0]},
    }
    used = SubspaceSet({site: subspaces[site] for site in subspaces if site in chosen})
    return GradientEnergy(meter.statistics(), used, meter.stacks, conventions)


@dataclass(frozen=True, eq=False, repr=False)
class GradientEnergy:
    """Gradient energies of the weights of one model.

    Attributes:
        statistics: sums over batches: energies in Q_T and its normals, of gradients and nulls.
        subspaces: what they were held against.
        stacks: Q_T and its normals at each site, side by side ``[d, (1 + B) * rank]``.
        conventions: how the numbers came about, JSON-able; ``meaning`` has the columns.
    """

    statistics: GradientStatistics
    subspaces: SubspaceSet
    stacks: Mapping[str, Tensor]
    conventions: Mapping[str, Any]

    @cached_property
    def _removals(self) -> Removals | None:
        return removals_of(self.statistics, self.stacks, zeta=self.conventions["zeta"])

    def to_dataframe(self, by: By = "weight") -> pd.DataFrame:
        """Return one row a weight, or one a kind, layer or side (with geometric means of ratios).

        Raises:
            TangentValueError: another ``by``.
        """
        import pandas as pd

        if by not in ("weight", "kind", "layer", "side"):
            raise TangentValueError(f"by is 'weight', 'kind', 'layer' or 'side', got {by!r}")
        rows = weight_rows(self.statistics, self._removals)
        frame = pd.DataFrame(rows if by == "weight" else grouped_rows(rows, by))
        return frame[[column for column in COLUMNS if column in frame]]

    def headline(self) -> str:
        """State what Q_T holds, beside the controls and what is mechanical."""
        frame = self.to_dataframe()
        frame = frame[frame["energy"] > 0]
        if frame.empty:
            return "Every gradient is zero: there is nothing to compare."

        def middle(column: str) -> float:
            return geometric_mean(frame[column].dropna().astype(float).tolist())

        controls = self.statistics.n_controls
        told = (
            f"Of the gradient energy of {len(frame)} weights Q_T holds "
            f"{frame['fraction'].mean():.1%} on average, "
            f"{middle('energy_ratio_exact'):.1f} times that of an average normal subspace of its "
            "rank (geometric mean)"
        )
        if controls:
            found = int((frame["p_value"] <= 1 / (1 + controls)).sum())
            told += f"; {found} of {len(frame)} weights reach the floor p = 1/{1 + controls}"
        if "excess_pairing" in frame:
            told += (
                f". Paired at random, the same activations and output gradients would give "
                f"{middle('pairing_ratio'):.1f}: the excess is {middle('excess_pairing'):.2f} at "
                f"{self.conventions['tokens_of_a_gradient']:.0f} tokens a gradient"
            )
        if "excess_within_token" in frame:
            told += f", and {middle('excess_within_token'):.2f} over pairs among equal input tokens"
        if self.conventions["subspaces"] == "the same batches":
            told += ". Q_T was fitted on the very tokens whose gradients are measured"
        return told + "."

    def plot(self) -> Figure:
        """Draw energy ratios over the layers, beside what is mechanical; a matplotlib figure."""
        from tl_tangent.views.gradient_figure import draw_gradients  # the one step up a floor

        return draw_gradients(self.to_dataframe(), title=str(self.conventions["model"]))

    def __repr__(self) -> str:
        return f"GradientEnergy({self.conventions['model']}): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.to_dataframe("kind").round(4).astype(object)
        records = rows.where(rows.notna(), None).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in records], self.headline())
