"""Fits on a model: streaming, positions and padding, gated sites, and errors."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers

EVERY = pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
SITE = "blocks.1.hook_resid_post"


def angle(a, b):
    return float(a.principal_angles(b).max())


@EVERY
def test_a_fit_is_the_pca_of_the_cached_activations(spec):
    model = helpers.build(spec)
    tokens = families.tiny_tokens(model, batch=4, pos=12)
    sites = [s for s in helpers.tangent_sites(model) if ".attn.hook_in" not in s and "mid" not in s]
    found = tt.fit_subspaces(model, tokens, sites, 3, positions="not_first", per_head=False)
    _, cache = model.run_with_cache(tokens)
    for site, subspace in found.items():
        if site not in set(cache.keys()):  # made for the fit
            continue
        rows = cache[site][:, 1:].detach().double()
        rows = rows.reshape(-1, rows.shape[-1])
        centred = rows - rows.mean(0)
        _, _, right = torch.linalg.svd(centred, full_matrices=False)
        expected = tt.TangentSubspace(right[:3].T.contiguous(), rows.mean(0))
        assert angle(subspace, expected) < 1e-3, site
        torch.testing.assert_close(subspace.mean.double(), rows.mean(0), atol=1e-5, rtol=1e-5)
        assert subspace.positions == "not_first" and subspace.site == site


def test_how_the_data_are_cut_does_not_matter():
    model = helpers.build(helpers.MODELS[0])
    tokens = families.tiny_tokens(model, batch=6, pos=12)
    whole = tt.fit_subspaces(model, tokens, SITE, 4)[SITE]
    cut = tt.fit_subspaces(model, [tokens[:1], tokens[1:4], tokens[4:]], SITE, 4)[SITE]
    assert angle(whole, cut) < 1e-5
    shards = [tt.collect(model, part, SITE)[SITE] for part in (tokens[:2], tokens[2:])]
    merged = shards[0].merge(shards[1]).fit(4)
    assert angle(whole, merged) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["all", "not_first", [1, 3], slice(1, None), -1])
def test_padding_never_enters(tmp_path, side, positions):
    """A padded batch gives the fit of its rows run one by one without padding."""
    tokenizer = families.tiny_tokenizer(tmp_path, padding_side=side)
    model = padded_model(tokenizer)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, 64, (n,), generator=generator) for n in (12, 5, 8, 10, 6, 11)]
    batch = torch.full((len(rows), 12), tokenizer.pad_token_id)
    mask = torch.zeros_like(batch)
    for i, row in enumerate(rows):
        span = slice(12 - len(row), 12) if side == "left" else slice(0, len(row))
        batch[i, span], mask[i, span] = row, 1
    single = tt.collect(model, [row[None] for row in rows], SITE, positions=positions)[SITE]
    masked = {"input": batch, "attention_mask": mask}
    for batches in (masked, batch) if side == "right" else (masked,):
        padded = tt.collect(model, batches, SITE, positions=positions)[SITE]
        assert padded.n_rows == single.n_rows
        torch.testing.assert_close(padded.mean, single.mean, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(padded.covariance(), single.covariance(), atol=1e-4, rtol=1e-4)


def padded_model(tokenizer):
    if families.HOOKED_FAMILIES:
        return families.hooked_transformer("rotary_gqa", tokenizer=tokenizer)
    return families.bridge("llama", tokenizer=tokenizer)


def test_left_padding_is_found_without_a_mask(tmp_path):
    tokenizer = families.tiny_tokenizer(tmp_path, padding_side="left")
    if not families.HOOKED_FAMILIES:
        pytest.skip("a bridge pads lists of strings; tokens come with their mask")
    model = padded_model(tokenizer)
    row = torch.randint(4, 64, (1, 6), generator=torch.Generator().manual_seed(0))
    batch = torch.cat([torch.full((1, 3), tokenizer.pad_token_id), row], dim=1)
    other = torch.randint(4, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    batch = torch.cat([batch, other])
    padded = tt.collect(model, {"input": batch, "prepend_bos": False}, SITE)[SITE]
    single = tt.collect(model, [row, other], SITE)[SITE]
    assert padded.n_rows == single.n_rows == 5 + 8
    torch.testing.assert_close(padded.covariance(), single.covariance(), atol=1e-4, rtol=1e-4)


def test_strings_and_tokens_are_the_same_data(tmp_path):
    tokenizer = families.tiny_tokenizer(tmp_path)
    model = padded_model(tokenizer)
    text = ["w5 w9 w11 w20 w33", "w7 w8"]
    tokens = model.to_tokens(text)
    by_text = tt.collect(model, [text], SITE)[SITE]
    by_tokens = tt.collect(model, tokens, SITE)[SITE]
    assert by_text.n_rows == by_tokens.n_rows == (tokens != tokenizer.pad_token_id).sum() - 2
    assert torch.equal(by_text.mean, by_tokens.mean)


def test_a_mask_of_ones_own(tmp_path):
    model = helpers.build(helpers.MODELS[0])
    tokens = families.tiny_tokens(model, batch=4, pos=9)
    mask = torch.rand(4, 9, generator=torch.Generator().manual_seed(2)) > 0.4
    fitter = tt.collect(model, tokens, SITE, positions=mask)[SITE]
    _, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(
        fitter.mean.float(), cache[SITE][mask].mean(0).detach(), atol=1e-5, rtol=1e-5
    )


@EVERY
def test_resid_mid_and_branch_inputs_are_fitted_on_what_flows_there(spec):
    model = helpers.build(spec)
    tokens = families.tiny_tokens(model, batch=4)
    for leaf in ("hook_resid_mid", "attn.hook_in", "mlp.hook_in"):
        site = f"blocks.0.{leaf}"
        if not helpers.has_site(model, site) or ("bert" in spec[1] and "mid" in leaf):
            continue
        fitter = tt.collect(model, tokens, site, positions="all")[site]
        with tt.tangents(model, helpers.random_subspaces(model, tokens, [site])):
            _, cache = model.run_with_cache(tokens)
        expected = cache[site].detach().flatten(0, 1).mean(0)
        torch.testing.assert_close(fitter.mean.float(), expected, atol=1e-5, rtol=1e-5)


def test_group_centring_removes_each_groups_mean():
    model = helpers.build(helpers.MODELS[0])
    tokens = families.tiny_tokens(model, batch=8, pos=12)
    batches = [{"input": tokens[:4], "group": 0}, {"input": tokens[4:], "group": 1}]
    fitter = tt.collect(model, batches, SITE, centering="group")[SITE]
    _, cache = model.run_with_cache(tokens)
    halves = [
        cache[SITE][part, 1:].detach().double().flatten(0, 1) for part in (slice(0, 4), slice(4, 8))
    ]
    centred = torch.cat([half - half.mean(0) for half in halves])
    expected = centred.T @ centred / (len(centred) - 2)
    torch.testing.assert_close(fitter.covariance(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["pca", "svd", "ica", "seminmf", "kmeans"])
def test_methods_run_on_a_model(method):
    model = helpers.build(helpers.MODELS[0])
    tokens = families.tiny_tokens(model, batch=8, pos=12)
    found = tt.fit_subspaces(model, tokens, [SITE, "blocks.0.hook_mlp_out"], 3, method)
    assert all(s.rank == 3 and s.method == method for s in found.values())
    with torch.no_grad(), tt.ablating(model, found):
        model(tokens)


def test_a_fit_leaves_no_trace_and_no_inference_tensors():
    model = helpers.build(helpers.MODELS[0])
    tokens = families.tiny_tokens(model)
    before = set(model.__dict__), set(model.hook_dict)
    with torch.inference_mode():
        found = tt.fit_subspaces(model, tokens, "blocks.*.attn.hook_in", 2)
    assert (set(model.__dict__), set(model.hook_dict)) == before
    assert not any(s.basis.is_inference() or s.mean.is_inference() for s in found.values())
    tt.attach(model, found)
    model.run_with_cache(tokens, incl_bwd=True, return_type="loss")
    tt.detach(model)


def test_activations_that_are_not_finite_are_an_error_and_leave_no_trace():
    model = (
        families.hooked_transformer("learned")
        if families.HOOKED_FAMILIES
        else families.bridge("gpt2")
    )
    tokens = families.tiny_tokens(model)
    before = set(model.__dict__)
    hooks = [("blocks.0.hook_resid_post", lambda x, hook: x * float("nan"))]
    with model.hooks(fwd_hooks=hooks), pytest.raises(tt.TangentValueError, match="NaN"):
        tt.fit_subspaces(model, tokens, SITE, 2)
    assert set(model.__dict__) == before


def test_what_cannot_be_fitted_is_said():
    model = helpers.build(helpers.MODELS[0])
    tokens = families.tiny_tokens(model)
    with pytest.raises(tt.TangentValueError, match="rank"):
        tt.fit_subspaces(model, tokens, SITE, 33)
    with pytest.raises(tt.TangentRuntimeError, match="never fired"):
        tt.fit_subspaces(model, [], SITE, 2)
    with pytest.raises(tt.TangentValueError, match="under 'input'"):
        tt.fit_subspaces(model, {"tokens": tokens}, SITE, 2)
    with pytest.raises(tt.TangentValueError, match="batches is a int"):
        tt.fit_subspaces(model, 3, SITE, 2)
    with pytest.raises(tt.TangentKeyError):
        tt.fit_subspaces(model, tokens, "blocks.9.hook_resid_post", 2)


def test_a_mask_of_another_length_is_refused():
    model = helpers.build(helpers.MODELS[0])
    tokens = families.tiny_tokens(batch=2, pos=6)
    batch = {"input": tokens, "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    with pytest.raises(tt.TangentValueError, match=r"\[2, 5\] for 6 positions"):
        tt.collect(model, [batch], "blocks.0.hook_resid_post")
