"""A point of the manifold that a cloud lies around, and the tangent space there.

The mean of a cloud lies off its manifold by about ``s^2 H / 2``, as far as a typical normal part,
and its leading directions are tilted where the cloud is skew. Both are the constant and the linear
part of the fit ``n = c + L w + II(w, w) / 2``: the point is ``mean + c`` and the tangent space is
spanned by the columns of ``T + L``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature import fit_second_form, local_parts
from tl_tangent.geometry.dimension import local_pca
from tl_tangent.geometry.linalg import one_thread, orthonormal_columns

Centre = Literal["fitted", "mean"]


class BasePoint(NamedTuple):
    """Where a cloud is looked at from.

    Attributes:
        point: the centre.
        tangent: orthonormal basis.
        principal: the leading principal directions, before any correction.
        shift: distance from the mean to the point.
    """

    point: Float[Tensor, " d"]
    tangent: Float[Tensor, "d m"]
    principal: Float[Tensor, "d m"]
    shift: float


def base_point(x: Float[Tensor, "n d"], rank: int, centre: Centre = "fitted") -> BasePoint:
    """Fit centre and tangent basis of rank m to a cloud.

    Args:
        x: points, one a row.
        rank: m, below d.
        centre: ``"fitted"``, corrected as above; ``"mean"``, the mean and the principal directions.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.curvature.fit_second_form`; if the cloud
            varies in fewer than m directions, or ``centre`` is neither.
    """
    if centre not in ("fitted", "mean"):
        raise TangentValueError(f"centre is 'fitted' or 'mean', got {centre!r}")
    mean = x.double().mean(0)
    principal = local_pca(x, mean, float("inf")).basis[:, :rank]
    if centre == "mean":
        return BasePoint(mean, principal, principal, 0.0)
    form = fit_second_form(x, mean, principal).second_form
    w, normal, *_ = local_parts(x, mean, principal)
    straight = normal - torch.einsum("ijd,ni,nj->nd", form, w, w) / 2
    with one_thread():  # given II, the other coefficients are those of the joint fit
        columns = torch.cat([torch.ones_like(w[:, :1]), w], dim=1)
        constant, *linear = torch.linalg.lstsq(columns, straight).solution
    tangent = orthonormal_columns(principal + torch.stack(linear, dim=1))
    return BasePoint(mean + constant, tangent, principal, float(constant.norm()))
