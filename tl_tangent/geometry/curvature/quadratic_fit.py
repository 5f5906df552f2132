"""The second fundamental form of a cloud, by least squares.

Normal parts are regressed on the tangent coordinates w,

    n = c + L w + II(w, w) / 2 + residual.

The constant and the linear part take up what is wrong with the centre and the tangent basis: the
mean of a cloud lies off its manifold by about ``s^2 H / 2``, and an estimated tangent space is
tilted. Standard errors are heteroscedastic ones (HC2), whose squares are unbiased where the noise
is even; from few points they are noisy themselves.

Squares of noisy estimates are too large by the sum of their variances, over all of R^d a large
number: ``||H||^2``, ``||II||^2`` and the scalar curvature are reported with that subtracted. The
``||II||^2`` as it came stands beside its expectation when normal parts are permuted over the
points; a tilted basis adds to the normal parts, and so to this null. With
``b = sum_i P_i y_{p(i)}`` and S^2 the sample variance of y,

    E b = ybar sum P_i,     Var b = S^2 (sum P_i^2 - (sum P_i)^2 / n)     exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature.local import Estimate, local_parts
from tl_tangent.geometry.curvature.quadratic_design import (
    QuadraticRows,
    quadratic_design,
    solve,
)


@dataclass(frozen=True, eq=False)
class SecondFormFit:
    """II of a cloud, its errors, and what permuted normal parts would give.

    Attributes:
        second_form: II, as vectors of R^d that lie in the normal space.
        error: standard errors of its entries.
        mean_curvature: H, the trace of II.
        mean_curvature_error: of its entries.
        mean_curvature_square: ``||H||^2``, less the bias by noise; may be negative.
        second_form_square: ``||II||^2``, likewise.
        scalar: ``Scal = ||H||^2 - ||II||^2``, less the bias; its error is that of the linear terms
            and too small where II itself is lost in the noise.
        raw_square: ``||II||^2`` as estimated.
        null_square: expectation of ``raw_square`` under permuted normal parts.
        p_value: share of permutations with a ``raw_square`` as large, by ``(1 + #) / (1 + B)``;
            None if none were drawn.
        explained: share of the normal parts' squares around the mean that the fit explains.
        n: number of points.
        columns: number of coefficients of each normal direction.
    """

    second_form: Float[Tensor, "m m d"]
    error: Float[Tensor, "m m d"]
    mean_curvature: Float[Tensor, " d"]
    mean_curvature_error: Float[Tensor, " d"]
    mean_curvature_square: float
    second_form_square: float
    scalar: Estimate
    raw_square: float
    null_square: float
    p_value: float | None
    explained: float
    n: int
    columns: int

    def __repr__(self) -> str:
        p = "" if self.p_value is None else f", p {self.p_value:.3g}"
        return (
            f"SecondFormFit({self.n} points, m={len(self.second_form)}: "
            f"|II|^2 {self.second_form_square:.4g} (raw {self.raw_square:.4g}, permuted "
            f"{self.null_square:.4g}{p}), |H|^2 {self.mean_curvature_square:.4g}, "
            f"Scal {self.scalar}, {self.explained:.1%} of the normal part explained)"
        )


def fit_second_form(
    x: Float[Tensor, "n d"],
    centre: Float[Tensor, " d"],
    tangent: Float[Tensor, "d m"],
    *,
    through_centre: bool = False,
    permutations: int = 0,
    seed: int = 0,
) -> SecondFormFit:
    """Estimate II around a centre.

    The form is quadratic only near the centre: take points within a radius where it is meant to
    hold. Third-order terms of the manifold are noise to the fit.

    Args:
        x: points, one a row.
        centre: ``[d]``.
        tangent: ``[d, m]``, orthonormal.
        through_centre: whether the centre is known to lie on the manifold and the basis to be
            tangent there: the constant and the linear part are then left out.
        permutations: B, number of draws for the p-value.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.curvature.local.local_parts`; if there are
            not more points than coefficients, m is d, or the points do not determine the form.
    """
    parts = local_parts(x, centre, tangent)
    n, m = parts.tangent.shape
    if m == x.shape[1]:
        raise TangentValueError(f"the tangent space is all of R^{m}: there is no normal part")
    design = quadratic_design(parts.tangent, through_centre)
    _check_count(n, design.columns, m)
    solver, leverage = solve(design)
    residual = parts.normal - design.matrix @ (solver @ parts.normal)
    scaled = residual / (1 - leverage).clamp(min=1e-12).sqrt()[:, None]
    quadratic = QuadraticRows.of(solver, design, parts.normal)
    variances = quadratic.rows.square() @ scaled.square()
    trace_row = quadratic.rows[design.diagonal].sum(0)
    mean, mean_variance = trace_row @ parts.normal, trace_row.square() @ scaled.square()
    raw = quadratic.square(quadratic.values)
    h_square = float(mean.square().sum() - mean_variance.sum())
    ii_square = raw - quadratic.square(variances.sqrt())
    around = parts.normal if through_centre else parts.normal - parts.normal.mean(0)
    return SecondFormFit(
        second_form=design.spread(quadratic.values, m),
        error=design.spread(variances.sqrt(), m),
        mean_curvature=mean,
        mean_curvature_error=mean_variance.sqrt(),
        mean_curvature_square=h_square,
        second_form_square=ii_square,
        scalar=Estimate(h_square - ii_square, _scalar_error(quadratic, trace_row, mean, scaled)),
        raw_square=raw,
        null_square=quadratic.null_square(parts.normal),
        p_value=quadratic.p_value(parts.normal, raw, permutations, seed) if permutations else None,
        explained=1 - float(residual.square().sum() / around.square().sum().clamp(min=1e-300)),
        n=n,
        columns=design.columns,
    )


def _check_count(n: int, columns: int, m: int) -> None:
    if n <= columns:
        raise TangentValueError(
            f"{n} points cannot determine the {columns} coefficients of a quadratic form in {m} "
            f"variables and their errors: give {columns + 1} points or more, or fewer tangent "
            "directions"
        )


def _scalar_error(
    quadratic: QuadraticRows, trace_row: Tensor, mean: Tensor, scaled: Tensor
) -> float:
    """Standard error of ``||H||^2 - ||II||^2`` from each point's effect on it, to first order."""
    of_mean = trace_row[:, None] * mean
    of_form = quadratic.rows.mT @ (quadratic.weights[:, None] * quadratic.values)
    return math.sqrt(float((2 * (of_mean - of_form) * scaled).sum(1).square().sum()))
