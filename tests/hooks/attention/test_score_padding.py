"""Rows that are padded to one length have the terms that they have on their own."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

from tests import families
from tests.hooks import helpers
from tests.hooks.attention import cases
from tl_tangent.analysis.attention.scores import split_attention_layers, split_attention_scores
from tl_tangent.geometry.score_terms import POSITION

LENGTHS = (9, 6, 4)
FAMILIES = [(kind, name) for kind, name, compat in helpers.MODELS if not compat] + [
    ("bridge", name) for name in ("qwen3", "gemma3", "glm", "phi", "gptj", "codegen", "opt", "mpt")
]
IDS = [f"{kind}-{name}" for kind, name in FAMILIES]


def rows_of(side: str) -> list[slice]:
    longest = max(LENGTHS)
    return [slice(0, n) if side == "right" else slice(longest - n, longest) for n in LENGTHS]


def padded(model, side: str):
    """Tokens and mask of a padded batch, and the rows without padding."""
    tokens = families.tiny_tokens(model, batch=len(LENGTHS), pos=max(LENGTHS))
    mask = torch.zeros_like(tokens)
    for row, real in enumerate(rows_of(side)):
        mask[row, real] = 1
    alone = [tokens[row : row + 1, real] for row, real in enumerate(rows_of(side))]
    return tokens * mask, mask, alone


def a_query_apart(position, seen):
    """A position term up to what is the same at every key of a query, which ALiBi leaves open."""
    inside = seen.to(position)
    mean = (position * inside).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp(min=1)
    return (position - mean) * inside


@pytest.fixture(params=FAMILIES, ids=IDS)
def padding_case(request):
    """Hosts other than HookedTransformer give NaN in float64 for queries that see no key."""
    kind, family = request.param
    dtype = torch.float64 if kind == "hooked" else torch.float32
    return helpers.build((kind, family, False), dtype), 1e-11 if kind == "hooked" else 2e-4


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("space", cases.SPACES)
def test_padded_rows_have_the_terms_of_single_rows(padding_case, side, space):
    model, tolerance = padding_case
    subspaces = cases.subspaces(model, space)
    tokens, mask, alone = padded(model, side)
    batch = {"input": tokens, "attention_mask": mask}
    together = split_attention_layers(model, batch, subspaces)
    singles = [split_attention_layers(model, row, subspaces) for row in alone]
    for layer, split in together.items():
        for row, real in enumerate(rows_of(side)):
            one = singles[row][layer]
            seen = one.seen[0]
            assert torch.equal(split.seen[row, real, real], seen)
            for name, term in split.terms.items():
                found, own = term[row, :, real, real], one.terms[name][0]
                if name == POSITION:
                    found, own = a_query_apart(found, seen), a_query_apart(own, seen)
                assert float((found - own)[:, seen].abs().max()) < tolerance, name
        assert split.error < tolerance


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_enters_no_sum(padding_case, side):
    model, tolerance = padding_case
    subspaces = cases.subspaces(model, "residual")
    tokens, mask, alone = padded(model, side)
    batch = {"input": tokens, "attention_mask": mask}
    together = split_attention_layers(model, batch, subspaces)
    singles = [split_attention_layers(model, row, subspaces) for row in alone]
    for layer, split in together.items():
        expected = functools.reduce(operator.add, (one[layer].moments for one in singles))
        assert split.moments.cells == expected.cells
        torch.testing.assert_close(
            split.moments.spread, expected.spread, rtol=10 * tolerance, atol=tolerance
        )


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_mask_is_an_argument_of_its_own(side):
    model = cases.model_of("gpt2")
    tokens, mask, _ = padded(model, side)
    subspaces = cases.subspaces(model, "input")
    given = split_attention_scores(model, tokens, 1, subspaces, attention_mask=mask)
    batch = {"input": tokens, "attention_mask": mask}
    (same,) = split_attention_layers(model, batch, subspaces, [1]).values()
    assert torch.equal(given.scores, same.scores) and torch.equal(given.seen, same.seen)
    assert not torch.equal(given.seen, split_attention_scores(model, tokens, 1, subspaces).seen)
