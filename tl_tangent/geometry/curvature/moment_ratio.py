"""The moment ratio eta_g, from a density or from data.

``eta_g = M_{m+1} / M_{m-1}`` with ``M_j = int g(t) t^j dt``, and to leading order it is the mean of
``t^2`` under the sampled law: neither m nor g has to be known. So a cloud that draws together is a
cloud whose eta_g goes to 0.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from tl_tangent.geometry.checks import check_points
from tl_tangent.geometry.curvature.local import Estimate
from tl_tangent.geometry.manifolds.density import RadialDensity


def eta_of_density(density: RadialDensity, dim: int) -> float:
    """Return eta_g in a manifold of dimension ``dim``.

    Raises:
        TangentValueError: if ``dim`` is not positive or the moments do not exist.
    """
    return density.eta(dim)


def eta_of_points(x: Float[Tensor, "n d"], centre: Float[Tensor, " d"]) -> Estimate:
    """Return the mean squared distance to the centre, and its standard error.

    The law's own value is ``(M_{m+1} + bbar M_{m+3}) / (M_{m-1} + bbar M_{m+1})`` to the next
    order, so it estimates eta_g with a bias of the order of ``eta_g^2``. The mean of the same
    points as a centre makes it smaller by the factor ``1 - 1/n``.

    Args:
        x: points, one a row.
        centre: ``[d]``.

    Raises:
        TangentValueError: if there are fewer than 2 points, NaN or infinite entries, or the centre
            has another width.
    """
    check_points(x, centre, least=2)
    squares = (x.detach().double() - centre.detach().double()).square().sum(1)
    return Estimate(float(squares.mean()), float(squares.std()) / len(x) ** 0.5)
