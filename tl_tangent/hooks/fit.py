"""Fit subspaces on the activations of a model: all sites in one forward pass a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.geometry import SubspaceFitter, SubspaceSet
from tl_tangent.geometry.extractors import SAMPLED
from tl_tangent.geometry.moments import Centering
from tl_tangent.geometry.rank import Rank
from tl_tangent.hooks import attachment
from tl_tangent.hooks.attachment import Placed
from tl_tangent.hooks.attention.norms import norms_folded
from tl_tangent.hooks.positions import NOT_FIRST, PositionMask, Positions, Run
from tl_tangent.hooks.sites import Site, Sites, find_sites


class Collector:
    """A layer that hands the selected rows of an activation to a fitter and lets it flow on."""

    needs_run = True
    listening = True

    def __init__(self, site: str, positions: PositionMask, options: dict[str, Any]):
        self.site = site
        self.positions = positions
        self.options = options
        self.group: Any = None
        self.fitter: SubspaceFitter | None = None

    def apply(self, flow: Tensor, carried: Tensor | None, run: Run | None) -> Tensor:
        x = (flow if carried is None else flow + carried).detach()
        run = run or Run(length=x.shape[1])
        mask = run.select(self.positions, x.shape[0], x.shape[1], x.device)
        rows = x.flatten(0, 1) if mask is None else x[mask.expand(x.shape[:2])]
        if self.fitter is None:
            self.fitter = _fitter_for(x, self.options)
        if self.fitter.heads is None:
            rows = rows.reshape(-1, rows.shape[-1])
        self.fitter.update(rows, group=self.group)
        return flow


def _fitter_for(x: Tensor, options: dict[str, Any]) -> SubspaceFitter:
    per_head = x.ndim == 4 and options["per_head"]
    keep = {name: value for name, value in options.items() if name != "per_head"}
    return SubspaceFitter(x.shape[-1], heads=x.shape[2] if per_head else None, **keep)


def collect(
    model: Any,
    batches: Any,
    sites: Sites,
    *,
    positions: Positions = NOT_FIRST,
    per_head: bool = True,
    centering: Centering = "global",
    keep_sample: bool = False,
    sample_rows: int = 4096,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, SubspaceFitter]:
    """Stream the activations at ``sites`` into one fitter a site; shards of data can be merged.

    Args:
        model: a HookedTransformer, a TransformerBridge, or any HookedRootModule.
        batches: an iterable of inputs. Each is what the model takes (tokens [batch, pos], a string,
            a list of strings) or a mapping of keyword arguments with an ``input``, such as
            ``{"input": tokens, "attention_mask": mask}``; a ``group`` in it is the batch's group
            for ``centering="group"``. A tensor alone is one batch.
        sites: names, patterns, or a predicate.
        positions: which positions enter; padding never does.
        per_head: at per-head sites, one subspace a head; otherwise one for all heads.
        centering, keep_sample, sample_rows, seed: see :class:`~tl_tangent.SubspaceFitter`.
        progress: show a progress bar.

    Raises:
        TangentKeyError: a site that the model does not have.
        TangentRuntimeError: a site that never fired, or no position was taken.
    """
    mask = PositionMask(positions)
    options = {
        "per_head": per_head,
        "centering": centering,
        "keep_sample": keep_sample,
        "sample_rows": sample_rows,
        "seed": seed,
    }
    found = [attachment.realised(model, site) for site in find_sites(model, sites)]
    collectors = [Collector(site.name, mask, options) for site in found]
    placed = [Placed(site, collector) for site, collector in zip(found, collectors, strict=True)]
    stop = _stop_at_layer(model, found)
    with attachment.temporarily(model, placed), torch.no_grad():
        for batch in shown(listed(batches), progress):
            _run_batch(model, batch, collectors, stop)
    return {collector.site: _filled(collector) for collector in collectors}


def fit_subspaces(
    model: Any,
    batches: Any,
    sites: Sites,
    rank: Rank,
    method: str = "pca",
    *,
    positions: Positions = NOT_FIRST,
    per_head: bool = True,
    centering: Centering = "global",
    sample_rows: int = 4096,
    seed: int = 0,
    progress: bool = False,
) -> SubspaceSet:
    """Fit a tangent proxy Q_T at each of ``sites``, all in one forward pass a batch.

    Args:
        model, batches, sites, positions, per_head, centering, sample_rows, seed, progress: see
            :func:`collect`.
        rank: number of directions; a share of the variance in (0, 1); "broken-stick" or "parallel".
        method: "pca" (centred), "svd" (uncentred), "ica", "nmf", "seminmf" or "kmeans".

    Returns:
        One subspace a site, which remembers the model, the method, the positions and the spectrum.

    Raises:
        TangentKeyError: a site that the model does not have.
        TangentRuntimeError: a site that never fired.
        TangentValueError: a rank that the data can't give, or activations that are not finite.
    """
    fitters = collect(
        model,
        batches,
        sites,
        positions=positions,
        per_head=per_head,
        centering=centering,
        keep_sample=method in SAMPLED or rank == "parallel",
        sample_rows=sample_rows,
        seed=seed,
        progress=progress,
    )
    labels: dict[str, Any] = {
        "model": getattr(model.cfg, "model_name", None),
        "positions": PositionMask(positions).description,
        "metadata": {"norms_folded": norms_folded(model)},
    }
    return SubspaceSet(
        {name: fit.fit(rank, method, site=name, **labels) for name, fit in fitters.items()}
    )


def listed(batches: Any) -> Any:
    """Return an iterable of batches; a tensor, a string or a mapping is one batch."""
    if isinstance(batches, (Tensor, str, Mapping)):
        return [batches]
    if not isinstance(batches, Iterable):
        raise TangentValueError(
            f"batches is a {type(batches).__name__}; accepted are a tensor of tokens or an "
            "iterable of inputs."
        )
    return batches


def shown(batches: Any, progress: bool, label: str = "fitting") -> Any:
    """Return the batches, under a progress bar if asked for."""
    if not progress:
        return batches
    from tqdm.auto import tqdm

    return tqdm(batches, desc=label, unit="batch")


def _run_batch(model: Any, batch: Any, collectors: list[Collector], stop: int | None) -> None:
    given, options = batch_input(batch)
    check_ids(model, given)
    group = options.pop("group", None)
    for collector in collectors:
        collector.group = group
    if stop is not None:
        options.setdefault("stop_at_layer", stop)
    model(given, return_type=None, **options)


def batch_input(batch: Any) -> tuple[Any, dict[str, Any]]:
    """Take a batch apart into the model's input and its keyword arguments.

    Raises:
        TangentValueError: a mapping without an ``input``.
    """
    options = dict(batch) if isinstance(batch, Mapping) else {"input": batch}
    if "input" not in options:
        raise TangentValueError(
            f"a batch has the keys {sorted(options)}: the model's input goes under 'input'."
        )
    return options.pop("input"), options


def check_ids(model: Any, given: Any) -> None:
    """Refuse token ids that the model does not have, and a tensor that holds nothing.

    Raises:
        TangentValueError: either of them.
    """
    if not isinstance(given, Tensor):
        return
    if not given.numel():
        raise TangentValueError(
            f"a batch has the shape {list(given.shape)} and so no tokens: leave it out."
        )
    vocabulary = getattr(model.cfg, "d_vocab", None)
    if given.is_floating_point() or not vocabulary or vocabulary < 1:
        return
    low, high = int(given.min()), int(given.max())
    if low < 0 or high >= vocabulary:
        raise TangentValueError(
            f"token ids are in [0, {vocabulary}), got {low} to {high}: is the tokenizer the "
            "model's own? Fill padding with its pad token."
        )


def _stop_at_layer(model: Any, sites: list[Site]) -> int | None:
    """The layer behind the last site, so that what lies beyond is not computed."""
    layers = [site.layer for site in sites]
    if not hasattr(model.cfg, "n_layers") or any(layer is None for layer in layers):
        return None
    return max(layer for layer in layers if layer is not None) + 1


def _filled(collector: Collector) -> SubspaceFitter:
    if collector.fitter is None:
        raise TangentRuntimeError(
            f"{collector.site} never fired, so nothing could be fitted there. Was the batch list "
            "empty, or does this architecture skip the site?"
        )
    return collector.fitter
