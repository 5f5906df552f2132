"""The two sides of a gradient ``G = sum_i u_i w_i^T``, reduced to what energies need of them.

The w_i are the vectors on the side that subspaces lie in (what a map reads, or the gradients at
what it writes), the u_i those on the other side. Both are reduced as soon as they are seen, so that
maps which read one tensor share the work and nothing of the size of the tokens is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.energy import EnergyRatio, check_stack
from tl_tangent.geometry.linalg import exact_math, full_dtype

IN_RANGE = 1e12  # norms up to here, and from its inverse, have squares that float32 can add up
CANCELLING = 0.1  # of the squares: what less is left around the mean is summed around the mean
KINDS: tuple[str, ...] = (
    "gradient",
    "centred_gradient",
    "mean_part",
    "sign_flip",
    "pairing",
    "activations",
    "centred_activations",
    "within_pairing",
)


@dataclass(frozen=True, eq=False, repr=False)
class NullEnergies:
    """Energies of one batch, of its nulls and of its activations; those of two batches add up.

    Attributes:
        energies: one row for each of :data:`KINDS`, in Q_T and then in its normals; float64. All
            but the gradient's are NaN in normals that the vectors were not reduced in.
        totals: the energy in all directions, of each kind.
        d: width of the side that the subspaces lie in.
        rank: rank of each subspace.
    """

    energies: Float[Tensor, "kind basis"]
    totals: Float[Tensor, " kind"]
    d: int
    rank: int

    def __add__(self, other: NullEnergies) -> NullEnergies:
        if (self.d, self.rank) != (other.d, other.rank):
            raise TangentValueError(
                f"energies of width {self.d}, rank {self.rank} do not add to those of width "
                f"{other.d}, rank {other.rank}: sum one site at a time"
            )
        energies, totals = self.energies + other.energies, self.totals + other.totals
        return NullEnergies(energies, totals, self.d, self.rank)

    def ratio(self, kind: str) -> EnergyRatio:
        """Return one of :data:`KINDS` as an energy ratio.

        ``ratio("gradient").excess(ratio("pairing"))`` is what is left of the gradient's.

        Raises:
            TangentValueError: if there is no such kind, or if all of its energies are zero.
        """
        if kind not in KINDS:
            raise TangentValueError(f"kind is one of {', '.join(KINDS)}, got {kind!r}")
        row = KINDS.index(kind)
        known = self.energies[row][~self.energies[row].isnan()]
        return EnergyRatio.of(known, self.totals[row], d=self.d, rank=self.rank)


class Strata(NamedTuple):
    """Groups of tokens within which a null permutes pairs, such as those of one input token.

    Attributes:
        member: the group of each token.
        sizes: the number of tokens in each group.
    """

    member: Int[Tensor, " n"]
    sizes: Int[Tensor, " stratum"]

    @classmethod
    def of(cls, labels: Int[Tensor, " n"]) -> Strata:
        """Group tokens by equal labels."""
        _, member, sizes = labels.unique(return_inverse=True, return_counts=True)
        return cls(member, sizes)

    def sums(self, rows: Float[Tensor, "n column"]) -> Float[Tensor, "stratum column"]:
        """Add up the rows of each group."""
        found = rows.new_zeros(len(self.sizes), rows.shape[1])
        return found.index_add_(0, self.member, rows)


@dataclass(frozen=True, eq=False, repr=False)
class Grouped:
    """One side within strata: the sum of each, and the squares around its own mean."""

    strata: Strata
    sums: Float[Tensor, "stratum width"]
    spread: Float[Tensor, "stratum column"]


@dataclass(frozen=True, eq=False, repr=False)
class Own:
    """The vectors w_i on the compared side.

    Attributes:
        squares: of each vector in each basis, and last in all directions.
        spread: the sum of those squares around the mean of the vectors.
        centre: that mean.
        mu: the point that the mean part and the centred gradient are about.
        n: number of tokens.
        grouped: the same within strata, where there are any.
    """

    squares: Float[Tensor, "n column"]
    spread: Float[Tensor, " column"]
    centre: Float[Tensor, " d"]
    mu: Float[Tensor, " d"]
    n: int
    grouped: Grouped | None = None

    @classmethod
    def of(
        cls,
        vectors: Float[Tensor, "n d"],
        stacked: Float[Tensor, "d columns"],
        rank: int,
        *,
        mean: Float[Tensor, " d"] | None = None,
        strata: Strata | None = None,
    ) -> Own:
        """Reduce the vectors of a batch; mu is their own mean unless it is given.

        Raises:
            TangentValueError: if the bases do not fit.
        """
        check_stack(stacked, vectors.shape[1], rank)
        with exact_math(vectors.device):
            x = vectors.detach().to(full_dtype(vectors.dtype))
            columns = stacked.to(x)
            centre = column_sums(x) / len(x)
            away = x - centre
            image = (columns.mT @ away.mT).mT.contiguous()  # quicker so for few columns
            squares = _with_total(squared_norms(image + centre @ columns, rank), row_squares(x))
            around = _with_total(squared_norms(image, rank).sum(0), row_squares(away).sum(0))
            mu = centre if mean is None else mean.to(x)
            grouped = None if strata is None else _grouped(x, columns, rank, strata)
            return cls(squares, around, centre, mu, len(x), grouped)


@dataclass(frozen=True, eq=False, repr=False)
class Upstream:
    """The vectors u_i on the other side.

    Attributes:
        squares: their squared norms.
        sum: their sum.
        spread: the sum of their squares around their mean.
        grouped: the same within strata, where there are any.
    """

    squares: Float[Tensor, " n"]
    sum: Float[Tensor, " other"]
    spread: Float[Tensor, ""]
    grouped: Grouped | None = None

    @classmethod
    def of(cls, vectors: Float[Tensor, "n other"], strata: Strata | None = None) -> Upstream:
        """Reduce the vectors of a batch."""
        with exact_math(vectors.device):
            u = vectors.detach().to(full_dtype(vectors.dtype))
            total, squares = column_sums(u), row_squares(u).squeeze(1)
            none = u.new_zeros(u.shape[1], 0)
            grouped = None if strata is None else _grouped(u, none, 1, strata)
            return cls(squares, total.double(), _around_mean(u, total, squares), grouped)

    @classmethod
    def of_tokens(cls, tokens: Int[Tensor, " n"], vocabulary: int) -> Upstream:
        """The same of one-hot vectors, which is what an embedding reads."""
        counts = torch.bincount(tokens, minlength=vocabulary).double()
        n = len(tokens)
        return cls(counts.new_ones(n), counts, n - counts.square().sum() / n)


def _grouped(
    x: Float[Tensor, "n d"], columns: Float[Tensor, "d columns"], rank: int, strata: Strata
) -> Grouped:
    sums = strata.sums(x)
    away = x - (sums / strata.sizes[:, None])[strata.member]
    squares = _with_total(squared_norms(away @ columns, rank), row_squares(away))
    return Grouped(strata, sums, strata.sums(squares))


def _around_mean(
    u: Float[Tensor, "n d"], total: Float[Tensor, " d"], squares: Float[Tensor, " n"]
) -> Float[Tensor, ""]:
    """Return ``sum ||u_i - mean||^2``, as a difference of squares unless these nearly cancel."""
    whole = squares.sum()
    left = whole - total.double().square().sum() / len(u)
    if float(left) < CANCELLING * float(whole):
        return row_squares(u - total / len(u)).sum()
    return left


def column_sums(x: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """Return the sum of all rows, in their dtype, by one product."""
    return (x.new_ones(1, len(x)) @ x).squeeze(0)


def row_squares(x: Float[Tensor, "n d"]) -> Float[Tensor, "n 1"]:
    """Return the squared norm of each row, in float64.

    Norms are summed in the dtype of the rows, which is quick, unless squares leave its range.
    """
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    largest = float(norms.max()) if norms.numel() else 1.0
    if not 1 / IN_RANGE < largest < IN_RANGE:
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)
    return norms.double().square()


def squared_norms(x: Float[Tensor, "*row column"], rank: int) -> Float[Tensor, "*row basis"]:
    """Return the squared norm of each row's coordinates in each basis, in float64."""
    by_basis = x.unflatten(-1, (-1, rank))
    return torch.linalg.vector_norm(by_basis, dim=-1, dtype=torch.float64).square()


def _with_total(by_basis: Tensor, total: Tensor) -> Tensor:
    return torch.cat([by_basis, total], dim=-1)


def token_energies(
    own: Own,
    upstream: Upstream,
    gradient: Float[Tensor, "other d"],
    stacked: Float[Tensor, "d columns"],
    rank: int,
) -> NullEnergies:
    """Return the energies of one batch's gradient, of its nulls and of the vectors themselves.

    Args:
        own: the vectors on the side of the bases.
        upstream: those on the other side.
        gradient: ``sum_i u_i w_i^T``, the compared side last. What is left of it without its mean
            part is no more precise than the whole of it.
        stacked: Q_T and its normals; ``own`` was reduced in all of them, or in the first few.
        rank: number of columns of each basis.

    Raises:
        TangentValueError: if the bases do not fit.
    """
    check_stack(stacked, gradient.shape[1], rank)
    with exact_math(gradient.device):
        g = gradient.detach().to(full_dtype(gradient.dtype))
        columns = stacked.to(g)
        image, constant = g @ columns, upstream.sum.square().sum()
        own_columns = columns[:, : rank * (own.squares.shape[1] - 1)]
        at_centre = _and_whole(own.centre.to(g), own_columns, rank)
        at_mu = _and_whole(own.mu.to(g), own_columns, rank)
        away = own.centre.double() - own.mu.double()
        kinds = {
            "gradient": _with_total(squared_norms(image, rank).sum(0), row_squares(g).sum(0)),
            "centred_gradient": _about_mu(
                g, image, upstream.sum.to(g), own.mu.to(g), own_columns, rank
            ),
            "mean_part": constant * at_mu,
            "sign_flip": upstream.squares @ own.squares,
            "pairing": constant * at_centre + upstream.spread * own.spread / max(own.n - 1, 1),
            "activations": own.squares.sum(0),
            "centred_activations": own.spread + own.n * _and_whole(away.to(g), own_columns, rank),
            "within_pairing": _within(own, upstream, own_columns, rank),
        }
    n_bases = image.shape[1] // rank
    energies = torch.full((len(KINDS), n_bases), torch.nan, dtype=torch.float64, device=g.device)
    for row, kind in enumerate(KINDS):
        energies[row, : len(kinds[kind]) - 1] = kinds[kind][:-1]
    totals = torch.stack([kinds[kind][-1] for kind in KINDS])
    return NullEnergies(energies, totals, gradient.shape[1], rank)


def _within(
    own: Own, upstream: Upstream, columns: Float[Tensor, "d own"], rank: int
) -> Float[Tensor, " column"]:
    """Return the expected energies under a random pairing within each stratum.

    ``||sum_s n_s mean(u)_s mean(w)_s^T||^2 + sum_s S_u,s S_w,s / (n_s - 1)``.
    """
    u, w = upstream.grouped, own.grouped
    if u is None or w is None:
        return torch.full_like(own.spread, torch.nan)
    sizes = w.strata.sizes
    fixed = (u.sums / sizes[:, None]).mT @ w.sums
    moved = u.spread.squeeze(1) / (sizes - 1).clamp(min=1)
    return (
        _with_total(squared_norms(fixed @ columns, rank).sum(0), row_squares(fixed).sum(0))
        + moved @ w.spread
    )


def _about_mu(
    g: Float[Tensor, "other d"],
    image: Float[Tensor, "other columns"],
    constant: Float[Tensor, " other"],
    mu: Float[Tensor, " d"],
    columns: Float[Tensor, "d own"],
    rank: int,
) -> Float[Tensor, " column"]:
    """Return the energies of ``G - (sum u) mu^T``."""
    inside = torch.addr(image[:, : columns.shape[1]], constant, mu @ columns, alpha=-1)
    whole = torch.addr(g, constant, mu, alpha=-1)
    return _with_total(squared_norms(inside, rank).sum(0), row_squares(whole).sum(0))


def _and_whole(
    x: Float[Tensor, " d"], columns: Float[Tensor, "d columns"], rank: int
) -> Float[Tensor, " column"]:
    return _with_total(squared_norms(x @ columns, rank), squared_norms(x, len(x)))
