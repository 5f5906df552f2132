"""What was found around token types, as a table, a sentence and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from tl_tangent.analysis.local.token_cloud import TokenCloud
from tl_tangent.analysis.local.token_words import ALPHA, headline
from tl_tangent.analysis.stream.followed import of_controls
from tl_tangent.errors import TangentKeyError
from tl_tangent.geometry.curvature import NormalSlope, RatioSlope
from tl_tangent.geometry.display import html_table
from tl_tangent.hooks.sites import Site

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


Measure = Literal["slope", "normal_slope"]


@dataclass(frozen=True)
class TokenType:
    """A token type of a corpus: its id, its text if there is a tokenizer, and how often it is."""

    id: int
    text: str | None
    count: int
    frequency: float


@dataclass(frozen=True, eq=False, repr=False)
class TokenGeometry:
    """The geometry of the occurrences of token types.

    Attributes:
        clouds: by site and token id; they hold forms, bases and the numbers of every control.
        types: what was looked at, by token id.
        conventions: how the numbers came about, JSON-able; ``meaning`` has the columns.
    """

    clouds: Mapping[tuple[str, int], TokenCloud]
    types: Mapping[int, TokenType]
    conventions: Mapping[str, Any]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a site and token type, NaN or None where something was not measured."""
        import pandas as pd

        return pd.DataFrame(
            [
                {**_named(site, self.types[token]), **_row(cloud)}
                for (site, token), cloud in self.clouds.items()
            ]
        )

    def occurrences(self, site: str, token: int) -> pd.DataFrame:
        """Return one row a measured occurrence: sizes of both parts, and distance to the centre.

        Raises:
            TangentKeyError: a site and type that were not looked at, or without enough vectors.
        """
        import pandas as pd

        cloud = self.clouds.get((site, token))
        if cloud is None or cloud.reading is None:
            known = [f"{one} at {at}" for (at, one), x in self.clouds.items() if x.reading]
            raise TangentKeyError(
                f"token {token} was not measured at {site}; there are {', '.join(known) or 'none'}"
            )
        found = cloud.reading
        chord = torch.hypot(found.tangent, found.normal)
        sizes = {"tangent": found.tangent, "normal": found.normal, "chord": chord}
        return pd.DataFrame({name: one.tolist() for name, one in sizes.items()})

    def headline(self) -> str:
        """State for how many types curvature is visible, and the slopes by frequency."""
        return headline(self.to_dataframe())

    def plot(self, measure: Measure = "slope") -> Figure:
        """Draw slopes with their intervals by frequency, and those of Gaussian clouds.

        Args:
            measure: "slope", of the ratio of both parts in the chord; or "normal_slope", of the
                normal in the tangent part.
        """
        from tl_tangent.views.local_figure import draw_slopes  # the one step up a floor

        return draw_slopes(self.to_dataframe(), str(self.conventions["model"] or ""), measure)

    def __repr__(self) -> str:
        return f"TokenGeometry({self.conventions['model']}): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.to_dataframe().round(4).astype(object)
        records = rows.where(rows.notna(), None).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in records], self.headline())


def _named(site: str, kind: TokenType) -> dict[str, Any]:
    return {
        "site": site,
        "layer": Site(site, None).layer,
        "token_id": kind.id,
        "text": kind.text,
        "count": kind.count,
        "frequency": kind.frequency,
    }


def _row(cloud: TokenCloud) -> dict[str, Any]:
    radius = math.sqrt(cloud.eta.value) if cloud.eta.value >= 0 else math.nan
    base, found = cloud.base, {} if cloud.reading is None else _measured(cloud)
    return {
        "n": cloud.n,
        "distinct": cloud.distinct,
        "copies": cloud.copies,
        "eta": cloud.eta.value,
        "eta_error": cloud.eta.error,
        "centre_norm": cloud.centre_norm,
        "relative_radius": radius / cloud.centre_norm if cloud.centre_norm else math.nan,
        "shift": math.nan if base is None or not radius else base.shift / radius,
        "tangent_share": cloud.tangent_share,
        "slope": math.nan,
        "normal_slope": math.nan,
        "form_square": math.nan,
        **found,
        **_dimensions(cloud),
        "note": cloud.note,
    }


def _measured(cloud: TokenCloud) -> dict[str, Any]:
    reading = cloud.reading
    assert reading is not None
    form, directions, drawn = reading.form, reading.directions, cloud.controls
    row: dict[str, Any] = {
        **_line("slope", reading.slope),
        **of_controls("slope", _there(one.slope for one in drawn)),
        "slope_p": cloud.slope_p,
        **_line("normal_slope", reading.normal_slope),
        **of_controls("normal_slope", _there(one.normal_slope for one in drawn)),
        **of_controls("random_normal_slope", _there(cloud.random)),
        **{f"normal_slope_p_{name}": p for name, p in cloud.normal_slope_p.items()},
        "form_square": form.second_form_square,
        "mean_curvature_square": form.mean_curvature_square,
        "scalar": form.scalar.value,
        "scalar_error": form.scalar.error,
        "form_raw": form.raw_square,
        **of_controls("form_raw", [one.form_square for one in drawn]),
        **{f"form_p_{name}": p for name, p in cloud.form_p.items()},
        "explained": form.explained,
        "visibility": cloud.visibility,
        **of_controls("visibility", cloud.visibility_controls),
    }
    if directions is not None:
        row |= {
            "directions": float(directions.tensor.norm()),
            "directions_p": cloud.directions_p,
            "directions_p_even": directions.p_value,
        }
    return row if not drawn else {**row, "visible": cloud.visible(ALPHA)}


def _line(name: str, line: RatioSlope | NormalSlope | None) -> dict[str, float]:
    if line is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"), math.nan)
    return {name: line.slope, f"{name}_low": line.low, f"{name}_high": line.high}


def _there(values: Iterable[float | None]) -> list[float]:
    return [one for one in values if one is not None]


def _dimensions(cloud: TokenCloud) -> dict[str, float]:
    if cloud.dimension is None:
        return {}
    row: dict[str, float] = {"dimension_n": cloud.dimension.n}
    for name, value in cloud.dimension.values.items():
        row |= {name: value, **of_controls(name, cloud.dimension.controls[name])}
    return row
