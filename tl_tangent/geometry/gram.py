"""Sums of ``X^T X``: in full for ordinary widths, or through a random sketch for very wide sites.

Both are linear in ``X^T X``, so that shards add up and means can be removed afterwards.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.geometry.eigen import Eigen, eigen_of, nystrom_eigen

MAX_BLOCKS = 8
MIN_BLOCK_WIDTH = 192


class Gram(ABC):
    """A running sum of ``X^T X`` over rows, one a head where there are heads, in float64."""

    _sums: list[Tensor]

    @abstractmethod
    def add(self, rows: Float[Tensor, "*head row d"], sign: int = 1) -> None:
        """Add (or with ``sign=-1`` remove) the products of ``rows``."""

    @abstractmethod
    def eigen(self, scale: float, precision: torch.dtype) -> list[Eigen]:
        """Decompose ``scale * X^T X``, whose rows came in ``precision``: one result a head."""

    def absorb(self, other: Gram) -> None:
        """Add another sum of the same kind and shape."""
        for own, theirs in zip(self._sums, other._sums, strict=True):
            own.add_(theirs.to(own.device))

    @property
    def sums(self) -> list[Tensor]:
        """The running sums themselves, in an order that the kind and shape decide."""
        return self._sums

    def clone(self) -> Gram:
        """Return an independent copy."""
        return copy.deepcopy(self)


class BlockGram(Gram):
    """The exact sum, as the blocks of its upper triangle.

    Only the blocks on and above the diagonal are multiplied, which saves up to 7/16 of the
    products; each product runs in the dtype of the rows and is added up in float64.
    """

    def __init__(self, d: int, heads: int | None, device: torch.device) -> None:
        self._d = d
        count = min(MAX_BLOCKS, max(1, d // MIN_BLOCK_WIDTH))
        edges = [d * i // count for i in range(count + 1)]
        self._spans = list(pairwise(edges))
        lead = () if heads is None else (heads,)
        self._sums = [
            torch.zeros(*lead, stop - start, d - start, dtype=torch.float64, device=device)
            for start, stop in self._spans
        ]

    def add(self, rows: Float[Tensor, "*head row d"], sign: int = 1) -> None:
        """Add (or with ``sign=-1`` remove) the products of ``rows``."""
        for (start, stop), block in zip(self._spans, self._sums, strict=True):
            block.add_(rows[..., start:stop].mT @ rows[..., start:], alpha=sign)

    def dense(self) -> Float[Tensor, "*head d d"]:
        """Return the full symmetric matrix."""
        first = self._sums[0]
        full = first.new_zeros(*first.shape[:-2], self._d, self._d)
        for (start, stop), block in zip(self._spans, self._sums, strict=True):
            full[..., start:stop, start:] = block
        upper = full.triu()
        return upper + upper.triu(1).mT

    def eigen(self, scale: float, precision: torch.dtype) -> list[Eigen]:
        """Decompose ``scale * X^T X``, whose rows came in ``precision``: one result a head."""
        matrices = self.dense().reshape(-1, self._d, self._d) * scale
        return [eigen_of(matrix, precision) for matrix in matrices]


class SketchGram(Gram):
    """The product of the sum with a fixed random matrix, ``X^T X Omega``, and the trace.

    ``Omega`` has ``width`` orthonormal columns drawn from the seed alone, so that the sketches of
    shards add up exactly.
    """

    def __init__(
        self, d: int, heads: int | None, device: torch.device, *, width: int, seed: int
    ) -> None:
        lead = () if heads is None else (heads,)
        generator = torch.Generator().manual_seed(seed)
        gaussian = torch.randn(d, width, generator=generator, dtype=torch.float64)
        self._omega = torch.linalg.qr(gaussian)[0].to(device)
        self._sums = [
            torch.zeros(*lead, d, width, dtype=torch.float64, device=device),
            torch.zeros(lead, dtype=torch.float64, device=device),
        ]

    def add(self, rows: Float[Tensor, "*head row d"], sign: int = 1) -> None:
        """Add (or with ``sign=-1`` remove) the products of ``rows``."""
        image, trace = self._sums
        image.add_(rows.mT @ (rows @ self._omega.to(rows.dtype)), alpha=sign)
        trace.add_(rows.square().sum((-2, -1), dtype=torch.float64), alpha=sign)

    def eigen(self, scale: float, precision: torch.dtype) -> list[Eigen]:
        """Decompose ``scale * X^T X``, whose rows came in ``precision``: one result a head."""
        image, trace = self._sums
        images = image.reshape(-1, *self._omega.shape) * scale
        return [
            nystrom_eigen(part, self._omega, whole, precision)
            for part, whole in zip(images, (trace * scale).reshape(-1).tolist(), strict=True)
        ]
