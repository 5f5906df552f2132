"""Gaussian clouds with exactly the mean and the covariance of a given one.

Of n Gaussian points, mean and covariance are all that tells of the law: given both, the centred
points are ``U S V^T`` with a U that is uniform over the matrices of orthonormal columns at right
angles to the vector of ones. So clouds with another such U are draws from the law of the given
cloud if that is Gaussian, in any number of dimensions and with no covariance to be estimated, and
the rank of any statistic among theirs is uniform. They show what the covariance alone gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.geometry.linalg import exact_math, one_thread, significant


def gaussian_twins(
    x: Float[Tensor, "n d"], count: int, seed: int
) -> Iterator[Float[Tensor, "n d"]]:
    """Yield ``count`` Gaussian clouds of the mean and covariance of ``x``, in float64."""
    x = x.detach().double()
    mean = x.mean(0)
    with exact_math(x.device), one_thread():
        _, sizes, directions = torch.linalg.svd(x - mean, full_matrices=False)
    used = significant(sizes, max(x.shape), x.dtype)
    used[len(x) - 1 :] = False
    axes = sizes[used, None] * directions[used]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield mean + uniform_frame(len(x), len(axes), generator).to(x.device) @ axes


def uniform_frame(n: int, r: int, generator: torch.Generator) -> Float[Tensor, "n r"]:
    """Return uniform orthonormal columns at right angles to the ones, for ``r`` up to ``n - 1``."""
    z = torch.randn(n, r, generator=generator, dtype=torch.float64)
    with one_thread():
        q, triangle = torch.linalg.qr(z - z.mean(0))
    return q * triangle.diagonal().sign()


def seed_of(seed: int, *names: object) -> int:
    """Return a seed of its own for what the names tell."""
    text = ":".join(map(str, (seed, *names)))
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")
