"""What comes back of a removed part: hand-written cuts, models that write nothing, and refusals."""

from __future__ import annotations

import math

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.analysis.stream.test_transfer_gains import (
    EVERY,
    a_model,
    a_subspace,
    tokens,
    writing_into,
)
from tests.hooks import helpers
from tl_tangent.analysis.stream.part_recovery import PartRecovery, part_recovery

POS = 5


def columns(result: PartRecovery, part: str, column: str) -> list[float]:
    return [row[column] for row in result.rows if row["part"] == part]


def streams(model, given, depth: int, change=None):
    """The stream in front of every layer from ``depth`` on and behind the last, but position 0."""
    found = {}

    def look(x, hook):
        found[hook.name] = x.detach()[:, 1:]

    def edit(x, hook):
        return torch.cat([x[:, :1], change(x[:, 1:])], dim=1)

    site = f"blocks.{depth}.hook_resid_pre"
    hooks = [(site, edit)] if change else []
    hooks += [(site, look)]
    hooks += [(f"blocks.{i}.hook_resid_post", look) for i in range(depth, model.cfg.n_layers)]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        model(given, return_type=None)
    return list(found.values())


# Against hand-written cuts ----------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("part", ["normal", "tangent"])
def test_numbers_are_those_of_a_cut_by_hand(spec, part):
    model, given, subspace = helpers.build(spec, torch.float64), tokens(POS, batch=2), a_subspace()
    result = part_recovery(model, given, subspace, 0, part=part, n_controls=0)
    removing = subspace.normal if part == "normal" else subspace.tangent
    clean = streams(model, given, 0)
    ablated = streams(model, given, 0, lambda x: x - removing(x))
    for depth, (before, after) in enumerate(zip(clean, ablated, strict=True)):
        for name, split in (("tangent", subspace.tangent), ("normal", subspace.normal)):
            c, a = split(before), split(after)
            row = next(r for r in result.rows if (r["depth"], r["part"]) == (depth, name))
            inner, energy = float((c * a).sum()), float(c.square().sum())
            assert row["energy_clean"] == pytest.approx(energy / 8, rel=1e-6)
            ratio = float(a.square().sum()) / energy
            assert row["energy_ratio"] == pytest.approx(ratio, rel=1e-6, abs=1e-12)
            assert row["coefficient"] == pytest.approx(inner / energy, rel=1e-6, abs=1e-7)
            if depth:
                cosine = inner / float(c.norm() * a.norm())
                assert row["cosine"] == pytest.approx(cosine, rel=1e-6)


def test_at_the_cut_one_part_is_gone_and_the_other_as_it_was():
    for part, other in (("normal", "tangent"), ("tangent", "normal")):
        result = part_recovery(a_model(), tokens(POS), a_subspace(), 1, part=part)
        assert columns(result, part, "energy_ratio")[0] < 1e-20
        assert math.isnan(columns(result, part, "cosine")[0])
        for column in ("energy_ratio", "cosine", "coefficient", "control_coefficient_mean"):
            assert columns(result, other, column)[0] == pytest.approx(1)
        assert columns(result, part, "removed") == [True, True]


def test_a_subspace_a_depth_is_cut_at_the_depth_and_looked_at_in_its_own():
    model, given = a_model(), tokens(POS)
    first, last = a_subspace(1), a_subspace(2)
    sets = {"blocks.0.hook_resid_post": first, "blocks.1.hook_resid_post": last}
    result = part_recovery(model, given, sets, 1, part="tangent", n_controls=0)
    clean = streams(model, given, 1)
    ablated = streams(model, given, 1, lambda x: x - first.tangent(x))
    c, a = last.tangent(clean[1]), last.tangent(ablated[1])
    energy = float(c.square().sum())
    assert columns(result, "tangent", "coefficient")[1] == pytest.approx(
        float((c * a).sum()) / energy
    )
    gone = (clean[0] - ablated[0]) @ helpers.projector(last)
    unchanged = 1 - float((c * gone).sum()) / energy
    assert columns(result, "tangent", "coefficient_unchanged")[1] == pytest.approx(unchanged)


def test_controls_are_cuts_of_random_normals():
    model, given, subspace = a_model(), tokens(POS), a_subspace()
    for part in ("normal", "tangent"):
        result = part_recovery(model, given, subspace, 0, part=part, n_controls=2, seed=3)
        alone = [
            columns(part_recovery(model, given, one, 0, part=part, n_controls=0), part, "cosine")
            for one in subspace.random_normals(2, 3)
        ]
        for depth in (1, 2):
            values = [found[depth] for found in alone]
            for name, value in (("min", min(values)), ("max", max(values))):
                found = columns(result, part, f"control_cosine_{name}")[depth]
                assert found == pytest.approx(value)


# Known recoveries -------------------------------------------------------------------------------


def test_layers_that_write_tangent_parts_rebuild_no_normal_part():
    subspace = a_subspace()
    result = part_recovery(writing_into(subspace), tokens(POS), subspace, 0)
    assert max(columns(result, "normal", "energy_ratio")) < 1e-20
    assert max(map(abs, columns(result, "normal", "coefficient"))) < 1e-10
    assert columns(result, "tangent", "coefficient")[2] != pytest.approx(1, abs=1e-3)
    cut = part_recovery(writing_into(subspace), tokens(POS), subspace, 0, part="tangent")
    assert columns(cut, "normal", "coefficient") == pytest.approx([1, 1, 1])
    assert columns(cut, "tangent", "energy_ratio")[2] > 0.01


def test_writes_that_do_not_depend_on_the_stream_are_no_repair():
    model, subspace = families.bridge("gpt2", dtype=torch.float64), a_subspace()
    constant = torch.linspace(-1, 1, families.D_MODEL, dtype=torch.float64)
    for layer in range(2):
        model.add_hook(f"blocks.{layer}.hook_attn_out", lambda x, hook: x * 0)
        model.add_hook(f"blocks.{layer}.hook_mlp_out", lambda x, hook: x * 0 + constant)
    for part in ("normal", "tangent"):
        result = part_recovery(model, tokens(POS), subspace, 0, part=part)
        found = columns(result, part, "coefficient")
        assert found == pytest.approx(columns(result, part, "coefficient_unchanged"))
        assert found[2] > 0.01
    real = part_recovery(a_model(), tokens(POS), subspace, 0)
    unchanged = columns(real, "normal", "coefficient_unchanged")[2]
    assert columns(real, "normal", "coefficient")[2] != pytest.approx(unchanged, abs=0.05)


def test_a_normal_part_that_is_written_again_is_back_in_full():
    """Layer 0 writes the clean normal part, whatever it reads: the coefficient is 1 behind it."""
    model, subspace, given = families.bridge("gpt2", dtype=torch.float64), a_subspace(), tokens(POS)
    clean = subspace.normal(streams(model, given, 0)[0])
    clean = torch.cat([clean[:, :1] * 0, clean], dim=1)
    seen = {}
    model.add_hook("blocks.0.hook_attn_out", lambda x, hook: x * 0)
    model.add_hook("blocks.0.hook_resid_mid", lambda x, hook: seen.update(x=x))
    model.add_hook("blocks.0.hook_mlp_out", lambda x, hook: clean - subspace.normal(seen["x"]))
    result = part_recovery(model, given, subspace, 0)
    assert columns(result, "normal", "coefficient")[:2] == pytest.approx([0, 1], abs=1e-10)
    assert columns(result, "normal", "energy_ratio")[1] == pytest.approx(1)


# Around it --------------------------------------------------------------------------------------


def test_attached_subspaces_do_not_matter_and_nothing_is_left():
    model, given, subspace = a_model(), tokens(POS), a_subspace()
    plain = part_recovery(model, given, subspace, 0)
    names, logits = set(model.hook_dict), model(given)
    site = "blocks.0.hook_resid_pre"
    with tt.tangents(model, {site: subspace}):
        model.add_hook(f"{site}.hook_normal", lambda x, hook: None)
        assert part_recovery(model, given, subspace, 0).rows[2:] == plain.rows[2:]
        model.reset_hooks()
    assert torch.equal(model(given), logits) and set(model.hook_dict) == names
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_batches_are_pooled_and_only_chosen_positions_are_cut():
    model, subspace, rows = a_model(), a_subspace(), tokens(POS, batch=2)
    together = part_recovery(model, rows, subspace, 0, positions=[2])
    apart = part_recovery(model, [rows[:1], rows[1:]], subspace, 0, positions=[2])
    assert together.conventions["n_tokens"] == 2
    for column in ("energy_ratio", "coefficient", "energy_clean"):
        found = columns(apart, "normal", column)
        assert found == pytest.approx(columns(together, "normal", column), abs=1e-12)
    everywhere = part_recovery(model, rows, subspace, 0)
    found = columns(everywhere, "normal", "coefficient")
    assert found[2] != pytest.approx(columns(together, "normal", "coefficient")[2], abs=1e-3)


def test_it_shows_itself():
    result = part_recovery(a_model(), tokens(POS), a_subspace(), 0)
    last = result.to_dataframe().iloc[-1]
    assert f"has {last['coefficient']:.2f} of the clean one behind" in result.headline()
    assert f"controls' {last['control_coefficient_mean']:.2f}" in result.headline()
    assert result.headline() in repr(result) and "<table>" in result._repr_html_()
    made = result.conventions
    assert (made["depth"], made["part"], made["n_controls"]) == (0, "normal", 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 2}, "depth is 2; .* 0 to 1"),
        ({"depth": -1}, "depth is -1"),
        ({"part": "both"}, "part='both' is not one of 'normal', 'tangent'"),
        ({"batches": []}, "no token counts"),
        ({"batches": tokens(1)}, "no token counts"),
    ],
)
def test_what_cannot_be_asked(options, words):
    options = {"batches": tokens(POS), "subspaces": a_subspace(), "depth": 0, **options}
    with pytest.raises(tt.TangentValueError, match=words):
        part_recovery(a_model(), **options)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("layer", [0, 1])
def test_another_edit_between_layers_is_refused(depth, layer):
    """At the depth of the cut too, where the clean run would have it."""
    model, site = a_model(), f"blocks.{layer}.hook_resid_pre"
    with model.hooks(fwd_hooks=[(site, lambda x, hook: 1.5 * x)]):
        with pytest.raises(tt.TangentRuntimeError, match=f"layer {layer}: .*edits it in between"):
            part_recovery(model, tokens(POS), a_subspace(), depth)
    with tt.ablating(model, a_subspace(site=site), positions="all"):
        with pytest.raises(tt.TangentRuntimeError, match=f"layer {layer}: .*edits it in between"):
            part_recovery(model, tokens(POS), a_subspace(), depth)


def test_other_refusals():
    sets = {"blocks.1.hook_resid_pre": a_subspace()}
    with pytest.raises(tt.TangentKeyError, match="in front of layer 2 .*blocks.1.hook_resid_post"):
        part_recovery(a_model(), tokens(POS), sets, 1)
    with pytest.raises(tt.TangentRuntimeError, match="do not add up"):
        part_recovery(families.bridge("bert", dtype=torch.float64), tokens(), a_subspace(), 0)
