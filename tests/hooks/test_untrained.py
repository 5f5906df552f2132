"""Models made anew: the same shapes, other weights, and the original untouched."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import IDS, MODELS, build
from tl_tangent.hooks.untrained import untrained


@pytest.mark.parametrize("spec", MODELS, ids=IDS)
def test_same_shapes_and_other_weights(spec):
    model, tokens = build(spec), families.tiny_tokens()
    before = model(tokens)
    state = torch.random.get_rng_state()
    fresh, again, other = untrained(model), untrained(model), untrained(model, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(model(tokens), before)
    assert type(fresh) is type(model)
    assert fresh(tokens).shape == before.shape
    assert torch.equal(fresh(tokens), again(tokens))
    assert not torch.allclose(fresh(tokens), other(tokens))
    assert not torch.allclose(fresh(tokens), before)


def test_other_models_are_refused():
    with pytest.raises(tt.TangentValueError, match="a Linear can't be made anew"):
        untrained(torch.nn.Linear(2, 2))
