"""The picture of attention term shares: groups of terms over layers, beside their controls."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.attention.term_rows import SHARES
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.score_terms import GROUPS, POSITION

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from tl_tangent.analysis.attention.shares import AttentionTermShares

# Okabe & Ito 2008: told apart by all common kinds of colour vision; markers tell them apart in grey
STYLES = {
    "tangent": ("#D55E00", "o", "tangent: v with v"),
    "cross": ("#CC79A7", "D", "cross: v with n, n with v"),
    "normal": ("#0072B2", "s", "normal: n with n"),
    "linear": ("#009E73", "^", "linear: v or n with the mean"),
    "constant": ("#000000", "x", "constant: mean with mean"),
    POSITION: ("#E69F00", "v", "position (ALiBi)"),
}
LABELS = {
    "square_share": "share of the terms' mean square",
    "variance_share": "share of the terms' variance\nover a query's keys",
    "score_share": "signed share of the variance\nof the score over a query's keys",
}
SIGNED = "score_share"
MAX_LABELS = 32


def draw_shares(shares: AttentionTermShares, share: str = "variance_share") -> Figure:
    """Draw each group's share of the attention scores over layers, and v^T M v by layer and head.

    Above, a line a group: the sum of its terms' shares, mean over heads. Matched random controls
    are dashed in the group's colour: the mean over controls, in a band from the lowest to the
    highest control. Below, the share of the term tangent_tangent in each head. Nothing is shown and
    no display is needed: call ``savefig``.

    Args:
        shares: from :func:`tl_tangent.attention_term_shares`.
        share: "variance_share", "square_share", or "score_share" where ``signed=True`` was asked
            for; without a unit.

    Raises:
        TangentValueError: a share that was not measured.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    _check(shares, share)
    figure = NewFigure(figsize=(10.5, 7.5), layout="constrained")
    lines, heads = figure.subplots(2, 1, sharex=True, height_ratios=[5, 4])
    _lines(lines, shares, share)
    _heat_map(figure, heads, shares, share)
    _label_layers(heads, [one.layer for one in shares.layers])
    figure.suptitle(_title(shares), fontsize=11)
    return figure


def _check(shares: AttentionTermShares, share: str) -> None:
    there = [name for name in SHARES if name in shares.to_dataframe()]
    if share not in there:
        hint = " It takes attention_term_shares(..., signed=True)." if share == SIGNED else ""
        raise TangentValueError(f"there is no {share!r} here; there are {', '.join(there)}.{hint}")


def by_group(shares: AttentionTermShares, share: str) -> pd.DataFrame:
    """Return one row a layer with a column a group: the sum of its terms, mean over heads."""
    import pandas as pd

    frame = shares.to_dataframe()
    table = frame.groupby(["layer", "term"])[share].mean().unstack("term")
    groups = GROUPS | ({POSITION: (POSITION,)} if POSITION in table else {})
    return pd.DataFrame(
        {
            name: table[list(groups[name])].sum(axis=1, skipna=False)
            for name in STYLES
            if name in groups
        }
    )


def controls_by_group(shares: AttentionTermShares, share: str) -> list[pd.DataFrame]:
    """Return :func:`by_group` of each matched random control."""
    numbers = range(min(len(one.controls) for one in shares.layers))
    return [by_group(_control(shares, i), share) for i in numbers]


def _control(shares: AttentionTermShares, i: int) -> AttentionTermShares:
    layers = (replace(one, moments=one.controls[i], controls=()) for one in shares.layers)
    return replace(shares, layers=tuple(layers))


def _lines(ax: Any, shares: AttentionTermShares, share: str) -> None:
    at = range(len(shares.layers))
    controls = controls_by_group(shares, share)
    for name, values in by_group(shares, share).items():
        colour, marker, label = STYLES[str(name)]
        ax.plot(at, values, marker=marker, color=colour, label=label)
        if controls:
            _control_line(ax, at, [control[name] for control in controls], colour)
    if controls:
        about = f"dashed: matched random\n(mean of {len(controls)}, band from min to max)"
        ax.plot([], [], "--", color="0.4", label=about)
    if share == SIGNED:
        ax.axhline(0, color="0.5", linewidth=0.8)
    else:
        ax.set_ylim(bottom=0)
    ax.set_ylabel(LABELS[share])
    ax.set_title("Groups of terms, mean over heads", loc="left", fontsize=10)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    ax.spines[["top", "right"]].set_visible(False)


def _control_line(ax: Any, at: range, controls: list[pd.Series], colour: str) -> None:
    import pandas as pd

    values = pd.concat(controls, axis=1)
    ax.plot(at, values.mean(axis=1), "--", color=colour, linewidth=1)
    low, high = values.min(axis=1), values.max(axis=1)
    ax.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)


def _heat_map(figure: Figure, ax: Any, shares: AttentionTermShares, share: str) -> None:
    frame = shares.to_dataframe()
    tangent = frame[frame["term"] == "tangent_tangent"]
    table = tangent.pivot(index="head", columns="layer", values=share)
    largest = float(table.abs().max(axis=None))
    largest = largest if largest > 0 else 1.0  # NaN where no head's scores vary
    signed = share == SIGNED
    image = ax.imshow(
        table.to_numpy(),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap="PuOr_r" if signed else "viridis",  # both told apart by all kinds of colour vision
        vmin=-largest if signed else 0.0,
        vmax=largest,
    )
    beside = ax.inset_axes((1.02, 0, 0.025, 1))  # no column of its own, which the lines would lose
    figure.colorbar(image, cax=beside, label=LABELS[share])
    step = -(-len(table) // (MAX_LABELS // 2))
    ax.set_yticks(range(0, len(table), step), [str(head) for head in table.index[::step]])
    ax.tick_params(axis="y", labelsize=8)
    ax.set_ylabel("head")
    ax.set_title("v^T M v (tangent_tangent) by layer and head", loc="left", fontsize=10)


def _label_layers(ax: Any, layers: list[int]) -> None:
    step = -(-len(layers) // MAX_LABELS)
    ax.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("layer")


def _title(shares: AttentionTermShares) -> str:
    """Return model, rank and space in one line; several where layers differ."""
    made = shares.conventions.values()

    def told(name: str) -> str:
        return ", ".join(dict.fromkeys(str(one[name]) for one in made))

    return f"{told('model')}, attention scores, rank {told('rank')}, {told('space')} space"
