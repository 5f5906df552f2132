"""What the terms do not depend on, and what of them the softmax can't see."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers
from tests.hooks.attention import cases
from tl_tangent.analysis.attention.scores import split_attention_layers
from tl_tangent.geometry.score_terms import KEY_CONSTANT, POSITION, TERMS

BOTH_SPACES = pytest.mark.parametrize("space", cases.SPACES)


def pattern_change(split) -> float:
    """How much the pattern changes without the terms whose key side is the mean, before any cap."""
    inside = split.seen[:, None].expand_as(split.scores)
    position = split.terms.get(POSITION, torch.zeros_like(split.tangent))
    patterns = [
        (split.sum_of(*names) + position).masked_fill(~inside, -torch.inf).softmax(-1)
        for names in (TERMS, [name for name in TERMS if name not in KEY_CONSTANT])
    ]
    return float((patterns[0] - patterns[1]).abs().max())


def terms_of(model, space: str, subspaces=None) -> dict[int, dict[str, torch.Tensor]]:
    tokens = families.tiny_tokens(model)
    subspaces = cases.subspaces(model, space) if subspaces is None else subspaces
    found = split_attention_layers(model, tokens, subspaces)
    return {layer: dict(split.terms) for layer, split in found.items()}


def assert_same_terms(found, expected, tolerance: float = 1e-11) -> None:
    assert found.keys() == expected.keys()
    for layer, terms in expected.items():
        for name, term in terms.items():
            assert float((found[layer][name] - term).abs().max()) < tolerance, (layer, name)


# The softmax --------------------------------------------------------------------------------------


def expected_reasons(family: str, space: str) -> list[str]:
    """Words of each reason why the softmax can see a term whose key side is the mean."""
    reasons = []
    if family not in ("learned", "alibi", "gpt2", "bloom", "bert", "roberta"):
        reasons.append("rotation")
    if space == "residual" and family not in ("bert", "roberta", "postnorm", "olmo2"):
        reasons.append("the norm divides")
    if family == "olmo2":
        reasons.append("the norm of keys")
    if family in ("softcap", "gemma2"):
        reasons.append("soft cap")
    return reasons


@BOTH_SPACES
@pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
def test_the_conventions_tell_whether_the_softmax_sees_the_keys_mean(spec, space):
    model = helpers.build(spec, torch.float64)
    found = split_attention_layers(
        model, families.tiny_tokens(model), cases.subspaces(model, space)
    )
    reasons = expected_reasons(spec[1], space)
    for split in found.values():
        assert split.conventions["softmax_cannot_see_key_constant_terms"] is (not reasons)
        why = split.conventions["softmax_invariance"]
        assert all(word in why for word in (*KEY_CONSTANT, *reasons))
        change = pattern_change(split)
        assert change > 1e-3 if reasons else change < 1e-12


@BOTH_SPACES
def test_without_a_norm_the_residual_stream_is_the_input(space):
    model = families.hooked_transformer("learned", torch.float64, normalization_type=None)
    found = split_attention_layers(
        model, families.tiny_tokens(model), cases.subspaces(model, space)
    )
    for split in found.values():
        assert split.conventions["softmax_cannot_see_key_constant_terms"] is True
        assert pattern_change(split) < 1e-12


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_norm_of_keys_is_a_reason(family):
    model = cases.model_of(family)
    found = split_attention_layers(
        model, families.tiny_tokens(model), cases.subspaces(model, "input")
    )
    for split in found.values():
        assert split.conventions["softmax_cannot_see_key_constant_terms"] is False
        assert "the norm of keys divides" in split.conventions["softmax_invariance"]


# The basis of the subspace ------------------------------------------------------------------------


def orthogonal(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64))[0]


@BOTH_SPACES
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
def test_terms_depend_on_the_span_only(spec, per_head, space):
    model = helpers.build(spec, torch.float64)
    subspaces = cases.subspaces(model, space, per_head=per_head)
    turned = {name: one.replace(basis=one.basis @ orthogonal(3)) for name, one in subspaces.items()}
    assert_same_terms(terms_of(model, space, turned), terms_of(model, space, subspaces))


@BOTH_SPACES
def test_the_same_subspace_in_every_head_is_a_shared_one(space):
    model = cases.model_of(cases.any_family())
    shared = cases.subspaces(model, space)
    heads = model.cfg.n_heads
    own = {
        name: one.replace(
            basis=one.basis.expand(heads, -1, -1).clone(), mean=one.mean.expand(heads, -1).clone()
        )
        for name, one in shared.items()
    }
    assert_same_terms(terms_of(model, space, own), terms_of(model, space, shared))


@BOTH_SPACES
def test_a_norm_over_all_grouped_keys_takes_one_subspace_for_all_heads(space):
    model = families.bridge("olmo2", dtype=torch.float64, num_key_value_heads=2)
    assert terms_of(model, space)
    own = cases.subspaces(model, space, per_head=True)
    with pytest.raises(tt.TangentValueError, match="Give one subspace for all heads"):
        terms_of(model, space, own)


# The basis of the heads ---------------------------------------------------------------------------


@BOTH_SPACES
@pytest.mark.parametrize("family", ["learned", "alibi"])
def test_terms_do_not_depend_on_the_basis_of_a_head(family, space):
    """W_Q -> W_Q A and W_K -> W_K A^-T, biases too, leave every product as it is."""
    model = families.hooked_transformer(family, torch.float64)
    expected = terms_of(model, space)
    generator = torch.Generator().manual_seed(3)
    shape = (families.N_HEADS, families.D_HEAD, families.D_HEAD)
    with torch.no_grad():
        for block in model.blocks:
            change = torch.randn(shape, generator=generator, dtype=torch.float64)
            change += 3 * torch.eye(families.D_HEAD, dtype=torch.float64)
            inverse = torch.linalg.inv(change).mT
            for letter, factor in (("Q", change), ("K", inverse)):
                weight, bias = (getattr(block.attn, f"{kind}_{letter}") for kind in "Wb")
                weight.copy_(weight @ factor)
                bias.copy_((bias[:, None] @ factor)[:, 0])
    assert_same_terms(terms_of(model, space), expected)


PROCESSED = 1e-4  # of terms up to 100: TransformerLens casts what it processes to float32
NO_PROCESSING = {
    "fold_ln": False,
    "center_writing_weights": False,
    "center_unembed": False,
    "fold_value_biases": False,
}


@BOTH_SPACES
@pytest.mark.parametrize("family", ["learned", "alibi"])
def test_terms_are_those_of_refactored_matrices(family, space):
    model = families.hooked_transformer(family, torch.float64)
    expected, before = terms_of(model, space), model.blocks[0].attn.W_Q.clone()
    model.load_and_process_state_dict(
        model.state_dict(), **NO_PROCESSING, refactor_factored_attn_matrices=True
    )
    assert not torch.allclose(model.blocks[0].attn.W_Q, before)
    assert_same_terms(terms_of(model, space), expected, PROCESSED)


@pytest.mark.parametrize("family", families.HOOKED_FAMILIES)
def test_terms_in_residual_space_do_not_depend_on_folding_the_norm(family):
    """The norm's gain may stand in front of W_Q and W_K or in them; beta is a bias either way."""
    if family == "postnorm":
        pytest.skip("there is no norm in front of its attention")
    model = families.hooked_transformer(family, torch.float64)
    expected = terms_of(model, "residual")
    model.load_and_process_state_dict(model.state_dict(), **NO_PROCESSING | {"fold_ln": True})
    folded = terms_of(model, "residual")
    if family == "softcap":  # folding one norm of a sandwich leaves later layers alone
        folded, expected = ({0: found[0]} for found in (folded, expected))
    assert_same_terms(folded, expected, PROCESSED)
