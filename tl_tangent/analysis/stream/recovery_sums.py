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

from tl_tangent.analysis.stream.followed import (
    BatchPositions,
    Followed,
    followed_rows,
    in_float64,
    with_controls,
)
from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.hooks.ablation import Part
from tl_tangent.hooks.attach import ablating
from tl_tangent.hooks.positions import PositionMask, Run, run_of_forward
from tl_tangent.hooks.stream.writes import LayerWrites, watching_writes

See = Callable[[int, Tensor], None]

_NOTHING = 1e-10  # a share of the energy that is rounding, and has no direction
_ROUNDINGS = 4  # of each entry, which the skip connections gather through depth


@dataclass
class RecoverySums:
    """Energies of both parts in both runs, and inner products, summed over tokens.

    Attributes:
        found: by depth, four sums of each part and basis: energy in the clean run, in the ablated
            one, and the clean part's inner product with the ablated one and with what was removed.
        totals: by depth, the clean part, the ablated one and the removed one of each part and
            basis, summed over tokens.
        rounding: by depth, the energy that the model's precision leaves in the ablated stream.
    """

    followed: Followed
    depth: int
    part: Part
    positions: BatchPositions
    found: dict[int, Float[Tensor, "four part basis"]] = field(default_factory=dict)
    totals: dict[int, Float[Tensor, "three part basis d"]] = field(default_factory=dict)
    rounding: dict[int, Float[Tensor, " basis"]] = field(default_factory=dict)
    n_tokens: int = 0

    def add(self, model: Any, given: Any, options: dict[str, Any]) -> None:
        mask = self.positions.of(options)
        run = run_of_forward(model, (given,), options)
        clean: dict[int, Tensor] = {}
        rows: list[Bool[Tensor, "batch pos"]] = []

        def keep(depth: int, stream: Tensor) -> None:
            if not rows:
                rows.append(followed_rows(run, mask, stream))
            clean[depth] = stream[rows[0]]

        self._run(model, given, options, run, keep)
        if bool(rows[0].any()):
            self.n_tokens += int(rows[0].sum())
            for i in range(len(self.followed.frame(self.depth).bases)):
                with self._cutting(model, i, mask):
                    compare = self._comparing(i, clean, rows[0])
                    self._run(model, given, options, run, compare, edited_at=self.depth)

    def _cutting(self, model: Any, i: int, mask: PositionMask) -> AbstractContextManager:
        """The ablation by one of the bases."""
        site = f"blocks.{self.depth}.hook_resid_pre"
        subspace = self.followed.subspace(self.depth)
        basis = self.followed.frame(self.depth).bases[i].to(subspace.basis)
        cut = subspace.replace(basis=basis, site=site, spectrum=None, explained=None)
        return ablating(model, cut, part=self.part, positions=mask.rule, any_model=True)

    def _comparing(self, i: int, clean: dict[int, Tensor], rows: Tensor) -> See:
        removed: dict[int, Tensor] = {}

        def compare(depth: int, stream: Tensor) -> None:
            ablated = stream[rows]
            if depth == self.depth:
                removed[depth] = in_float64(clean[depth]) - in_float64(ablated)
            self._enter(depth, i, clean[depth], ablated, removed[self.depth])

        return compare

    def _run(
        self,
        model: Any,
        given: Any,
        options: dict[str, Any],
        run: Run,
        see: See,
        edited_at: int | None = None,
    ) -> None:
        """Run the model, and show the stream at the depth of the cut and at every later one."""

        def receive(found: LayerWrites) -> None:
            if found.layer == self.depth:
                see(found.layer, found.before)
            if found.layer >= self.depth:
                see(found.layer + 1, found.after)

        watching = watching_writes(model, receive, edited_at=edited_at, run=run)
        with torch.no_grad(), watching:
            model(given, return_type=None, stop_at_layer=model.cfg.n_layers, **options)

    def _enter(self, depth: int, i: int, *vectors: Float[Tensor, "row d"]) -> None:
        """Add the clean stream, the ablated one and what was removed, of some tokens."""
        frame, eps = self.followed.frame(depth), torch.finfo(vectors[1].dtype).eps
        clean, ablated, removed = map(in_float64, vectors)
        mean, basis = frame.mean.to(clean), frame.bases[i].to(clean)
        parts = [_split(x, basis) for x in (clean - mean, ablated - mean, removed)]
        if depth not in self.found:
            self.found[depth] = torch.zeros(4, 2, len(frame.bases), dtype=torch.float64)
            shape = (3, 2, *frame.bases.shape[:2])
            self.totals[depth] = torch.zeros(shape, dtype=torch.float64)
            self.rounding[depth] = torch.zeros(len(frame.bases), dtype=torch.float64)
        self.rounding[depth][i] += float((_ROUNDINGS * eps * ablated).square().sum())
        for part, (c, a, r) in enumerate(zip(*parts, strict=True)):
            pairs = [(c, c), (a, a), (c, a), (c, r)]
            sums = torch.stack([(x * y).sum() for x, y in pairs])
            self.found[depth][:, part, i] += sums.cpu()
            totals = torch.stack([x.sum(0) for x in (c, a, r)])
            self.totals[depth][:, part, i] += totals.cpu()

    def rows(self) -> Iterator[dict[str, Any]]:
        for depth, part in product(self.found, range(len(PARTS))):
            clean, ablated, inner, removed = self.found[depth][:, part]
            row = {"depth": depth, "part": PARTS[part], "removed": PARTS[part] == self.part}
            row |= {
                "energy_clean": float(clean[0]) / self.n_tokens,
                "energy_ablated": float(ablated[0]) / self.n_tokens,
            }
            ratio, cosine = ablated / clean, inner / (clean * ablated).sqrt()
            cosine[(ratio < _NOTHING) | (ablated < self.rounding[depth])] = torch.nan
            row |= with_controls("energy_ratio", ratio.tolist())
            row |= with_controls("cosine", cosine.tolist())
            row |= with_controls("coefficient", (inner / clean).tolist())
            row |= with_controls("coefficient_unchanged", (1 - removed / clean).tolist())
            yield row | self._centred(depth, part)

    def _centred(self, depth: int, part: int) -> dict[str, float]:
        """The same of what differs between tokens: without the mean of each part over them."""
        c, a, r = self.totals[depth][:, part] / self.n_tokens
        common = [(x * y).sum(-1) * self.n_tokens for x, y in ((c, c), (a, c), (r, c))]
        clean, _, inner, removed = self.found[depth][:, part]
        energy = clean - common[0]
        energy[energy < _NOTHING * clean] = torch.nan  # one token, or all alike
        back, gone = (inner - common[1]) / energy, (removed - common[2]) / energy
        row = with_controls("common_share", (common[0] / clean).tolist())
        row |= with_controls("coefficient_centred", back.tolist())
        return row | with_controls("coefficient_centred_unchanged", (1 - gone).tolist())


def _split(x: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    tangent = (x @ basis) @ basis.T
    return tangent, x - tangent
