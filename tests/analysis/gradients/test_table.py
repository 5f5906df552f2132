"""The table of a result: its columns, its groups, and the sentence above it."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from tests import families
from tests.analysis.gradients.cases import (
    RANK,
    B,
    batches,
    build,
    fresh,
    loss_of,
    measure,
    measured,
)
from tl_tangent.analysis.gradients.rows import COLUMNS, WORDS, geometric_mean, grouped_rows

GEOMETRIC = ["energy", "energy_ratio", "energy_ratio_exact", "pairing_ratio", "excess_pairing"]
GEOMETRIC += ["activation_ratio", "excess_activations", "energy_ratio_centred"]
ARITHMETIC = ["fraction", "p_value", "mean_part", "efficiency", "delta_tangent", "delta_p_value"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_columns_stand_in_one_order_and_each_is_explained(family):
    frame = measure(build("hf", family), moments=True, within="token").to_dataframe()
    of_groups = ("weights", "p_value_mean", "delta_p_value_mean")
    assert list(frame) == [column for column in COLUMNS if column not in of_groups]
    assert set(frame) - set(WORDS) == {"weight", "kind", "layer", "side", "d", "rank"}
    assert measured("hf", family).conventions["meaning"] == WORDS


def test_rows_name_their_weight():
    frame = measured().to_dataframe()
    assert frame["weight"].is_unique
    assert set(frame["d"]) == {families.D_MODEL}
    assert set(frame["rank"]) == {RANK}
    for row in frame.to_dict("records"):
        inside = str(row["weight"]).startswith("blocks.")
        assert inside == (not math.isnan(row["layer"]))
        assert not inside or f"blocks.{int(row['layer'])}." in row["weight"]


@pytest.mark.parametrize("by", ["kind", "layer", "side"])
def test_groups_are_means_of_their_rows(by):
    frame, groups = measured().to_dataframe(), measured().to_dataframe(by)
    assert groups["weights"].sum() == len(frame)
    for row in groups.to_dict("records"):
        same = frame[by].isna() if pd.isna(row[by]) else frame[by] == row[by]
        inside = frame[same]
        assert len(inside) == row["weights"]
        for column in GEOMETRIC:
            mean = np.exp(np.log(inside[column]).mean())
            assert row[column] == pytest.approx(mean, nan_ok=True)
        for column in ARITHMETIC:
            name = f"{column}_mean" if "p_value" in column else column
            assert row[name] == pytest.approx(inside[column].mean())
        assert not {"p_value", "delta_p_value"} & set(row)  # a mean of them is none


def test_groups_skip_what_was_not_measured():
    """GPT-2's tied and position embeddings have no pairs; other weights of the group do."""
    frame, groups = (measured("hf", "gpt2").to_dataframe(by) for by in ("weight", "side"))
    inputs = frame[(frame["side"] == "input")]["excess_pairing"]
    assert inputs.isna().sum() == 1
    found = groups.set_index("side").loc["input", "excess_pairing"]
    assert found == pytest.approx(np.exp(np.log(inputs.dropna()).mean()))
    alone = measured("hf", "gpt2").to_dataframe("kind").set_index("kind")
    assert math.isnan(alone.loc["tied", "excess_pairing"])


def test_geometric_means_of_extremes():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2)
    assert geometric_mean([0.0, 4.0]) == 0
    assert geometric_mean([1.0, math.inf]) == math.inf
    assert math.isnan(geometric_mean([0.0, math.inf]))
    rows = [{"kind": "q", "energy": 1.0}, {"kind": "k"}, {"kind": "q", "energy": 9.0}]
    first, second = grouped_rows(rows, "kind")
    assert first["kind"] == "q"
    assert first["energy"] == pytest.approx(3)
    assert second == {"kind": "k", "weights": 1}


def test_the_headline_has_the_numbers_of_the_table():
    result, frame = measured(), measured().to_dataframe()

    def mean(column):
        return np.exp(np.log(frame[column]).mean())

    floor = int((frame["p_value"] == 1 / (1 + B)).sum())
    told = result.headline()
    assert f"of {len(frame)} weights Q_T holds {frame['fraction'].mean():.1%} on average" in told
    assert f"{mean('energy_ratio_exact'):.1f} times that of an average normal" in told
    assert f"{floor} of {len(frame)} weights reach the floor p = 1/{1 + B}" in told
    assert f"would give {mean('pairing_ratio'):.1f}" in told
    excess = f"the excess is {mean('excess_pairing'):.2f} at 18 tokens a gradient. Q_T was fitted"
    assert excess in told
    apart = measure(fit_batches=batches(3)).headline()
    assert "very tokens" in told and "very tokens" not in apart
    assert told in repr(result)
    assert told in result._repr_html_().replace("&#x27;", "'")


def test_the_headline_without_controls_and_of_some_zero_gradients():
    assert "floor" not in measure(n_controls=0).headline()

    def early(model, batch):
        found = model(batch.tokens, output_hidden_states=True)
        return found.hidden_states[1].square().mean() + 0 * found.logits.mean()

    told = measure(objective=early).headline()
    assert "Of the gradient energy of 8 weights" in told  # the embedding and block 0


def test_html_shows_one_row_a_kind():
    html = measured()._repr_html_()
    for kind in measured().to_dataframe()["kind"].unique():
        assert f">{kind}<" in html


def test_conventions_say_how_the_numbers_came_about():
    result = measure(seed=3, positions="all", zeta=0.1)
    told = json.loads(json.dumps(dict(result.conventions)))
    expected = {
        "model_class": "LlamaForCausalLM",
        "dtype": "float64",
        "objective": "causal",
        "batches": 2,
        "tokens": 36,
        "subspaces": "the same batches",
        "fit_positions": "all",
        "gradient_positions": "all real tokens",
        "n_controls": B,
        "zeta": 0.1,
        "seed": 3,
        "not_measured": [],
    }
    assert {name: told[name] for name in expected} == expected
    assert {"torch", "python", "transformer-lens"} <= set(told["versions"])
    some = measure(kinds=("q",), layers=(0,)).conventions["not_measured"]
    assert "blocks.1.attn.W_Q" in some
    alone = measure(kinds="q", layers=0)  # one of each needs no list
    assert alone.conventions["not_measured"] == some
    function = measure(objective=lambda model, batch: loss_of(model, batch.tokens))
    assert function.conventions["objective"] == "a function of the caller"


def test_shrinkage_moves_isoscore_towards_one():
    frames = [measure(moments=True, zeta=zeta).to_dataframe() for zeta in (0.0, 0.5, 1.0)]
    scores = [frame["isoscore"].to_numpy() for frame in frames]
    assert (scores[0] < scores[1]).all()
    assert scores[2] == pytest.approx(1)
    np.testing.assert_allclose(frames[2]["delta_tangent"], 0, atol=1e-6)


@pytest.mark.parametrize("kind", ["bridge", "hooked"])
def test_every_class_of_model_has_a_table(kind):
    family = "learned" if kind == "hooked" else "bert"
    model = fresh(kind, family)
    masked = kind == "bridge"
    from tl_tangent.hooks.gradients.objectives import mask_tokens

    data = [mask_tokens(one, mask_token=3, vocabulary=64, share=0.5) for one in batches()]
    result = measure(
        model, data if masked else batches(), objective="masked" if masked else "causal"
    )
    frame = result.to_dataframe()
    assert frame["energy"].gt(0).all()
    assert frame["fraction"].between(0, 1).all()
