"""What draws a query to a key: against the definition, and what cancels."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import MODELS, build
from tl_tangent.analysis.attention.term_advantage import term_advantage


@pytest.fixture(scope="module")
def split():
    model = build(MODELS[0], torch.float64)
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(model.cfg.d_model, 3, generator=generator, dtype=torch.float64)
    mean = torch.randn(model.cfg.d_model, generator=generator, dtype=torch.float64)
    subspace = tt.TangentSubspace(basis, mean, orthonormalize=True)
    return tt.split_attention_scores(model, families.tiny_tokens(), 1, subspace, space="input")


def keys_of(split, query, key):
    keys = torch.full(split.seen.shape[:2], -1)
    keys[:, query] = key
    return keys


def test_one_query_by_hand(split):
    found = term_advantage(split.terms, split.seen, keys_of(split, 5, 2))
    for i, term in enumerate(split.terms.values()):
        others = [0, 1, 3, 4, 5]
        by_hand = (term[:, :, 5, 2] - term[:, :, 5, others].mean(-1)).mean(0)
        torch.testing.assert_close(found[i], by_hand)


def test_terms_add_up_to_the_score(split):
    keys = keys_of(split, slice(1, None), 0)
    score = split.total
    others = split.seen.clone()
    others[..., 0] = False
    rest = (score * others[:, None]).sum(-1) / others.sum(-1).clamp(min=1)[:, None]
    expected = (score[..., 0] - rest)[:, :, 1:].mean(dim=(0, 2))
    torch.testing.assert_close(term_advantage(split.terms, split.seen, keys).sum(0), expected)


def test_what_is_the_same_at_every_key_gives_no_advantage(split):
    """Without rotary positions: the terms whose key side is the mean."""
    frame = split.advantage(keys_of(split, 6, 3)).set_index("term")["advantage"]
    for name in ("mean_mean", "tangent_mean", "normal_mean"):
        assert float(frame[name].abs().max()) < 1e-12
    assert float(frame["tangent_tangent"].abs().min()) > 1e-6


@pytest.mark.parametrize(
    ("query", "key", "says"),
    [
        (5, 6, "key 6 chosen for query 5 of row 0 is masked"),
        (5, 99, "positions are 0 to 8"),
        (5, -1, "no query has a chosen key"),
        (0, 0, "no query has a chosen key and another one"),
    ],
)
def test_keys_that_can_not_be_are_refused(split, query, key, says):
    with pytest.raises(tt.TangentValueError, match=says):
        term_advantage(split.terms, split.seen, keys_of(split, query, key))


def test_keys_of_another_shape_are_refused(split):
    with pytest.raises(tt.TangentValueError, match=r"keys is \[2, 3\]; this split has \[2, 9\]"):
        term_advantage(split.terms, split.seen, torch.zeros(2, 3, dtype=torch.long))
