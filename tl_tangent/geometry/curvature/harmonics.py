"""The angle of directions in a tangent plane, by its second and fourth harmonic.

On a surface ``2 pi p(f) = 1 + sum_k a_k cos kf + b_k sin kf`` has k = 2 and 4 only, to first order
in eta: b is a form of degree 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.curvature.directions import check_directions, predicted_response
from tl_tangent.geometry.curvature.local import Direction, Estimate
from tl_tangent.geometry.curvature.profile import direction_profile

ORDERS = (2, 4)
GRID = 64  # angles on which a trigonometric polynomial of degree 4 is read off without error


@dataclass(frozen=True, eq=False)
class Harmonics:
    """Coefficients of ``2 pi p(f) = 1 + sum_k a_k cos kf + b_k sin kf`` for k = 2 and 4.

    Attributes:
        cosine, sine: a_k and b_k.
        error: standard errors, of the cosines in the first row; 0 for a prediction.
        n: number of points; 0 for a prediction.
    """

    cosine: Float[Tensor, " order"]
    sine: Float[Tensor, " order"]
    error: Float[Tensor, "wave order"]
    n: int

    def __repr__(self) -> str:
        parts = [
            f"{name}{k} {Estimate(float(value), float(error))}"
            for name, values, errors in zip(
                ("cos", "sin"), (self.cosine, self.sine), self.error, strict=True
            )
            for k, value, error in zip(ORDERS, values, errors, strict=True)
        ]
        return f"Harmonics({', '.join(parts)}; {self.n} directions)"


def direction_harmonics(u: Float[Tensor, "n m"]) -> Harmonics:
    """Return the second and fourth harmonic of the angle of directions in a plane, with errors.

    Raises:
        TangentValueError: if m is not 2, rows are not of unit length, or there are fewer than 2.
    """
    check_directions(u)
    _check_plane(u.shape[1])
    angle = torch.atan2(u[:, 1].double(), u[:, 0].double())
    waves = torch.stack(
        [torch.stack([f(k * angle) for k in ORDERS]) for f in (torch.cos, torch.sin)]
    )
    found, error = 2 * waves.mean(-1), 2 * waves.std(-1) / len(u) ** 0.5
    return Harmonics(cosine=found[0], sine=found[1], error=error, n=len(u))


def predicted_harmonics(
    second_form: Float[Tensor, "m m c"], eta: int | float, *, direction: Direction = "projected"
) -> Harmonics:
    """Return the harmonics of ``p`` on a surface: those of b times ``eta / (1 + eta bbar)``.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.curvature.profile.direction_density`, or
            if m is not 2.
    """
    _check_plane(len(second_form))
    angle = torch.arange(GRID, dtype=torch.float64) * (2 * math.pi / GRID)
    u = torch.stack([angle.cos(), angle.sin()], dim=1)
    weight = predicted_response(second_form, eta) * direction_profile(
        second_form, u, direction=direction
    )
    cosine, sine = (
        torch.stack([2 * (weight * f(k * angle)).mean() for k in ORDERS])
        for f in (torch.cos, torch.sin)
    )
    return Harmonics(cosine=cosine, sine=sine, error=torch.zeros(2, 2).double(), n=0)


def _check_plane(m: int) -> None:
    if m != 2:
        raise TangentValueError(
            f"an angle needs 2 tangent dimensions, got m={m}: take direction_tensor or "
            "direction_response"
        )
