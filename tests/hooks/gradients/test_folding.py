"""Why folded norms are refused: their weights have other gradients than those of training."""

from __future__ import annotations

import pytest
import torch

from tests.families import hooked_transformer
from tests.hooks.gradients.cases import error, scalar, tokens_for

pytestmark = pytest.mark.hooked


@pytest.fixture(scope="module")
def pair():
    """A model and the same with its LayerNorms folded, each with gradients of one loss."""
    plain = hooked_transformer("learned", torch.float64)
    folded = hooked_transformer("learned", torch.float64, normalization_type="LNPre")
    state = plain.fold_layer_norm(dict(plain.state_dict()), center_weights=False)
    assert not folded.load_state_dict(state, strict=False).missing_keys
    tokens = tokens_for(plain)
    assert error(folded(tokens), plain(tokens)) < 1e-12  # one function, two sets of weights
    for model in (plain, folded):
        scalar(model, tokens).backward()
        model.requires_grad_(False)
    return plain, folded


READERS = [
    ("blocks.1.attn.W_Q", "blocks.1.attn.b_Q", "blocks.1.ln1"),
    ("blocks.0.attn.W_K", "blocks.0.attn.b_K", "blocks.0.ln1"),
    ("blocks.1.attn.W_V", "blocks.1.attn.b_V", "blocks.1.ln1"),
    ("blocks.0.mlp.W_in", "blocks.0.mlp.b_in", "blocks.0.ln2"),
    ("unembed.W_U", "unembed.b_U", "ln_final"),
]


@pytest.mark.parametrize(("weight", "bias", "norm"), READERS)
def test_the_gradient_of_training_takes_the_gain_that_is_gone(pair, weight, bias, norm):
    """With W' = diag(w) W and b' = b + beta W: dL/dW = diag(w) dL/dW' + beta (dL/db')^T."""
    plain, folded = pair
    gain = plain.get_parameter(f"{norm}.w")[:, None]
    offset = plain.get_parameter(f"{norm}.b")[:, None]
    whole = plain.get_parameter(weight).grad
    inner = folded.get_parameter(weight).grad
    along = folded.get_parameter(bias).grad.unsqueeze(-2)
    assert error(gain * inner + offset * along, whole) < 1e-12
    assert error(inner, whole) > 1e-3
    # softmax does not see a shift of all keys: dL/db_K = 0, and elsewhere both terms are needed
    assert (error(gain * inner, whole) < 1e-3) == weight.endswith("W_K")


def test_energies_in_one_subspace_differ(pair):
    """The same Q holds another share of the folded gradient."""
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(32, 4, generator=generator, dtype=torch.float64))[0]
    shares = []
    for model in pair:
        gradient = model.get_parameter("blocks.0.mlp.W_in").grad
        shares.append(float((q.T @ gradient).square().sum() / gradient.square().sum()))
    assert abs(shares[0] / shares[1] - 1) > 0.05


def test_writing_weights_keep_their_gradients(pair):
    plain, folded = pair
    for name in ("blocks.0.attn.W_O", "blocks.1.mlp.W_out", "embed.W_E", "pos_embed.W_pos"):
        assert error(folded.get_parameter(name).grad, plain.get_parameter(name).grad) < 1e-12
