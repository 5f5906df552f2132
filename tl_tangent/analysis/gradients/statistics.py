"""What is measured of gradients, as sums that add up over batches, machines and checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.geometry.energy import EnergyRatio
from tl_tangent.geometry.token_energies import KINDS

WHOLE_OF = {"centred_gradient": "gradient", "centred_activations": "activations"}
ROUNDING = 1e-12  # of an energy, in float32: no part below can be told from nothing
FORMAT = "tl_tangent.gradient_statistics.2"


@dataclass(frozen=True)
class Label:
    """Which weight a row is about, and what it was compared with.

    Attributes:
        name, kind, layer, side, site, d: see :class:`~tl_tangent.hooks.gradients.weight.Weight`.
        rank: of Q_T.
        activation_share: share of the fitted activations' variance that Q_T holds.
        compared: a fingerprint of Q_T and of the seed of its normals.
    """

    name: str
    kind: str
    layer: int | None
    side: str
    site: str
    d: int
    rank: int
    activation_share: float | None
    compared: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class GradientStatistics:
    """Sums over batches, one row a weight.

    Attributes:
        labels: the weights.
        energies: one entry for each of :data:`~tl_tangent.geometry.token_energies.KINDS`, in Q_T
            and then in its normals; NaN where a kind was not measured. Of what is mechanical only
            the energy in Q_T is, which gives the exact ratio.
        totals: the energy in all directions.
        moments: by the weight's name, ``sum_b G_b^T G_b`` over batches; empty unless asked for.
        n_batches, n_tokens: how many.
        loss: sum over batches of their mean loss.
    """

    labels: tuple[Label, ...]
    energies: Float[Tensor, "weight kind basis"]
    totals: Float[Tensor, "weight kind"]
    moments: Mapping[str, Float[Tensor, "d d"]] = field(default_factory=dict)
    n_batches: int = 0
    n_tokens: int = 0
    loss: float = 0.0

    @property
    def n_controls(self) -> int:
        """Number of matched normals."""
        return self.energies.shape[-1] - 1

    def __add__(self, other: GradientStatistics) -> GradientStatistics:
        """Add the batches of another piece, whose order matters for rounding alone.

        Raises:
            TangentValueError: of other weights or subspaces.
        """
        if self.labels != other.labels or self.n_controls != other.n_controls:
            raise TangentValueError(
                "only statistics of the same weights, subspaces and controls add up: "
                f"{len(self.labels)} weights with {self.n_controls} controls, and "
                f"{len(other.labels)} with {other.n_controls}"
            )
        if set(self.moments) != set(other.moments):
            raise TangentValueError("one of the two keeps second moments and the other does not")
        return GradientStatistics(
            self.labels,
            self.energies + other.energies,
            self.totals + other.totals,
            {name: one + other.moments[name] for name, one in self.moments.items()},
            self.n_batches + other.n_batches,
            self.n_tokens + other.n_tokens,
            self.loss + other.loss,
        )

    def ratio(self, row: int, kind: str = "gradient") -> EnergyRatio | None:
        """Return one row's energies of one kind.

        None where it was not measured, is zero, or is what rounding leaves of a difference.
        """
        column = KINDS.index(kind)
        total = float(self.totals[row, column])
        whole = float(self.totals[row, KINDS.index(WHOLE_OF.get(kind, kind))])
        if not total > ROUNDING * whole or not total > 0:
            return None
        label = self.labels[row]
        known = self.energies[row, column]
        return EnergyRatio.of(known[~known.isnan()], total, d=label.d, rank=label.rank)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file."""
        tensors = {"energies": self.energies, "totals": self.totals}
        tensors |= {f"moment.{name}": one.contiguous() for name, one in self.moments.items()}
        told = {
            "format": FORMAT,
            "labels": json.dumps([asdict(label) for label in self.labels]),
            "counts": json.dumps([self.n_batches, self.n_tokens, self.loss]),
        }
        save_file(tensors, str(path), metadata=told)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GradientStatistics:
        """Read what :meth:`save` wrote.

        Raises:
            TangentFileError: a missing, truncated or foreign file.
        """
        told, tensors = read_tensors(Path(path), FORMAT)
        labels = tuple(Label(**one) for one in json.loads(told["labels"]))
        n_batches, n_tokens, loss = json.loads(told["counts"])
        moments = {
            name.removeprefix("moment."): one
            for name, one in tensors.items()
            if name.startswith("moment.")
        }
        return cls(
            labels, tensors["energies"], tensors["totals"], moments, n_batches, n_tokens, loss
        )


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a safetensors file of one format: what is told, and the tensors.

    Raises:
        TangentFileError: a missing, truncated or foreign file.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise TangentFileError(f"{path} can't be read ({error}); measure it again") from error
    if told.get("format") != kind:
        raise TangentFileError(
            f"{path} holds {told.get('format', 'something else')}, not {kind}; name another file"
        )
    return told, tensors


def empty(labels: tuple[Label, ...], n_controls: int) -> GradientStatistics:
    """Return the sums over no batches."""
    shape = (len(labels), len(KINDS))
    return GradientStatistics(
        labels,
        torch.zeros(*shape, 1 + n_controls, dtype=torch.float64),
        torch.zeros(*shape, dtype=torch.float64),
    )
