"""Sampled manifolds whose tangent space, curvature and distances are known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.linalg import orthonormal_columns
from tl_tangent.geometry.manifolds.base import Manifold
from tl_tangent.geometry.manifolds.density import RadialDensity
from tl_tangent.geometry.manifolds.rejection import Measure, draw


@dataclass(frozen=True, eq=False)
class ManifoldSample:
    """Points around a base point of a manifold in R^d, with the answers; float64.

    ``x - mu = v + n`` splits into the tangent and the normal part at the base point. With noise, n
    also holds what the noise adds outside of the manifold's own normal directions.

    Attributes:
        x: the points, with noise where there is any.
        mu: the base point, on the manifold.
        tangent: orthonormal basis T of the tangent space at mu.
        normal: orthonormal basis N of the manifold's normal directions, as many as it has by
            itself; the other d - D directions of R^d it never enters.
        second_form: II at mu in these bases, the N coordinates of ``II(T_i, T_j)``.
        r: distances to mu in the manifold, of the points without noise; None where the manifold has
            no closed form for them. Never a numerical approximation.
        u: directions in which the geodesics from mu to the points start, unit vectors in the
            coordinates of ``tangent``; None where r is.
        noise: standard deviation of the Gaussian noise in each of the d coordinates.
        acceptance: share of proposals that the sampler accepted.
        manifold, density, measure, seed: what was sampled.
    """

    x: Float[Tensor, "n d"]
    mu: Float[Tensor, " d"]
    tangent: Float[Tensor, "d m"]
    normal: Float[Tensor, "d codim"]
    second_form: Float[Tensor, "m m codim"]
    r: Float[Tensor, " n"] | None
    u: Float[Tensor, "n m"] | None
    noise: int | float
    acceptance: float
    manifold: Manifold
    density: RadialDensity
    measure: Measure
    seed: int
    _clean: Float[Tensor, "n d"] = field(repr=False)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def v(self) -> Float[Tensor, "n d"]:
        """Tangent parts, as vectors of R^d."""
        return (self.x - self.mu) @ self.tangent @ self.tangent.mT

    @property
    def n(self) -> Float[Tensor, "n d"]:
        """Normal parts, as vectors of R^d."""
        return self.x - self.mu - self.v

    @property
    def t(self) -> Float[Tensor, " n"]:
        """Chords, the distances to mu in R^d."""
        return (self.x - self.mu).norm(dim=1)

    @property
    def clean(self) -> ManifoldSample:
        """The same points without their noise."""
        return replace(self, x=self._clean, noise=0.0)

    def __repr__(self) -> str:
        mean_square = float(self.t.square().mean())
        law = "" if self.measure == "volume" else " of its chart"
        return (
            f"ManifoldSample({len(self)} points of {self.manifold} in R^{self.x.shape[1]}, "
            f"{self.density}{law}, noise {self.noise:g}, mean squared chord {mean_square:.4g}, "
            f"{self.acceptance:.0%} accepted, r {'known' if self.r is not None else 'None'})"
        )


def sample(
    manifold: Manifold,
    density: RadialDensity,
    n: int,
    *,
    d: int | None = None,
    noise: int | float = 0.0,
    seed: int = 0,
    measure: Measure = "volume",
) -> ManifoldSample:
    """Draw ``n`` independent points around the base point of a manifold, turned into R^d.

    The law is exact: rejection with the volume factor, no approximation on a grid. A random
    rotation and a random offset, both of the seed alone, place the manifold in R^d.

    Args:
        manifold: one of this package, or your own that keeps to the
            :class:`~tl_tangent.geometry.manifolds.base.Manifold` protocol.
        density: g(t) of the chord t to the base point.
        d: width; by default the smallest that holds the manifold.
        noise: standard deviation in each of the d coordinates; the points below it do not change.
        measure: ``"volume"``: g is a density with respect to the Riemannian volume. ``"chart"``:
            one of |w| with respect to dw; on a graph with a Gaussian density that makes the tangent
            coordinates exactly Gaussian.

    Raises:
        TangentValueError: if ``n`` is not positive, R^d is too small, the noise is negative, the
            density is too wide for a closed manifold, or it cannot be drawn exactly.
    """
    width = manifold.ambient if d is None else d
    if n < 1:
        raise TangentValueError(f"n must be 1 or more, got {n}")
    if width < manifold.ambient:
        raise TangentValueError(
            f"{manifold} needs {manifold.ambient} dimensions or more, got d={width}"
        )
    if not 0 <= noise < float("inf"):
        raise TangentValueError(f"noise must be finite and not negative, got {noise}")
    if measure not in ("volume", "chart"):
        raise TangentValueError(f"measure is 'volume' or 'chart', got {measure!r}")
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(width, manifold.ambient + 1, generator=generator, dtype=torch.float64)
    frame, mu = orthonormal_columns(gaussian[:, 1:]), gaussian[:, 0]
    w, acceptance = draw(manifold, density, n, generator=generator, measure=measure)
    clean = mu + manifold.point(w) @ frame.mT
    shift = torch.randn(n, width, generator=generator, dtype=torch.float64) if noise else 0.0
    r = w.norm(dim=1) if manifold.geodesic else None
    return ManifoldSample(
        x=clean + noise * shift,
        mu=mu,
        tangent=frame[:, : manifold.dim],
        normal=frame[:, manifold.dim :],
        second_form=manifold.second_fundamental_form,
        r=r,
        u=None if r is None else w / r[:, None],
        noise=noise,
        acceptance=acceptance,
        manifold=manifold,
        density=density,
        measure=measure,
        seed=seed,
        _clean=clean,
    )
