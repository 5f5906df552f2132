"""How many directions to keep: a number, a share of the variance, or a rule against chance."""

from __future__ import annotations

import operator
from typing import Literal, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.eigen import Eigen

Rank = int | float | Literal["broken-stick", "parallel"]
ACCEPTED = "an int, a share of the variance in (0, 1), 'broken-stick' or 'parallel'"
RULES = ("broken-stick", "parallel")
PARALLEL_DRAWS = 20
PARALLEL_QUANTILE = 0.95
ROUNDING = 1e-9


def choose_rank(rank: Rank, eigen: Eigen, n_rows: int, seed: int) -> int:
    """Return the number of leading eigenvectors that ``rank`` asks for.

    Args:
        rank: an int; a float in (0, 1), the smallest number of directions whose share of the trace
            reaches it; ``"broken-stick"`` (see :func:`broken_stick_rank`) or ``"parallel"`` (see
            :func:`parallel_rank`).
        eigen: the decomposed covariance of the rows.
        n_rows: number of rows that it was estimated from.
        seed: seed of the random spectra of ``"parallel"``.

    Raises:
        TangentValueError: if ``rank`` is none of these, if it exceeds the numerical rank of the
            data, or if a rule keeps no direction.
    """
    check_rank(rank)
    if isinstance(rank, str):
        return _rank_by_rule(rank, eigen, n_rows, seed)
    if isinstance(rank, float):
        return energy_rank(eigen, rank)
    if (rank := operator.index(rank)) > eigen.rank:
        source = "data have" if eigen.missed is None else "sketch shows"
        raise TangentValueError(
            f"rank {rank} was asked for, but the {source} numerical rank {eigen.rank} "
            f"({n_rows} rows of width {len(eigen.vectors)}): ask for less or fit on more rows"
        )
    return rank


def check_rank(rank: object) -> None:
    """Refuse what is no rank, whatever the data are.

    Raises:
        TangentValueError: naming what is accepted.
    """
    if isinstance(rank, str):
        known = rank in RULES
    elif isinstance(rank, float):
        known = 0 < rank < 1
    else:
        known = isinstance(rank, SupportsIndex) and operator.index(rank) >= 1 and rank is not True
    if not known:
        raise TangentValueError(f"rank must be {ACCEPTED}, got {rank!r}")


def _rank_by_rule(rule: str, eigen: Eigen, n_rows: int, seed: int) -> int:
    if rule == "broken-stick":
        kept = broken_stick_rank(eigen)
    else:
        kept = parallel_rank(eigen, n_rows, seed)
    if kept == 0:
        raise TangentValueError(
            f"the {rule} rule finds no direction above chance: give the rank as an int"
        )
    return kept


def energy_rank(eigen: Eigen, share: float) -> int:
    """Return the smallest number of directions that hold ``share`` of the trace.

    Raises:
        TangentValueError: if ``share`` is not in (0, 1) or the known directions do not reach it.
    """
    if not 0 < share < 1:
        raise TangentValueError(f"a share of the variance must be in (0, 1), got {share}")
    reached = eigen.values.cumsum(0) / eigen.trace
    enough = (reached >= share - ROUNDING).nonzero()
    if not len(enough):
        raise TangentValueError(
            f"a share of {share} was asked for, but the {len(reached)} directions of the sketch "
            f"hold {float(reached[-1]):.4f}: ask for less or widen the sketch"
        )
    return int(enough[0]) + 1


def broken_stick_rank(eigen: Eigen) -> int:
    """Count the leading shares above those of a stick broken at random (Frontier 1976).

    Direction ``k`` of ``d`` is kept while its share of the trace exceeds
    ``(1/d) * sum_{i=k}^{d} 1/i``.
    """
    d = len(eigen.vectors)
    pieces = (1 / torch.arange(d, 0, -1, dtype=torch.float64)).cumsum(0).flip(0) / d
    shares = eigen.values.cpu() / eigen.trace
    return _leading(shares > pieces[: len(shares)])


def parallel_rank(eigen: Eigen, n_rows: int, seed: int) -> int:
    """Count the leading eigenvalues above those of independent columns (Horn 1965).

    The reference is the 95 % quantile, over 20 seeded draws, of the covariance spectrum of
    ``n_rows`` Gaussian rows whose columns are independent with the variances of the data.

    Raises:
        TangentValueError: if the covariance is only known through a sketch.
    """
    if eigen.missed is not None:
        raise TangentValueError(
            "parallel analysis needs the exact spectrum, and this site is wider than "
            "max_exact_width: use an int, a share or 'broken-stick'"
        )
    scales = eigen.diagonal().cpu().sqrt()
    rng = np.random.default_rng(seed)
    spectra = torch.stack([_null_spectrum(scales, n_rows, rng) for _ in range(PARALLEL_DRAWS)])
    reference = spectra.quantile(PARALLEL_QUANTILE, dim=0)
    return _leading(eigen.values.cpu()[: len(reference)] > reference)


def _null_spectrum(
    scales: Float[Tensor, " d"], n_rows: int, rng: np.random.Generator
) -> Float[Tensor, " n"]:
    """Draw the covariance spectrum of ``n_rows`` centred Gaussian rows with these scales."""
    freedom, d = n_rows - 1, len(scales)
    wide = freedom < d
    factor = rng.standard_normal((freedom, d)) if wide else _bartlett_factor(freedom, d, rng)
    return torch.linalg.svdvals(torch.from_numpy(factor) * scales).square() / freedom


def _bartlett_factor(freedom: int, d: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ``A`` with ``A^T A`` Wishart: what ``freedom`` rows give, without drawing the rows."""
    chi = np.sqrt(rng.chisquare(freedom - np.arange(d)))
    return np.triu(rng.standard_normal((d, d)), 1) + np.diag(chi)


def _leading(above: Tensor) -> int:
    """Count the True entries before the first False one."""
    return int(above.int().cumprod(0).sum())
