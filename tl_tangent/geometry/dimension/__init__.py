"""How many dimensions a cloud has, and how much room it takes in them."""

from tl_tangent.geometry.dimension.entropy import (
    Entropy,
    gaussian_entropy,
    gaussian_entropy_of,
    neighbour_entropy,
    spectral_entropy,
)
from tl_tangent.geometry.dimension.levina_bickel import LevinaBickel, levina_bickel
from tl_tangent.geometry.dimension.local_pca import (
    LocalPca,
    local_dimension,
    local_pca,
    local_pca_dimension,
)
from tl_tangent.geometry.dimension.multiscale import MultiscalePca, ball_radii, multiscale_pca
from tl_tangent.geometry.dimension.neighbours import (
    Neighbours,
    distinct_rows,
    nearest_neighbours,
)
from tl_tangent.geometry.dimension.two_nn import TwoNN, two_nn

__all__ = [
    "Entropy",
    "LevinaBickel",
    "LocalPca",
    "MultiscalePca",
    "Neighbours",
    "TwoNN",
    "ball_radii",
    "distinct_rows",
    "gaussian_entropy",
    "gaussian_entropy_of",
    "levina_bickel",
    "local_dimension",
    "local_pca",
    "local_pca_dimension",
    "multiscale_pca",
    "nearest_neighbours",
    "neighbour_entropy",
    "spectral_entropy",
    "two_nn",
]
