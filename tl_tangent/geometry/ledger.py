"""Energies of tangent and normal parts as vectors are added to a stream, one write at a time.

Around a mean mu with basis Q a stream is ``x - mu = v + n``. A write f adds ``P_T f`` to v and
``P_N f`` to n, so ``||v + P_T f||^2 = ||v||^2 + ||P_T f||^2 + 2 <v, P_T f>``, and the same for n.
Everything is found from coordinates in Q and from inner products of whole vectors: low-rank
products, no projector. Several bases (Q_T and its controls) are followed side by side. What is
normal is the rest of the whole, so beside a massive activation all of it has to be in float64: see
:meth:`Frame.exact`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.geometry.linalg import orthonormal_columns


@dataclass(frozen=True)
class Frame:
    """Bases around one mean: the first is Q_T, the others its controls.

    Attributes:
        bases: ``[basis, d, rank]``, each orthonormal.
        mean: ``[d]``.
    """

    bases: Float[Tensor, "basis d rank"]
    mean: Float[Tensor, " d"]

    @classmethod
    def exact(cls, bases: Float[Tensor, "basis d rank"], mean: Float[Tensor, " d"]) -> Frame:
        """Return the frame in float64, each basis orthonormal to that precision.

        One in float32 is orthonormal to 1e-7, and that share of a tangent part would pass for
        normal, or be missing there.
        """
        return cls(orthonormal_columns(bases), mean.double())

    def coordinates(self, x: Float[Tensor, "row d"]) -> Float[Tensor, "basis row rank"]:
        """Return ``Q^T x`` for every basis; no mean is taken out."""
        bases, d, rank = self.bases.shape
        flat = self.bases.movedim(0, 1).reshape(d, bases * rank)
        return (x.to(flat.dtype) @ flat).unflatten(-1, (bases, rank)).movedim(-2, 0)


@dataclass(frozen=True)
class Entry:
    """What one write does to both parts.

    Attributes:
        energy: squared norm of the write's tangent and normal part.
        with_carried: inner product of each with that part of the stream as it was before.
    """

    energy: Float[Tensor, "part basis row"]
    with_carried: Float[Tensor, "part basis row"]


@dataclass(frozen=True)
class Position:
    """A stream around the mean of a frame, and its coordinates there."""

    frame: Frame
    centred: Float[Tensor, "row d"]
    coordinates: Float[Tensor, "basis row rank"]

    @classmethod
    def of(cls, frame: Frame, x: Float[Tensor, "row d"]) -> Position:
        centred = x.to(frame.mean.dtype) - frame.mean
        return cls(frame, centred, frame.coordinates(centred))

    def energy(self) -> Float[Tensor, "part basis row"]:
        """Squared norms of the tangent and the normal part."""
        return _energies(_squared(self.coordinates), _squared(self.centred))

    def add(self, write: Float[Tensor, "row d"]) -> tuple[Entry, Position]:
        """Add a write; returns what it does, and where the stream is then."""
        write = write.to(self.centred.dtype)
        a = self.frame.coordinates(write)
        entry = Entry(
            energy=_energies(_squared(a), _squared(write)),
            with_carried=_parts(_inner(self.coordinates, a), _inner(self.centred, write)),
        )
        return entry, Position(self.frame, self.centred + write, self.coordinates + a)

    def move(self, frame: Frame) -> tuple[dict[str, Entry], Position]:
        """Look at the same stream in another frame: what the new subspace and the new mean change.

        With ``y = x - mu`` and ``u = P' y - P y``, the tangent part gains u and the normal part
        loses it; the norm of u comes from the cosines ``Q'^T Q`` between the two bases. Then the
        mean moves by delta: the parts change by ``-P' delta`` and ``-(delta - P' delta)``.
        """
        old, new = self.coordinates, frame.coordinates(self.centred)
        cosines = frame.bases.mT @ self.frame.bases  # [basis, rank, rank]
        both = _inner(new, old @ cosines.mT)  # <P' y, P y>
        turned = (_squared(new) + _squared(old) - 2 * both).clamp(min=0)
        subspace = Entry(
            energy=torch.stack([turned, turned]),
            with_carried=torch.stack([both - _squared(old), both - _squared(new)]),
        )
        delta = (frame.mean - self.frame.mean)[None]
        shift = frame.coordinates(delta)
        mean = Entry(
            energy=_energies(_squared(shift), _squared(delta)).expand(2, *new.shape[:2]),
            with_carried=-_parts(_inner(new, shift), _inner(self.centred, delta)),
        )
        return {"subspace": subspace, "mean": mean}, Position(
            frame, self.centred - delta, new - shift
        )

    def with_part(self, other: Position) -> Float[Tensor, "part basis row"]:
        """Inner products of the tangent parts, and of the normal parts, of two positions."""
        if other.frame is self.frame:
            return _parts(
                _inner(self.coordinates, other.coordinates), _inner(self.centred, other.centred)
            )
        cosines = other.frame.bases.mT @ self.frame.bases
        tangent = _inner(other.coordinates, self.coordinates @ cosines.mT)
        crossed = _inner(self.frame.coordinates(other.centred), self.coordinates)
        crossed = crossed + _inner(other.frame.coordinates(self.centred), other.coordinates)
        return torch.stack([tangent, _inner(self.centred, other.centred) - crossed + tangent])


def _squared(x: Float[Tensor, "*axes n"]) -> Float[Tensor, "*axes"]:
    return x.square().sum(-1)


def _inner(x: Float[Tensor, "*axes n"], y: Float[Tensor, "*_ n"]) -> Float[Tensor, "*axes"]:
    return (x * y).sum(-1)


def _parts(
    tangent: Float[Tensor, "basis row"], whole: Float[Tensor, " row"]
) -> Float[Tensor, "part basis row"]:
    """Tangent and normal part of something that adds up over the two."""
    return torch.stack([tangent, whole - tangent])


def _energies(
    tangent: Float[Tensor, "basis row"], whole: Float[Tensor, " row"]
) -> Float[Tensor, "part basis row"]:
    """The same of squared norms, of which rounding can leave less than none."""
    return _parts(tangent, whole).clamp(min=0)
