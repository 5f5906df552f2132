"""What leaves with Q_T: against IsoScores written out by hand, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tl_tangent.geometry import SubspaceSet, TangentSubspace, isoscore_from_covariance

SITES = ["blocks.0.hook_resid_post", "blocks.1.hook_mlp_out"]


def a_model():
    if families.HAS_HOOKED_TRANSFORMER:
        return families.hooked_transformer("rotary_gqa")
    return families.bridge("llama")


def rows(n: int = 24, seed: int = 0):
    return families.tiny_tokens(batch=n, pos=12, seed=seed)


def activations(model, tokens, site):
    _, cache = model.run_with_cache(tokens, names_filter=site)
    return cache[site][:, 1:].flatten(0, 1).double()


def without(moment, basis):
    """IsoScore in coordinates of what is left."""
    left = torch.linalg.svd(basis.double())[0][:, basis.shape[1] :]
    return float(isoscore_from_covariance(left.T @ moment @ left))


@pytest.mark.parametrize("centred", [True, False])
def test_scores_are_those_of_what_is_left(centred):
    model = a_model()
    found = tt.removal_test(
        model, rows(seed=1).split(8), sites=SITES, fit_batches=rows(), rank=2, centred=centred
    )
    for site, effect in found.effects.items():
        x = activations(model, rows(seed=1), site)
        moment = torch.cov(x.T) if centred else x.T @ x / len(x)
        assert effect.isoscore == pytest.approx(float(isoscore_from_covariance(moment)), rel=1e-5)
        expected = without(moment, found.subspaces[site].basis)
        assert effect.without_tangent == pytest.approx(expected, rel=1e-5)
        leading = torch.linalg.eigh(moment)[1][:, -2:]
        most = without(moment, leading) - effect.isoscore
        assert found.leading[site].delta_tangent == pytest.approx(most, rel=1e-4)
    frame = found.to_dataframe()
    assert frame["site"].tolist() == SITES
    assert frame["layer"].tolist() == [0, 1]
    assert (frame["rows"] == 24 * 11).all()
    assert (frame["contrast"] == frame["delta_tangent"] - frame["delta_normal"]).all()


def test_on_the_rows_that_it_was_fitted_on_it_is_their_leading_directions():
    found = tt.removal_test(a_model(), rows(), sites=SITES, rank=3)
    frame = found.to_dataframe()
    assert frame["captured"].tolist() == pytest.approx([1, 1], rel=1e-4)
    assert "most of its change is mechanical" in found.headline()
    other = tt.removal_test(a_model(), rows(seed=1), sites=SITES, rank=3, fit_batches=rows())
    assert "mechanical" not in other.headline()
    assert (other.to_dataframe()["captured"] < 1).all()


def test_random_subspaces_do_what_their_normals_do():
    """No subspace that knows nothing of the model reaches the floor of p more than by chance."""
    model, d = a_model(), families.D_MODEL
    reached = 0
    for seed in range(20):
        basis = torch.linalg.qr(torch.randn(d, 1, generator=torch.Generator().manual_seed(seed)))[0]
        chance = SubspaceSet({SITES[0]: TangentSubspace(basis)})
        found = tt.removal_test(model, rows(4), chance, n_controls=9, seed=seed)
        reached += found.effects[SITES[0]].p_value <= 0.1
    assert reached <= 6  # 2 expected


def test_conventions_and_targets_reach_the_scores():
    model = a_model()
    subspaces = tt.fit_subspaces(model, rows(), SITES, 2)
    measured = {"subspaces": subspaces, "batches": rows(seed=1)}
    plain = tt.removal_test(model, **measured)
    ambient = tt.removal_test(model, **measured, space="ambient")
    own = {site: torch.eye(families.D_MODEL) for site in SITES}
    given = tt.removal_test(model, **measured, zeta=0.5, c0=own)
    identity = tt.removal_test(model, **measured, zeta=0.5, c0="identity")
    for site in SITES:
        ratio, d = plain.effects[site].without_tangent * (families.D_MODEL - 3), families.D_MODEL
        assert ambient.effects[site].without_tangent == pytest.approx(ratio / (d - 1))
        assert given.effects[site].isoscore == pytest.approx(identity.effects[site].isoscore)
        assert given.effects[site].isoscore != pytest.approx(plain.effects[site].isoscore)
    assert plain.conventions["target"] == "trace-matched identity"
    assert given.conventions["target"] == "given"
    assert plain.conventions["subspaces"] == "given subspaces"


def test_the_result_shows_itself():
    found = tt.removal_test(a_model(), rows(), sites=SITES, rank=2)
    assert "matched normal" in repr(found)
    assert "<table" in found._repr_html_()
    figure = found.plot()
    assert len(figure.axes) == 2
    bare = tt.removal_test(a_model(), rows(), sites=SITES, rank=2, n_controls=0)
    assert "p_value" not in bare.to_dataframe()
    assert bare.plot().axes[1].get_ylabel() == "change when removed"
    assert "matched normal" not in bare.headline()


def test_what_it_refuses():
    model = a_model()
    with pytest.raises(tt.TangentValueError, match="LlamaForCausalLM: wrap it by tl_tangent"):
        tt.removal_test(families.hf_model("llama"), rows())
    fitted = tt.fit_subspaces(model, rows(), SITES, 2)
    with pytest.raises(tt.TangentValueError, match="there are no subspaces"):
        tt.removal_test(model, rows(), {})
    with pytest.raises(tt.TangentValueError, match="no shrinkage target for blocks.1"):
        tt.removal_test(model, rows(), fitted, zeta=0.5, c0={SITES[0]: torch.eye(families.D_MODEL)})
    with pytest.raises(tt.TangentValueError, match=r"2 \* rank <= d"):
        tt.removal_test(model, rows(), sites=SITES, rank=families.D_MODEL - 1)
    with pytest.raises(tt.TangentKeyError, match="hook_nowhere"):
        tt.removal_test(model, rows(), sites="blocks.0.hook_nowhere")
    with pytest.raises(tt.TangentValueError, match="basis for each head"):
        heads = tt.fit_subspaces(model, rows(), "blocks.0.attn.hook_q", 2)
        tt.removal_test(model, rows(), heads)
