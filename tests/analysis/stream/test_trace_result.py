"""Medians over tokens, massive tokens, selections and the sentence of a residual trace."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.analysis.stream.test_residual_trace import (
    CONTROLS,
    F64,
    LAYERS,
    PARTS,
    STREAMS,
    both_references,
    close,
    part_rows,
    plain,
    same,
    subspaces_of,
)
from tests.hooks import helpers
from tests.hooks.attention.cases import any_family, model_of
from tl_tangent.analysis.stream.trace_words import inner_layers


def with_ledger(trace, **values):
    """The same trace with other numbers in its ledger."""
    return replace(trace, ledger=replace(trace.ledger, **values))


def growing(trace, factor: float, token: int, depth: int = 1):
    """The same trace, in which one token's energies at one depth are so many times as large."""
    stream, copied = trace.ledger.stream.clone(), trace.ledger.copied.clone()
    stream[depth, :, token] *= factor
    copied[depth - 1, :, token] *= factor**0.5
    copied[depth, :, token] *= factor**0.5
    return with_ledger(trace, stream=stream, copied=copied)


# The median token ---------------------------------------------------------------------------------


@both_references
@pytest.mark.parametrize("part", range(2))
def test_medians_are_those_of_the_tokens_own_ratios(reference, part):
    ledger = plain(reference).ledger
    rows = part_rows(plain(reference).stream(), PARTS[part])
    energy, copied = ledger.stream[:, part], ledger.copied[:, part]

    def middle(x):
        return x.quantile(0.5, dim=-1)  # 18 tokens: between the 9th and the 10th

    close(rows["gain_median"][:LAYERS], middle((energy[1:] / energy[:-1]).sqrt()))
    close(rows["kept_median"][:LAYERS], middle(copied / energy[:-1]))
    close(rows["share_median"], middle(energy / ledger.stream.sum(1)))
    control = ledger.control_stream[:, part]
    gains = middle((control[1:] / control[:-1]).sqrt())
    close(rows["control_gain_median_mean"][:LAYERS], gains.mean(-1))
    close(rows["control_gain_median_max"][:LAYERS], gains.amax(-1))
    assert rows[["gain_median", "kept_median"]].iloc[LAYERS].isna().all()


def test_one_huge_token_decides_the_pooled_gain_but_not_the_median():
    trace = plain("fixed")
    huge = growing(trace, 1e6, token=4)
    before, after = (part_rows(one.stream(), "tangent") for one in (trace, huge))
    assert after["gain"][0] > 50 * before["gain"][0]
    energy = trace.ledger.stream[:, 0]
    lower = (energy[1] / energy[0]).sqrt().sort().values
    # whatever becomes of one token, the median stays between its neighbours
    assert lower[7] <= after["gain_median"][0] <= lower[10]


def test_a_token_without_energy_has_no_gain_and_does_not_count():
    trace = plain("fixed")
    stream, copied = trace.ledger.stream.clone(), trace.ledger.copied.clone()
    stream[:2, 0, 3] = copied[0, 0, 3] = 0.0
    found = part_rows(with_ledger(trace, stream=stream, copied=copied).stream(), "tangent")
    others = torch.arange(trace.ledger.n_tokens) != 3
    expected = part_rows(trace.select(others).stream(), "tangent")
    assert found["gain_median"][0] == pytest.approx(expected["gain_median"][0], rel=1e-12)


# Massive tokens, and traces without them ----------------------------------------------------------


def test_massive_are_tokens_above_so_many_medians_at_some_depth():
    trace = plain("fixed")
    energy = trace.ledger.stream.sum(1)
    ratio = energy / energy.quantile(0.5, dim=-1, keepdim=True)
    assert not bool(trace.massive(float(ratio.max()) * 1.5).any())
    assert growing(trace, 1e4, token=4).massive().nonzero().tolist() == [[4]]
    at = energy[1]
    level = float(at.sort().values[-3:-1].mean() / at.median())
    only = with_ledger(trace, stream=trace.ledger.stream[1:2])
    assert only.massive(level).sum() == 2
    for times in (1.0, -1, math.nan):
        with pytest.raises(tt.TangentValueError, match="give more than 1 times"):
            trace.massive(times)


@both_references
def test_a_selection_is_the_trace_of_those_tokens(reference):
    trace = plain(reference)
    some = trace.ledger.position != 4
    chosen = trace.select(some)
    model = helpers.build(STREAMS["bridge-llama"], F64)
    given = families.tiny_tokens(model)
    keep = [p for p in range(9) if p != 4]
    alone = tt.trace_residual(
        model, given, subspaces_of(reference), n_controls=CONTROLS, positions=keep
    )
    for name in ("energy", "carried", "stream", "copied"):
        for prefix in ("", "control_"):
            same(getattr(chosen.ledger, prefix + name), getattr(alone.ledger, prefix + name))
    assert torch.equal(chosen.ledger.ids, alone.ledger.ids)
    assert chosen.pairs is None and chosen.conventions["tokens"] == "16 selected of 18"
    np.testing.assert_allclose(chosen.stream()["energy"], alone.stream()["energy"], rtol=1e-11)


@pytest.mark.parametrize(
    "tokens", [torch.zeros(18).bool(), torch.ones(17).bool(), torch.arange(18), [0, 1]]
)
def test_what_is_no_selection(tokens):
    with pytest.raises(tt.TangentValueError, match="a boolean for each of the 18 followed tokens"):
        plain("fixed").select(tokens)


# Labels, own positions, words ---------------------------------------------------------------------


def test_tokens_are_labelled_by_their_own_ids():
    for table in (plain("fixed").stream, plain("fixed").writes):
        frame = table(by="token", label=lambda i: f"<{i}>")
        assert (frame["label"] == frame["token"].map("<{}>".format)).all()
        with pytest.raises(tt.TangentValueError, match="Pass by='token'"):
            table(by="position", label=str)


def test_every_batch_may_have_its_own_positions():
    model = model_of(any_family())
    tokens, mask = families.tiny_tokens(model), torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 2] = mask[1, 3:5] = True
    subspaces = subspaces_of("own")
    whole = tt.trace_residual(model, tokens, subspaces, positions=mask)
    own = [
        {"input": t, "positions": m} for t, m in zip(tokens.split(1), mask.split(1), strict=True)
    ]
    apart = tt.trace_residual(model, own, subspaces)
    same(apart.ledger.stream, whole.ledger.stream)
    assert whole.ledger.position.tolist() == [2, 3, 4]
    assert apart.conventions["positions"] == "custom" and "positions" in own[0]
    one = subspaces_of("fixed")
    for tool in (tt.part_recovery, tt.transfer_gains):
        assert tool(model, own, one, 0).conventions["n_tokens"] == 3
        with pytest.raises(tt.TangentValueError, match="of 2 rows and this batch has 1. Give eve"):
            tool(model, tokens.split(1), one, 0, positions=mask)
    cut, expected = (
        tt.part_recovery(model, batches, one, 0, **options).to_dataframe()["coefficient"]
        for batches, options in ((own, {}), (tokens, {"positions": mask}))
    )
    np.testing.assert_allclose(cut, expected, rtol=1e-11, atol=1e-13)


def test_the_layers_that_a_sentence_is_about():
    assert list(inner_layers(5)) == [1, 2, 3] and list(inner_layers(3)) == [1]
    assert list(inner_layers(2)) == [0, 1] and list(inner_layers(1)) == [0]


def test_the_sentence_has_medians_over_layers_for_both_parts_and_their_controls():
    trace = plain("own")
    said = trace.headline()
    assert "layers 0 to 1, medians" in said and "massive" not in said
    for part in PARTS:
        rows = part_rows(trace.stream(), part)[:LAYERS]
        values = {
            name: f"{rows[name].median():.2f} (control {rows[f'control_{name}_mean'].median():.2f})"
            for name in ("gain_median", "gain", "kept_median")
        }
        assert (
            f"the {part} part has a gain of {values['gain_median']} at the median token, "
            f"{values['gain']} in pooled energy, and keeps {values['kept_median']} of itself"
        ) in said


def test_the_sentence_leaves_out_the_first_and_the_last_layer():
    """Energies that grow by 10, 2, 3, 4 and 100 a layer: the median inner gain is sqrt(3)."""
    trace = plain("fixed")
    sizes = torch.tensor([1.0, 10, 20, 60, 240, 24000], dtype=torch.float64)
    stream = sizes[:, None, None].expand(6, 2, 18).clone()
    values = {"stream": stream, "copied": stream[:-1]}
    values |= {f"control_{n}": x[:, :, None].expand(-1, 2, 2, 18) for n, x in values.items()}
    said = with_ledger(trace, **values).headline()
    assert "layers 1 to 3, medians: the tangent part has a gain of 1.73 (control 1.73)" in said


def test_massive_tokens_are_told_with_where_they_weigh_most():
    huge = growing(plain("fixed"), 1e4, token=4)
    share = huge.ledger.stream[..., 4] / huge.ledger.stream.sum(-1)
    depth, part = divmod(int(share.argmax()), 2)
    assert depth == 1
    assert (
        f"1 of 18 tokens have massive activations and carry {float(share.max()):.0%} of the "
        f"{PARTS[part]} energy in front of layer 1."
    ) in huge.headline()
    assert "massive" not in huge.select(~huge.massive()).headline()


def test_tokens_are_shown_by_share_or_by_change():
    trace = plain("fixed")
    stream = trace.ledger.stream
    share = stream[:, 1] / stream.sum(1)
    shown = trace.show_tokens(str, 1, tokens=slice(2, 6)).props
    assert shown["tokens"] == [str(i) for i in trace.ledger.ids[2:6].tolist()]
    assert shown["values"] == pytest.approx(share[1, 2:6].tolist(), rel=1e-3)
    change = trace.show_tokens(str, 0, 2).props["values"]
    assert change == pytest.approx((share[2] - share[0]).tolist(), rel=1e-3, abs=1e-9)
