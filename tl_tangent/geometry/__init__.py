"""Geometry of activations: tensors in, tensors out, no model library anywhere."""

from tl_tangent.geometry.subspace import TangentSubspace

__all__ = ["TangentSubspace"]
