"""Manifolds whose tangent spaces, curvatures and laws are known, and exact samples of them."""

from tl_tangent.geometry.manifolds.base import Manifold
from tl_tangent.geometry.manifolds.closed import Ellipsoid, Sphere
from tl_tangent.geometry.manifolds.density import (
    CustomDensity,
    Exponential,
    Gaussian,
    RadialDensity,
    StudentT,
    Uniform,
)
from tl_tangent.geometry.manifolds.flat import Cylinder, FlatTorus, Linear
from tl_tangent.geometry.manifolds.graphs import CubicGraph, Paraboloid, QuadraticGraph
from tl_tangent.geometry.manifolds.helix import Helix
from tl_tangent.geometry.manifolds.revolution import RevolutionTorus
from tl_tangent.geometry.manifolds.sample import ManifoldSample, sample

__all__ = [
    "CubicGraph",
    "CustomDensity",
    "Cylinder",
    "Ellipsoid",
    "Exponential",
    "FlatTorus",
    "Gaussian",
    "Helix",
    "Linear",
    "Manifold",
    "ManifoldSample",
    "Paraboloid",
    "QuadraticGraph",
    "RadialDensity",
    "RevolutionTorus",
    "Sphere",
    "StudentT",
    "Uniform",
    "sample",
]
