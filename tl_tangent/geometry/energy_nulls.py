"""How much of a gradient's energy in a subspace the activations alone explain.

The gradient of a linear map ``y_i = W x_i`` is ``G = sum_i g_i x_i^T``. Its rows lie in the span of
the activations, so that a subspace which holds most of their energy holds most of the gradient's,
whatever the upstream gradients g_i are. Nulls that keep the activations and break their tie to g
have exact expectations, which take no permutation to be drawn.

With ``sum_i`` over the N tokens of one batch, and ``a_i = Q^T x_i``:

    sign flip    E ||sum_i e_i g_i a_i^T||^2, e_i = +-1 at random  =  sum_i ||g_i||^2 ||a_i||^2
    pairing      E ||sum_i g_i a_p(i)^T||^2, p a random permutation
                 =  ||sum g||^2 ||mean a||^2  +  S_g S_a / (N - 1), S_a = sum_i ||a_i - mean a||^2
    within       the same for permutations among tokens of one stratum s, such as one input token
                 =  ||sum_s n_s mean(g)_s mean(a)_s^T||^2  +  sum_s S_g,s S_a,s / (n_s - 1)
    mean part    ||sum g||^2 ||Q^T mu||^2, the energy of ``(sum g) mu^T``
    centred      that of ``G - (sum g) mu^T``, the gradient at inputs ``x - mu``

The two terms of the pairing null are the energy that no permutation changes, and the rest; no terms
cancel. For the output side (Q in the space of y) swap the roles of x and g: G becomes G^T.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.energy import check_stack
from tl_tangent.geometry.linalg import exact_math, full_dtype
from tl_tangent.geometry.token_energies import NullEnergies, Own, Strata, Upstream, token_energies

GRADIENT_TOLERANCE = 0.1  # a gradient summed in bfloat16 stays well below
CANCELLED = 1e-3  # of the norms of its factors: a gradient below is rounding for all one can tell


def null_energies(
    inputs: Float[Tensor, "n d"],
    output_gradients: Float[Tensor, "n o"],
    stacked: Float[Tensor, "d columns"],
    rank: int,
    *,
    mean: Float[Tensor, " d"] | None = None,
    gradient: Float[Tensor, "o d"] | None = None,
    strata: Int[Tensor, " n"] | None = None,
) -> NullEnergies:
    """Return the energies of a batch and of its nulls in Q_T and its normals.

    Products are computed in the dtype of ``inputs`` (float32 at least), squares summed in float64.

    Args:
        inputs: the activations that the map reads, one token a row, without padding.
        output_gradients: the gradient at the map's output, of the same tokens.
        stacked: the bases, from :func:`~tl_tangent.geometry.energy.stack_bases`.
        rank: number of columns of each basis.
        mean: mu of the mean part; the mean of ``inputs`` if not given.
        gradient: ``sum_i g_i x_i^T`` where it is known already, which saves the largest product.
        strata: a label of each token, for the null of pairs that are permuted among equal labels.

    Raises:
        TangentValueError: if the numbers of tokens differ, there are none, the bases do not fit, or
            ``gradient`` is not that of these tokens.
    """
    _check_rows(inputs, output_gradients)
    check_stack(stacked, inputs.shape[1], rank)
    dtype = full_dtype(inputs.dtype)
    with exact_math(inputs.device):
        x, g = inputs.to(dtype), output_gradients.to(dtype)
        whole = g.mT @ x if gradient is None else gradient.to(x)
        if gradient is not None:
            leading = stacked.to(x)[:, :rank]
            _check_gradient(whole @ leading, x @ leading, g)
        groups = None if strata is None else Strata.of(strata)
        own = Own.of(x, stacked, rank, mean=mean, strata=groups)
        upstream = Upstream.of(g, groups)
        return token_energies(own, upstream, whole, stacked, rank)


def sign_flip_moment(
    inputs: Float[Tensor, "n d"], output_gradients: Float[Tensor, "n o"]
) -> Float[Tensor, "d d"]:
    """Return ``sum_i ||g_i||^2 x_i x_i^T``, the expected ``G^T G`` under random signs, in float64.

    Raises:
        TangentValueError: if the numbers of tokens differ or there are none.
    """
    _check_rows(inputs, output_gradients)
    with exact_math(inputs.device):
        upstream = Upstream.of(output_gradients.to(full_dtype(output_gradients.dtype)))
        x = inputs.double()
        return x.mT @ (x * upstream.squares[:, None])


def pairing_moment(
    inputs: Float[Tensor, "n d"], output_gradients: Float[Tensor, "n o"]
) -> Float[Tensor, "d d"]:
    """Return the expected ``G^T G`` under a random pairing of inputs and gradients, in float64.

    Raises:
        TangentValueError: if the numbers of tokens differ or there are none.
    """
    _check_rows(inputs, output_gradients)
    with exact_math(inputs.device):
        upstream = Upstream.of(output_gradients.to(full_dtype(output_gradients.dtype)))
        x, n = inputs.double(), len(inputs)
        mean, spread = x.mean(0), x - x.mean(0)
        constant = upstream.sum.square().sum() * torch.outer(mean, mean)
        return constant + upstream.spread / max(n - 1, 1) * (spread.mT @ spread)


def per_sample_ratio(
    tangent: Float[Tensor, "n d"],
    normal: Float[Tensor, "n d"],
    output_gradients: Float[Tensor, "n o"],
) -> float:
    """Return ``sqrt(sum ||g_i||^2 ||n_i||^2 / sum ||g_i||^2 ||v_i||^2)``.

    It lies between the smallest and the largest ``||n_i|| / ||v_i||``, and so falls as O(t) on a
    curved manifold in whatever way the g_i depend on the inputs. The ratio of the two parts of the
    summed gradient does not: contributions to either may cancel over the samples.

    Raises:
        TangentValueError: if the numbers of samples differ, there are none, or no sample has both a
            tangent part and a gradient.
    """
    _check_rows(tangent, output_gradients)
    _check_rows(normal, output_gradients)
    g, v, n = (
        torch.linalg.vector_norm(one.detach(), dim=1, dtype=torch.float64)
        for one in (output_gradients, tangent, normal)
    )
    below = float((g * v).square().sum())
    if not 0 < below < math.inf:
        raise TangentValueError(
            f"the tangent parts, weighted by their gradients, have the energy {below}: a ratio "
            "needs one that is positive and finite"
        )
    return math.sqrt(float((g * n).square().sum()) / below)


def _check_rows(inputs: Tensor, output_gradients: Tensor) -> None:
    if len(inputs) != len(output_gradients) or not len(inputs):
        raise TangentValueError(
            f"{len(inputs)} inputs and {len(output_gradients)} output gradients: each token has "
            "one of both, and there is at least one"
        )


def _check_gradient(given: Tensor, a: Tensor, g: Tensor) -> None:
    """Refuse a gradient of other tokens or of a rescaled loss, judged by its part in Q_T."""
    own = g.mT @ a
    size = torch.maximum(own.norm(), CANCELLED * g.norm() * a.norm())
    if bool((given - own).norm() > GRADIENT_TOLERANCE * size):
        raise TangentValueError(
            f"the given gradient has norm {float(given.norm()):.4g} in Q_T, but sum_i g_i x_i^T "
            f"has {float(own.norm()):.4g} and differs: give that of the same tokens and loss scale"
        )
