"""The picture of a trace: every mark of it is a number of the tables, on fair scales."""

from __future__ import annotations

import functools
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba

import tl_tangent as tt
from tests import families
from tests.hooks.attention.cases import captured
from tests.hooks.helpers import build
from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.views.ledger_figure import CONTROLS, FRAME, FRAMES, draw_ledger
from tl_tangent.views.ledger_travel import pieces
from tl_tangent.views.stream_lines import COLOURS, TINTS

LAYERS, F64 = families.N_LAYERS, torch.float64


def subspace(site: str, seed: int) -> tt.TangentSubspace:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(families.D_MODEL, 3, generator=generator, dtype=F64)
    mean = torch.randn(families.D_MODEL, generator=generator, dtype=F64)
    return tt.TangentSubspace(basis, mean, site=site, orthonormalize=True, positions="all")


SITES = ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(LAYERS))]


@functools.cache
def traced(reference: str = "fixed", n_controls: int = 3, heads: bool = False):
    model = build(("bridge", "llama", False), F64)
    own = {site: subspace(site, seed) for seed, site in enumerate(SITES)}
    given = own[SITES[-1]] if reference == "fixed" else own
    tokens = families.tiny_tokens(model)
    return tt.trace_residual(model, tokens, given, n_controls=n_controls, heads=heads)


def scaled(trace, values):
    """The same trace with other energies."""
    return replace(trace, ledger=replace(trace.ledger, **values))


def panels(figure) -> dict[str, object]:
    """The panels by what they show: ledger, stack and flow by their titles."""
    return {ax.get_title("left"): ax for ax in figure.axes if ax.get_title("left")}


def bars(ax) -> list[list[tuple[float, float]]]:
    """Every series of bars as pairs of ends."""
    return [[(bar.get_y(), bar.get_y() + bar.get_height()) for bar in one] for one in ax.containers]


def rows(trace, part: str):
    frame = trace.stream()
    return frame[frame["part"] == part].reset_index(drop=True)


# The four energies --------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["fixed", "own"])
@pytest.mark.parametrize("part", PARTS)
def test_the_four_pieces_add_up_to_the_energy_behind(reference, part):
    trace = traced(reference)
    table, energy = pieces(trace, part), rows(trace, part)["energy"].to_numpy()
    np.testing.assert_allclose(table["carried"], energy[:-1])
    np.testing.assert_allclose(table["behind"], energy[1:])
    total = table[["carried", "frame", "written", "interference"]].sum(axis=1)
    np.testing.assert_allclose(total, energy[1:])
    assert (table["along"] < table["behind"]).all() and (table["written"] > 0).all()


def test_with_one_subspace_no_frame_moves_and_written_are_the_writes():
    """Their squared norms, and in the interference also the product of attention and MLP."""
    trace = traced()
    for i, part in enumerate(PARTS):
        pairs, table = trace.pairs[part], pieces(trace, part)
        assert (table["frame"] == 0).all()
        for layer in range(LAYERS):
            at = [trace.writers.index(f"{layer}.{x}") for x in ("attn", "mlp")]
            before = [k for k, one in enumerate(trace.ledger.layers) if one is None or one < layer]
            assert table["written"][layer] == pytest.approx(float(pairs[at, at].sum()))
            both = 2 * (pairs[before][:, at].sum() + pairs[at[0], at[1]])
            assert table["interference"][layer] == pytest.approx(float(both))
        assert float(trace.ledger.stream[-1, i].mean()) == pytest.approx(table["behind"].iloc[-1])


def test_the_frame_is_what_the_same_stream_holds_in_the_next_subspace():
    """The stream in front of a layer, around the next depth's mean and in its subspace."""
    model, trace = build(("bridge", "llama", False), F64), traced("own")
    sites = [f"blocks.{layer}.hook_resid_pre" for layer in range(LAYERS)]
    cache = captured(model, families.tiny_tokens(model), sites)
    for layer in range(LAYERS):
        stream = cache[sites[layer]].flatten(0, 1)
        for part in PARTS:
            own, following = (getattr(subspace(SITES[i], i), part) for i in (layer, layer + 1))
            energies = [float(one(stream).square().sum(-1).mean()) for one in (own, following)]
            frame = pieces(trace, part)["frame"][layer]
            assert frame == pytest.approx(energies[1] - energies[0], abs=1e-10)


# What is drawn ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["fixed", "own"])
@pytest.mark.parametrize("part", PARTS)
def test_the_ledger_is_what_is_written_by_layer_and_writer(reference, part):
    trace = traced(reference)
    shown = panels(draw_ledger(trace))
    (image,) = shown[f"written to the {part} part"].images
    first = shown["written to the tangent part"]  # both share their rows
    writers = [text.get_text() for text in first.get_yticklabels()]
    assert writers == [*(("subspace", "mean") if reference == "own" else ()), "attn", "mlp"]
    frame = trace.writes()
    for row in frame[(frame["part"] == part) & frame["layer"].notna()].to_dict("records"):
        cell = image.get_array()[writers.index(row["writer"]), int(row["layer"])]
        assert cell == row["written"]


def test_both_ledgers_share_one_logarithmic_scale_from_the_data():
    from matplotlib.colors import LogNorm

    trace = traced("own")
    shown = panels(draw_ledger(trace))
    images = [shown[f"written to the {part} part"].images[0] for part in PARTS]
    assert images[0].norm is images[1].norm and isinstance(images[0].norm, LogNorm)
    written = trace.writes()["written"].dropna()
    low, high = images[0].get_clim()
    assert high == written.max() and low == pytest.approx(min(written.min(), 0.1 * high))


def test_where_nothing_is_written_there_is_no_colour_and_the_scale_stays():
    trace = traced()
    energy = trace.ledger.energy.clone()
    energy[[layer == 0 for layer in trace.ledger.layers], 1] = 0.0
    energy[trace.writers.index("1.attn"), 1] = 1e-30
    shown = panels(draw_ledger(scaled(trace, {"energy": energy})))
    (image,) = shown["written to the normal part"].images
    assert image.get_array().mask.tolist() == [[True, False], [True, False]]
    assert image.norm.vmin > 1e-5
    draw_ledger(scaled(trace, {"energy": 0 * energy})).canvas.draw()


@pytest.mark.parametrize("reference", ["fixed", "own"])
@pytest.mark.parametrize("part", PARTS)
def test_stacks_end_at_one_with_what_is_negative_below_zero(reference, part):
    trace = traced(reference)
    table = pieces(trace, part)
    names = ["carried", "frame", "written", "interference"]
    if reference == "fixed":
        names.remove("frame")
    ax = panels(draw_ledger(trace))[f"{part}: energy behind each layer"]
    assert [one.get_label() for one in ax.containers] == names
    if reference == "own":
        assert ax.containers[1].patches[0].get_facecolor() == to_rgba(FRAME)
    series = bars(ax)
    for layer in range(LAYERS):
        top = bottom = 0.0
        for name, one in zip(names, series, strict=True):
            size = table[name][layer] / table["behind"][layer]
            start = top if size > 0 else bottom
            assert one[layer] == pytest.approx((start, start + size))
            top, bottom = top + max(size, 0), bottom + min(size, 0)
        assert top + bottom == pytest.approx(1)


def test_both_signs_of_interference_are_in_these_tests():
    signs = {
        bool(value > 0)
        for reference in ("fixed", "own")
        for part in PARTS
        for value in pieces(traced(reference), part)["interference"]
    }
    assert signs == {True, False}


def test_the_flow_splits_the_stream_by_part_and_by_what_is_new():
    trace = traced("own")
    ax = panels(draw_ledger(trace))["flow: share of the stream's energy"]
    series = bars(ax)
    colours = [one.patches[0].get_facecolor() for one in ax.containers]
    order = (TINTS["tangent"], COLOURS["tangent"], COLOURS["normal"], TINTS["normal"])
    assert colours == [to_rgba(colour) for colour in order]
    tables = {part: pieces(trace, part) for part in PARTS}
    for layer in range(LAYERS):
        ends = [0.0, *(one[layer][1] for one in series)]
        assert [one[layer][0] for one in series] == pytest.approx(ends[:-1])
        assert ends[-1] == pytest.approx(1)
        share = rows(trace, "tangent")["share"][layer + 1]
        assert ends[2] == pytest.approx(share)
        whole = sum(table["behind"][layer] for table in tables.values())
        for part, (low, high) in zip(PARTS, (ends[:2], ends[3:]), strict=True):
            assert high - low == pytest.approx(tables[part]["along"][layer] / whole)


def check_band(ax, i: int, table, name: str) -> None:
    """The dashed line and the band of the controls are those of the table."""
    dashed = [line for line in ax.lines if line.get_linestyle() == "--"][i]
    np.testing.assert_allclose(dashed.get_ydata(), table[f"control_{name}_mean"])
    points = ax.collections[i].get_paths()[0].vertices
    for depth, low, high in zip(
        table["depth"], table[f"control_{name}_min"], table[f"control_{name}_max"], strict=True
    ):
        heights = points[points[:, 0] == depth, 1]
        assert (heights.min(), heights.max()) == pytest.approx((low, high))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["gain", "kept"])
def test_layers_by_median_token_and_pooled_beside_the_controls(name, part):
    trace = traced("own")
    ax = panels(draw_ledger(trace))[f"{part}: {name} by layer"]
    table = rows(trace, part).dropna(subset=name)
    check_band(ax, 0, table, f"{name}_median")
    for style, column in ((":", name), ("-", f"{name}_median")):
        drawn = [line for line in ax.lines if line.get_linestyle() == style]
        assert any(np.array_equal(line.get_ydata(), table[column]) for line in drawn)
    low, high = ax.get_ylim()
    assert low < table[f"{name}_median"].min() and high > table[f"{name}_median"].max()
    assert all(tick == int(tick) for tick in ax.get_xticks())


def test_energies_with_their_controls_in_bands():
    trace = traced("own")
    ax = panels(draw_ledger(trace))["energy at each depth"]
    for i, part in enumerate(PARTS):
        check_band(ax, i, rows(trace, part), "energy")
        assert any(
            np.array_equal(line.get_ydata(), rows(trace, part)["energy"]) for line in ax.lines
        )


@pytest.mark.parametrize(
    "growth, energies, stack",
    [(1.5, "linear", "linear"), (1e3, "log", "linear"), (1e-3, "log", "symlog")],
)
def test_axes_are_logarithmic_only_where_decades_are_spanned(growth, energies, stack):
    trace = traced()
    grown = torch.tensor([growth**depth for depth in range(LAYERS + 1)], dtype=F64)
    stream = grown[:, None, None].expand_as(trace.ledger.stream)
    carried = torch.zeros_like(trace.ledger.energy)
    for layer in range(LAYERS):  # all that changes is what the attention writes along the part
        change = (stream[layer + 1] - stream[layer]) / 2
        carried[trace.writers.index(f"{layer}.attn")] = change
    values = {"stream": stream, "copied": stream[:-1], "carried": carried, "energy": 0 * carried}
    shown = panels(draw_ledger(scaled(trace, values)))
    assert shown["energy at each depth"].get_yscale() == energies
    for part in PARTS:
        assert shown[f"{part}: energy behind each layer"].get_yscale() == stack


# Words and forms ----------------------------------------------------------------------------------


def text_of(figure) -> str:
    found = [figure.get_suptitle()]
    return " ".join([*found, *(one.get_supxlabel() for one in figure.subfigs)])


def test_words():
    trace = traced()
    text = text_of(draw_ledger(trace))
    for part in ("external", "rank 3", "one subspace for every depth", "18 tokens", "closes to"):
        assert part in text
    assert "the sum is 1" in text and CONTROLS in text
    assert CONTROLS not in text_of(draw_ledger(traced(n_controls=0)))
    assert FRAMES not in text and FRAMES in text_of(draw_ledger(traced("own")))
    stream = trace.ledger.stream.clone()
    stream[1, :, 4] *= 1e4
    assert "1 of 18 tokens have massive" in text_of(draw_ledger(scaled(trace, {"stream": stream})))


def test_without_controls_there_is_nothing_dashed():
    for ax in draw_ledger(traced(n_controls=0)).axes:
        assert not ax.collections or ax.get_title("left") == ""
        assert all(line.get_linestyle() != "--" for line in ax.lines)


@pytest.mark.parametrize("biased", [True, False])
def test_heads_are_rows_of_their_own_and_a_bias_only_where_there_is_one(biased):
    trace = traced(heads=True)
    energy = trace.ledger.energy.clone()
    energy[[writer.endswith("attn_bias") for writer in trace.writers]] = float(biased)
    ax = panels(draw_ledger(scaled(trace, {"energy": energy})))["written to the normal part"]
    assert ax.images[0].get_array().shape == (families.N_HEADS + 1 + biased, LAYERS)


def test_a_plain_figure_that_pyplot_does_not_hold():
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    held = pyplot.get_fignums()
    figure = traced("own").plot()
    assert isinstance(figure, Figure) and pyplot.get_fignums() == held
    assert tuple(figure.get_size_inches()) == (10.5, 11)
    written = io.BytesIO()
    figure.savefig(written, format="png")
    assert written.getvalue().startswith(b"\x89PNG")
