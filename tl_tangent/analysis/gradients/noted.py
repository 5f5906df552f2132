"""What one forward and backward pass showed of each map, for what is mechanical in its gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from tl_tangent.analysis.gradients.probe import Probe
from tl_tangent.errors import TangentRuntimeError
from tl_tangent.geometry.energy_nulls import CANCELLED, GRADIENT_TOLERANCE
from tl_tangent.geometry.token_energies import Own, Strata, Upstream
from tl_tangent.hooks.gradients.weight import Weight


class Noted:
    """What a backward pass showed of each weight: its own side, and the other.

    Maps that read one tensor share the work on it, so it is held until the last of them has come.
    """

    def __init__(self, weights: Iterable[Weight], probes: Mapping[str, Probe]) -> None:
        self.pairs: dict[str, tuple[Own, Upstream]] = {}
        self._probes = probes
        self._readers = Counter(one.site for one in weights if one.side == "input")
        self._shared: dict[str, tuple[Tensor, Own]] = {}
        self._left: Counter[str] = Counter()
        self._real: Tensor | None = None
        self._strata: Strata | None = None
        self.checks = True
        self._images: dict[str, tuple[Tensor, float]] = {}

    def forget(self, real: Tensor | None, strata: Strata | None = None) -> None:
        self._strata = strata
        self._real = None if real is None else real.nonzero().flatten()
        self.pairs, self._shared, self._left = {}, {}, Counter(self._readers)
        self._images = {}

    def receive(self, weight: Weight, x: Tensor, g: Tensor) -> None:
        if weight.name in self.pairs:
            raise TangentRuntimeError(
                f"{weight.name} was passed twice before its gradient was recorded: run one forward "
                "and backward pass a batch (no gradient accumulation while nulls are measured)"
            )
        if self.checks and weight.kind != "embed":
            self._image(weight, *((x, g) if weight.side == "input" else (g, x)))
        if weight.side == "input":
            self.pairs[weight.name] = self._read(weight, x), self._other(g)
        elif weight.kind == "embed":
            self.pairs[weight.name] = self._of_embedding(weight, self._rows(x.flatten()), g)
        else:
            self.pairs[weight.name] = self._own(weight, g), self._other(x)

    def _image(self, weight: Weight, own: Tensor, other: Tensor) -> None:
        """Note ``sum_i u_i w_i^T Q_T``, and how large it could be."""
        own, other = self._rows(own), self._rows(other)
        basis = self._probes[weight.site].tangent_on(own)
        a, u = own.to(basis.dtype) @ basis, other.to(basis.dtype)
        self._images[weight.name] = u.mT @ a, float(u.norm() * a.norm())

    def check(self, weight: Weight, gradient: Tensor) -> None:
        """Refuse a gradient that is not that of what its map was seen to read and write.

        Raises:
            TangentRuntimeError: it differs by more than a factor, as of clipping.
        """
        if weight.name not in self._images:
            return
        expected, size = self._images[weight.name]
        found = gradient.to(expected) @ self._probes[weight.site].tangent_on(expected)
        square = float(expected.square().sum())
        factor = float((found * expected).sum()) / square if square else 1.0
        left = float((found - factor * expected).norm())
        if left > GRADIENT_TOLERANCE * max(float(found.norm()), CANCELLED * abs(factor) * size):
            raise TangentRuntimeError(
                f"the gradient of {weight.name} is not sum g x^T of what its map was seen to read "
                f"and to write: {left / max(float(found.norm()), 1e-300):.0%} of it is something "
                "else. A hook or a subclass changes the map's output, or two maps share the "
                "weight; measure without it, or with nulls=False"
            )

    def _read(self, weight: Weight, x: Tensor) -> Own:
        site = weight.site
        known, own = self._shared.get(site, (None, None))
        if own is None or not _same(known, x):
            own = self._own(weight, x)
            self._shared[site] = x, own
        self._left[site] -= 1
        if not self._left[site]:
            del self._shared[site]
        return own

    def _own(self, weight: Weight, vectors: Tensor) -> Own:
        probe, rows = self._probes[weight.site], self._rows(vectors)
        return Own.of(rows, probe.tangent_on(vectors), probe.rank, strata=self._strata)

    def _other(self, vectors: Tensor) -> Upstream:
        return Upstream.of(self._rows(vectors), self._strata)

    def _of_embedding(self, weight: Weight, tokens: Tensor, g: Tensor) -> tuple[Own, Upstream]:
        """The pair of an embedding, which learns nothing from its own padding token."""
        assert weight.writes is not None
        g, padding = self._rows(g), getattr(weight.writes.module, "padding_idx", None)
        if padding is not None:
            tokens, g = tokens[tokens != padding], g[tokens != padding]
        probe = self._probes[weight.site]
        upstream = Upstream.of_tokens(tokens, weight.parameter.shape[0])
        return Own.of(g, probe.tangent_on(g), probe.rank), upstream

    def _rows(self, x: Any) -> Tensor:
        return x if self._real is None else x[self._real.to(x.device)]


def _same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.data_ptr() == b.data_ptr() and a.shape == b.shape
