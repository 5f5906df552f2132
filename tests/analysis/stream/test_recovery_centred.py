"""What comes back of what differs between tokens, without the vector common to all of them."""

from __future__ import annotations

import math

import pytest
import torch

from tests import families
from tests.analysis.stream.test_part_recovery import POS, columns, streams
from tests.analysis.stream.test_transfer_gains import a_model, a_subspace, tokens
from tests.hooks import helpers
from tl_tangent.analysis.stream.part_recovery import part_recovery


@pytest.mark.parametrize("part", ["normal", "tangent"])
def test_centred_numbers_are_those_of_deviations_by_hand(part):
    model, given, subspace = a_model(), tokens(POS, batch=2), a_subspace()
    result = part_recovery(model, given.split(1), subspace, 0, part=part, n_controls=0)
    removing = subspace.normal if part == "normal" else subspace.tangent
    clean = streams(model, given, 0)
    ablated = streams(model, given, 0, lambda x: x - removing(x))
    gone = clean[0] - ablated[0]
    for name, split in (("tangent", subspace.tangent), ("normal", subspace.normal)):
        found = [row for row in result.rows if row["part"] == name]
        for row, before, after in zip(found, clean, ablated, strict=True):
            whole = split(before).flatten(0, 1)
            along = gone @ helpers.projector(subspace)
            r = along if name == "tangent" else gone - along
            c, a, r = (x - x.mean(0) for x in (whole, split(after).flatten(0, 1), r.flatten(0, 1)))
            energy = float(c.square().sum())
            assert row["common_share"] == pytest.approx(1 - energy / float(whole.square().sum()))
            back, unchanged = float((c * a).sum()), energy - float((c * r).sum())
            assert row["coefficient_centred"] == pytest.approx(back / energy, abs=1e-9)
            assert row["coefficient_centred_unchanged"] == pytest.approx(
                unchanged / energy, abs=1e-9
            )


def test_a_vector_that_all_tokens_get_is_back_but_nothing_else_is():
    """Layers that write one vector whatever they read rebuild nothing that differs."""
    model, subspace = families.bridge("gpt2", dtype=torch.float64), a_subspace()
    constant = 3 * torch.linspace(-1, 1, families.D_MODEL, dtype=torch.float64)
    for layer in range(2):
        model.add_hook(f"blocks.{layer}.hook_attn_out", lambda x, hook: x * 0)
        model.add_hook(f"blocks.{layer}.hook_mlp_out", lambda x, hook: x * 0 + constant)
    for part in ("normal", "tangent"):
        result = part_recovery(model, tokens(POS), subspace, 0, part=part)
        assert columns(result, part, "coefficient")[2] > 0.2
        assert columns(result, part, "common_share")[2] > 0.2
        for name in ("coefficient_centred", "coefficient_centred_unchanged"):
            assert columns(result, part, name) == pytest.approx([0, 0, 0], abs=1e-9)
            assert columns(result, part, f"control_{name}_max") == pytest.approx([0] * 3, abs=1e-9)


def test_one_token_differs_from_nothing():
    result = part_recovery(a_model(), tokens(POS), a_subspace(), 0, positions=[2])
    for part in ("tangent", "normal"):
        assert columns(result, part, "common_share") == pytest.approx([1, 1, 1])
        assert all(map(math.isnan, columns(result, part, "coefficient_centred")))
    assert "differs between tokens" not in result.headline()


def test_the_sentence_has_what_differs_between_tokens():
    result = part_recovery(a_model(), tokens(POS), a_subspace(), 0)
    last = result.to_dataframe().iloc[-1]
    assert (
        f"; of what differs between tokens {last['coefficient_centred']:.2f} "
        f"({last['coefficient_centred_unchanged']:.2f})"
    ) in result.headline()
    assert {"removed", "reference", "common_share"} <= set(result.conventions["meaning"])
