"""The loss without Q_T, without matched random subspaces, and with Q_T alone, site by site."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_tangent.analysis.site_fit import matched_controls
from tl_tangent.analysis.staged import StagedLoss
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.hooks.attach import ablating
from tl_tangent.hooks.positions import Positions
from tl_tangent.hooks.sites import Site, find_sites


@dataclass(frozen=True)
class SiteLosses:
    """Mean next-token cross-entropy under the ablations of one site, in nats a token.

    Attributes:
        site, layer: where; the layer is None in front of the first block.
        baseline: nothing ablated.
        ablated: without the tangent part.
        kept: without the normal part (the mean and the tangent part are what flows on).
        controls: without the part in each of the matched random normals.
    """

    site: str
    layer: int | None
    baseline: float
    ablated: float
    kept: float
    controls: tuple[float, ...]

    def row(self) -> dict[str, float]:
        """Return losses, their increases over the baseline, and the spread of the controls."""
        controls = {
            "mean": mean(self.controls),
            "sd": stdev(self.controls) if len(self.controls) > 1 else float("nan"),
            "min": min(self.controls),
            "max": max(self.controls),
        }
        return {
            "loss": self.baseline,
            "loss_tangent_ablated": self.ablated,
            **{f"loss_control_ablated_{name}": value for name, value in controls.items()},
            "loss_tangent_kept": self.kept,
            "increase_tangent_ablated": self.ablated - self.baseline,
            "increase_control_ablated_mean": controls["mean"] - self.baseline,
            "increase_control_ablated_min": controls["min"] - self.baseline,
            "increase_control_ablated_max": controls["max"] - self.baseline,
            "increase_tangent_kept": self.kept - self.baseline,
        }


def ablate_sites(
    model: Any,
    subspaces: SubspaceSet,
    eval_tokens: Int[Tensor, "row pos"],
    *,
    n_controls: int = 5,
    positions: Positions = "not_first",
    seed: int = 0,
    progress: bool = True,
    done: Collection[str] = (),
) -> Iterator[SiteLosses]:
    """Measure site after site, in the order of their layers; a finished site is yielded at once.

    Args:
        model: a HookedTransformer or a TransformerBridge of a causal language model.
        subspaces: Q_T at every site.
        eval_tokens: rows without padding.
        n_controls, seed: of the matched random normals; each site draws from a seed of its own.
        positions: which positions are ablated.
        progress: show a progress bar on stderr.
        done: sites to leave out, because they were measured before.

    Raises:
        TangentValueError: rows or a model of which there is no next-token loss; ``2 * rank > d``.
        TangentRuntimeError: a site that never fired.
    """
    missing = [name for name in subspaces if name not in done]
    sites = sorted(find_sites(model, missing), key=_depth) if missing else []
    staged = StagedLoss(model, eval_tokens)
    total = len(sites) * (n_controls + 2) + 1
    with tqdm(total=total, desc="ablating", unit="run", disable=not progress) as bar:
        baseline = staged.loss()
        bar.update()
        for site in sites:
            staged.go_to(site.layer)
            controls = matched_controls(subspaces[site.name], n_controls, seed)

            def loss(subspace: TangentSubspace, mode: Any = "zero", at: str = site.name) -> float:
                with ablating(model, subspace, mode=mode, positions=positions, sites=at):
                    found = staged.loss()
                bar.update()
                return found

            yield SiteLosses(
                site=site.name,
                layer=site.layer,
                baseline=baseline,
                ablated=loss(subspaces[site.name]),
                kept=loss(subspaces[site.name], mode="keep"),
                controls=tuple(loss(control) for control in controls),
            )


def _depth(site: Site) -> int:
    return -1 if site.layer is None else site.layer
