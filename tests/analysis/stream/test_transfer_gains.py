"""Gains from part to part: dense Jacobians, copies, models whose gains are known, and refusals."""

from __future__ import annotations

import math

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers
from tl_tangent.analysis.stream import transfer_gains as module
from tl_tangent.analysis.stream.transfer_gains import TransferGains, transfer_gains
from tl_tangent.hooks.stream.jvp import Stretch, TwiceBackward, side_by_side

D, RANK, POS = families.D_MODEL, 3, 4
STREAMS = [
    (spec, name)
    for spec, name in zip(helpers.MODELS, helpers.IDS, strict=True)
    if "bert" not in name
]
EVERY = pytest.mark.parametrize("spec", [s for s, _ in STREAMS], ids=[n for _, n in STREAMS])


def a_model(family: str = "gpt2"):
    return helpers.build(("bridge", family, False), torch.float64)


def a_subspace(seed: int = 0, rank: int = RANK, site: str | None = None) -> tt.TangentSubspace:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(D, rank, generator=generator, dtype=torch.float64)
    mean = torch.randn(D, generator=generator, dtype=torch.float64)
    return tt.TangentSubspace(basis, mean, site=site, orthonormalize=True)


def tokens(pos: int = POS, batch: int = 1, seed: int = 0):
    return families.tiny_tokens(batch=batch, pos=pos, seed=seed)


def table(result: TransferGains, column: str = "gain", start: int = 0) -> dict[str, float]:
    rows = [row for row in result.rows if row["start"] == start]
    return {f"{row['source'][0]}{row['target'][0]}": row[column] for row in rows}


def dense_jacobian(model, given, start: int, stop: int, frozen=()):
    """d resid_post of layer stop - 1 by d resid_pre of layer start, [pos, d, pos, d]."""
    found = {}

    def run(x):
        hooks = [
            (f"blocks.{start}.hook_resid_pre", lambda _, hook: x[None]),
            (f"blocks.{stop - 1}.hook_resid_post", lambda y, hook: found.update(y=y)),
        ]
        for layer in range(start, stop):
            hooks += [(f"blocks.{layer}.{name}", lambda z, hook: z.detach()) for name in frozen]
        with model.hooks(fwd_hooks=hooks):
            model(given, return_type=None)
        return found["y"][0]

    return torch.autograd.functional.jacobian(run, stream_at(model, given, start))


def stream_at(model, given, depth: int):
    found = {}
    hook = (f"blocks.{depth}.hook_resid_pre", lambda x, hook: found.update(x=x.detach()[0]))
    with torch.no_grad(), model.hooks(fwd_hooks=[hook]):
        model(given, return_type=None)
    return found["x"]


def dense_gains(jacobian, before, after) -> dict[str, float]:
    """||P_out J P_in||_F / sqrt(dim) over all positions but the first."""
    jacobian = jacobian[1:, :, 1:].double()
    n, eye, found = jacobian.shape[0], torch.eye(D, dtype=torch.float64), {}
    tangent_in, tangent_out = helpers.projector(before), helpers.projector(after)
    for source, p_in in (("t", tangent_in), ("n", eye - tangent_in)):
        for target, p_out in (("t", tangent_out), ("n", eye - tangent_out)):
            cut = torch.einsum("ab,pbqc,cd->paqd", p_out, jacobian, p_in)
            found[source + target] = float(cut.norm() / (n * p_in.trace()).sqrt())
    return found


# Against the whole Jacobian ---------------------------------------------------------------------


@EVERY
def test_all_directions_give_the_gains_of_the_dense_jacobian(spec):
    model, given, subspace = helpers.build(spec, torch.float64), tokens(3), a_subspace()
    result = transfer_gains(model, given, subspace, 0, 2, directions="all")
    expected = dense_gains(dense_jacobian(model, given, 0, 2), subspace, subspace)
    assert table(result) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])  # one behind the other, and in parallel
@pytest.mark.parametrize(
    ("through", "frozen"), [("attention", ["hook_mlp_out"]), ("mlp", ["hook_attn_out"])]
)
def test_one_branch_alone(family, through, frozen):
    model, given, subspace = a_model(family), tokens(3), a_subspace()
    result = transfer_gains(model, given, subspace, 0, 2, directions="all", through=through)
    jacobian = dense_jacobian(model, given, 0, 2, frozen)
    assert table(result) == pytest.approx(dense_gains(jacobian, subspace, subspace), rel=1e-9)
    whole = dense_gains(dense_jacobian(model, given, 0, 2), subspace, subspace)
    assert table(result)["nn"] != pytest.approx(whole["nn"], rel=1e-2)


def test_two_subspaces_and_what_is_aligned():
    model, given, before, after = a_model(), tokens(3), a_subspace(1), a_subspace(2, rank=5)
    sets = {"blocks.1.hook_resid_pre": before, "blocks.1.hook_resid_post": after}
    result = transfer_gains(model, given, sets, 1, directions="all")
    jacobian = dense_jacobian(model, given, 1, 2)
    assert table(result, start=1) == pytest.approx(dense_gains(jacobian, before, after), rel=1e-9)
    chain = helpers.projector(after) @ torch.einsum("paqb->ab", diagonal(jacobian[1:, :, 1:]))
    aligned = float((chain * helpers.projector(before)).sum() / (2 * RANK))
    assert table(result, "aligned", start=1)["tt"] == pytest.approx(aligned, rel=1e-9)


def diagonal(jacobian):
    """Blocks from a token to itself."""
    n = jacobian.shape[0]
    return jacobian * torch.eye(n, dtype=jacobian.dtype)[:, None, :, None]


def test_random_directions_converge_to_it():
    model, given, subspace = a_model(), tokens(3), a_subspace()
    exact = table(transfer_gains(model, given, subspace, 0, 2, directions="all"))
    drawn = transfer_gains(model, given, subspace, 0, 2, n_directions=80)
    few = transfer_gains(model, given, subspace, 0, 2, n_directions=5)
    for pair, error in table(drawn, "gain_se").items():
        assert abs(table(drawn)[pair] - exact[pair]) < 4 * error
        assert error < 0.06 * exact[pair]
        assert error < table(few, "gain_se")[pair]


def test_data_directions_are_every_tokens_own_part():
    model, given, subspace = a_model(), tokens(), a_subspace()
    result = transfer_gains(model, given, subspace, 0, 2, directions="data")
    jacobian = dense_jacobian(model, given, 0, 2)[1:, :, 1:]
    v, n = subspace.split(stream_at(model, given, 0)[1:])
    for source, u in (("t", v), ("n", n)):
        made = torch.einsum("paqb,qb->pa", jacobian, u)
        tangent = made @ helpers.projector(subspace)
        for target, part in (("t", tangent), ("n", made - tangent)):
            expected = float(part.norm() / u.norm())
            assert table(result)[source + target] == pytest.approx(expected, rel=1e-9)
    assert math.isnan(table(result, "gain_se")["tt"])


def test_without_forward_mode_the_numbers_are_the_same(monkeypatch):
    model, subspace = a_model(), a_subspace()
    forward = transfer_gains(model, tokens(), subspace, None)
    monkeypatch.setattr(module, "mode_for", lambda *args: TwiceBackward("asked for"))
    backward = transfer_gains(model, tokens(), subspace, None)
    assert table(backward) == pytest.approx(table(forward), rel=1e-10)
    assert backward.conventions["derivative"] == "asked for"


def test_a_host_without_forward_mode_is_told_by_its_operation():
    result = transfer_gains(a_model("bloom"), tokens(), a_subspace(), 0)
    assert "GeLUFunction.apply(x) (modeling_bloom.py" in result.conventions["derivative"]


# Known gains ------------------------------------------------------------------------------------


@EVERY
def test_neither_branch_leaves_the_copy(spec):
    model = helpers.build(spec, torch.float64)
    result = transfer_gains(model, tokens(), a_subspace(), None, through="neither")
    for start in (0, 1):
        assert table(result, "gain", start) == pytest.approx({"tt": 1, "tn": 0, "nt": 0, "nn": 1})
        assert table(result, "copy", start) == pytest.approx({"tt": 1, "tn": 0, "nt": 0, "nn": 1})


def test_the_copy_between_two_subspaces_follows_from_their_angles():
    before, after = a_subspace(1), a_subspace(2)
    sets = {"blocks.0.hook_resid_pre": before, "blocks.1.hook_resid_post": after}
    options = {"directions": "all", "through": "neither"}
    exact = transfer_gains(a_model(), tokens(3), sets, 0, 2, **options)
    kept = float(before.principal_angles(after).cos().square().sum())
    share = {"tt": kept / RANK, "tn": 1 - kept / RANK}
    share |= {"nt": (RANK - kept) / (D - RANK), "nn": 1 - (RANK - kept) / (D - RANK)}
    assert table(exact) == pytest.approx({pair: x**0.5 for pair, x in share.items()})
    assert table(exact) == pytest.approx(table(exact, "copy"), rel=1e-12)
    given = tokens(30, batch=4)
    drawn = transfer_gains(a_model(), given, sets, 0, 2, n_directions=4, through="neither")
    assert table(drawn) == pytest.approx(table(drawn, "copy"), rel=1e-12)
    assert table(drawn, "copy") == pytest.approx(table(exact, "copy"), rel=0.05)


def writing_into(subspace: tt.TangentSubspace):
    """A GPT-2 whose every layer writes into the tangent subspace alone."""
    hf, projector = families.hf_model("gpt2", torch.float64), helpers.projector(subspace)
    with torch.no_grad():
        for block in hf.transformer.h:
            for out in (block.attn.c_proj, block.mlp.c_proj):  # [in, out]
                out.weight.copy_(out.weight @ projector)
                out.bias.copy_(projector @ out.bias)
    return tt.TangentBridge.from_hf(hf)


def test_layers_that_write_tangent_parts_copy_the_normal_part():
    subspace = a_subspace()
    result = transfer_gains(writing_into(subspace), tokens(), subspace, [0, 1], 2)
    for start in (0, 1):
        gains = table(result, start=start)
        assert gains["nn"] == pytest.approx(1, abs=1e-12) and gains["tn"] < 1e-12
        assert gains["tt"] != pytest.approx(1, abs=0.01) and gains["nt"] > 0.1


def linear_layers(model, subspace: tt.TangentSubspace, a: float):
    """Hooks by which every layer writes ``a P_T x``, so that its Jacobian is ``1 + a P_T``."""
    projector, seen = helpers.projector(subspace), {}

    def keep(x, hook):
        seen["x"] = x

    for layer in range(model.cfg.n_layers):
        block = f"blocks.{layer}"
        model.add_hook(f"{block}.hook_attn_out", lambda x, hook: x * 0)
        model.add_hook(f"{block}.hook_resid_mid", keep)
        model.add_hook(f"{block}.hook_mlp_out", lambda x, hook: a * seen["x"] @ projector)
    return model


def test_layers_that_add_a_times_the_tangent_part():
    subspace, a = a_subspace(), 0.25
    model = linear_layers(families.bridge("gpt2", dtype=torch.float64), subspace, a)
    result = transfer_gains(model, tokens(), subspace, 0, 2, n_controls=1)
    expected = {"tt": (1 + a) ** 2, "tn": 0, "nt": 0, "nn": 1}
    assert table(result) == pytest.approx(expected, abs=1e-12)
    assert table(result, "excess")["tt"] == pytest.approx((1 + a) ** 2)
    assert table(result, "gain_se")["tt"] == pytest.approx(0, abs=1e-12)
    assert table(result, "aligned")["tt"] == pytest.approx((1 + a) ** 2)
    assert table(result, "control_gain_mean")["tt"] == pytest.approx(1)  # at right angles to it
    frozen = transfer_gains(model, tokens(), subspace, 0, 2, through="attention")
    assert table(frozen)["tt"] == pytest.approx(1)


# Stretches, controls, batches and tokens --------------------------------------------------------


def test_stretches_that_share_a_pass_are_those_run_apart():
    model, subspace = a_model(), a_subspace()
    together = transfer_gains(model, tokens(), subspace, None)
    for start in (0, 1):
        alone = transfer_gains(model, tokens(), subspace, start)
        assert table(alone, start=start) == pytest.approx(table(together, start=start), rel=1e-12)
    overlapping = transfer_gains(model, tokens(), subspace, [0, 1], 2)
    assert table(overlapping, start=1) == pytest.approx(table(together, start=1), rel=1e-12)


def test_groups_of_stretches_do_not_overlap():
    a, b, c, d = Stretch(0, 2), Stretch(1, 3), Stretch(2, 3), Stretch(3, 4)
    assert side_by_side([d, c, b, a, a]) == [[a, c, d], [b]]


def test_controls_are_the_gains_of_random_normals():
    model, subspace = a_model(), a_subspace()
    result = transfer_gains(model, tokens(2), subspace, 0, directions="all", n_controls=2, seed=5)
    gains = [
        table(transfer_gains(model, tokens(2), control, 0, directions="all"))
        for control in subspace.random_normals(2, 5)
    ]
    for pair in ("tt", "tn", "nt", "nn"):
        values = [gain[pair] for gain in gains]
        assert table(result, "control_gain_min")[pair] == pytest.approx(min(values))
        assert table(result, "control_gain_max")[pair] == pytest.approx(max(values))
        assert table(result, "control_gain_mean")[pair] == pytest.approx(sum(values) / 2)


def test_batches_are_pooled_and_padding_does_not_count():
    model, subspace, options = a_model(), a_subspace(), {"directions": "all"}
    rows = tokens(3, batch=2)
    together = transfer_gains(model, rows, subspace, 0, **options)
    apart = transfer_gains(model, [rows[:1], rows[1:]], subspace, 0, **options)
    assert table(apart) == pytest.approx(table(together), rel=1e-12)
    mask = torch.ones_like(rows[:1])
    mask[:, -1] = 0
    padded = transfer_gains(
        model, {"input": rows[:1], "attention_mask": mask}, subspace, 0, **options
    )
    short = transfer_gains(model, rows[:1, :-1], subspace, 0, **options)
    assert padded.conventions["n_tokens"] == short.conventions["n_tokens"] == 1
    assert table(padded) == pytest.approx(table(short), rel=1e-9)
