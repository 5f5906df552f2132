"""Geometry of activations: tensors in, tensors out, no model library anywhere."""

from tl_tangent.geometry.covariance import (
    effective_rank,
    effective_rank_from_eigenvalues,
    isoscore_from_covariance,
    isoscore_from_eigenvalues,
    participation_ratio,
    participation_ratio_from_eigenvalues,
    remove_directions,
    removed_covariance_participation,
    stable_rank,
)
from tl_tangent.geometry.dictionaries import subspace_from_dictionary
from tl_tangent.geometry.extractors import EXTRACTORS
from tl_tangent.geometry.fitting import SubspaceFitter
from tl_tangent.geometry.isotropy import isoscore, isoscore_star, mean_cosine, shrink_covariance
from tl_tangent.geometry.rank import choose_rank
from tl_tangent.geometry.removal import RemovalEffect, cloud_removal, removal
from tl_tangent.geometry.subspace import TangentSubspace
from tl_tangent.geometry.subspace_set import SubspaceSet

__all__ = [
    "EXTRACTORS",
    "RemovalEffect",
    "SubspaceFitter",
    "SubspaceSet",
    "TangentSubspace",
    "choose_rank",
    "cloud_removal",
    "effective_rank",
    "effective_rank_from_eigenvalues",
    "isoscore",
    "isoscore_from_covariance",
    "isoscore_from_eigenvalues",
    "isoscore_star",
    "mean_cosine",
    "participation_ratio",
    "participation_ratio_from_eigenvalues",
    "removal",
    "remove_directions",
    "removed_covariance_participation",
    "shrink_covariance",
    "stable_rank",
    "subspace_from_dictionary",
]
