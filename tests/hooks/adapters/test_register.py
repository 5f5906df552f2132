"""Which adapters are registered, how models are booted with them, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
    ArchitectureAdapterFactory,
)

import tl_tangent as tt
from tests import families
from tests.hooks.adapters import builders
from tests.hooks.adapters.builders import OURS, SETTINGS
from tl_tangent.errors import TangentValueError
from tl_tangent.hooks.adapters import ADAPTERS, register_adapters
from tl_tangent.hooks.adapters.roberta import RobertaAdapter


def test_all_are_known_and_transformer_lens_own_come_first():
    assert ADAPTERS.keys() <= SUPPORTED_ARCHITECTURES.keys()
    known = ArchitectureAdapterFactory._adapters
    own = {name for name, adapter in known.items() if ADAPTERS.get(name) is adapter}
    assert own == ADAPTERS.keys() - ({"RobertaForMaskedLM"} if families.HAS_ROBERTA else set())
    assert register_adapters() == []


def test_an_adapter_of_somebody_else_stays(monkeypatch):
    class Theirs(RobertaAdapter):
        pass

    theirs = {"CamembertForMaskedLM": Theirs}
    monkeypatch.setattr(ArchitectureAdapterFactory, "_adapters", theirs)
    monkeypatch.setattr(ArchitectureAdapterFactory, "_entry_points_discovered", True)
    registered = register_adapters()
    assert theirs["CamembertForMaskedLM"] is Theirs
    assert set(registered) == ADAPTERS.keys() - {"CamembertForMaskedLM"}


@pytest.mark.parametrize("family", SETTINGS)
def test_boot_from_a_folder(family, tmp_path):
    hf = builders.hf_model(family, torch.float32)
    folder = tmp_path / "model"
    hf.save_pretrained(folder)
    families.tiny_tokenizer(tmp_path).save_pretrained(folder)
    bridge = tt.TangentBridge.boot_transformers(str(folder), device="cpu")
    assert type(bridge) is tt.TangentBridge
    with torch.no_grad():
        found, expected = bridge(builders.tokens()), hf(builders.tokens()).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", OURS)
def test_texts_of_a_batch_do_not_see_their_padding(family, tmp_path):
    hf = builders.hf_model(family, torch.float32, pad_token_id=0)  # that of the tokenizer
    bridge = tt.TangentBridge.from_hf(hf, families.tiny_tokenizer(tmp_path))
    both, alone = bridge(["w4 w5 w6 w7 w8 w9", "w8 w7"]), bridge("w8 w7")
    torch.testing.assert_close(both[1, : alone.shape[1]], alone[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", OURS)
def test_attention_is_eager_whatever_it_was(family, attention, tmp_path):
    hf = builders.hf_model(family)
    hf.set_attn_implementation(attention)
    given = copy.deepcopy(hf)
    given.config.architectures = [type(hf).__name__]  # as in a model from a folder
    bridge = tt.TangentBridge.boot_transformers(
        "any", hf_model=given, tokenizer=families.tiny_tokenizer(tmp_path), device="cpu"
    )
    batch = builders.padded("left")
    with torch.no_grad():
        found, expected = bridge(**batch), hf(**builders.as_hf(family, batch)).logits
    assert given.config._attn_implementation == "eager"
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", OURS)
def test_compatibility_mode_keeps_the_probabilities(family):
    batch = builders.padded("right")
    for options, atol in (({"no_processing": True}, 1e-12), ({}, 1e-5)):  # processed in float32
        made = builders.pair(family)
        made.bridge.enable_compatibility_mode(disable_warnings=True, **options)
        with torch.no_grad():
            expected = made.hf(**builders.as_hf(family, batch)).logits.log_softmax(-1)
            found = made.bridge(**batch).log_softmax(-1)
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("family", OURS)
def test_an_untrained_one_is_of_the_same_kind(family):
    bridge = builders.pair(family).bridge
    fresh = tt.untrained(bridge)
    assert type(fresh) is type(bridge) and type(fresh.adapter) is type(bridge.adapter)
    assert fresh(builders.tokens()).isfinite().all()


@pytest.mark.parametrize("family", OURS)
def test_no_next_token_is_predicted(family):
    bridge = builders.pair(family).bridge
    with pytest.raises(NotImplementedError, match="causal loss"):
        bridge(builders.tokens(), return_type="loss")
    with pytest.raises(NotImplementedError, match="generation"):
        bridge.generate(builders.tokens(), max_new_tokens=1)


@pytest.mark.parametrize("family", ["EuroBert", "ModernBert", "Camembert"])
def test_a_model_without_its_head_is_refused(family):
    hf = builders.hf_model(family)
    headless = getattr(transformers, f"{family}Model")(hf.config)
    headless.config.architectures = [f"{family}ForMaskedLM"]  # as in a folder with the whole model
    with pytest.raises(TangentValueError, match=rf"{family}Model.*{family}ForMaskedLM.*AutoModel"):
        tt.TangentBridge.from_hf(headless)


@pytest.mark.parametrize("family", ["Camembert", "Roberta", "XLMRoberta"])
def test_the_context_is_without_the_rows_in_front_of_the_first_position(family):
    made = builders.pair(family)
    assert made.bridge.cfg.n_ctx == 40 - 2
    made.hf(torch.full((1, 38), 5))
    with pytest.raises((IndexError, RuntimeError)):
        made.hf(torch.full((1, 39), 5))
