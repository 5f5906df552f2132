"""The two sides of a gradient ``G = sum_i u_i w_i^T``, reduced to what energies need of them.

The w_i are the vectors on the side that subspaces lie in (what a map reads, or the gradients at
what it writes), the u_i those on the other side. Both are reduced as soon as they are seen, so that
maps which read one tensor share the work and nothing of the size of the tokens is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.energy import EnergyRatio, check_stack, total_energy
from tl_tangent.geometry.linalg import exact_math, full_dtype

KINDS: tuple[str, ...] = (
    "gradient",
    "centred_gradient",
    "mean_part",
    "sign_flip",
    "pairing",
    "activations",
    "centred_activations",
)


@dataclass(frozen=True, eq=False, repr=False)
class NullEnergies:
    """Energies of one batch, of its nulls and of its activations; those of two batches add up.

    Attributes:
        energies: one row for each of :data:`KINDS`, in Q_T and then in its normals; float64.
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
        return EnergyRatio.of(self.energies[row], self.totals[row], d=self.d, rank=self.rank)


@dataclass(frozen=True, eq=False, repr=False)
class Own:
    """The vectors w_i on the compared side.

    Attributes:
        squares: of each vector in each basis, and last in all directions.
        spread: the sum of those squares around the mean of the vectors.
        centre: that mean.
        mu: the point that the mean part and the centred gradient are about.
        n: number of tokens.
    """

    squares: Float[Tensor, "n column"]
    spread: Float[Tensor, " column"]
    centre: Float[Tensor, " d"]
    mu: Float[Tensor, " d"]
    n: int

    @classmethod
    def of(
        cls,
        vectors: Float[Tensor, "n d"],
        stacked: Float[Tensor, "d columns"],
        rank: int,
        *,
        mean: Float[Tensor, " d"] | None = None,
    ) -> Own:
        """Reduce the vectors of a batch; mu is their own mean unless it is given.

        Raises:
            TangentValueError: if the bases do not fit.
        """
        check_stack(stacked, vectors.shape[1], rank)
        with exact_math(vectors.device):
            x = vectors.detach().to(full_dtype(vectors.dtype))
            columns = stacked.to(x)
            centre = x.mean(0, dtype=torch.float64).to(x)
            away = x - centre
            image = away @ columns
            squares = _with_total(
                squared_norms(image + centre @ columns, rank), squared_norms(x, x.shape[1])
            )
            around = _with_total(
                squared_norms(image, rank).sum(0), squared_norms(away, x.shape[1]).sum(0)
            )
            mu = centre if mean is None else mean.to(x)
            return cls(squares, around, centre, mu, len(x))


@dataclass(frozen=True, eq=False, repr=False)
class Upstream:
    """The vectors u_i on the other side.

    Attributes:
        squares: their squared norms.
        sum: their sum.
        spread: the sum of their squares around their mean.
    """

    squares: Float[Tensor, " n"]
    sum: Float[Tensor, " other"]
    spread: Float[Tensor, ""]

    @classmethod
    def of(cls, vectors: Float[Tensor, "n other"]) -> Upstream:
        """Reduce the vectors of a batch."""
        with exact_math(vectors.device):
            u = vectors.detach().to(full_dtype(vectors.dtype))
            total = u.sum(0, dtype=torch.float64)
            return cls(
                squares=squared_norms(u, u.shape[1]).squeeze(1),
                sum=total,
                spread=total_energy(u - (total / len(u)).to(u)),
            )

    @classmethod
    def of_tokens(cls, tokens: Int[Tensor, " n"], vocabulary: int) -> Upstream:
        """The same of one-hot vectors, which is what an embedding reads."""
        counts = torch.bincount(tokens, minlength=vocabulary).double()
        n = len(tokens)
        return cls(counts.new_ones(n), counts, n - counts.square().sum() / n)


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
        stacked: the bases that ``own`` was reduced in.
        rank: number of columns of each basis.

    Raises:
        TangentValueError: if the bases do not fit.
    """
    check_stack(stacked, gradient.shape[1], rank)
    with exact_math(gradient.device):
        g = gradient.detach().to(full_dtype(gradient.dtype))
        columns = stacked.to(g)
        image, constant = g @ columns, upstream.sum.square().sum()
        at_centre = _and_whole(own.centre.to(g), columns, rank)
        at_mu = _and_whole(own.mu.to(g), columns, rank)
        about = g - torch.outer(upstream.sum.to(g), own.mu.to(g))
        away = own.centre.double() - own.mu.double()
        kinds = {
            "gradient": _with_total(squared_norms(image, rank).sum(0), total_energy(g)[None]),
            "centred_gradient": _with_total(
                squared_norms(about @ columns, rank).sum(0), total_energy(about)[None]
            ),
            "mean_part": constant * at_mu,
            "sign_flip": upstream.squares @ own.squares,
            "pairing": constant * at_centre + upstream.spread * own.spread / max(own.n - 1, 1),
            "activations": own.squares.sum(0),
            "centred_activations": own.spread + own.n * _and_whole(away.to(g), columns, rank),
        }
        found = torch.stack([kinds[kind] for kind in KINDS])
    return NullEnergies(found[:, :-1], found[:, -1], gradient.shape[1], rank)


def _and_whole(
    x: Float[Tensor, " d"], columns: Float[Tensor, "d columns"], rank: int
) -> Float[Tensor, " column"]:
    return _with_total(squared_norms(x @ columns, rank), squared_norms(x, len(x)))
