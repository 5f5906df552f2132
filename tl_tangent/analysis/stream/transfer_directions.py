"""In which directions of a part the residual stream is changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.analysis.stream.followed import Followed, in_float64
from tl_tangent.errors import TangentValueError
from tl_tangent.hooks.numbers import whole
from tl_tangent.hooks.stream.jvp import Direct, Stretch

KINDS = ("random", "data", "all")
MOST = 5000  # directions of one batch that are tried one by one


@dataclass(frozen=True)
class Cut:
    """One part (0 tangent, 1 normal), by one of the bases (0 is Q_T, the others its controls)."""

    followed: Followed
    basis: int
    part: int

    def at(self, depth: int, like: Tensor) -> Float[Tensor, "d rank"]:
        return self.followed.frame(depth).bases[self.basis].to(like)

    def project(self, depth: int, x: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
        """Return ``P x``; no mean is taken out."""
        basis = self.at(depth, x)
        tangent = (x @ basis) @ basis.T
        return x - tangent if self.part else tangent

    def dimension(self, depth: int) -> int:
        _, d, rank = self.followed.frame(depth).bases.shape
        return d - rank if self.part else rank

    def column(self, depth: int, i: int, like: Tensor) -> Float[Tensor, " d"]:
        """One of an orthonormal basis of the part."""
        basis = self.at(depth, like)
        if not self.part:
            return basis[:, i]
        return torch.linalg.qr(basis, mode="complete")[0][:, basis.shape[1] + i]


@dataclass(frozen=True)
class Directions:
    """How directions are chosen, and where: at the followed tokens of one batch.

    Attributes:
        kind: "random", "data" or "all".
        n: of "random".
        seed, batch: what random directions are drawn from; parts and bases share the numbers.
        rows: the tokens that are followed.
    """

    kind: str
    n: int
    seed: int
    batch: int
    rows: Bool[Tensor, "batch pos"]

    def of(self, cut: Cut, stretches: list[Stretch]) -> Iterator[tuple[int, Direct]]:
        """Number and direction of every pass; those of "all" are one sample, number 0."""
        if self.kind == "random":
            for k in range(self.n):
                yield k, self._placed(_Random(cut, self.seed, self.batch, k))
        elif self.kind == "data":
            yield 0, self._placed(_Data(cut))
        else:
            columns = max(cut.dimension(stretch.start) for stretch in stretches)
            for token in range(int(self.rows.sum())):
                for column in range(columns):
                    yield 0, self._placed(_One(cut, token, column))

    def _placed(self, vectors: _Vectors) -> Direct:
        """Directions at the followed tokens, and nothing at the others."""

        def direct(stretch: Stretch, x: Float[Tensor, "batch pos d"]) -> Tensor:
            found = vectors.at(stretch.start, in_float64(x[self.rows]))
            placed = torch.zeros(x.shape, dtype=found.dtype, device=found.device)
            placed[self.rows.to(found.device)] = found
            return placed

        return direct


class _Vectors:
    """Directions for the followed tokens, which are ``x`` there."""

    def at(self, depth: int, x: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
        raise NotImplementedError


@dataclass(frozen=True)
class _Random(_Vectors):
    """Standard normal in the part, independent from token to token."""

    cut: Cut
    seed: int
    batch: int
    k: int

    def at(self, depth: int, x: Tensor) -> Tensor:
        key = [self.seed, self.batch, self.k, depth]
        (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state) >> 1)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return self.cut.project(depth, noise.to(x))


@dataclass(frozen=True)
class _Data(_Vectors):
    """Each token's own part around the mean."""

    cut: Cut

    def at(self, depth: int, x: Tensor) -> Tensor:
        return self.cut.project(depth, x - self.cut.followed.frame(depth).mean.to(x))


@dataclass(frozen=True)
class _One(_Vectors):
    """One basis direction at one token; nothing where the part has fewer."""

    cut: Cut
    token: int
    column: int

    def at(self, depth: int, x: Tensor) -> Tensor:
        vectors = torch.zeros_like(x)
        if self.column < self.cut.dimension(depth):
            vectors[self.token] = self.cut.column(depth, self.column, x)
        return vectors


def check_directions(kind: str, n: Any) -> int:
    """Refuse an unknown kind of directions, or none of them; return how many.

    Raises:
        TangentValueError: says what is accepted.
    """
    if kind not in KINDS:
        accepted = ", ".join(map(repr, KINDS))
        raise TangentValueError(f"directions={kind!r} is not one of {accepted}.")
    return whole("n_directions", n, at_least=1)


def check_count(directions: Directions, followed: Followed) -> None:
    """Refuse to try all directions of a model that is not tiny.

    Raises:
        TangentValueError: more than ``MOST`` of them in one batch.
    """
    tokens, d = int(directions.rows.sum()), next(iter(followed.references.values())).subspaces[0].d
    if directions.kind == "all" and tokens * d > MOST:
        raise TangentValueError(
            f"directions='all' would need {tokens * d} passes for {tokens} tokens of width {d}, "
            f"more than {MOST}. Take directions='random', which estimates the same numbers with a "
            "standard error, or follow fewer tokens."
        )
