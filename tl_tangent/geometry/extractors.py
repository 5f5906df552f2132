"""Ways from activations to directions: each returns an orthonormal basis, leading direction first.

An extractor sees :class:`Evidence` (moments and, if it needs one, a sample of rows) and returns a
:class:`Directions`. ``pca`` and ``svd`` read the moments alone. The others find a dictionary, whose
span is orthonormalised and turned so that its directions have descending, uncorrelated variances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.dictionaries import Directions, ordered
from tl_tangent.geometry.eigen import Eigen
from tl_tangent.geometry.factorization import semi_nmf
from tl_tangent.geometry.linalg import canonical_signs

MAX_ITER = 500


@dataclass(frozen=True, eq=False)
class Evidence:
    """What an extractor may look at, all of it around one centre.

    Attributes:
        eigen: decomposed second moments.
        rows: a sample of rows, or None where the method reads moments alone.
        seed: seed of whatever the method draws.
        dictionary: the user's atoms, for the method ``"dictionary"``.
    """

    eigen: Eigen
    rows: Float[Tensor, "row d"] | None = None
    seed: int = 0
    dictionary: Float[Tensor, "atom d"] | None = None


def pca(evidence: Evidence, rank: int) -> Directions:
    """Return the leading eigenvectors of the second moments, with the whole spectrum."""
    basis = canonical_signs(evidence.eigen.vectors[:, :rank])
    return Directions(basis, evidence.eigen.values)


def svd(evidence: Evidence, rank: int) -> Directions:
    """Return the leading right singular vectors of the rows: :func:`pca` of uncentred moments."""
    return pca(evidence, rank)


def ica(evidence: Evidence, rank: int) -> Directions:
    """Return the span of the FastICA sources, whitened in the leading ``rank`` eigenvectors.

    Its span is that of :func:`pca` whatever the sources are (Hyvarinen & Oja 2000): sources are
    axes within the span, and they differ from the principal ones, but a basis is orthonormal.
    """
    from sklearn.decomposition import FastICA

    plane = evidence.eigen.vectors[:, :rank]
    coordinates = (_rows(evidence) @ plane).cpu().numpy()
    model = FastICA(whiten="unit-variance", max_iter=MAX_ITER, random_state=evidence.seed)
    mixing = torch.as_tensor(model.fit(coordinates).mixing_).to(plane)
    return ordered(plane @ mixing, evidence.eigen, rank)


def nmf(evidence: Evidence, rank: int) -> Directions:
    """Return the span of the atoms of a nonnegative factorisation (Lee & Seung 1999).

    Raises:
        TangentValueError: if the sampled rows have negative entries.
    """
    from sklearn.decomposition import NMF

    rows = _rows(evidence)
    if bool((rows < 0).any()):
        raise TangentValueError(
            f"nmf needs nonnegative activations, and {float((rows < 0).float().mean()):.1%} of "
            "the sampled entries here are negative: use method='seminmf'"
        )
    model = NMF(n_components=rank, init="nndsvda", max_iter=MAX_ITER, random_state=evidence.seed)
    model.fit(rows.cpu().numpy())
    return ordered(torch.as_tensor(model.components_.T).to(rows), evidence.eigen, rank)


def seminmf(evidence: Evidence, rank: int) -> Directions:
    """Return the span of the free dictionary of a semi-nonnegative factorisation (Ding 2010)."""
    _, dictionary = semi_nmf(_rows(evidence), rank, seed=evidence.seed, max_iter=MAX_ITER)
    return ordered(dictionary.mT, evidence.eigen, rank)


def kmeans(evidence: Evidence, rank: int) -> Directions:
    """Return the span of the offsets of ``rank + 1`` k-means centroids from the mean.

    The offsets of k clusters, weighted by size, add up to zero: one cluster more than directions.
    """
    from sklearn.cluster import KMeans

    rows = _rows(evidence)
    rows = rows - rows.mean(0)
    model = KMeans(n_clusters=rank + 1, n_init=4, random_state=evidence.seed)
    model.fit(rows.cpu().numpy())
    return ordered(torch.as_tensor(model.cluster_centers_.T).to(rows), evidence.eigen, rank)


def dictionary(evidence: Evidence, rank: int) -> Directions:
    """Return the leading directions, by captured variance, of the span of the user's atoms."""
    assert evidence.dictionary is not None
    atoms = evidence.dictionary.to(evidence.eigen.vectors)
    return ordered(atoms.mT, evidence.eigen, rank)


Extractor = Callable[[Evidence, int], Directions]

EXTRACTORS: Mapping[str, Extractor] = {
    "pca": pca,
    "svd": svd,
    "ica": ica,
    "nmf": nmf,
    "seminmf": seminmf,
    "kmeans": kmeans,
    "dictionary": dictionary,
}
UNCENTERED = frozenset({"svd", "nmf", "seminmf"})
"""Methods that see activations around zero, as a factorisation ``x ~ Z D`` does."""
SAMPLED = frozenset({"ica", "nmf", "seminmf", "kmeans"})
"""Methods that need a sample of rows beside the moments."""


def _rows(evidence: Evidence) -> Tensor:
    assert evidence.rows is not None
    return evidence.rows
