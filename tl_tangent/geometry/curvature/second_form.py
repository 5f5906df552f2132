"""What follows from the second fundamental form II at a point: mean, Ricci and scalar curvature.

II is ``[m, m, c]``: the normal coordinates of ``II(e_i, e_j)`` for an orthonormal tangent basis.
Nothing here depends on the normal basis, so that the c coordinates may as well be those of R^d.
H is the trace of II, not divided by m.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_finite

SYMMETRY = 1e-6  # of the largest entry


def mean_curvature(second_form: Float[Tensor, "m m c"]) -> Float[Tensor, " c"]:
    """Return ``H = sum_i II(e_i, e_i)``.

    Raises:
        TangentValueError: if II is not ``[m, m, c]``, finite and symmetric.
    """
    return torch.einsum("iic->c", checked(second_form))


def square_norm(second_form: Float[Tensor, "m m c"]) -> float:
    """Return ``||II||^2 = sum_ij ||II(e_i, e_j)||^2``.

    Raises:
        TangentValueError: as :func:`mean_curvature`.
    """
    return float(checked(second_form).square().sum())


def square_form(second_form: Float[Tensor, "m m c"]) -> Float[Tensor, "m m"]:
    """Return ``K_ij = sum_k <II(e_i, e_k), II(e_j, e_k)>``.

    Raises:
        TangentValueError: as :func:`mean_curvature`.
    """
    form = checked(second_form)
    return torch.einsum("ikc,jkc->ij", form, form)


def ricci(second_form: Float[Tensor, "m m c"]) -> Float[Tensor, "m m"]:
    """Return ``Ric_ij = <H, II(e_i, e_j)> - K_ij``, the Gauss equation in a flat space.

    Raises:
        TangentValueError: as :func:`mean_curvature`.
    """
    return checked(second_form) @ mean_curvature(second_form) - square_form(second_form)


def scalar_curvature(second_form: Float[Tensor, "m m c"]) -> float:
    """Return ``Scal = ||H||^2 - ||II||^2``; twice the Gauss curvature of a surface.

    Raises:
        TangentValueError: as :func:`mean_curvature`.
    """
    return float(mean_curvature(second_form).square().sum()) - square_norm(second_form)


def along(second_form: Float[Tensor, "m m c"], u: Float[Tensor, "n m"]) -> Float[Tensor, "n c"]:
    """Return ``II(u, u)`` for each row u.

    Raises:
        TangentValueError: as :func:`mean_curvature`, or if u has another number of coordinates.
    """
    form = checked(second_form)
    if u.shape[1] != len(form):
        raise TangentValueError(
            f"directions have {u.shape[1]} coordinates and the second fundamental form {len(form)}"
        )
    return torch.einsum("ijc,ni,nj->nc", form, u.double(), u.double())


def normal_curvature(
    second_form: Float[Tensor, "m m c"], u: Float[Tensor, "n m"]
) -> Float[Tensor, " n"]:
    """Return ``||II(u, u)||``, the curvature of the geodesic along each unit row u.

    Raises:
        TangentValueError: as :func:`along`.
    """
    return along(second_form, u).norm(dim=1)


def checked(second_form: Tensor) -> Float[Tensor, "m m c"]:
    """Return II in float64 if it is ``[m, m, c]``, finite and symmetric.

    Raises:
        TangentValueError: if it is not.
    """
    check_finite("second fundamental form", second_form)
    if (
        second_form.ndim != 3
        or not len(second_form)
        or second_form.shape[0] != second_form.shape[1]
    ):
        raise TangentValueError(
            f"a second fundamental form is [m, m, c], got {list(second_form.shape)}"
        )
    form = second_form.double()
    if form.numel():
        error = float((form - form.transpose(0, 1)).abs().max())
        if error > SYMMETRY * float(form.abs().max()):
            raise TangentValueError(
                f"a second fundamental form is symmetric in its first two axes, this one is off by "
                f"{error:.3g}: are the normal coordinates last?"
            )
    return form
