"""What was found around token types, as a table, a sentence and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.local.token_cloud import TokenCloud
from tl_tangent.analysis.local.token_words import ALPHA, headline
from tl_tangent.analysis.stream.followed import of_controls
from tl_tangent.geometry.display import html_table
from tl_tangent.hooks.sites import Site

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


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

    def headline(self) -> str:
        """State for how many types curvature is visible, and the slopes by frequency."""
        return headline(self.to_dataframe())

    def plot(self) -> Figure:
        """Draw slopes with their intervals by frequency, and those of Gaussian clouds."""
        from tl_tangent.views.local_figure import draw_slopes  # the one step up a floor

        return draw_slopes(self.to_dataframe(), str(self.conventions["model"] or ""))

    def __repr__(self) -> str:
        return f"TokenGeometry({self.conventions['model']}): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.to_dataframe().round(4).astype(object).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())


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
        "copies": cloud.copies,
        "eta": cloud.eta.value,
        "eta_error": cloud.eta.error,
        "centre_norm": cloud.centre_norm,
        "relative_radius": radius / cloud.centre_norm if cloud.centre_norm else math.nan,
        "shift": math.nan if base is None or not radius else base.shift / radius,
        "tangent_share": cloud.tangent_share,
        "slope": math.nan,
        "form_square": math.nan,
        **found,
        **_dimensions(cloud),
        "note": cloud.note,
    }


def _measured(cloud: TokenCloud) -> dict[str, Any]:
    reading = cloud.reading
    assert reading is not None
    slope, form, directions = reading.slope, reading.form, reading.directions
    drawn = cloud.controls
    slopes = [one.slope for one in drawn if one.slope is not None]
    row: dict[str, Any] = {
        "slope": math.nan if slope is None else slope.slope,
        "slope_low": math.nan if slope is None else slope.low,
        "slope_high": math.nan if slope is None else slope.high,
        **of_controls("slope", slopes),
        "slope_p": cloud.slope_p,
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


def _dimensions(cloud: TokenCloud) -> dict[str, float]:
    if cloud.dimension is None:
        return {}
    row: dict[str, float] = {"dimension_n": cloud.dimension.n}
    for name, value in cloud.dimension.values.items():
        row |= {name: value, **of_controls(name, cloud.dimension.controls[name])}
    return row
