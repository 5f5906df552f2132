"""A subspace laid out for the kernels: low-rank products on one device, in float32 at least."""

from __future__ import annotations

import torch
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import TangentSubspace

# An edit of a part may leave that part by this share of its own norm, beyond rounding.
OFF_PART = 1e-3


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything narrower is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Frame:
    """Q, mu and Q^T mu of one subspace on one device, with the products that a splice needs.

    ``x`` is ``[..., d]`` (or ``[..., head, d_head]`` for a basis per head) and coordinates are
    ``[..., rank]``, both in the frame's dtype. No d x d matrix is ever formed.
    """

    def __init__(self, subspace: TangentSubspace, device: torch.device, dtype: torch.dtype):
        self.basis, self.mean = subspace.on(device, dtype)
        self.dtype = dtype
        self.per_head = self.basis.ndim == 3
        self.mean_coordinates = (self.mean[..., None, :] @ self.basis)[..., 0, :]

    def coordinates(self, x: Tensor) -> Tensor:
        """Q^T (x - mu)."""
        if self.per_head:
            return self.linear_coordinates(x) - self.mean_coordinates
        flat = torch.addmm(-self.mean_coordinates, x.reshape(-1, x.shape[-1]), self.basis)
        return flat.view(*x.shape[:-1], self.basis.shape[-1])

    def linear_coordinates(self, x: Tensor) -> Tensor:
        """Q^T x."""
        if self.per_head:
            return torch.einsum("...hd,hdr->...hr", x, self.basis)
        return x @ self.basis

    def lift(self, coordinates: Tensor) -> Tensor:
        """Q a."""
        if self.per_head:
            return torch.einsum("...hr,hdr->...hd", coordinates, self.basis)
        return coordinates @ self.basis.T

    def add_lifted(self, x: Tensor, coordinates: Tensor) -> Tensor:
        """x + Q a, in one product."""
        if self.per_head:
            return x + self.lift(coordinates)
        flat = torch.addmm(
            x.reshape(-1, x.shape[-1]), coordinates.reshape(-1, coordinates.shape[-1]), self.basis.T
        )
        return flat.view(x.shape)

    def normal(self, x: Tensor, coordinates: Tensor) -> Tensor:
        """x - mu - Q a."""
        return x - self.mean - self.lift(coordinates)

    def off_tangent(self, change: Tensor) -> Tensor:
        """P_N e: what a change has outside the tangent part."""
        return change - self.lift(self.linear_coordinates(change))

    def on_tangent(self, change: Tensor) -> Tensor:
        """P_T e."""
        return self.lift(self.linear_coordinates(change))


class Frames:
    """The frames of one subspace, made once for each device and dtype that it meets."""

    def __init__(self, subspace: TangentSubspace):
        self.subspace = subspace
        self._made: dict[tuple[torch.device, torch.dtype], Frame] = {}

    def at(self, x: Tensor, site: str) -> Frame:
        """The frame for activations like ``x``.

        Raises:
            TangentValueError: ``x`` has another width, or other heads, than the subspace.
        """
        self._check(x, site)
        key = (x.device, compute_dtype(x.dtype))
        if key not in self._made:
            with torch.inference_mode(False), torch.no_grad():
                self._made[key] = Frame(self.subspace, *key)
        return self._made[key]

    def _check(self, x: Tensor, site: str) -> None:
        wanted = self.subspace.mean.shape
        if x.shape[-len(wanted) :] != wanted:
            kind = "[head, d_head]" if self.subspace.heads else "[d]"
            raise TangentValueError(
                f"{site} holds {tuple(x.shape)} and its subspace is over {kind} = {tuple(wanted)}. "
                "Fit the subspace at this site of this model."
            )


def changed_rows(returned: Tensor, exact: Tensor) -> Tensor | None:
    """Rows [..., 1] in which ``returned`` differs, by value, from what was handed out; or None."""
    handed = exact.to(returned.dtype)
    differs = returned != handed
    if not bool(differs.any()):
        return None
    both_nan = (returned != returned) & (handed != handed)
    rows = (differs & ~both_nan).any(dim=-1, keepdim=True)
    return rows if bool(rows.any()) else None


def change_of(returned: Tensor | None, exact: Tensor) -> Tensor | None:
    """How hooks changed a part: [..., d] in full precision, 0 on untouched rows; None if nowhere.

    ``exact`` is the part in full precision, of which the hooks were handed a copy in the model's
    dtype; ``returned`` is None where no gradient arrived at all, which is a change to zero.
    """
    if returned is None:
        return -exact
    rows = changed_rows(returned, exact)
    if rows is None:
        return None
    return torch.where(rows, returned.to(exact.dtype) - exact, exact.new_zeros(()))


def check_on_part(change: Tensor, off: Tensor, part: Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse an edit of a part that leaves the part, row by row.

    Raises:
        TangentValueError: more than ``OFF_PART`` of the edit's norm lies outside the part, beyond
            the rounding of the dtype in which the hook saw it.
    """
    rounding = 4 * torch.finfo(dtype).eps * (part.norm(dim=-1) + change.norm(dim=-1))
    outside, size = off.norm(dim=-1), change.norm(dim=-1)
    bad = outside > OFF_PART * size + rounding
    if bool(bad.any()):
        worst = float((outside / size)[bad].max())
        site = name.rpartition(".")[0]
        raise TangentValueError(
            f"a hook on {name} left its part: {worst:.1%} of the edit's norm lies outside it, at "
            f"most {OFF_PART:.1%} may. To edit the whole activation, hook {site} itself."
        )
