"""Shares of the terms at every layer, without their maps: against shares from the maps."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers
from tests.hooks.attention import cases
from tl_tangent.analysis.attention.scores import split_attention_layers
from tl_tangent.analysis.attention.shares import attention_term_shares
from tl_tangent.geometry.score_terms import TERMS

SHARES = ("mean_square", "square_share", "variance_share", "score_share", "cancelling")


@pytest.fixture
def model():
    return cases.model_of(cases.any_family())


def rows(model, batch: int = 6, pos: int = 9) -> torch.Tensor:
    return families.tiny_tokens(model, batch=batch, pos=pos)


def measured(model, batches=None, space: str = "input", **options):
    batches = rows(model) if batches is None else batches
    return attention_term_shares(model, batches, cases.subspaces(model, space), **options)


def shares_of_maps(split, cells: torch.Tensor, head: int) -> dict[str, dict[str, float]]:
    """Shares of one head as their definitions say, from its maps, query by query."""
    maps = {name: term[:, head] for name, term in split.terms.items()}
    maps["score"] = sum(maps.values())
    square = {name: float(x[cells].square().sum()) for name, x in maps.items()}
    product = dict.fromkeys(maps, 0.0)
    variance = dict.fromkeys(maps, 0.0)
    for row, seen in enumerate(cells):
        for query, keys in enumerate(seen):
            apart = {name: x[row, query, keys] for name, x in maps.items()}
            apart = {name: x - x.mean() for name, x in apart.items() if keys.any()}
            for name, x in apart.items():
                variance[name] += float(x.square().sum())
                product[name] += float((x * apart["score"]).sum())
    names = [name for name in maps if name != "score"]
    return {
        name: {
            "mean_square": square[name] / int(cells.sum()),
            "square_share": square[name] / sum(square[other] for other in names),
            "variance_share": variance[name] / sum(variance[other] for other in names),
            "score_share": product[name] / variance["score"],
            "cancelling": variance["score"] / sum(variance[other] for other in names),
        }
        for name in names
    }


@pytest.mark.parametrize("space", cases.SPACES)
@pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
def test_shares_are_those_of_the_maps(spec, space):
    model = helpers.build(spec, torch.float64)
    tokens = rows(model, batch=2, pos=7)
    frame = measured(model, tokens, space, signed=True).to_dataframe().set_index(["layer", "head"])
    maps = split_attention_layers(model, tokens, cases.subspaces(model, space))
    for layer, split in maps.items():
        for head in (0, families.N_HEADS - 1):
            found = frame.loc[(layer, head)].set_index("term")
            for term, expected in shares_of_maps(split, split.seen, head).items():
                values = found.loc[term, list(SHARES)].to_dict()
                assert values == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_signed_shares_only_where_asked_for(model):
    plain, signed = (measured(model, signed=signed).to_dataframe() for signed in (False, True))
    assert set(signed) - set(plain) == {"score_share", "cancelling"}
    assert plain.equals(signed[list(plain)])
    sums = signed.groupby(["layer", "head"])[list(SHARES[1:4])].sum().to_numpy()
    assert sums == pytest.approx(1.0, abs=1e-12)
    assert (signed["score_share"] < 0).any()


# Batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_add_up(model, size):
    tokens = rows(model)
    whole = measured(model, signed=True, n_controls=1).to_dataframe()
    parts = measured(model, tokens.split(size), signed=True, n_controls=1).to_dataframe()
    for name in whole:
        if whole[name].dtype == float:
            assert parts[name].to_numpy() == pytest.approx(whole[name].to_numpy(), rel=1e-9)


def test_padded_batches_are_the_rows_without_padding(model):
    tokens = rows(model, batch=2)
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    padded = measured(model, {"input": tokens * mask, "attention_mask": mask})
    alone = measured(model, [tokens[:1], tokens[1:, :5]])
    for found, expected in zip(padded.layers, alone.layers, strict=True):
        assert found.moments.cells == expected.moments.cells
        torch.testing.assert_close(
            found.moments.spread, expected.moments.spread, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("batches", [[], torch.zeros(1, 1, dtype=torch.long)])
def test_nothing_to_sum_is_refused(model, batches):
    subspaces = cases.subspaces(model, "input", positions="not_first")
    with pytest.raises(tt.TangentValueError, match="layer 0: no query"):
        attention_term_shares(model, batches, subspaces)


@pytest.mark.parametrize(
    "fitted, given, cells",
    [
        ("not_first", None, 36),
        ("all", None, 45),
        (None, None, 36),
        ("all", "not_first", 36),
        ("not_first", "all", 45),
        ("all", [2, 5], 3),
    ],
)
def test_positions_default_to_those_of_the_fit(model, fitted, given, cells):
    subspaces = cases.subspaces(model, "input", positions=fitted)
    found = attention_term_shares(model, rows(model), subspaces, positions=given)
    assert [one.moments.cells for one in found.layers] == [6 * cells] * 2


# Controls -----------------------------------------------------------------------------------------


def control_bases(model, seed: int, monkeypatch) -> dict[int, list[torch.Tensor]]:
    from tl_tangent.analysis.attention import shares as attention_shares

    drawn: dict[int, list[torch.Tensor]] = {}
    found = attention_shares.controls_of

    def remember(chosen, n, seed):
        controls = found(chosen, n, seed)
        drawn[chosen.layer] = [one.subspace.basis for one in controls]
        return controls

    with monkeypatch.context() as patch:
        patch.setattr(attention_shares, "controls_of", remember)
        measured(model, n_controls=2, seed=seed)
    return drawn


def test_controls_are_seeded_and_differ_from_layer_to_layer(model, monkeypatch):
    first, again, other = (control_bases(model, seed, monkeypatch) for seed in (1, 1, 2))
    for layer in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(first[layer], again[layer], strict=True))
        assert not torch.allclose(first[layer][0], other[layer][0])
        assert not torch.allclose(first[layer][0], first[layer][1])
    assert not torch.allclose(first[0][0], first[1][0])
    own = cases.subspaces(model, "input")
    for layer, bases in first.items():
        basis = own[cases.SITES["input"].format(layer)].basis
        for control in bases:
            assert control.shape == basis.shape
            torch.testing.assert_close(control.T @ control, torch.eye(3, dtype=control.dtype))
            assert float((basis.T.to(control.dtype) @ control).abs().max()) < 1e-6


def test_controls_of_one_subspace_differ_from_layer_to_layer(model):
    """One subspace split at every layer has its own controls at each of them."""
    one = cases.subspace(model, 0, "input", site=None)
    found = attention_term_shares(
        model, rows(model), one, [0, 1], space="input", n_controls=1, seed=3
    )
    alone = attention_term_shares(model, rows(model), one, [1], space="input", n_controls=1, seed=3)
    assert torch.equal(found.layers[1].controls[0].spread, alone.layers[0].controls[0].spread)


def test_columns_of_controls_are_mean_and_extremes(model):
    found = measured(model, n_controls=3, signed=True)
    frame = found.to_dataframe()
    for share in ("square_share", "variance_share", "score_share"):
        low, mean, high = (frame[f"control_{share}_{which}"] for which in ("min", "mean", "max"))
        assert (low <= mean).all() and (mean <= high).all() and (low < high).any()
    controls = torch.stack([one.spread / one.spread.sum(0) for one in found.layers[0].controls])
    first = frame[(frame["layer"] == 0) & (frame["term"] == "tangent_tangent")]
    expected = controls[:, TERMS.index("tangent_tangent")]
    assert first["control_variance_share_mean"].to_list() == pytest.approx(
        expected.mean(0).tolist()
    )
    assert first["control_variance_share_min"].to_list() == pytest.approx(expected.amin(0).tolist())
    assert not any("control" in name for name in measured(model).to_dataframe())


def test_a_negative_number_of_controls_is_refused(model):
    with pytest.raises(tt.TangentValueError, match="n_controls is -1"):
        measured(model, n_controls=-1)


# The model and the result -------------------------------------------------------------------------


def test_the_model_is_as_it_was(model):
    tokens = rows(model)
    before, hooks = model(tokens), cases.hooks_left(model)
    measured(model, tokens, n_controls=1)
    assert torch.equal(model(tokens), before) and cases.hooks_left(model) == hooks
    edit = ("blocks.1.attn.hook_q", lambda x, hook: 2 * x)
    with model.hooks(fwd_hooks=[edit]), pytest.raises(tt.TangentRuntimeError, match="layer 1"):
        measured(model, tokens)
    assert torch.equal(model(tokens), before) and cases.hooks_left(model) == hooks


@pytest.mark.parametrize("pos, query", [(9, 3), (9, 8), (32, 5), (32, 31)])
def test_an_edit_of_one_query_is_found(model, pos, query):
    """Scores are checked at queries spread over a pass, the last among them."""

    def edit(scores, hook):
        scores = scores.clone()
        scores[:, 0, query] += 0.5
        return scores

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", edit)]):
        with pytest.raises(tt.TangentRuntimeError, match="layer 0, head 0"):
            measured(model, rows(model, pos=pos))


def test_one_table_a_share(model):
    found = measured(model, n_controls=1)
    assert found.error < 1e-12 and set(found.conventions) == {0, 1}
    frame = found.to_dataframe()
    for share in ("variance_share", "square_share", "control_variance_share_mean"):
        table = found.by_layer(share)
        assert list(table.columns) == list(TERMS) and list(table.index) == [0, 1]
        mean = frame[(frame["layer"] == 1) & (frame["term"] == TERMS[4])]
        assert table.loc[1, TERMS[4]] == pytest.approx(mean[share].mean())
    with pytest.raises(tt.TangentValueError, match="no 'score_share' here; there are .*square"):
        found.by_layer("score_share")


def test_its_text_tells_rank_space_and_error(model):
    found = measured(model, space="residual", n_controls=1)
    text = repr(found)
    assert "AttentionTermShares(2 layers)" in text and "rank 3, residual space" in text
    assert "matched random subspaces" in text and f"{found.error:.1e}" in text
    assert "matched random" not in repr(measured(model))
    assert all(name in found._repr_html_() for name in TERMS)


def test_inference_mode_and_half_precision():
    model = helpers.build(("bridge", "llama", False), torch.bfloat16)
    with torch.inference_mode():
        found = measured(model, signed=True)
    assert 0 < found.error < 0.03
    sums = found.to_dataframe().groupby(["layer", "head"])["score_share"].sum().to_numpy()
    assert sums == pytest.approx(1.0, abs=1e-9)
