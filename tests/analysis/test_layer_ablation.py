"""Layer ablation: hand-written projections, closed forms, controls, and the result."""

from __future__ import annotations

import math

import pytest
import torch

import tl_tangent as tt
from tests import families
from tl_tangent.analysis import LayerAblation, SiteLosses, layer_ablation
from tl_tangent.analysis.site_fit import STATISTICS, fit_sites, site_statistics, takes_first
from tl_tangent.analysis.staged import StagedLoss
from tl_tangent.geometry import SubspaceFitter, TangentSubspace

POST = "blocks.*.hook_resid_post"
QUIET = {"progress": False}


def a_model():
    if families.HAS_HOOKED_TRANSFORMER:
        return families.hooked_transformer("rotary_gqa")
    return families.bridge("llama")


def rows(n: int = 24, pos: int = 12, seed: int = 0):
    return families.tiny_tokens(batch=n, pos=pos, seed=seed)


def measured(model=None, **options) -> LayerAblation:
    tokens = rows()
    defaults = {"rank": 2, "n_controls": 3, **QUIET}
    return layer_ablation(
        model or a_model(), tokens[:20].split(8), tokens[20:], **defaults | options
    )


# What is measured -------------------------------------------------------------------------------


def test_losses_equal_hand_written_projections():
    model, tokens = a_model(), rows()
    result = measured(model)
    for item in result.losses:
        subspace = result.subspaces[item.site]
        mean, projector = subspace.mean, subspace.basis @ subspace.basis.T

        def hand(change, name=item.site):
            def hook(x, hook):
                x = x.clone()
                x[:, 1:] = change(x[:, 1:])
                return x

            evaluation = tokens[20:]
            loss = model.run_with_hooks(evaluation, return_type="loss", fwd_hooks=[(name, hook)])
            return pytest.approx(float(loss.detach()), rel=1e-5)

        assert item.ablated == hand(lambda x: x - (x - mean) @ projector)  # noqa: B023
        assert item.kept == hand(lambda x: mean + (x - mean) @ projector)  # noqa: B023


def test_controls_are_the_matched_random_normals_of_the_set():
    model, tokens = a_model(), rows()
    result = measured(model, seed=7)
    drawn = result.subspaces.random_normals(3, 7)
    for item in result.losses:
        for control, loss in zip(drawn, item.controls, strict=True):
            with tt.ablating(model, control[item.site], positions="not_first"):
                assert loss == StagedLoss(model, tokens[20:]).loss()


def test_the_same_seed_gives_the_same_table_and_another_one_other_controls():
    first, again, other = (measured(seed=seed).to_dataframe() for seed in (1, 1, 2))
    assert first.equals(again)
    control = "loss_control_ablated_mean"
    assert (first["loss_tangent_ablated"] == other["loss_tangent_ablated"]).all()
    assert not (first[control] == other[control]).any()


def test_hooks_and_names_of_the_model_are_as_before():
    model = a_model()
    before, logits = set(model.hook_dict), model(rows(2))
    measured(model)
    assert set(model.hook_dict) == before
    assert torch.equal(model(rows(2)), logits)


@pytest.mark.parametrize("sites", ["blocks.*.attn.hook_z", "blocks.*.hook_mlp_out", "hook_embed"])
def test_other_sites(sites):
    result = measured(sites=sites, n_controls=2)
    assert result.to_dataframe().notna().drop(columns="layer").all(axis=None)
    assert all(item.ablated != item.baseline for item in result.losses)


def test_layers_restrict_and_count_from_the_end():
    assert [item.layer for item in measured(layers=[-1]).losses] == [1]


def test_a_rank_without_room_for_a_control_is_refused():
    with pytest.raises(tt.TangentValueError, match=r"2 \* rank <= d"):
        measured(rank=17)


def test_no_control_at_all_is_refused():
    with pytest.raises(tt.TangentValueError, match="n_controls=0"):
        measured(n_controls=0)


@pytest.mark.skipif(not families.HOOKED_FAMILIES, reason="compares the two classes")
def test_both_classes_measure_the_same():
    hf = families.hf_model("llama")
    raw = dict.fromkeys(
        ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), False
    )
    hooked = measured(tt.TangentHookedTransformer.from_hf(hf, **raw)).to_dataframe()
    bridged = measured(tt.TangentBridge.from_hf(families.hf_model("llama"))).to_dataframe()
    numbers = hooked.columns.drop("site")
    assert (hooked["site"] == bridged["site"]).all()
    torch.testing.assert_close(
        torch.tensor(hooked[numbers].values.astype(float)),
        torch.tensor(bridged[numbers].values.astype(float)),
        atol=2e-5,
        rtol=2e-5,
    )


# Statistics -------------------------------------------------------------------------------------


def fitter_of(variances: list[float]) -> SubspaceFitter:
    """A fitter of rows whose covariance is exactly diagonal and proportional to ``variances``."""
    half = torch.tensor(variances, dtype=torch.float64).sqrt().diag()
    fitter = SubspaceFitter(len(variances))
    fitter.update(torch.cat([half, -half]))
    return fitter


def test_closed_forms_of_a_spike():
    """C = diag(100, 1 x 63): without the spike, 63 of 64 dimensions are used evenly."""
    fitter = fitter_of([100.0] + [1.0] * 63)
    axes = torch.eye(64, dtype=torch.float64)
    spike, bulk = TangentSubspace(axes[:, :1]), TangentSubspace(axes[:, 1:2])
    found = site_statistics(fitter, spike, [bulk])
    assert found["variance_share"] == pytest.approx(100 / 163)
    assert found["control_variance_share"] == pytest.approx(1 / 163)
    assert found["participation_ratio"] == pytest.approx(163**2 / 10063)
    assert found["isoscore"] == pytest.approx(0.026035973367783)
    assert found["participation_ratio_without_tangent"] == pytest.approx(63)
    assert found["isoscore_without_tangent"] == pytest.approx(1)
    assert found["isoscore_without_tangent_ambient"] == pytest.approx(62 / 63)
    assert found["isoscore_without_control_ambient"] == pytest.approx(0.025527, abs=1e-6)
    assert found["first_direction_share"] == pytest.approx(100 / 163)


def test_the_share_with_position_0_is_that_of_a_fit_with_it():
    model, tokens = a_model(), rows()
    without = fit_sites(model, tokens.split(8), POST, rank=2, **QUIET)
    fitters = tt.collect(model, tokens.split(8), POST, positions="all")
    for name, subspace in without.items():
        share = subspace.metadata[STATISTICS]["first_direction_share_with_position_0"]
        assert share == pytest.approx(fitters[name].fit(1).explained, rel=1e-4)
        assert share != subspace.metadata[STATISTICS]["first_direction_share"]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [("all", True), ("not_first", False), ([0, 3], True), ([1, 2], False), (slice(2, None), False)],
)
def test_which_rules_take_position_0(positions, expected):
    assert takes_first(positions, 6) is expected


# The result -------------------------------------------------------------------------------------


def a_result(first_shares: list[float]) -> LayerAblation:
    """A result of made-up numbers at the sites of a model with so many layers."""
    statistics = site_statistics(fitter_of([9.0, 4.0, 1.0, 1.0]), *_axes())
    subspaces = {}
    for layer, share in enumerate(first_shares):
        told = {**statistics, "first_direction_share_with_position_0": share}
        site = f"blocks.{layer}.hook_resid_post"
        subspaces[site] = _axes()[0].replace(site=site, metadata={STATISTICS: told})
    losses = [
        SiteLosses(site, layer, 3.0, 3.5 + layer, 7.0, (3.01, 3.02, 2.99))
        for layer, site in enumerate(subspaces)
    ]
    conventions = {"model": "made-up", "sites": POST, "rank": 1, "method": "pca"}
    return LayerAblation(tt.SubspaceSet(subspaces), tuple(losses), conventions)


def _axes() -> tuple[TangentSubspace, list[TangentSubspace]]:
    axes = torch.eye(4, dtype=torch.float64)
    return TangentSubspace(axes[:, :1]), [TangentSubspace(axes[:, 2:3])]


def test_the_table_holds_increases_and_the_spread_of_the_controls():
    row = a_result([0.5]).to_dataframe().iloc[0]
    assert row["increase_tangent_ablated"] == 0.5
    assert row["increase_tangent_kept"] == 4.0
    assert row["loss_control_ablated_mean"] == pytest.approx(3.02 - 0.04 / 3)
    assert row["loss_control_ablated_sd"] == pytest.approx(math.sqrt(0.0007 / 3))
    assert (row["loss_control_ablated_min"], row["loss_control_ablated_max"]) == (2.99, 3.02)


def test_the_headline_names_the_middle_site_and_its_control():
    text = a_result([0.5] * 3).headline()
    assert "blocks.1.hook_resid_post raises the loss by 1.500 nats a token (3.000 to 4.500)" in text
    assert "0.007 (mean of 3, from -0.010 to 0.020)" in text


def test_position_0_is_only_spoken_of_where_it_takes_over():
    assert a_result([0.5, 0.9]).position_0_note() is None
    note = a_result([0.5, 0.95, 0.993, 0.2]).position_0_note()
    assert "2 of 4 sites, first at blocks.1.hook_resid_post;" in note
    assert "99.30% at blocks.2" in note


def test_it_shows_itself():
    result = a_result([0.5] * 2)
    assert "made-up" in repr(result) and result.headline() in repr(result)
    assert "<table>" in result._repr_html_() and "blocks.0.hook_resid_post" in result._repr_html_()


def test_the_conventions_say_how_it_was_measured():
    made = measured(layers=[0], seed=3).conventions
    assert (made["fit_tokens"], made["evaluation_tokens"]) == (20 * 12, 4 * 12)
    assert (made["rank"], made["seed"], made["n_controls"], made["layers"]) == (2, 3, 3, [0])
    assert made["positions"] == "not_first" and "torch" in made["versions"]
