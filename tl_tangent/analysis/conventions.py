"""How the numbers of a layer ablation came about, in words and JSON-able values."""

from __future__ import annotations

import sys
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_tangent.geometry.extractors import UNCENTERED
from tl_tangent.geometry.subspace_io import package_versions
from tl_tangent.hooks.positions import PositionMask, Positions

WORDS = {
    "loss": "mean next-token cross-entropy over the evaluation rows, in nats a token",
    "tangent_ablated": "x - Q Q^T (x - mean) flows on at the ablated positions",
    "tangent_kept": "mean + Q Q^T (x - mean) flows on at the ablated positions",
    "controls": (
        "in place of Q a random orthonormal basis of its rank in its orthogonal complement, drawn "
        "from the seed and the name of the site; same mean, same positions"
    ),
    "variance": "of the fitted rows around their mean, divided by n - 1",
    "isoscore": (
        "(PR - 1) / (d - 1) with PR = (tr C)^2 / ||C||_F^2; without a subspace, C is projected "
        "first and the score counts the d - rank dimensions left (reduced); columns _ambient: all d"
    ),
    "first_direction_share_with_position_0": (
        "share of the leading principal direction if position 0 of every fitted row is added"
    ),
    "heads": "where each head has its own basis, covariance statistics are means over heads",
}


def conventions_of(
    model: Any,
    fit_batches: list[Int[Tensor, "batch pos"]],
    eval_tokens: Int[Tensor, "row pos"],
    *,
    sites: Any,
    rank: Any,
    method: str,
    n_controls: int,
    positions: Positions,
    layers: Any,
    seed: int,
) -> dict[str, Any]:
    """Return what has to be known to read the numbers, or to measure them again."""
    return {
        "model": getattr(model.cfg, "model_name", None),
        "model_class": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "sites": sites if isinstance(sites, str) else _listed(sites),
        "layers": layers if layers is None or isinstance(layers, int) else list(layers),
        "rank": rank,
        "method": method,
        "centring": "none" if method in UNCENTERED else "the mean of the fitted rows is removed",
        "positions": PositionMask(positions).description,
        "fit_rows": sum(batch.shape[0] for batch in fit_batches),
        "fit_tokens": sum(batch.numel() for batch in fit_batches),
        "evaluation_rows": eval_tokens.shape[0],
        "evaluation_tokens": eval_tokens.numel(),
        "n_controls": n_controls,
        "seed": seed,
        "meaning": dict(WORDS),
        "versions": {**package_versions(), "python": sys.version.split()[0]},
    }


def _listed(sites: Any) -> Any:
    return getattr(sites, "__name__", "a predicate") if callable(sites) else list(sites)
