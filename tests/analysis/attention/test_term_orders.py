"""Orders in t of clouds whose geometry is known, and sizes against maps of the terms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import IDS, MODELS, build
from tl_tangent.analysis.attention.order_results import CURVED, FLAT
from tl_tangent.analysis.attention.term_orders import attention_term_orders
from tl_tangent.geometry.power_law import SIZES
from tl_tangent.hooks.attention.choose import choose
from tl_tangent.hooks.attention.pass_over import pass_over
from tl_tangent.hooks.attention.split import source_of

D, RANK, SHELLS, EACH = 32, 3, 8, 40
RADII = torch.logspace(-3, -1, SHELLS, dtype=torch.float64)
needs_hooked = pytest.mark.skipif(
    not families.HAS_HOOKED_TRANSFORMER, reason="needs transformer-lens<4"
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_subspace(d: int = D, *heads: int, seed: int = 0) -> tt.TangentSubspace:
    mean = randn(*heads, d, seed=seed + 1)
    return tt.TangentSubspace(randn(*heads, d, RANK, seed=seed), mean, orthonormalize=True)


def model_that_reads(points: Tensor) -> tuple[object, Tensor]:
    """A model without norms or positions whose first attention reads ``points``, and its tokens."""
    model = families.hooked_transformer(
        "learned", torch.float64, d_vocab=len(points), normalization_type=None
    )
    with torch.no_grad():
        model.W_E.copy_(points)
        model.W_pos.zero_()
    return model, torch.arange(len(points)).reshape(-1, 32)


def frame_axes(subspace: tt.TangentSubspace) -> Tensor:
    """Orthonormal normal directions [d, d - rank] of a subspace."""
    return torch.linalg.qr(torch.cat([subspace.basis, torch.eye(D).double()], 1)).Q[:, RANK:]


def unit(n: int, seed: int) -> Tensor:
    return torch.nn.functional.normalize(randn(EACH, n, seed=seed), dim=-1)


def cloud(subspace: tt.TangentSubspace, height) -> Tensor:
    """Points mean + Q w + N h, w on shells of RADII in the same directions: h = height(w)."""
    w = (RADII[:, None, None] * unit(RANK, 2)).flatten(0, 1)
    return subspace.mean + w @ subspace.basis.T + height(w) @ frame_axes(subspace).T


def quadratic(w: Tensor) -> Tensor:
    form = randn(D - RANK, RANK, RANK, seed=3)
    return 0.1 * torch.einsum("pi,aij,pj->pa", w, form + form.mT, w)


def on_a_sphere(w: Tensor) -> Tensor:
    """Height of a sphere of radius 2 over its tangent plane, along the first normal direction."""
    height = torch.zeros(len(w), D - RANK, dtype=torch.float64)
    height[:, 0] = (4 - w.square().sum(-1)).sqrt() - 2
    return height


def noise(w: Tensor) -> Tensor:
    return (RADII[:, None, None] * unit(D - RANK, 4)).flatten(0, 1)


@needs_hooked
@pytest.mark.parametrize(
    ("height", "expected"), [(quadratic, CURVED), (on_a_sphere, CURVED), (noise, FLAT)]
)
def test_slopes_are_the_orders_of_the_geometry(height, expected):
    subspace = some_subspace()
    model, tokens = model_that_reads(cloud(subspace, height))
    found = attention_term_orders(
        model, tokens, subspace, 0, space="input", positions="all", n_bins=SHELLS
    )
    frame = found.to_dataframe()
    assert frame["n_tokens"].eq(SHELLS * EACH).all() and frame["n_bins"].eq(SHELLS).all()
    for row in frame.itertuples():
        assert row.slope == pytest.approx(expected[row.term], abs=0.02), row
        assert row.slope_se < 0.02
    assert found.error < 1e-9


@needs_hooked
def test_batches_and_their_order_do_not_matter():
    subspace = some_subspace()
    model, tokens = model_that_reads(cloud(subspace, quadratic) + 0.01 * randn(320, D))
    options = {"space": "input", "positions": "all", "n_controls": 1}
    one = attention_term_orders(model, tokens, subspace, 0, **options).layers[0]
    pieces = (piece for piece in reversed(tokens.split(3)))  # consumed once, read twice
    other = attention_term_orders(model, pieces, subspace, 0, **options).layers[0]
    for a, b in zip((one.sizes, *one.controls), (other.sizes, *other.controls), strict=True):
        assert torch.equal(a.counts, b.counts)
        torch.testing.assert_close(a.t, b.t)
        torch.testing.assert_close(a.sizes, b.sizes)


@needs_hooked
def test_slopes_survive_bins_that_cut_through_a_smooth_cloud():
    """t log-uniform, so that bins have width: a side of order 2 is as wide as its bin everywhere"""
    subspace = some_subspace()
    t = torch.logspace(-3, -1, 960, dtype=torch.float64)[:, None]
    order = torch.randperm(960, generator=torch.Generator().manual_seed(0))
    w = t[order] * torch.nn.functional.normalize(randn(960, RANK, seed=2), dim=-1)
    points = subspace.mean + w @ subspace.basis.T + quadratic(w) @ frame_axes(subspace).T
    model, tokens = model_that_reads(points)
    frame = attention_term_orders(
        model, tokens, subspace, 0, space="input", positions="all"
    ).to_dataframe()
    for row in frame.itertuples():
        assert row.slope == pytest.approx(CURVED[row.term], abs=0.1), row


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
@pytest.mark.parametrize("space", ["input", "residual"])
def test_sizes_are_those_of_the_maps_of_the_terms(spec, space):
    """One row of 31 tokens, the first left out, in 3 bins of 10: all pairs are in its maps."""
    model, tokens = build(spec, torch.float64), families.tiny_tokens(batch=1, pos=31)
    subspace = some_subspace()
    options = {"space": space, "positions": "not_first"}
    (layer,) = attention_term_orders(model, tokens, subspace, 1, n_bins=3, **options).layers
    terms = dict(tt.split_attention_scores(model, tokens, 1, subspace, **options).terms)
    terms["cross"] = terms["tangent_normal"] + terms["normal_tangent"]
    x = inputs_of(model, tokens, subspace, space)
    v, n = (part[0, 1:].norm(dim=-1) for part in subspace.split(x))
    t = (x[0, 1:] - subspace.mean).norm(dim=-1)
    for one, inside in enumerate(t.argsort().split(10)):
        torch.testing.assert_close(layer.sizes.t[:, one], rms(t[inside]).expand(4))
        for i, name in enumerate(SIZES[:10]):
            cells = terms[name][0][:, inside + 1][:, :, inside + 1].double()
            torch.testing.assert_close(layer.sizes.sizes[i, :, one], rms(cells, (1, 2)))
        norms = torch.stack([rms(v[inside]), rms(n[inside])])
        torch.testing.assert_close(layer.sizes.sizes[10:, :, one], norms[:, None].expand(2, 4))


def inputs_of(model, tokens, subspace, space) -> Tensor:
    (chosen,) = choose(model, subspace, [1], space=space)
    seen = []
    pass_over(model, tokens, [1], lambda observed, about: seen.append(observed))
    return source_of(chosen.circuit, seen[0], space).x.detach()


def rms(x: Tensor, axes: tuple[int, ...] = (0,)) -> Tensor:
    return x.square().mean(axes).sqrt()


@needs_hooked
def test_a_basis_a_query_head_is_each_head_on_its_own():
    model, tokens = build(("hooked", "rotary_gqa", False), torch.float64), families.tiny_tokens()
    tokens = families.tiny_tokens(batch=3, pos=20)
    subspace = some_subspace(D, 4)
    options = {"space": "residual", "n_bins": 4, "n_controls": 1}
    (found,) = attention_term_orders(model, tokens, subspace, 1, **options).layers
    options["n_controls"] = 0
    for head in range(4):
        (alone,) = attention_term_orders(model, tokens, subspace.head(head), 1, **options).layers
        torch.testing.assert_close(found.sizes.t[head], alone.sizes.t[head])
        torch.testing.assert_close(found.sizes.sizes[:, head], alone.sizes.sizes[:, head])


@needs_hooked
def test_padding_and_other_positions_do_not_count():
    model = build(("hooked", "rotary_gqa", False), torch.float64)
    tokens = families.tiny_tokens(batch=4, pos=20)
    mask = torch.ones_like(tokens)
    mask[:, 15:] = 0
    batch = {"input": tokens, "attention_mask": mask}
    options = {"space": "input", "positions": slice(2, None), "n_bins": 4}
    (padded,) = attention_term_orders(model, batch, some_subspace(), 1, **options).layers
    (short,) = attention_term_orders(model, tokens[:, :15], some_subspace(), 1, **options).layers
    assert int(padded.sizes.counts[0].sum()) == 4 * 13
    torch.testing.assert_close(padded.sizes.sizes, short.sizes.sizes)


@needs_hooked
def test_the_result_tells_what_it_holds():
    subspace = some_subspace()
    model, tokens = model_that_reads(cloud(subspace, quadratic))
    found = attention_term_orders(
        model, tokens, subspace, [0, 1], space="input", positions="all", n_controls=3
    )
    frame = found.to_dataframe()
    assert len(frame) == 2 * 4 * len(SIZES)
    low, mean, high = (frame[f"control_slope_{name}"] for name in ("min", "mean", "max"))
    assert ((low <= mean) & (mean <= high)).all()
    first = frame[frame["layer"] == 0]
    assert first["t_min"].iloc[0] == pytest.approx(1e-3, rel=1e-3)
    assert first["t_max"].iloc[0] == pytest.approx(1e-1, rel=0.01)
    table = found.by_layer()
    assert list(table.columns) == list(SIZES) and list(table.index) == [0, 1]
    assert table.loc[0, "normal_normal"] == pytest.approx(4, abs=0.02)
    assert "normal_norm" in repr(found) and "<table>" in found._repr_html_()
    meaning = found.conventions[0]["meaning"]
    assert {"mechanical", "residual", "slope"} <= set(meaning)
    with pytest.raises(tt.TangentValueError, match="no 'share' here; there are slope"):
        found.by_layer("share")


@needs_hooked
def test_controls_do_not_see_the_curvature():
    """A random normal subspace holds part of n: its tangent part grows like t^2, not like t."""
    subspace = some_subspace()
    model, tokens = model_that_reads(cloud(subspace, quadratic))
    found = attention_term_orders(
        model, tokens, subspace, 0, space="input", positions="all", n_controls=2
    )
    control = found.by_layer("control_slope_mean").loc[0]
    assert control["tangent_norm"] == pytest.approx(2, abs=0.02)
    assert control["normal_norm"] == pytest.approx(1, abs=0.02)


@needs_hooked
def test_what_cannot_be_is_refused():
    subspace = some_subspace()
    model, tokens = model_that_reads(cloud(subspace, quadratic))
    options = {"space": "input", "positions": "all"}
    with pytest.raises(tt.TangentValueError, match="n_bins=2 .* a slope needs 3 bins"):
        attention_term_orders(model, tokens, subspace, 0, n_bins=2, **options)
    with pytest.raises(tt.TangentValueError, match="n_controls=-1"):
        attention_term_orders(model, tokens, subspace, 0, n_controls=-1, **options)
    with pytest.raises(tt.TangentValueError, match="32 tokens count, and 5 bins need 40"):
        attention_term_orders(model, tokens[:1], subspace, 0, n_bins=5, **options)
    with pytest.raises(tt.TangentValueError, match="0 tokens count"):
        attention_term_orders(model, [], subspace, 0, **options)


@needs_hooked
@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0], [1.0, 1 + 1e-6, 1 + 2e-6, 1 + 3e-6]])
def test_a_constant_radius_is_refused(values):
    subspace = some_subspace()
    directions = torch.nn.functional.normalize(randn(96, D, seed=2), dim=-1)
    points = subspace.mean + torch.tensor(values).double().repeat(96)[:96, None] * directions
    model, tokens = model_that_reads(points)
    with pytest.raises(tt.TangentValueError, match=r"layer 0: t = \|\|x - mean\|\| goes from 1"):
        attention_term_orders(model, tokens, subspace, 0, space="input", positions="all")
