"""What the numbers around token types say in words: the columns, and the sentence on top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency import spearman

if TYPE_CHECKING:
    import pandas as pd

ALPHA = 0.05
MEANING = {
    "token_id, text": "the type; its text where the model has a tokenizer",
    "count": "occurrences of the type at the chosen positions of the batches",
    "frequency": "count over all tokens at these positions",
    "n, distinct, copies": (
        "vectors that were measured, at random of the distinct ones in a uniform sample of the "
        "occurrences where equal_n is set: then n is that of the type with the fewest at the site; "
        "and those left out as exact copies (one context gives one vector)"
    ),
    "eta, eta_error": (
        "mean squared distance to the mean of the type, unbiased, and its standard error; to first "
        "order the moment ratio of the theory, whose ideal point is not known"
    ),
    "centre_norm, relative_radius": "norm of that mean; root of eta over it",
    "split": (
        "vectors are halved at random: centre and tangent basis are fitted on one half, and all "
        "that follows but the dimensions is measured on the other, around that centre. Occurrences "
        "count as independent, also those of one text"
    ),
    "centre": (
        "'fitted': mean plus the constant of the fit n = c + L w + II(w, w) / 2, basis T + L, an "
        "estimate of a point of the manifold and its tangent space, off by terms of fourth order "
        "in the radius; 'mean': mean and principal directions, which flatten the slope by a "
        "constant normal part of about s^2 H / 2"
    ),
    "shift": "distance from the mean to the fitted centre, over the root of eta",
    "tangent_share": "share of the tested half's variance in the principal directions of the other",
    "slope, slope_low, slope_high": (
        "p of E|n|^2 ~ t^2p E|v|^2 in the chord t, and its interval. 1: a curved manifold seen "
        "from a point on it. -1: thin noise around a flat one. 0: isotropic. Below -1: a flat "
        "cloud with a thick normal part of many dimensions"
    ),
    "control_slope": "of Gaussian clouds of the same mean and covariance, which have no curvature",
    "slope_p": "share of these with a slope as high, (1 + #) / (1 + n_controls)",
    "normal_slope, normal_slope_low, normal_slope_high": (
        "p of |n| ~ |v|^p, least squares of logarithms over single occurrences, and its interval "
        "by a bootstrap over them. 2: a curved manifold. 1: a tilted tangent space, or occurrences "
        "that differ in size. 0: parts that know nothing of each other"
    ),
    "control_random_normal_slope": (
        "of random tangent spaces of the same rank at the same centre, at right angles to the "
        "fitted one: occurrences that differ in size alone have the same slope in all of them"
    ),
    "normal_slope_p_gaussian, normal_slope_p_random": (
        "share of the Gaussian clouds, and of the random tangent spaces, with a slope as high"
    ),
    "form_square, mean_curvature_square, scalar, scalar_error": (
        "|II|^2, |H|^2 and Scal = |H|^2 - |II|^2, less the bias by noise, in the inverse square of "
        "the unit of the activations, and the last one's standard error"
    ),
    "form_raw, control_form_raw": "|II|^2 as fitted, and that of the Gaussian clouds",
    "form_p_gaussian": "share of the Gaussian clouds with as large a raw |II|^2; exact for those",
    "form_p_permuted": (
        "the same where normal parts are permuted over the points, which takes the sizes of both "
        "parts apart: flat clouds of heavy tails mostly fail it"
    ),
    "form_p_flipped": (
        "the same where normal parts around their mean get random signs, which keeps sizes: for "
        "clouds of any tails whose normal parts are as likely as their opposites"
    ),
    "explained": "share of the normal part's variance that the fit of II explains, in sample",
    "visibility, control_visibility": (
        "eta (max b' - min b'), by how much curvature would spread the density of projected "
        "directions; fitted noise in II makes it too large, so that some Gaussian clouds are "
        "measured beside it"
    ),
    "directions, directions_p": (
        "norm of mean u u^T - I/m over projected directions; share of the Gaussian clouds, which "
        "are as stretched, with as uneven ones"
    ),
    "directions_p_even": "of Bingham's test of even directions, which any stretched cloud fails",
    "two_nn, levina_bickel, dimension_n": (
        "intrinsic dimension, and of how many of the vectors; control_: of Gaussian clouds of the "
        "same covariance and number of points"
    ),
    "visible": (
        f"whether slope_p and all form_p are at most {ALPHA}: the normal part bends with the "
        "tangent part more than in any null. Clusters of contexts, or any other dependence of the "
        "normal on the tangent part that is not odd, do that too. Random tangent spaces have no "
        "say: noise hides the order from them while the form is still plain"
    ),
    "note": "what could not be measured, and why",
}


def headline(frame: pd.DataFrame) -> str:
    """State for how many types curvature is visible, and the slopes by frequency."""
    return " ".join(filter(None, [_visible(frame), _slopes(frame), _halves(frame)]))


def _visible(frame: pd.DataFrame) -> str:
    measured = frame.dropna(subset=["form_square"])
    of = "types" if frame["site"].nunique() == 1 else "types and sites"
    left = len(frame) - len(measured)
    without = f" ({left} could not be measured)" if left else ""
    if "visible" not in frame:
        return f"No controls were drawn for {len(measured)} {of}{without}."
    tested = measured.dropna(subset=["visible"])
    k = int(tested["visible"].astype(bool).sum())
    verb = "visible" if k else "not visible"
    caution = " Clusters of contexts do that too." if k else ""
    return (
        f"Curvature is {verb} beyond every null"
        f"{f' for {k} of' if k else ' for any of'} {len(tested)} {of}{without}; by chance at most "
        f"{ALPHA * len(tested):.1f} would be.{caution}"
    )


def _slopes(frame: pd.DataFrame) -> str:
    if not frame["slope"].notna().any():
        return "No slope of the normal part could be measured."
    told = f"Median slope {frame['slope'].median():+.2f}"
    if "control_slope_mean" in frame:
        told += f" (Gaussian clouds {frame['control_slope_mean'].median():+.2f})"
    return (
        f"{told}; a curved manifold without noise has +1. The normal part goes as the tangent part "
        f"to the power of {frame['normal_slope'].median():+.2f}{_nulls(frame)}; there it is +2."
    )


def _nulls(frame: pd.DataFrame) -> str:
    """The same in both nulls, where they were drawn."""
    names = {
        "Gaussian clouds": "control_normal_slope_mean",
        "random tangents": "control_random_normal_slope_mean",
    }
    told = [f"{of} {frame[name].median():+.2f}" for of, name in names.items() if name in frame]
    return f" ({', '.join(told)})" if told else ""


def _halves(frame: pd.DataFrame) -> str:
    """Slopes of the more and of the less frequent half of the types, and their correlation."""
    measured = frame.dropna(subset=["slope"])
    types = measured.groupby("token_id")[["count", "slope"]].mean()
    if len(types) < 2:
        return ""
    ordered = types.sort_values("count")
    half = len(ordered) // 2
    told = (
        f"Slopes of frequent against rare tokens, {_numbers(measured)}: "
        f"{ordered['slope'].iloc[-half:].median():+.2f} against "
        f"{ordered['slope'].iloc[:half].median():+.2f}"
    )
    found = _rank_correlation(types["count"], types["slope"])
    return f"{told}{f', {found} over types' if found else ''}."


def _numbers(measured: pd.DataFrame) -> str:
    equal = (measured.groupby("site")["n"].nunique() == 1).all()
    return "from equally many vectors" if equal else "from unequal numbers of vectors"


def _rank_correlation(x: Any, y: Any) -> Any:
    """Spearman's with its interval; None for fewer than 4 pairs or a constant column."""
    import torch

    columns = [torch.tensor(column.to_numpy(float)) for column in (x, y)]
    try:
        return spearman(*columns)
    except TangentValueError:
        return None
