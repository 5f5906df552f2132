"""Small pieces of linear algebra that the geometry modules share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def ordinary(
    x: Float[Tensor, "*shape"], dtype: torch.dtype | None = None
) -> Float[Tensor, "*shape"]:
    """Copy ``x`` to a detached, contiguous tensor that is never an inference tensor."""
    with torch.inference_mode(False):
        return x.detach().to(dtype or x.dtype).clone(memory_format=torch.contiguous_format)


def full_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that ``dtype`` is computed in: float64 for itself, else float32."""
    return torch.promote_types(dtype, torch.float32)


def canonical_signs(basis: Float[Tensor, "*head d rank"]) -> Float[Tensor, "*head d rank"]:
    """Flip columns so that the entry of largest magnitude in each is positive."""
    peak = basis.gather(-2, basis.abs().argmax(-2, keepdim=True))
    return torch.where(peak < 0, -basis, basis)


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    """Give torch this number of threads, on which the last bits of its sums depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Run small decompositions on one thread.

    A thin QR gains nothing from a second one, and on a machine whose cores are shared it waits for
    it a thousand times longer than it computes.
    """
    return on_threads(1)


def orthonormal_columns(matrix: Float[Tensor, "*head d rank"]) -> Float[Tensor, "*head d rank"]:
    """Return an orthonormal basis of the columns' span, in float64 and canonical in sign."""
    with one_thread():
        return canonical_signs(torch.linalg.qr(matrix.double())[0])


def orthonormality_error(basis: Float[Tensor, "*head d rank"]) -> float:
    """Return the largest absolute entry of ``Q^T Q - I``, computed in float64."""
    basis = basis.double()
    identity = torch.eye(basis.shape[-1], device=basis.device, dtype=basis.dtype)
    return float((basis.mT @ basis - identity).abs().max())


def significant(
    values: Float[Tensor, "*head n"], size: int, dtype: torch.dtype
) -> Bool[Tensor, "*head n"]:
    """Mark the singular values above ``max * size * eps``, the usual numerical-rank threshold."""
    floor = values.amax(-1, keepdim=True) * size * torch.finfo(dtype).eps
    return values > floor


def numerical_rank(matrix: Float[Tensor, "*head d k"]) -> int:
    """Return the numerical rank of ``matrix`` at its own precision (the smallest over heads)."""
    with one_thread():
        values = torch.linalg.svdvals(matrix.double())
    kept = significant(values, max(matrix.shape[-2:]), full_dtype(matrix.dtype))
    return int(kept.sum(-1).min())


@contextmanager
def exact_math(device: torch.device) -> Iterator[None]:
    """Compute without autograd, autocast or inference tensors, whatever surrounds the call."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
