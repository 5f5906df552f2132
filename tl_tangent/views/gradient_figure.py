"""The picture of gradient energies: what Q_T holds over layers, beside what is mechanical."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tl_tangent.errors import TangentValueError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Okabe & Ito 2008: told apart by all common kinds of colour vision; markers tell them apart in grey
STYLES = {
    "q": ("#0072B2", "o", "W_Q"),
    "k": ("#56B4E9", "s", "W_K"),
    "v": ("#009E73", "^", "W_V"),
    "gate": ("#E69F00", "v", "W_gate"),
    "in": ("#D55E00", "D", "W_in"),
    "o": ("#0072B2", "o", "W_O"),
    "out": ("#D55E00", "D", "W_out"),
    "embed": ("#000000", "P", "embedding"),
    "pos": ("#CC79A7", "X", "positions"),
    "unembed": ("#000000", "P", "unembedding"),
    "tied": ("#000000", "P", "tied embeddings"),
}
SIDES = {"input": "input side: what is read", "output": "output side: what is written"}
BEFORE, AFTER = ("embed", "pos"), ("unembed", "tied")  # of weights that belong to no layer
# each row of panels: its column, the column beside it, the label of the axis, and both in words
ROWS = (
    (
        "energy_ratio_exact",
        "pairing_ratio",
        "energy ratio\nQ_T / average normal",
        ("gradient", "paired at random"),
    ),
    ("excess_pairing", None, "excess: gradient /\npaired at random", ("gradient", "")),
    (
        "delta_tangent",
        "delta_normal",
        "change of IsoScore*\nof the gradients",
        ("without Q_T", "without a normal"),
    ),
)
RATIOS = ("energy_ratio_exact", "excess_pairing")  # drawn around 1 on a logarithmic axis
HOLLOW = {"markerfacecolor": "white", "linewidth": 0.8, "markersize": 4}
FINE, COARSE = (1, 1.5, 2, 3, 5, 7), (1, 3)  # multiples of powers of ten that are labelled
MAX_LABELS = 16


def draw_gradients(frame: pd.DataFrame, *, title: str = "") -> Figure:
    """Draw the frame of a :class:`~tl_tangent.analysis.gradients.gradient_energy.GradientEnergy`.

    One column of panels a side, one line a kind of weight, over layers. Above, the energy ratio,
    and hollow what it would be if inputs and output gradients were paired at random. Below, the
    first over the second; and, where second moments were kept, the change of IsoScore* without Q_T,
    and hollow without a matched normal. Embeddings stand before the first layer, the unembedding
    behind the last. Nothing is shown and no display is needed: call ``savefig``.

    Args:
        frame: one row a weight, as ``to_dataframe()`` returns it.
        title: of the figure.

    Raises:
        TangentValueError: a frame of groups, or one in which no weight has a gradient.
    """
    from tl_tangent.views.figure import ShownFigure as NewFigure

    _check(frame)
    sides = [side for side in SIDES if (frame["side"] == side).any()]
    rows = [row for row in ROWS if row[0] in frame and frame[row[0]].notna().any()]
    size = (1.5 + 5.5 * len(sides), 1 + 2.6 * len(rows))
    figure = NewFigure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), len(sides), sharex=True, sharey="row", squeeze=False)
    places = _places(frame)
    for of_row, row in zip(panels, rows, strict=True):
        for ax, side in zip(of_row, sides, strict=True):
            _panel(ax, frame[frame["side"] == side], row, places)
            _legend(ax, row, kinds=ax in panels[0])
        of_row[0].set_ylabel(row[2])
        if row[0] in RATIOS:
            _logarithmic(of_row[0])
    for ax, side in zip(panels[0], sides, strict=True):
        ax.set_title(SIDES[side], loc="left", fontsize=10)
    for ax in panels[-1]:
        _label_layers(ax, places)
    figure.suptitle(title, fontsize=11)
    return figure


def _check(frame: pd.DataFrame) -> None:
    if not {"weight", "kind", "layer", "side"} <= set(frame):
        raise TangentValueError(
            f"a frame with the columns {', '.join(map(str, frame))} is not one row a weight: draw "
            "to_dataframe() itself, not its groups"
        )
    if "energy_ratio_exact" not in frame or not frame["energy_ratio_exact"].notna().any():
        raise TangentValueError("no weight in this frame has a gradient: there is nothing to draw")


def _places(frame: pd.DataFrame) -> dict[Any, int]:
    """Where layers stand, and what belongs to no layer: by layer or, for those, by kind."""
    layers = sorted({int(layer) for layer in frame["layer"].dropna()})
    kinds = set(frame.loc[frame["layer"].isna(), "kind"])
    gap = 1 + len(layers) // 10  # room for their labels
    places: dict[Any, int] = {layer: place for place, layer in enumerate(layers)}
    if kinds & set(BEFORE):
        places["embed"] = -gap
    if kinds & set(AFTER):
        places["unembed"] = len(layers) - 1 + gap
    return places


def _panel(ax: Any, frame: pd.DataFrame, row: tuple, places: dict[Any, int]) -> None:
    column, beside, _, words = row
    for kind, weights in frame.groupby("kind", sort=False):
        colour, marker, label = STYLES[str(kind)]
        at = [places[_place(one)] for one in weights[["kind", "layer"]].to_dict("records")]
        if beside in weights:
            ax.plot(at, weights[beside], marker=marker, ls=":", color=colour, **HOLLOW)
        ax.plot(at, weights[column], marker=marker, color=colour, label=label, markersize=4.5)
    if beside in frame:
        ax.plot([], [], "o-", color="0.4", markersize=4.5, label=words[0])
        ax.plot([], [], "o:", color="0.4", label=words[1], **HOLLOW)
    ax.axhline(1 if column in RATIOS else 0, color="0.5", linewidth=0.8, zorder=1)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _legend(ax: Any, row: tuple, *, kinds: bool) -> None:
    """What filled and hollow are and, once a column of panels, which line is which kind."""
    handles, labels = ax.get_legend_handles_labels()
    shown = {h: label for h, label in zip(handles, labels, strict=True) if kinds or label in row[3]}
    if shown:
        where = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        ax.legend(shown.keys(), shown.values(), fontsize=8, frameon=False, **where)


def _logarithmic(ax: Any) -> None:
    """A logarithmic axis with plain numbers, also within one power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=FINE if high < 10 * low else COARSE))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _place(weight: dict[str, Any]) -> Any:
    if weight["layer"] == weight["layer"]:  # not NaN
        return int(weight["layer"])
    return "embed" if weight["kind"] in BEFORE else "unembed"


def _label_layers(ax: Any, places: dict[Any, int]) -> None:
    step = -(-len(places) // MAX_LABELS)
    layers = [name for name in places if not isinstance(name, str)]
    outside = [name for name in places if isinstance(name, str)]
    shown = [*layers[::step], *outside]
    ax.set_xticks([places[name] for name in shown], [str(name) for name in shown])
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("layer")
