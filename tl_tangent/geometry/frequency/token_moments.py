"""Mean and spread of the vectors of each token type, from a stream of any length.

Per type w there are a count n_w, a centre c_w and ``S_w = sum ||x - c_w||^2``. A batch is reduced
to these around its own means, then joined (Chan, Golub & LeVeque 1983): with gap g between two
centres, ``S = S_1 + S_2 + n_1 n_2 / (n_1 + n_2) ||g||^2``. No large sums are subtracted, and means
are taken from the first vector of a type on, so that equal vectors have a spread of exactly 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency.type_statistics import TypeStatistics
from tl_tangent.geometry.linalg import exact_math, full_dtype

PRECISIONS = (torch.float32, torch.float64)


class TokenMoments:
    """Counts, centres and spreads of ``n_types`` token types, in memory that tokens do not grow.

    Memory is ``n_types * (d * item + 16)`` bytes, see :attr:`nbytes`: for 50 000 types of width 768
    that is 308 MB with centres in float64 and 154 MB in float32. A batch takes about four times
    its own size in float64 on top, while it is added.

    In float64 any two ways of cutting and merging a stream agree to rounding. In float32 a centre
    is rounded at each update, by 6e-8 of its own size, and stands still where an update would move
    it by less; V_w takes the square of what the centre is off as spread. Prefer float64 where
    centres are far longer than the spread around them.

    Attributes:
        counts: n_w.
        centres: c_w; zero where nothing was seen.
        spreads: S_w in float64.
    """

    counts: Int[Tensor, " type"]
    centres: Float[Tensor, "type d"]
    spreads: Float[Tensor, " type"]

    def __init__(
        self,
        d: int,
        n_types: int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start with no tokens.

        Args:
            d: width of the vectors.
            n_types: number of types; those that come are from 0 to ``n_types - 1``.
            dtype: of the centres, float64 or float32.
            device: where everything is kept; vectors are brought there.

        Raises:
            TangentValueError: if a size is below 1 or ``dtype`` is neither.
        """
        if d < 1 or n_types < 1:
            raise TangentValueError(f"d and n_types are 1 or more, got d={d}, n_types={n_types}")
        if dtype not in PRECISIONS:
            raise TangentValueError(f"centres are float32 or float64, got {dtype}")
        with exact_math(torch.device(device)):
            self.counts = torch.zeros(n_types, dtype=torch.int64, device=device)
            self.centres = torch.zeros(n_types, d, dtype=dtype, device=device)
            self.spreads = torch.zeros(n_types, dtype=torch.float64, device=device)

    @property
    def d(self) -> int:
        """Width of the vectors."""
        return self.centres.shape[1]

    @property
    def n_types(self) -> int:
        """Number of types, seen or not."""
        return len(self.counts)

    @property
    def n_tokens(self) -> int:
        """Number of tokens so far."""
        return int(self.counts.sum())

    @property
    def nbytes(self) -> int:
        """Memory of the statistics in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.counts, self.centres, self.spreads))

    def update(self, vectors: Float[Tensor, "n d"], types: Int[Tensor, " n"]) -> None:
        """Add vectors, each to its type; nothing is added if an error is raised.

        Args:
            vectors: one token a row.
            types: the type of each.

        Raises:
            TangentValueError: if shapes do not fit, a type is out of range, or a vector holds NaN
                or infinite entries.
        """
        check_types(types, self.n_types)
        self._check_vectors(vectors, types)
        if not len(types):
            return
        device = self.counts.device
        with exact_math(device):
            x = vectors.to(device, torch.float64)
            present, own = torch.unique(types.to(device, torch.int64), return_inverse=True)
            n = len(present)
            counts = torch.bincount(own, minlength=n)
            first = x[_first(own, n)]
            x = x - first[own]
            offsets = _sums(x, own, n) / counts[:, None]
            spreads = _sums((x - offsets[own]).square().sum(1), own, n)
            self._join(present, counts, first + offsets, spreads)

    def merge(self, other: TokenMoments) -> None:
        """Add the tokens of ``other`` as if they had come here; ``other`` stays as it is.

        Raises:
            TangentValueError: if the widths, numbers of types or precisions differ.
        """
        mine, theirs = self.centres, other.centres
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise TangentValueError(
                f"centres {list(theirs.shape)} in {theirs.dtype} do not merge into "
                f"{list(mine.shape)} in {mine.dtype}: only like moments do"
            )
        device = self.counts.device
        with exact_math(device):
            seen = other.counts.nonzero().flatten()
            parts = (other.counts, theirs, other.spreads)
            counts, centres, spreads = (part[seen].to(device) for part in parts)
            self._join(seen.to(device), counts, centres.double(), spreads)

    def statistics(self) -> TypeStatistics:
        """Return dispersions and distances of every type."""
        with exact_math(self.counts.device):
            norms = torch.linalg.vector_norm(self.centres, dim=1, dtype=torch.float64)
            norms = norms.masked_fill(self.counts == 0, torch.nan)
            return TypeStatistics(self.counts.clone(), self.spreads.clone(), norms)

    def _join(self, types: Tensor, counts: Tensor, centres: Tensor, spreads: Tensor) -> None:
        """Join statistics of distinct types to those that are here."""
        before = self.counts[types]
        after = before + counts
        share = counts / after.double()
        old = self.centres[types].double()
        gap = centres - old
        between = before * share * gap.square().sum(1)
        self.counts[types] = after
        self.centres[types] = (old + share[:, None] * gap).to(self.centres.dtype)
        self.spreads[types] += spreads + between

    def _check_vectors(self, vectors: Tensor, types: Tensor) -> None:
        if vectors.shape != (len(types), self.d):
            raise TangentValueError(
                f"{len(types)} types take vectors of shape [{len(types)}, {self.d}], got "
                f"{list(vectors.shape)}: flatten batch and position, and leave padding out"
            )
        if not bool(vectors.sum(dtype=full_dtype(vectors.dtype)).isfinite()):
            bad = int((~vectors.isfinite()).any(1).sum())
            if bad:
                raise TangentValueError(
                    f"{bad} of {len(vectors)} vectors hold NaN or infinite entries: leave these "
                    "positions out"
                )


def check_types(types: Tensor, n_types: int) -> None:
    """Refuse types that are no row of integers in ``[0, n_types)``."""
    if types.ndim != 1 or types.is_floating_point() or types.dtype == torch.bool:
        raise TangentValueError(
            f"types are one row of integers, got {types.dtype} of shape {list(types.shape)}"
        )
    if len(types) and not 0 <= int(types.min()) <= int(types.max()) < n_types:
        raise TangentValueError(
            f"types lie in [0, {n_types}), got from {int(types.min())} to {int(types.max())}: "
            "make n_types the size of the vocabulary"
        )


def _first(own: Tensor, n: int) -> Tensor:
    """Return where each of n types comes first."""
    at = torch.arange(len(own), device=own.device)
    return at.new_full((n,), len(own)).scatter_reduce_(0, own, at, "amin")


def _sums(rows: Tensor, own: Tensor, n: int) -> Tensor:
    """Add up the rows of each of n types."""
    return rows.new_zeros(n, *rows.shape[1:]).index_add_(0, own, rows)
