"""A model of learning that is solved exactly: linear regression under gradient flow.

A student W learns a teacher W* from inputs of covariance ``diag(variance)``, uncorrelated over
tangent and normal directions. The loss ``E ||(W - W*) x||^2 / 2`` has the gradient
``G = (W - W*) diag(variance)``, so that under ``dW/ds = -G`` each column i of the error decays:

    W_i(s) - W*_i = (W_i(0) - W*_i) exp(-variance_i s)

and the energy of G in a block of one variance is ``variance^2 ||error(0)||^2 exp(-2 variance s)``.
Directions of large variance dominate the gradient early and, learned first, lose it later.
"""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError


def gradient_flow_weights(
    start: Float[Tensor, "o d"],
    teacher: Float[Tensor, "o d"],
    variance: Float[Tensor, " d"],
    s: int | float,
) -> Float[Tensor, "o d"]:
    """Return the weights at time ``s``.

    Args:
        start: W(0).
        teacher: W*.
        variance: of each input direction.
        s: learning time, steps times learning rate.
    """
    return teacher + (start - teacher) * (-variance * s).exp()


def gradient_flow_gradient(
    start: Float[Tensor, "o d"],
    teacher: Float[Tensor, "o d"],
    variance: Float[Tensor, " d"],
    s: int | float,
) -> Float[Tensor, "o d"]:
    """Return the gradient ``(W(s) - W*) diag(variance)`` at time ``s``."""
    return (start - teacher) * (variance * (-variance * s).exp())


def energy_ratio_at(
    s: int | float,
    *,
    tangent_variance: int | float,
    normal_variance: int | float,
    tangent_error: int | float = 1.0,
    normal_error: int | float = 1.0,
) -> float:
    """Return the gradient's energy in the tangent block over that in the normal block at time s.

    ``(sT^2 / sN^2)^2 (||DW_T|| / ||DW_N||)^2 exp(-2 (sT^2 - sN^2) s)``. Blocks of unequal numbers
    of directions are not rescaled.

    Args:
        s: learning time.
        tangent_variance, normal_variance: input variances sT^2 and sN^2 of the two blocks.
        tangent_error, normal_error: Frobenius norms of ``W(0) - W*`` in the two blocks.

    Raises:
        TangentValueError: if a variance or an error is not positive and finite.
    """
    log_start = _log_amplitude(tangent_variance, tangent_error, normal_variance, normal_error)
    return math.exp(2 * (log_start - (tangent_variance - normal_variance) * s))


def crossing_time(
    *,
    tangent_variance: int | float,
    normal_variance: int | float,
    tangent_error: int | float = 1.0,
    normal_error: int | float = 1.0,
) -> float:
    """Return the time at which :func:`energy_ratio_at` is 1; negative if it was before the start.

    ``ln(sT^2 ||DW_T|| / (sN^2 ||DW_N||)) / (sT^2 - sN^2)``.

    Raises:
        TangentValueError: as :func:`energy_ratio_at`, or if the variances are equal: the ratio
            stays what it is.
    """
    log_start = _log_amplitude(tangent_variance, tangent_error, normal_variance, normal_error)
    if tangent_variance == normal_variance:
        raise TangentValueError(
            f"both variances are {tangent_variance}: the energy ratio does not change in time"
        )
    return log_start / (tangent_variance - normal_variance)


def _log_amplitude(*values: int | float) -> float:
    """Return the logarithm of the ratio of gradient norms at the start."""
    if not all(0 < value < math.inf for value in values):
        raise TangentValueError(f"variances and errors are positive and finite, got {values}")
    tangent_variance, tangent_error, normal_variance, normal_error = map(math.log, values)
    return tangent_variance + tangent_error - normal_variance - normal_error
