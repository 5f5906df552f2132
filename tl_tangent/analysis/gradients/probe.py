"""The subspaces that gradients are held against: Q_T and its matched normals, ready to multiply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentKeyError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.geometry.energy import check_room, stack_bases
from tl_tangent.geometry.linalg import full_dtype
from tl_tangent.hooks.gradients.weight import Weight, Weights


@dataclass(frozen=True, eq=False)
class Probe:
    """Q_T and its B normals at one site, their columns side by side.

    Attributes:
        subspace: Q_T.
        stacked: the columns.
        fingerprint: of the basis of Q_T, bit by bit, and of the seed of the normals.
    """

    subspace: TangentSubspace
    stacked: Float[Tensor, "d columns"]
    fingerprint: str

    @property
    def rank(self) -> int:
        return self.subspace.rank

    def on(self, like: Tensor) -> Float[Tensor, "d columns"]:
        """Return the columns on the device and in the dtype of a gradient, float32 at least."""
        return self.stacked.to(like.device, full_dtype(like.dtype))

    def tangent_on(self, like: Tensor) -> Float[Tensor, "d rank"]:
        """Return those of Q_T alone: what is mechanical has its limit in many normals exactly."""
        return self.on(like)[:, : self.rank]


def make_probes(
    weights: Weights, subspaces: Mapping[str, TangentSubspace], n_controls: int, seed: int
) -> dict[str, Probe]:
    """Stack Q_T and matched normals for every site that a weight is compared at.

    Raises:
        TangentKeyError: a site without a subspace.
        TangentValueError: a subspace of another width, one with heads, or no room for controls.
    """
    found: dict[str, Probe] = {}
    for weight in weights.weights:
        if weight.site not in subspaces:
            raise TangentKeyError(
                f"{weight.name} is compared at {weight.site}, where there is no subspace; there "
                f"are {', '.join(subspaces) or 'none'}. Fit one there, or leave the weight out by "
                "kinds= or layers=."
            )
        subspace = subspaces[weight.site]
        _check(weight, subspace, n_controls)
        if weight.site not in found:
            stacked = normal_stack(weight.site, subspace, n_controls, seed)
            found[weight.site] = Probe(subspace, stacked, _fingerprint(subspace, seed))
    return found


def normal_stack(
    site: str, subspace: TangentSubspace, n_controls: int, seed: int
) -> Float[Tensor, "d columns"]:
    """Return Q_T and the normals that the site and the seed decide, side by side, in float32.

    Raises:
        TangentValueError: no room for controls.
    """
    normals: list[TangentSubspace] = []
    if n_controls:  # none need no room
        alone = SubspaceSet({site: subspace})
        normals = [one[site] for one in alone.random_normals(n_controls, seed)]
    return stack_bases(subspace, normals, dtype=torch.float32)


def _fingerprint(subspace: TangentSubspace, seed: int) -> str:
    content = subspace.basis.detach().cpu().contiguous().numpy().tobytes()
    return sha256(content + str(seed).encode()).hexdigest()[:16]


def _check(weight: Weight, subspace: TangentSubspace, n_controls: int) -> None:
    if subspace.heads is not None or subspace.d != weight.d:
        raise TangentValueError(
            f"{weight.name} has {weight.d} directions on its {weight.side} side, and the subspace "
            f"at {weight.site} is {subspace!r}. Fit one subspace of that width."
        )
    if n_controls:
        check_room(subspace.d, subspace.rank)
