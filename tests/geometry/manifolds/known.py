"""One manifold of each kind."""

from __future__ import annotations

import torch

from tl_tangent.geometry.manifolds import (
    CubicGraph,
    Cylinder,
    Ellipsoid,
    FlatTorus,
    Helix,
    Linear,
    Manifold,
    Paraboloid,
    QuadraticGraph,
    RevolutionTorus,
    Sphere,
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symmetric(forms: torch.Tensor) -> torch.Tensor:
    """Average over all orders of the axes after the first."""
    if forms.ndim == 3:
        return (forms + forms.mT) / 2
    orders = ((1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1))
    return torch.stack([forms.permute(0, *order) for order in orders]).mean(0)


FORMS, CUBICS = symmetric(randn(3, 2, 2)), symmetric(randn(3, 2, 2, 2, seed=1))
MANIFOLDS: list[Manifold] = [
    Linear(2),
    Sphere(1, 0.8),
    Sphere(2, 1.3),
    Cylinder(0.9),
    FlatTorus((1.0, 0.6)),
    RevolutionTorus(1.2, 0.7),
    Ellipsoid((1.0, 1.6), 1.2),
    Ellipsoid((1.5, 0.9), 0.7),
    Helix(0.8, 0.3),
    Paraboloid((1.5, -0.5)),
    QuadraticGraph(FORMS),
    CubicGraph(FORMS, CUBICS),
]
LARGER: list[Manifold] = [
    Linear(5),
    Sphere(4, 1.3),
    Cylinder(0.9, dim=4),
    FlatTorus((1.0, 0.6, 0.8)),
    Ellipsoid((1.0, 1.6, 0.7, 1.1), 1.2),
    Paraboloid((1.5, -0.5, 0.3)),
    QuadraticGraph(symmetric(randn(2, 4, 4))),
    QuadraticGraph(symmetric(randn(6, 3, 3))),
    CubicGraph(symmetric(randn(2, 3, 3)), symmetric(randn(2, 3, 3, 3, seed=1))),
]
