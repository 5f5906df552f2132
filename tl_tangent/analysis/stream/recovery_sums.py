"""Runs a model with and without one part of its stream, and sums what later depths hold of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.analysis.stream.followed import Followed, followed_rows, with_controls
from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.hooks.ablation import Part
from tl_tangent.hooks.attach import ablating
from tl_tangent.hooks.positions import PositionMask, run_of_forward
from tl_tangent.hooks.stream.writes import LayerWrites, watching_writes

See = Callable[[int, Tensor], None]

_NOTHING = 1e-10  # a share of the energy that is rounding, and has no direction


@dataclass
class RecoverySums:
    """Energies of both parts in both runs, and inner products, summed over tokens.

    Attributes:
        found: by depth, four sums of each part and basis: energy in the clean run, in the ablated
            one, and the clean part's inner product with the ablated one and with what was removed.
    """

    followed: Followed
    depth: int
    part: Part
    mask: PositionMask
    found: dict[int, Float[Tensor, "four part basis"]] = field(default_factory=dict)
    n_tokens: int = 0

    def add(self, model: Any, given: Any, options: dict[str, Any]) -> None:
        run = run_of_forward(model, (given,), options)
        clean: dict[int, Tensor] = {}
        rows: list[Bool[Tensor, "batch pos"]] = []

        def keep(depth: int, stream: Tensor) -> None:
            if not rows:
                rows.append(followed_rows(run, self.mask, stream))
            clean[depth] = stream[rows[0]]

        self._run(model, given, options, keep)
        if bool(rows[0].any()):
            self.n_tokens += int(rows[0].sum())
            for i in range(len(self.followed.frame(self.depth).bases)):
                with self._cutting(model, i):
                    self._run(model, given, options, self._comparing(i, clean, rows[0]))

    def _cutting(self, model: Any, i: int) -> AbstractContextManager:
        """The ablation by one of the bases."""
        site = f"blocks.{self.depth}.hook_resid_pre"
        basis = self.followed.frame(self.depth).bases[i]
        labels = {"site": site, "spectrum": None, "explained": None}
        cut = self.followed.subspace(self.depth).replace(basis=basis, **labels)
        return ablating(model, cut, part=self.part, positions=self.mask.rule, any_model=True)

    def _comparing(self, i: int, clean: dict[int, Tensor], rows: Tensor) -> See:
        removed: dict[int, Tensor] = {}

        def compare(depth: int, stream: Tensor) -> None:
            ablated = stream[rows]
            if depth == self.depth:
                removed[depth] = clean[depth] - ablated
            self._enter(depth, i, clean[depth], ablated, removed[self.depth])

        return compare

    def _run(self, model: Any, given: Any, options: dict[str, Any], see: See) -> None:
        """Run the model, and show the stream at the depth of the cut and at every later one."""

        def receive(found: LayerWrites) -> None:
            if found.layer == self.depth:
                see(found.layer, found.before)
            if found.layer >= self.depth:
                see(found.layer + 1, found.after)

        with torch.no_grad(), watching_writes(model, receive, edited=True):
            model(given, return_type=None, **{"stop_at_layer": model.cfg.n_layers, **options})

    def _enter(self, depth: int, i: int, *vectors: Float[Tensor, "row d"]) -> None:
        """Add the clean stream, the ablated one and what was removed, of some tokens."""
        frame, whole = self.followed.frame(depth), full_dtype(vectors[0].dtype)
        clean, ablated, removed = (x.to(whole) for x in vectors)
        mean, basis = frame.mean.to(clean), frame.bases[i].to(clean)
        parts = [_split(x, basis) for x in (clean - mean, ablated - mean, removed)]
        if depth not in self.found:
            self.found[depth] = torch.zeros(4, 2, len(frame.bases), dtype=torch.float64)
        for part, (c, a, r) in enumerate(zip(*parts, strict=True)):
            pairs = [(c, c), (a, a), (c, a), (c, r)]
            sums = torch.stack([(x * y).sum(dtype=torch.float64) for x, y in pairs])
            self.found[depth][:, part, i] += sums.cpu()

    def rows(self) -> Iterator[dict[str, Any]]:
        for depth, part in product(self.found, range(len(PARTS))):
            clean, ablated, inner, removed = self.found[depth][:, part]
            row = {"depth": depth, "part": PARTS[part], "removed": PARTS[part] == self.part}
            row |= {
                "energy_clean": float(clean[0]) / self.n_tokens,
                "energy_ablated": float(ablated[0]) / self.n_tokens,
            }
            ratio, cosine = ablated / clean, inner / (clean * ablated).sqrt()
            cosine[ratio < _NOTHING] = torch.nan
            row |= with_controls("energy_ratio", ratio.tolist())
            row |= with_controls("cosine", cosine.tolist())
            row |= with_controls("coefficient", (inner / clean).tolist())
            yield row | with_controls("coefficient_unchanged", (1 - removed / clean).tolist())


def _split(x: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    tangent = (x @ basis) @ basis.T
    return tangent, x - tangent
