"""Fit Q_T where the weights of a model read and write, on any of the three kinds of model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.gradients.passes import borrowed
from tl_tangent.errors import TangentRuntimeError
from tl_tangent.geometry import SubspaceFitter, SubspaceSet
from tl_tangent.geometry.extractors import SAMPLED
from tl_tangent.geometry.moments import Centering
from tl_tangent.geometry.rank import Rank
from tl_tangent.hooks.gradients.objectives import Batch, logits_of
from tl_tangent.hooks.gradients.watch import watching_activations
from tl_tangent.hooks.gradients.weight import Weights
from tl_tangent.hooks.positions import NOT_FIRST, PositionMask, Positions, Run


class ActivationMeter:
    """Streams the activations at the sites of some weights into one fitter a site.

    Args:
        weights: whose sites are watched.
        positions: which positions enter; padding never does.
        centering: see :class:`~tl_tangent.SubspaceFitter`.
        keep_sample: keep sampled rows, which some methods need.
        seed: of the sample.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        positions: Positions = NOT_FIRST,
        centering: Centering = "global",
        keep_sample: bool = False,
        seed: int = 0,
    ) -> None:
        self._taps, self._mask = weights.sites, PositionMask(positions)
        widths = {weight.site: weight.d for weight in weights.weights}
        self.fitters = {
            site: SubspaceFitter(
                widths[site], centering=centering, keep_sample=keep_sample, seed=seed
            )
            for site in self._taps
        }

    def take_in(self, model: Any, batches: Iterable[Batch], group: Any = None) -> None:
        """Take in what passes in one forward pass a batch, in evaluation mode."""
        device = next(model.parameters()).device
        with borrowed(model), torch.inference_mode(False), torch.no_grad():
            for batch in batches:
                with self.watching(batch, group):
                    logits_of(model, batch.to(device))

    @contextmanager
    def watching(self, batch: Batch, group: Any = None) -> Iterator[None]:
        """Take in what one forward pass of ``batch`` shows."""
        run = Run(length=batch.tokens.shape[1], real=batch.mask)

        def receive(site: str, x: Tensor) -> None:
            self.fitters[site].update(chosen_rows(x, self._mask, run), group=group)

        with watching_activations(self._taps, receive):
            yield

    def fit(self, rank: Rank, method: str = "pca", *, model: str | None = None) -> SubspaceSet:
        """Fit a subspace at every site.

        Raises:
            TangentRuntimeError: a site that nothing passed.
            TangentValueError: a rank that the data can't give.
        """
        silent = [site for site, fitter in self.fitters.items() if not fitter.n_rows]
        if silent:
            raise TangentRuntimeError(
                f"no activation passed {', '.join(silent)}: was the list of batches empty, or all "
                "of them padding?"
            )
        return fit_each(self.fitters, rank, method, positions=self._mask, model=model)


def chosen_rows(
    x: Float[Tensor, "batch pos d"], mask: PositionMask, run: Run
) -> Float[Tensor, "row d"]:
    """Return the activations at the positions that ``mask`` takes in a run."""
    chosen = run.select(mask, x.shape[0], x.shape[1], x.device)
    return x.flatten(0, 1) if chosen is None else x[chosen.expand(x.shape[:2])]


def fit_each(
    fitters: Mapping[str, SubspaceFitter],
    rank: Rank,
    method: str,
    *,
    positions: PositionMask,
    model: str | None,
    metadata: Mapping[str, Any] | None = None,
) -> SubspaceSet:
    """Fit a subspace to what each fitter saw at its site in a model with unfolded norms.

    Raises:
        TangentValueError: a rank that the data can't give.
    """
    told: dict[str, Any] = {
        "model": model,
        "positions": positions.description,
        "metadata": {"norms_folded": False, **(metadata or {})},
    }
    return SubspaceSet(
        {site: one.fit(rank, method, site=site, **told) for site, one in fitters.items()}
    )


def fit_at_weights(
    model: Any,
    weights: Weights,
    batches: Iterable[Batch],
    rank: Rank,
    method: str = "pca",
    *,
    positions: Positions = NOT_FIRST,
    seed: int = 0,
) -> SubspaceSet:
    """Fit Q_T at the site of every weight, all in one forward pass a batch, in evaluation mode.

    Raises:
        TangentError: as :meth:`ActivationMeter.fit`.
    """
    meter = ActivationMeter(weights, positions=positions, keep_sample=method in SAMPLED, seed=seed)
    meter.take_in(model, batches)
    return meter.fit(rank, method, model=name_of(model))


def name_of(model: Any) -> str | None:
    """The name that a model goes by."""
    cfg = getattr(model, "cfg", None)
    config = getattr(model, "config", None)
    return getattr(cfg, "model_name", None) or getattr(config, "name_or_path", None) or None
