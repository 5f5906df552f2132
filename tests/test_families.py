"""The tiny models are what the other tests take them for."""

from __future__ import annotations

import pytest
import torch

from tests import families

BRIDGES = pytest.mark.parametrize(
    ("family", "compat"), families.BRIDGE_FAMILIES, ids=lambda v: str(v)
)


def _logits(model):
    with torch.no_grad():
        out = model(families.tiny_tokens(model))
    return getattr(out, "logits", out)


def _nontrivial(model):
    """Every bias has entries away from 0, every norm gain entries away from 1 (or 0)."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or ".b_" in name or "._b_" in name:
            assert parameter.std() > 0.02, name


def test_unknown_versions_are_noticed():
    assert families.HOOKED_FAMILIES or not families.HAS_HOOKED_TRANSFORMER
    assert ("roberta", False) in families.BRIDGE_FAMILIES or not families.HAS_ROBERTA


@pytest.mark.parametrize("family", families._HOOKED)
def test_hooked_transformer(family):
    model = families.hooked_transformer(family)
    logits = _logits(model)
    assert logits.shape == (2, 9, families.D_VOCAB) and logits.isfinite().all()
    assert logits.std() > 0.1 and not model.training
    _nontrivial(model)


@pytest.mark.parametrize("family", families._HOOKED)
def test_hooked_transformer_is_seeded(family):
    first = families.hooked_transformer(family).state_dict()
    again = families.hooked_transformer(family).state_dict()
    other = families.hooked_transformer(family, seed=1).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["embed.W_E"], other["embed.W_E"])


@pytest.mark.parametrize("family", families._HF)
def test_hf_model(family):
    model = families.hf_model(family)
    assert _logits(model).isfinite().all() and not model.training
    _nontrivial(model)
    again = families.hf_model(family).state_dict()
    assert all(torch.equal(v, again[k]) for k, v in model.state_dict().items())


@BRIDGES
def test_bridge(family, compat):
    model = families.bridge(family, compat)
    logits = _logits(model)
    assert logits.shape == (2, 9, families.D_VOCAB) and logits.isfinite().all()
    assert not model.training
    # compatibility mode may centre the unembedding: log-probabilities stay
    expected = _logits(families.hf_model(family)).log_softmax(-1)
    torch.testing.assert_close(logits.log_softmax(-1), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_bridge_dtype(dtype):
    assert _logits(families.bridge("llama", dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_hooked_transformer_dtype(dtype):
    assert _logits(families.hooked_transformer("learned", dtype)).dtype == dtype


def test_no_global_randomness_is_used():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    families.hf_model("gpt2")
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokenizer_pads_on_both_sides(tmp_path, side):
    tokenizer = families.tiny_tokenizer(tmp_path, padding_side=side)
    model = families.hooked_transformer("learned", tokenizer=tokenizer)
    tokens = model.to_tokens(["w4 w5 w6", "w7"], padding_side=side).tolist()
    padded = [0, 0, 1, 7] if side == "left" else [1, 7, 0, 0]
    assert tokens == [[1, 4, 5, 6], padded]
    assert model.to_string(model.to_tokens("w9", prepend_bos=False)) == ["w9"]
