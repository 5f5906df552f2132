"""The value everything else works with: a mean and a low-rank orthonormal basis around it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentFileError, TangentKeyError, TangentValueError
from tl_tangent.geometry import angles
from tl_tangent.geometry.checks import (
    check_activations,
    check_basis,
    check_full_rank,
    check_mean,
    check_orthonormal,
    check_spectrum,
)
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.linalg import full_dtype, ordinary, orthonormal_columns
from tl_tangent.geometry.subspace_io import Record, read_records, write_records

TENSORS = ("basis", "mean", "spectrum")
LABELS = ("site", "model", "method", "explained", "positions", "n_tokens", "metadata")


@dataclass(frozen=True, eq=False, init=False, repr=False)
class TangentSubspace:
    """A mean and an orthonormal basis Q that split ``x = mean + v + n``, ``v = Q Q^T (x - mean)``.

    With a basis ``[head, d_head, rank]`` every head has a subspace of its own, and ``x`` is
    ``[..., head, d_head]``. Whatever the dtype of ``x``, the split is computed in float32 at least
    and returned in the dtype and on the device of ``x``.

    Attributes:
        basis: orthonormal columns, leading directions first.
        mean: the point around which ``x`` is split.
        site: name of the hook point it was fitted at.
        model: name of the model it was fitted on.
        method: how it was found, such as ``"pca"``.
        spectrum: variances ``[n]`` or ``[head, n]`` in squared activation units, first those along
            the basis (descending), then those of further known directions (descending).
        explained: share of the variance inside the subspace, in [0, 1] (averaged over heads).
        head_explained: the same for each head.
        positions: JSON-able description of the positions that entered the fit.
        n_tokens: number of rows that entered the fit.
    """

    basis: Float[Tensor, "*head d rank"]
    mean: Float[Tensor, "*head d"]
    site: str | None
    model: str | None
    method: str | None
    spectrum: Float[Tensor, "*head n"] | None
    explained: float | None
    head_explained: tuple[float, ...] | None
    positions: Any
    n_tokens: int | None
    _metadata: dict[str, Any]
    _placed: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]]

    def __init__(
        self,
        basis: Float[Tensor, "*head d rank"],
        mean: Float[Tensor, "*head d"] | None = None,
        *,
        site: str | None = None,
        model: str | None = None,
        method: str | None = None,
        spectrum: Float[Tensor, "*head n"] | None = None,
        explained: int | float | Sequence[float] | None = None,
        positions: Any = None,
        n_tokens: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        orthonormalize: bool = False,
    ) -> None:
        """Check the parts and store them as ordinary float32 (or given float64) tensors.

        Args:
            basis: orthonormal columns; any columns of full rank with ``orthonormalize=True``.
            mean: zeros if not given.
            metadata: anything JSON-able that should travel with the subspace.
            orthonormalize: make the columns orthonormal by QR, canonical in sign.

        Raises:
            TangentValueError: if a part is not finite, has the wrong shape or the basis is not
                orthonormal to 1e-4.
        """
        check_basis(basis)
        dtype = full_dtype(basis.dtype)
        if orthonormalize:
            check_full_rank(basis)
            basis = orthonormal_columns(basis)
        check_orthonormal(basis)
        if mean is None:
            mean = torch.zeros_like(basis[..., 0])
        check_mean(mean, basis)
        if spectrum is not None:
            check_spectrum(spectrum, basis)
            spectrum = ordinary(spectrum, full_dtype(spectrum.dtype))
        shares = (explained,) if isinstance(explained, int | float) else explained
        self._store(
            basis=ordinary(basis, dtype),
            mean=ordinary(mean.to(basis.device), dtype),
            site=site,
            model=model,
            method=method,
            spectrum=spectrum,
            explained=None if shares is None else sum(shares) / len(shares),
            head_explained=tuple(shares) if shares is not None and basis.ndim == 3 else None,
            positions=positions,
            n_tokens=n_tokens,
            _metadata=dict(metadata or {}),
            _placed={},
        )

    def _store(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def d(self) -> int:
        """Width of the activations (``d_head`` where each head has its own basis)."""
        return self.basis.shape[-2]

    @property
    def rank(self) -> int:
        """Number of tangent directions."""
        return self.basis.shape[-1]

    @property
    def heads(self) -> int | None:
        """Number of heads with a basis of their own, or None for a single basis."""
        return self.basis.shape[0] if self.basis.ndim == 3 else None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Read-only view of the free metadata."""
        return MappingProxyType(self._metadata)

    def on(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "*head d rank"], Float[Tensor, "*head d"]]:
        """Return basis and mean on ``device`` in ``dtype``, copied there once and kept."""
        if self.basis.device == device and self.basis.dtype == dtype:
            return self.basis, self.mean
        if (device, dtype) not in self._placed:
            self._placed[device, dtype] = (
                ordinary(self.basis.to(device), dtype),
                ordinary(self.mean.to(device), dtype),
            )
        return self._placed[device, dtype]

    def coordinates(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... rank"]:
        """Return ``Q^T (x - mean)``.

        Raises:
            TangentValueError: if the last axes of ``x`` are not those of the basis.
        """
        basis, centered = self._centered(x)
        return _into(basis, centered).to(x.dtype)

    def tangent(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Return the tangent part ``v = Q Q^T (x - mean)``; raises as :meth:`coordinates`."""
        basis, centered = self._centered(x)
        return _project(basis, centered).to(x.dtype)

    def normal(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Return the normal part ``n = x - mean - v``; raises as :meth:`coordinates`."""
        return self.split(x)[1]

    def split(
        self, x: Float[Tensor, "... d"]
    ) -> tuple[Float[Tensor, "... d"], Float[Tensor, "... d"]]:
        """Return ``(v, n)`` with ``x = mean + v + n``; raises as :meth:`coordinates`."""
        basis, centered = self._centered(x)
        tangent = _project(basis, centered)
        return tangent.to(x.dtype), (centered - tangent).to(x.dtype)

    def _centered(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the basis where ``x`` is, and ``x - mean`` in full precision."""
        check_activations(x, tuple(self.mean.shape))
        basis, mean = self.on(x.device, full_dtype(x.dtype))
        return basis, x.to(mean.dtype) - mean

    def random_normals(self, n: int, seed: int) -> list[TangentSubspace]:
        """Draw ``n`` matched controls: Haar subspaces of the same rank in the normal space.

        Each is the span of a Gaussian matrix projected off the basis, with the same mean, and
        orthogonal to the basis to float precision. The first draws do not depend on ``n``.

        Raises:
            TangentValueError: if ``2 * rank > d``, when the normal space has no room for one.
        """
        if 2 * self.rank > self.d:
            raise TangentValueError(
                f"a matched control of rank {self.rank} needs 2 * rank <= d, but d is {self.d}: "
                f"truncate the subspace to rank {self.d // 2} or less"
            )
        generator = torch.Generator().manual_seed(seed)
        basis = orthonormal_columns(self.basis.cpu())
        return [
            self.replace(
                basis=angles.haar_normal(basis, generator).to(self.basis),
                method="random_normal",
                spectrum=None,
                explained=None,
                metadata={"seed": seed, "draw": draw, "control_of": self.method},
            )
            for draw in range(n)
        ]

    def principal_angles(self, other: TangentSubspace) -> Float[Tensor, "*head angle"]:
        """Return the ``min(rank, other.rank)`` principal angles in radians, ascending, in float64.

        Tiny angles are accurate too (Knyazev & Argentati 2002: sines below pi/4, cosines above).
        One basis for all heads is compared with each basis of a per-head subspace.

        Raises:
            TangentValueError: if the widths or the numbers of heads differ.
        """
        self._check_comparable(other)
        return angles.principal_angles(self.basis, other.basis.to(self.basis.device))

    def overlap(self, other: TangentSubspace) -> Float[Tensor, "*head"]:
        """Return ``||Q1^T Q2||_F^2 / min(rank)``, the mean squared cosine, in [0, 1].

        Raises:
            TangentValueError: if the widths or the numbers of heads differ.
        """
        self._check_comparable(other)
        return angles.overlap(self.basis, other.basis.to(self.basis.device))

    def _check_comparable(self, other: TangentSubspace) -> None:
        per_head = {heads for heads in (self.heads, other.heads) if heads is not None}
        if self.d != other.d or len(per_head) > 1:
            raise TangentValueError(f"cannot compare {self!r} with {other!r}: shapes differ")

    def truncate(self, rank: int) -> TangentSubspace:
        """Keep the ``rank`` leading directions.

        Raises:
            TangentValueError: if ``rank`` is not between 1 and the present rank.
        """
        if not 1 <= rank <= self.rank:
            raise TangentValueError(f"rank must be from 1 to {self.rank} here, got {rank}")
        return self.replace(basis=self.basis[..., :rank], explained=self._shares_of_leading(rank))

    def _shares_of_leading(self, rank: int) -> list[float] | None:
        if self.explained is None or self.spectrum is None:
            return None
        inside = self.spectrum[..., : self.rank].double()
        kept = inside[..., :rank].sum(-1) / inside.sum(-1)
        return (kept * torch.tensor(self._shares(), device=kept.device)).reshape(-1).tolist()

    def head(self, index: int) -> TangentSubspace:
        """Return the subspace of one head as a single basis.

        Raises:
            TangentValueError: if there is one basis for all heads.
            TangentKeyError: if there is no such head.
        """
        if self.heads is None:
            raise TangentValueError(f"{self!r} has one basis for all heads: use it as it is")
        if not 0 <= index < self.heads:
            raise TangentKeyError(f"no head {index} here: heads are 0 to {self.heads - 1}")
        return self.replace(
            basis=self.basis[index],
            mean=self.mean[index],
            spectrum=None if self.spectrum is None else self.spectrum[index],
            explained=None if self.head_explained is None else self.head_explained[index],
            metadata={**self._metadata, "head": index},
        )

    def replace(self, **changes: Any) -> TangentSubspace:
        """Return a copy with some constructor arguments changed, checked anew."""
        own = {name: getattr(self, name) for name in (*TENSORS, *LABELS)}
        return type(self)(**{**own, "explained": self._shares(), **changes})

    def _shares(self) -> float | tuple[float, ...] | None:
        return self.explained if self.head_explained is None else self.head_explained

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the subspace to one safetensors file, atomically.

        Raises:
            TangentValueError: if metadata or positions are not JSON-able.
        """
        write_records(path, [self.to_record()], kind="TangentSubspace")

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, model: str | None = None, d: int | None = None
    ) -> TangentSubspace:
        """Read a subspace, optionally checking the model name and width it is meant for.

        Raises:
            FileNotFoundError: if there is no such file.
            TangentFileError: if the file is truncated, altered or foreign, or if it was fitted on
                another model or width.
        """
        (record,) = read_records(path, kind="TangentSubspace")
        subspace = cls.from_record(record, path)
        subspace.check_fits(path, model, d)
        return subspace

    def to_record(self) -> Record:
        """Return the tensors and JSON-able fields that a file holds."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        labels = {name: getattr(self, name) for name in LABELS}
        return Record(
            tensors={name: tensor for name, tensor in tensors.items() if tensor is not None},
            fields={**labels, "explained": self._shares(), "metadata": self._metadata},
        )

    @classmethod
    def from_record(cls, record: Record, path: str | os.PathLike[str]) -> TangentSubspace:
        """Rebuild a subspace from what was read at ``path``.

        Raises:
            TangentFileError: if the parts do not make a valid subspace.
        """
        values: dict[str, Any] = {**record.fields, **record.tensors}
        try:
            return cls(**values)
        except (TypeError, TangentValueError) as error:
            raise TangentFileError(f"{path} does not hold a valid subspace: {error}") from error

    def check_fits(self, path: object, model: str | None, d: int | None) -> None:
        """Refuse a subspace that was fitted on another model or width.

        Raises:
            TangentFileError: says what differs.
        """
        if model is not None and self.model is not None and model != self.model:
            raise TangentFileError(f"{path} was fitted on model {self.model!r}, not on {model!r}")
        if d is not None and d != self.d:
            raise TangentFileError(f"{path} has width d={self.d}, but d={d} is wanted here")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_placed": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> TangentSubspace:
        return self  # a value: copies of a model share it

    def __repr__(self) -> str:
        parts = [f"{key}={value}" for key, value in self.summary().items() if value is not None]
        return f"TangentSubspace({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return html_table([self.summary()], caption="TangentSubspace")

    def summary(self) -> dict[str, Any]:
        """Return what identifies the subspace as one row: site, model, sizes, method, share."""
        return {
            "site": self.site,
            "model": self.model,
            "method": self.method,
            "heads": self.heads,
            "d": self.d,
            "rank": self.rank,
            "explained": None if self.explained is None else round(self.explained, 4),
            "n_tokens": self.n_tokens,
            "positions": self.positions,
        }


def _into(basis: Tensor, centered: Tensor) -> Tensor:
    with torch.autocast(centered.device.type, enabled=False):
        if basis.ndim == 2:
            return centered @ basis
        return torch.einsum("...hd,hdr->...hr", centered, basis)


def _project(basis: Tensor, centered: Tensor) -> Tensor:
    return _into(basis.mT, _into(basis, centered))
