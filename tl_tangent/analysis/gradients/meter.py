"""Measure gradients batch by batch, in one backward pass for all weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.analysis.gradients.noted import Noted
from tl_tangent.analysis.gradients.probe import make_probes
from tl_tangent.analysis.gradients.statistics import GradientStatistics, Label
from tl_tangent.errors import TangentRuntimeError, TangentValueError
from tl_tangent.geometry import TangentSubspace
from tl_tangent.geometry.energy import energies, total_energy
from tl_tangent.geometry.gram import BlockGram
from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.geometry.token_energies import KINDS, Own, Strata, token_energies
from tl_tangent.hooks.gradients.watch import watching_maps
from tl_tangent.hooks.gradients.weight import Weight, Weights

Within = Literal["token", "shuffled"]


class GradientMeter:
    """Sums of gradient energies over batches.

    ``with meter.watching(real): loss.backward()`` notes what the nulls need, ``meter.record()``
    then reads the gradients that lie in the parameters. Without nulls ``record`` is enough.

    Args:
        weights: of the model.
        subspaces: Q_T at every site that a weight is compared at.
        n_controls: matched random normals at each site.
        seed: of the controls.
        nulls: measure what is mechanical.
        moments: keep ``sum G^T G`` of every weight: ``8 * d**2`` bytes each.
        within: also measure the null of pairs permuted among equal input tokens, or, as a control
            of that one, among groups of the same sizes with shuffled members.

    Raises:
        TangentError: as :func:`~tl_tangent.analysis.gradients.probe.make_probes`.
    """

    def __init__(
        self,
        weights: Weights,
        subspaces: Mapping[str, TangentSubspace],
        *,
        n_controls: int = 20,
        seed: int = 0,
        nulls: bool = True,
        moments: bool = False,
        within: Within | None = None,
    ) -> None:
        if within not in (None, "token", "shuffled"):
            raise TangentValueError(f"within is None, 'token' or 'shuffled', got {within!r}")
        if n_controls < 0:
            raise TangentValueError(f"n_controls is 0 or more, got {n_controls}")
        self.weights, self.nulls, self.within = weights.weights, nulls, within
        self.n_controls = n_controls
        self._probes = make_probes(weights, subspaces, n_controls, seed)
        self.labels = tuple(self._label(weight) for weight in self.weights)
        shape = (len(self.weights), len(KINDS))
        self._energies = torch.zeros(*shape, 1 + n_controls, dtype=torch.float64)
        self._totals = torch.zeros(*shape, dtype=torch.float64)
        self._grams: dict[str, BlockGram] | None = {} if moments else None
        self._noted = Noted(self.weights, self._probes)
        self.n_batches, self.n_tokens, self.loss = 0, 0, 0.0

    @property
    def stacks(self) -> dict[str, Tensor]:
        """Q_T and its normals at each site, side by side ``[d, (1 + B) * rank]``."""
        return {site: probe.stacked for site, probe in self._probes.items()}

    def _label(self, weight: Weight) -> Label:
        probe = self._probes[weight.site]
        subspace = probe.subspace
        return Label(
            weight.name,
            weight.kind,
            weight.layer,
            weight.side,
            weight.site,
            weight.d,
            subspace.rank,
            subspace.explained,
            probe.fingerprint,
        )

    @contextmanager
    def watching(
        self, real: Tensor | None = None, tokens: Int[Tensor, "batch pos"] | None = None
    ) -> Iterator[None]:
        """Note what one forward and backward pass shows, for the nulls.

        Args:
            real: which rows of ``[batch * pos]`` are real tokens; None for all.
            tokens: what is read, for the null within tokens.
        """
        if not self.nulls:
            yield
            return
        self._noted.forget(real, self._strata(real, tokens))
        with watching_maps(self.weights, self._noted.receive):
            yield

    def _strata(self, real: Tensor | None, tokens: Tensor | None) -> Strata | None:
        if self.within is None or tokens is None:
            return None
        labels = tokens.flatten() if real is None else tokens.flatten()[real]
        if self.within == "shuffled":
            generator = torch.Generator().manual_seed(self.n_batches)
            labels = labels[torch.randperm(len(labels), generator=generator).to(labels.device)]
        return Strata.of(labels)

    def record(self, loss: float = 0.0, n_tokens: int = 0) -> None:
        """Add the gradients that lie in the parameters now.

        Raises:
            TangentRuntimeError: a weight without a gradient, or one that is NaN or infinite.
        """
        energies, totals = self.take()
        bad = (~totals[:, 0].isfinite()).nonzero().flatten().tolist()
        if bad:
            raise TangentRuntimeError(
                f"the gradient of {self.weights[bad[0]].name} is not finite: its squared norm is "
                f"{float(totals[bad[0], 0])}. Lower the loss scale or the learning rate, or leave "
                "this batch out."
            )
        self._energies += energies
        self._totals += totals
        self.n_batches += 1
        self.n_tokens += n_tokens
        self.loss += loss

    def take(self) -> tuple[Float[Tensor, "weight kind basis"], Float[Tensor, "weight kind"]]:
        """Return the energies of the gradients that lie in the parameters now, and add nothing.

        Raises:
            TangentRuntimeError: a weight without a gradient.
        """
        found = [self._measured(weight) for weight in self.weights]
        self._noted.checks = False  # once is enough: a model does not change what its maps are
        self._noted.forget(None)
        energies, totals = zip(*found, strict=True)
        return torch.stack(energies), torch.stack(totals)

    def reduce(self, site: str, rows: Float[Tensor, "row d"]) -> Own:
        """Reduce activations of a site to their energies in Q_T and in all directions."""
        probe = self._probes[site]
        return Own.of(rows, probe.tangent_on(rows), probe.rank)

    def _measured(self, weight: Weight) -> tuple[Tensor, Tensor]:
        gradient, probe = weight.gradient(), self._probes[weight.site]
        if self._grams is not None:
            self._add_moment(weight, gradient)
        noted = self._noted.pairs.get(weight.name)
        if noted is None and self.nulls and weight.reads is not None:
            raise TangentRuntimeError(
                f"{weight.name} has a gradient, but no pass through its map was seen: run forward "
                "and backward inside of watching(), through the module itself, or measure with "
                "nulls=False"
            )
        if noted is not None:
            self._noted.check(weight, gradient)
            found = token_energies(*noted, gradient, probe.on(gradient), probe.rank)
            return found.energies.cpu(), found.totals.cpu()
        shape = (len(KINDS), 1 + self.n_controls)
        kinds = torch.full(shape, torch.nan, dtype=torch.float64)
        kinds[0] = energies(gradient, probe.on(gradient), probe.rank).cpu()
        totals = torch.full(shape[:1], torch.nan, dtype=torch.float64)
        totals[0] = total_energy(gradient).cpu()
        return kinds, totals

    def _add_moment(self, weight: Weight, gradient: Tensor) -> None:
        assert self._grams is not None
        if weight.name not in self._grams:
            self._grams[weight.name] = BlockGram(weight.d, None, gradient.device)
        self._grams[weight.name].add(gradient.to(full_dtype(gradient.dtype)))

    def statistics(self) -> GradientStatistics:
        """Return the sums so far."""
        grams = self._grams or {}
        return GradientStatistics(
            self.labels,
            self._energies.clone(),
            self._totals.clone(),
            {name: gram.dense().cpu() for name, gram in grams.items()},
            self.n_batches,
            self.n_tokens,
            self.loss,
        )
