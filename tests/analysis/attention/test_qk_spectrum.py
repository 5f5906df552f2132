"""The query-key form inside of a subspace, against dense d x d matrices and its invariances."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import IDS, MODELS, build
from tl_tangent.analysis.attention import qk_spectrum as qk
from tl_tangent.analysis.attention.qk_spectrum import qk_spectrum
from tl_tangent.hooks.attention.choose import choose
from tl_tangent.hooks.attention.pass_over import pass_over
from tl_tangent.hooks.attention.split import source_of

LAYER, RANK = 1, 3
ALL = pytest.mark.parametrize("spec", MODELS, ids=IDS)
needs_hooked = pytest.mark.skipif(
    not families.HAS_HOOKED_TRANSFORMER, reason="needs transformer-lens<4"
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_subspace(d: int, *heads: int, seed: int = 0) -> tt.TangentSubspace:
    mean = randn(*heads, d, seed=seed + 1)
    return tt.TangentSubspace(randn(*heads, d, RANK, seed=seed), mean, orthonormalize=True)


def spectrum_of(model, subspace, **options):
    options = {"space": "input", "n_controls": 0, **options}
    return qk_spectrum(model, subspace, [LAYER], **options)


def dense(model, offset: int = 0) -> torch.Tensor:
    """M [head, d, d] of a model without norms of queries and keys, rotated entry by entry."""
    attn = model.blocks[LAYER].attn
    query, key = attn.W_Q.double(), attn.W_K.double()
    key = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
    if model.cfg.positional_embedding_type == "rotary":
        width = attn.rotary_cos.shape[-1]
        angles = offset * 1e4 ** (-torch.arange(0, width, 2) / width).double()
        turn = torch.eye(query.shape[-1], dtype=torch.float64)
        for i, angle in enumerate(angles):
            a, b = i, i + width // 2
            turn[a, a] = turn[b, b] = angle.cos()
            turn[a, b], turn[b, a] = angle.sin(), -angle.sin()
        query = query @ turn
    return query @ key.mT / attn.attn_scale


@needs_hooked
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("family", ["learned", "rotary_gqa", "rotary_parallel"])
def test_all_numbers_are_those_of_the_dense_form(family, offset):
    model = build(("hooked", family, False), torch.float64)
    subspace = some_subspace(32)
    form, q = dense(model, offset), subspace.basis
    found = spectrum_of(model, subspace, offset=offset, n_controls=3)
    (layer,) = found.layers
    inside = q.T @ form @ q
    whole = torch.linalg.svdvals(form)
    tolerances = {"rtol": 1e-6, "atol": 1e-6}  # the model's angles are float32
    torch.testing.assert_close(
        found.singular_values[LAYER], torch.linalg.svdvals(inside), **tolerances
    )
    torch.testing.assert_close(layer.full_singular_values, whole[:, :8], **tolerances)
    size = form.square().sum((-2, -1))
    share = inside.square().sum((-2, -1)) / size
    torch.testing.assert_close(layer.share, share, **tolerances)
    frame = found.to_dataframe()
    assert frame["norm"].tolist() == pytest.approx(size.sqrt().tolist(), rel=1e-6)
    assert frame["top_singular_value"].tolist() == pytest.approx(whole[:, 0].tolist(), rel=1e-6)
    controls = subspace.replace(site=f"blocks.{LAYER}.attn")
    drawn = [one.values() for one in tt.SubspaceSet([controls]).random_normals(3, 0)]
    shares = [
        (c.basis.T @ form @ c.basis).square().sum((-2, -1)) / size for one in drawn for c in one
    ]
    torch.testing.assert_close(layer.control_shares, torch.stack(shares), **tolerances)
    assert frame["control_share_min"].tolist() == pytest.approx(
        torch.stack(shares).amin(0).tolist(), rel=1e-5
    )


def divisors(circuit, observed, space):
    """What norms divide the parts of each token by, [batch, head or 1, pos]: queries, keys."""
    scale = source_of(circuit, observed, space).scale
    in_front = 1.0 if scale is None else scale.mT
    found = []
    for projection, x in ((circuit.query, observed.query), (circuit.key, observed.key)):
        behind = torch.ones(1, 1, 1)
        if projection.norm is not None:
            x = x.flatten(2)[:, :, None] if projection.norm_over_heads else x
            behind = projection.norm.scale(x.double())[..., 0].mT
        found.append(in_front * behind)
    return found


@ALL
@pytest.mark.parametrize("space", ["input", "residual"])
@pytest.mark.parametrize("offset", [0, 4])
def test_on_every_class_it_is_the_form_of_the_tangent_term(spec, space, offset):
    """With the norms' divisions put back, v_i^T M v_j is the model's tangent term."""
    model, tokens = build(spec, torch.float64), families.tiny_tokens(pos=9)
    subspace = some_subspace(32)
    split = tt.split_attention_scores(model, tokens, LAYER, subspace, space=space)
    term = split.tangent.diagonal(-offset, -2, -1)
    (chosen,) = choose(model, subspace, [LAYER], space=space)
    form = qk._form(chosen, qk._shown(model, [chosen], offset)[LAYER], offset)
    seen = []
    pass_over(model, tokens, [LAYER], lambda observed, about: seen.append(observed))
    x = source_of(chosen.circuit, seen[0], space).x
    query, key = (
        subspace.coordinates(x)[:, None] / divisor[..., None]
        for divisor in divisors(chosen.circuit, seen[0], space)
    )
    key = key.repeat_interleave(4 // key.shape[1], 1)
    inside = form.restricted(subspace)
    own = (query[:, :, offset:] @ inside * key[:, :, : 9 - offset]).sum(-1)
    torch.testing.assert_close(own.expand_as(term), term, rtol=1e-5, atol=1e-5)
    (layer,) = spectrum_of(model, subspace, space=space, offset=offset).layers
    torch.testing.assert_close(layer.singular_values, torch.linalg.svdvals(inside))


@needs_hooked
def test_a_basis_a_query_head_is_each_head_on_its_own():
    model = build(("hooked", "rotary_gqa", False), torch.float64)
    subspace = some_subspace(32, 4)
    (found,) = spectrum_of(model, subspace, n_controls=2).layers
    for head in range(4):
        (alone,) = spectrum_of(model, subspace.head(head)).layers
        for name in ("singular_values", "share", "expected_share"):
            torch.testing.assert_close(getattr(found, name)[head], getattr(alone, name)[head])
    assert found.control_shares.shape == (2, 4)


@ALL
def test_a_rotation_of_the_basis_changes_nothing(spec):
    model, subspace = build(spec, torch.float64), some_subspace(32)
    turn = torch.linalg.qr(randn(RANK, RANK, seed=5)).Q
    (one,), (other,) = (
        spectrum_of(model, s).layers
        for s in (subspace, subspace.replace(basis=subspace.basis @ turn))
    )
    torch.testing.assert_close(one.singular_values, other.singular_values)
    torch.testing.assert_close(one.share, other.share)


@needs_hooked
def test_an_invertible_change_of_the_heads_basis_changes_nothing():
    model, subspace = families.hooked_transformer("learned", torch.float64), some_subspace(32)
    (before,) = spectrum_of(model, subspace, n_controls=2).layers
    change = torch.eye(8, dtype=torch.float64) + 0.3 * randn(4, 8, 8)
    attn = model.blocks[LAYER].attn
    with torch.no_grad():
        attn.W_Q.copy_(attn.W_Q @ change)
        attn.W_K.copy_(attn.W_K @ torch.linalg.inv(change).mT)
    (after,) = spectrum_of(model, subspace, n_controls=2).layers
    for name in vars(before):
        if isinstance(getattr(before, name), torch.Tensor):
            torch.testing.assert_close(getattr(before, name), getattr(after, name))


@needs_hooked
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_expected_share_is_the_mean_over_random_subspaces(symmetric):
    """A form that compares a token with itself (W_K = W_Q) has a share far above (rank / d)^2."""
    model = families.hooked_transformer("learned", torch.float64)
    attn = model.blocks[LAYER].attn
    if symmetric:
        with torch.no_grad():
            attn.W_K.copy_(attn.W_Q)
    form, q = dense(model), torch.linalg.qr(randn(20000, 32, RANK)).Q
    size = form.square().sum((-2, -1))
    drawn = torch.stack([(q.mT @ one @ q).square().sum((-2, -1)) for one in form]).T / size
    (found,) = spectrum_of(model, some_subspace(32)).layers
    noise = drawn.std(0) / 20000**0.5
    assert ((drawn.mean(0) - found.expected_share).abs() < 4 * noise).all()
    naive = (RANK / 32) ** 2
    assert bool((found.expected_share > 2 * naive).all()) == symmetric


@needs_hooked
def test_a_subspace_that_is_everything_holds_all_of_it():
    model = build(("hooked", "learned", False), torch.float64)
    whole = tt.TangentSubspace(torch.eye(32, dtype=torch.float64))
    (found,) = spectrum_of(model, whole).layers
    torch.testing.assert_close(found.share, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(found.expected_share, found.share)


@needs_hooked
def test_the_result_tells_what_it_holds():
    model = build(("hooked", "learned", False), torch.float64)
    found = qk_spectrum(model, some_subspace(32), [0, 1], space="input", n_controls=2)
    frame = found.to_dataframe()
    assert len(frame) == 8 and frame["layer"].tolist() == [0] * 4 + [1] * 4
    assert {"control_share_mean", "restricted_top", "top_singular_value"} <= set(frame)
    assert (frame["restricted_top"] <= frame["top_singular_value"]).all()
    assert {n: tuple(x.shape) for n, x in found.singular_values.items()} == dict.fromkeys(
        (0, 1), (4, 3)
    )
    assert found.conventions[1]["meaning"]["left_out"]
    assert "random subspace" in repr(found) and "<table>" in found._repr_html_()
    without = qk_spectrum(model, some_subspace(32), 0, space="input", n_controls=0)
    assert "control_share_mean" not in without.to_dataframe()
    assert "matched random" not in without.headline()


@needs_hooked
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offset": -1}, "offset=-1: a key is 0 to 31 positions"),
        ({"offset": 32}, "offset=32"),
        ({"n_controls": -1}, "n_controls is -1"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    model = build(("hooked", "learned", False), torch.float64)
    with pytest.raises(tt.TangentValueError, match=said):
        spectrum_of(model, some_subspace(32), **options)
