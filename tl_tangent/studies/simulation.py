"""The whole story on a manifold whose answers are known: draw the law together, and watch.

As a law concentrates around its centre, curvature fades from the directions of the samples, the
cloud flattens onto its tangent space, IsoScore falls to that of a flat cloud, and the gradient of a
linear map that reads the cloud comes to lie in the tangent directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import isoscore
from tl_tangent.geometry.curvature import AttenuationCurve, attenuation_curve, projected_directions
from tl_tangent.geometry.curvature.profile import profile_variance
from tl_tangent.geometry.curvature.second_form import square_norm
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.energy_nulls import per_sample_ratio
from tl_tangent.geometry.manifolds import Manifold, ManifoldSample, RadialDensity, sample

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Upstream = Literal["random", "constant"]
FACTORS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12)
CONSTANT = 1e-12
ROUNDING = 1e-10  # of the tangent parts: normal ones below are no parts at all
MEANING = {
    "factor": "by which the scale of the density is multiplied",
    "eta": "moment ratio M_{m+1} / M_{m-1} of the law",
    "t": "root mean square distance to the centre",
    "normal_share": "sum ||n||^2 / sum ||x - mu||^2",
    "isoscore": "of the covariance of the cloud; a flat one of even spread has (m - 1) / (d - 1)",
    "nonuniformity": "root mean square of p(u) |S| - 1 along the profile of curvature, of the "
    "projected directions; beside it its error and the prediction to first order in eta",
    "per_sample_ratio": "sqrt(sum ||g||^2 ||n||^2 / sum ||g||^2 ||v||^2): O(t) for any gradients g",
    "gradient_ratio": "||G P_N|| / ||G P_T|| of the summed gradient G = sum g (x - mu)^T, which "
    "follows only where contributions do not cancel",
}


def simulate(
    manifold: Manifold,
    density: RadialDensity,
    factors: Sequence[int | float] = FACTORS,
    *,
    n: int = 20_000,
    d: int | None = None,
    noise: int | float = 0.0,
    outputs: int = 256,
    upstream: Upstream = "random",
    seed: int = 0,
) -> Simulation:
    """Sample a manifold at several concentrations of one density, and measure everything.

    Args:
        manifold, density: of :mod:`tl_tangent.geometry.manifolds`, or your own.
        factors: multiply the scale of the density; small ones draw the points together.
        n: points at each.
        d: width; by default the smallest that holds the manifold.
        noise: standard deviation of Gaussian noise in each of the d coordinates.
        outputs: of the linear map whose gradient is taken.
        upstream: the gradients g at its output: "random", independent of the points, or "constant",
            the same for all. With a law that is even around its centre the tangent contributions
            of constant ones cancel but for chance, and the summed ratio is far above 1, the more
            the more points there are: the counterexample to a bound of O(t) on it.
        seed: of the points and the gradients.

    Raises:
        TangentValueError: as :func:`~tl_tangent.geometry.manifolds.sample`; no factors; another
            ``upstream``.
    """
    if not factors:
        raise TangentValueError("there are no factors: give at least one, such as 1.0")
    if upstream not in ("random", "constant"):
        raise TangentValueError(f"upstream is 'random' or 'constant', got {upstream!r}")
    laws = [density.scaled(factor) for factor in factors]
    clouds = tuple(
        sample(manifold, law, n, d=d, noise=noise, seed=seed + i) for i, law in enumerate(laws)
    )
    gradients = _gradients(n, outputs, upstream, seed)
    rows = tuple(
        {"factor": float(factor), "eta": law.eta(manifold.dim), **_measures(cloud, gradients)}
        for factor, law, cloud in zip(factors, laws, clouds, strict=True)
    )
    return Simulation(clouds, rows, _attenuation(clouds, [row["eta"] for row in rows]), upstream)


@dataclass(frozen=True, eq=False, repr=False)
class Simulation:
    """What was found at each concentration.

    Attributes:
        clouds: the samples.
        rows: what was measured of each; :data:`MEANING` has the columns.
        attenuation: predicted and measured non-uniformity of directions; None where the curvature
            is the same in all directions.
        upstream: which gradients.
    """

    clouds: tuple[ManifoldSample, ...]
    rows: tuple[dict[str, float], ...]
    attenuation: AttenuationCurve | None
    upstream: Upstream

    @property
    def flat_isoscore(self) -> float:
        """``(m - 1) / (d - 1)``, of an even cloud in the tangent space."""
        d, m = self.clouds[0].tangent.shape
        return (m - 1) / (d - 1)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a concentration."""
        import pandas as pd

        frame = pd.DataFrame(list(self.rows))
        if self.attenuation is not None:
            frame["nonuniformity"] = [one.value for one in self.attenuation.measured]
            frame["nonuniformity_error"] = [one.error for one in self.attenuation.measured]
            frame["nonuniformity_predicted"] = self.attenuation.predicted
        return frame

    def order(self, column: Literal["per_sample_ratio", "gradient_ratio"]) -> float:
        """Return the slope of the logarithm of a ratio over that of t.

        1 is what curvature gives, -1 what noise of one size gives; NaN of a single concentration,
        or where there are no normal parts.
        """
        known = [row for row in self.rows if ROUNDING < row[column] < math.inf]
        if len(known) < 2:
            return math.nan
        logs = [[math.log(row[name]) for row in known] for name in ("t", column)]
        x, y = torch.tensor(logs, dtype=torch.float64)
        x = x - x.mean()
        return float(x @ y / x.square().sum())

    def headline(self) -> str:
        """State how the ratios fall with t, and how far directions and IsoScore have come."""
        first, last = self.rows[0], self.rows[-1]
        told = (
            f"{self.clouds[0].manifold}: from t = {first['t']:.3g} to {last['t']:.3g} IsoScore "
            f"goes from {first['isoscore']:.3f} to {last['isoscore']:.3f} (flat: "
            f"{self.flat_isoscore:.3f}); normal over tangent goes from "
            f"{first['per_sample_ratio']:.3g} to {last['per_sample_ratio']:.3g} in single "
            f"gradients ({_power(self.order('per_sample_ratio'))}) and from "
            f"{first['gradient_ratio']:.3g} to {last['gradient_ratio']:.3g} in their sum "
            f"({_power(self.order('gradient_ratio'))}, {self.upstream} upstream)"
        )
        if self.attenuation is None:
            return f"{told}; curvature is the same in all directions, so that none stands out."
        before, after = self.attenuation.measured[0], self.attenuation.measured[-1]
        return f"{told}; non-uniformity of directions from {before} to {after}."

    def plot(self, at: int = 0) -> Figure:
        """Draw the cloud at one concentration, its directions, and all measures over t."""
        from tl_tangent.views.simulation_figure import draw_simulation  # the one step up a floor

        return draw_simulation(self, at)

    def __repr__(self) -> str:
        return f"Simulation of {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.to_dataframe().round(4).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())


def _power(order: float) -> str:
    return "no normal parts" if math.isnan(order) else f"as t^{order:.2f}"


def _gradients(n: int, outputs: int, upstream: str, seed: int) -> Float[Tensor, "n o"]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    return drawn if upstream == "random" else drawn[:1].expand(n, outputs)


def _measures(cloud: ManifoldSample, g: Float[Tensor, "n o"]) -> dict[str, float]:
    v, n = cloud.v, cloud.n
    in_tangent, in_normal = (float((g.mT @ part).norm()) for part in (v, n))
    square = cloud.t.square()
    return {
        "t": float(square.mean().sqrt()),
        "normal_share": float(n.square().sum() / square.sum()),
        "isoscore": float(isoscore(cloud.x)),
        "per_sample_ratio": per_sample_ratio(v, n, g),
        "gradient_ratio": in_normal / in_tangent if in_tangent else math.inf,
    }


def _attenuation(clouds: Sequence[ManifoldSample], etas: list[float]) -> AttenuationCurve | None:
    form = clouds[0].second_form
    if profile_variance(form) <= CONSTANT * square_norm(form) ** 2:
        return None
    directions = [projected_directions(one.x, one.mu, one.tangent) for one in clouds]
    return attenuation_curve(directions, etas, form)
