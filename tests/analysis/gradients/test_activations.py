"""Q_T fitted at the weights is that of ``fit_subspaces`` at the hook points of the same name."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests.analysis.gradients.cases import (
    IDS,
    MODELS,
    RANK,
    assert_close,
    batches,
    build,
    measure,
)
from tests.hooks.helpers import has_site
from tl_tangent.analysis.gradients.activations import ActivationMeter, fit_at_weights
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.objectives import Batch

HOOKED = [spec for spec in MODELS if spec[0] != "hf"]


def of(data) -> list[Batch]:
    return [Batch.of(one) for one in data]


def fitted(model, data, **options) -> tt.SubspaceSet:
    return fit_at_weights(model, find_weights(model), of(data), RANK, **options)


def assert_same_subspace(one, other, atol: float = 1e-6) -> None:
    projectors = [(q.basis @ q.basis.T).double() for q in (one, other)]
    assert_close(*projectors, 0, atol)
    assert_close(one.mean.double(), other.mean.double(), 0, atol)
    assert one.explained == pytest.approx(other.explained)
    assert one.n_tokens == other.n_tokens


@pytest.mark.parametrize("method", ["pca", "svd", "ica"])
@pytest.mark.parametrize("spec", HOOKED, ids=[spec[0] for spec in HOOKED])
def test_a_fit_at_the_weights_is_a_fit_at_the_hook_points(spec, method):
    model, data = build(*spec), batches(2, batch=4)
    found = fitted(model, data, method=method)
    sites = [site for site in found if has_site(model, site)]
    assert len(sites) >= 6
    expected = tt.fit_subspaces(model, data, sites, RANK, method)
    for site in sites:
        assert_same_subspace(found[site], expected[site])
        assert (found[site].method, found[site].positions) == (method, "not_first")


def test_a_plain_model_is_fitted_as_its_bridge():
    data = batches(2, batch=4)
    one, other = (fitted(build(kind, "llama"), data) for kind in ("hf", "bridge"))
    assert set(one) == set(other)
    for site in one:
        assert_same_subspace(one[site], other[site])


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_positions_and_padding(spec):
    """Position 0 is left out by default, padding always."""
    model, (tokens,) = build(*spec), batches(1, batch=4)
    mask = torch.ones(4, 9)
    mask[:, 6:] = 0
    padded = [{"input_ids": tokens, "attention_mask": mask}]
    bare = fitted(model, [tokens[:, :6]])
    found = fitted(model, padded)
    assert {q.n_tokens for q in found.values()} == {4 * 5}
    for site in bare:
        assert_same_subspace(found[site], bare[site])
    whole = fitted(model, padded, positions="all")
    assert {q.n_tokens for q in whole.values()} == {4 * 6}
    assert {q.positions for q in whole.values()} == {"all"}


def test_a_fit_knows_where_it_comes_from():
    result = measure()
    assert result.conventions["subspaces"] == "the same batches"
    assert result.conventions["fit_positions"] == "not_first"
    assert measure(fit_batches=batches(3)).conventions["subspaces"] == "fit_batches"
    for site, q in result.subspaces.items():
        assert (q.site, q.method, q.rank) == (site, "pca", RANK)


def test_groups_are_centred_one_by_one():
    """Two groups far apart: their distance is variance around a global mean, not around theirs."""
    model, data = build("hf", "llama"), of(batches(2, batch=4))
    weights = find_weights(model).choose(("q",), (0,))
    meter = ActivationMeter(weights, centering="group")
    for group, batch in enumerate(data):
        with torch.no_grad(), meter.watching(batch, group):
            model(batch.tokens)
    apart = meter.fit(RANK)["blocks.0.attn.hook_in"]
    one, other = (fit_at_weights(model, weights, [batch], RANK) for batch in data)
    each = [q["blocks.0.attn.hook_in"] for q in (one, other)]
    assert_close(apart.mean, (each[0].mean + each[1].mean) / 2, 0, 1e-6)
    assert (
        apart.spectrum.sum()
        < fit_at_weights(model, weights, data, RANK)["blocks.0.attn.hook_in"].spectrum.sum()
    )


def test_a_site_that_saw_nothing_is_named():
    weights = find_weights(build("hf", "llama")).choose(("q",))
    told = r"no activation passed blocks\.0\.attn\.hook_in, blocks\.1\.attn\.hook_in"
    with pytest.raises(tt.TangentRuntimeError, match=told):
        ActivationMeter(weights).fit(RANK)
    with pytest.raises(tt.TangentRuntimeError, match="was the list of batches empty"):
        fit_at_weights(build("hf", "llama"), weights, [], RANK)
