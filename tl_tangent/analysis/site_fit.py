"""Q_T at every site from one fitting pass, and what the fitted covariance alone tells about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import (
    SubspaceFitter,
    SubspaceSet,
    TangentSubspace,
    isoscore_from_covariance,
    participation_ratio,
)
from tl_tangent.geometry.covariance import removed_covariance_participation, rescaled
from tl_tangent.geometry.extractors import SAMPLED
from tl_tangent.geometry.rank import Rank
from tl_tangent.hooks.attention.norms import norms_folded
from tl_tangent.hooks.fit import collect
from tl_tangent.hooks.positions import PositionMask, Positions, Run
from tl_tangent.hooks.sites import Sites, find_sites, in_layers

STATISTICS = "statistics"


def fit_sites(
    model: Any,
    fit_batches: Tensor | Iterable[Tensor],
    sites: Sites,
    *,
    rank: Rank = 8,
    method: str = "pca",
    n_controls: int = 5,
    positions: Positions = "not_first",
    layers: Iterable[int] | int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> SubspaceSet:
    """Fit Q_T at every site, all in one pass a batch, and describe each by its covariance.

    Args:
        model: a HookedTransformer or a TransformerBridge of a causal language model.
        fit_batches: tokens ``[batch, pos]`` without padding, or several of them.
        sites, layers: names or patterns of sites, restricted to these layers.
        rank, method, positions, seed, progress: see :func:`tl_tangent.fit_subspaces`.
        n_controls: how many matched random normals the statistics average over.

    Returns:
        One subspace a site, with :func:`site_statistics` in its metadata under ``"statistics"``.

    Raises:
        TangentKeyError: a site that the model does not have.
        TangentValueError: a rank that the data can't give, or one beside which no matched control
            fits (``2 * rank > d``); no control at all; no batch.
    """
    batches = [fit_batches] if isinstance(fit_batches, Tensor) else list(fit_batches)
    if not batches or n_controls < 1:
        raise TangentValueError(
            f"{len(batches)} batches and n_controls={n_controls}: both must be 1 or more"
        )
    batches = [batch.to(next(model.parameters()).device) for batch in batches]
    n_layers = getattr(model.cfg, "n_layers", 0)
    names = [site.name for site in in_layers(find_sites(model, sites), layers, n_layers)]
    options: dict[str, Any] = {"keep_sample": method in SAMPLED or rank == "parallel", "seed": seed}
    fitters = collect(model, batches, names, positions=positions, progress=progress, **options)
    first: dict[str, SubspaceFitter] = {}
    if not takes_first(positions, batches[0].shape[1]):
        first = collect(model, _first_tokens(batches), names, positions="all", **options)
    labels: dict[str, Any] = {
        "model": getattr(model.cfg, "model_name", None),
        "positions": PositionMask(positions).description,
        "metadata": {"norms_folded": norms_folded(model)},
    }
    found = []
    for name, fitter in tqdm(fitters.items(), "decomposing", unit="site", disable=not progress):
        subspace = fitter.fit(rank, method, site=name, **labels)
        controls = matched_controls(subspace, n_controls, seed)
        statistics = site_statistics(fitter, subspace, controls, first.get(name))
        found.append(subspace.replace(metadata={**subspace.metadata, STATISTICS: statistics}))
    return SubspaceSet(found)


def matched_controls(subspace: TangentSubspace, n: int, seed: int) -> list[TangentSubspace]:
    """Draw what :meth:`SubspaceSet.random_normals` draws at this site: each site has its seed."""
    drawn = SubspaceSet([subspace]).random_normals(n, seed)
    return [control for one in drawn for control in one.values()]


def takes_first(positions: Positions, n_positions: int) -> bool:
    """Whether a rule of positions takes position 0 of unpadded rows of ``n_positions``."""
    rows = PositionMask(positions).rows(Run(length=n_positions), n_positions)
    return rows is None or bool(rows[:, 0].any())


def _first_tokens(batches: list[Int[Tensor, "batch pos"]]) -> list[dict[str, Tensor]]:
    """Rows of one token: a causal model's activations at position 0 need no more than that."""
    firsts = [batch[:, :1] for batch in batches]
    return [{"input": first, "attention_mask": torch.ones_like(first)} for first in firsts]


def site_statistics(
    fitter: SubspaceFitter,
    subspace: TangentSubspace,
    controls: list[TangentSubspace],
    first: SubspaceFitter | None = None,
) -> dict[str, float]:
    """Describe the variance at a site and what Q_T holds of it, from the fitted covariance C.

    Closed forms: the participation ratio ``PR = (tr C)^2 / ||C||_F^2``, and IsoScore as
    ``(PR - 1) / (d - 1)`` (Rudman et al. 2022). ``_without_`` projects a subspace out of C first;
    its IsoScore counts the ``d - rank`` dimensions that are left ("reduced"), ``_ambient`` all d.
    Values of controls are their means. Where each head has a basis, values are means over heads.

    Args:
        fitter: the statistics of the site.
        subspace, controls: Q_T and its matched random normals.
        first: the statistics of position 0 where it is not in the fit; merged into a copy of C for
            ``first_direction_share_with_position_0``, and left with these rows too.
    """
    cov = _heads(fitter.covariance())
    basis = _heads(subspace.basis.to(cov))
    others = [_heads(control.basis.to(cov)) for control in controls]
    with_first = cov if first is None else _heads(first.merge(fitter).covariance())
    return {
        "variance_share": _share(cov, basis),
        "control_variance_share": _mean([_share(cov, other) for other in others]),
        "participation_ratio": float(participation_ratio(cov).mean()),
        "isoscore": float(isoscore_from_covariance(cov).mean()),
        **_without("tangent", cov, [basis]),
        **_without("control", cov, others),
        "first_direction_share": _top_share(cov),
        "first_direction_share_with_position_0": _top_share(with_first),
    }


def _heads(matrix: Float[Tensor, "*head d n"]) -> Float[Tensor, "head d n"]:
    return matrix if matrix.ndim == 3 else matrix[None]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _trace(matrix: Float[Tensor, "head n n"]) -> Float[Tensor, " head"]:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _share(cov: Float[Tensor, "head d d"], basis: Float[Tensor, "head d rank"]) -> float:
    """tr(Q^T C Q) / tr C."""
    return float((_trace(basis.mT @ cov @ basis) / _trace(cov)).mean())


def _top_share(cov: Float[Tensor, "head d d"]) -> float:
    """Largest eigenvalue over trace."""
    return float((torch.linalg.eigvalsh(cov)[:, -1] / _trace(cov)).mean())


def _without(
    name: str, cov: Float[Tensor, "head d d"], bases: list[Float[Tensor, "head d rank"]]
) -> dict[str, float]:
    """Participation ratio and both IsoScores of C with a basis projected out, averaged."""
    pairs = [(c, q) for basis in bases for c, q in zip(cov, basis, strict=True)]
    ratio = torch.stack([removed_covariance_participation(c, q) for c, q in pairs]).mean()
    d, rank = bases[0].shape[-2:]
    return {
        f"participation_ratio_without_{name}": float(ratio),
        f"isoscore_without_{name}": float(rescaled(ratio, d - rank)),
        f"isoscore_without_{name}_ambient": float(rescaled(ratio, d)),
    }
