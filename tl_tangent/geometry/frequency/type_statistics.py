"""How far the occurrences of each token type lie from each other and from the origin.

With n occurrences, their centre c and ``S = sum ||x - c||^2``, where the x of a type have the total
variance V:

    dispersion           S / (n - 1)             mean V: no trace of n
    naive dispersion     S / n                   mean V (n - 1) / n: rare types look tight
    leave one out        n S / (n - 1)^2         mean V n / (n - 1): rare types look wide

The last is the mean over occurrences of the squared distance to the centre of the others, since
``x - c_others = n / (n - 1) (x - c)``. Logarithms and roots put some of n back: ``E ln(S / (n-1))``
is below ``ln V`` by about ``1 / (r (n - 1))`` with r the participation ratio of the covariance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TypeStatistics:
    """Statistics of every token type; NaN where a type has too few occurrences for them.

    Attributes:
        counts: n.
        spreads: S, 0 where nothing was seen.
        centre_norm: ``||c||``; its square has the mean ``||E x||^2 + V / n``, so that rare types
            look long (see :attr:`centre_square`).
    """

    counts: Int[Tensor, " type"]
    spreads: Float[Tensor, " type"]
    centre_norm: Float[Tensor, " type"]

    @property
    def dispersion(self) -> Float[Tensor, " type"]:
        """``V_w = S / (n - 1)``, unbiased; from 2 occurrences."""
        return self._over(self.counts - 1)

    @property
    def naive_dispersion(self) -> Float[Tensor, " type"]:
        """``S / n``, the trap: it grows with n where nothing else does; 0 for one occurrence."""
        return self._over(self.counts)

    @property
    def leave_one_out(self) -> Float[Tensor, " type"]:
        """Mean squared distance of an occurrence to the centre of the others; from 2."""
        return self.dispersion * self.counts / (self.counts - 1)

    @property
    def centre_square(self) -> Float[Tensor, " type"]:
        """``||c||^2 - V_w / n``, unbiased for ``||E x||^2``, and so sometimes negative; from 2."""
        return self.centre_norm.square() - self.dispersion / self.counts

    def _over(self, freedom: Tensor) -> Tensor:
        return torch.where(freedom > 0, self.spreads / freedom, torch.nan)
