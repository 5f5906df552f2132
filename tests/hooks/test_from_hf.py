"""A HookedTransformer made from a HuggingFace model in memory computes what that model computes."""

from __future__ import annotations

import socket
import warnings

import pytest
import torch
import transformers

from tests import families
from tl_tangent import TangentBridge
from tl_tangent.errors import TangentImportError, TangentValueError
from tl_tangent.hooks.from_hf import FAMILIES, configs, hooked_from_hf, loading

needs_hooked = pytest.mark.skipif(
    not families.HAS_HOOKED_TRANSFORMER, reason="HookedTransformer needs transformer-lens<4"
)
RAW = dict.fromkeys(
    ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), False
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}

VARIANTS = [
    *((family, {}) for family in FAMILIES),
    *(("gpt2", {"activation_function": name}) for name in configs.ACTIVATIONS),
    ("gpt2", {"tie_word_embeddings": False, "n_inner": 48, "layer_norm_epsilon": 0.3}),
    ("gpt2", {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}),
    ("gpt_neox", {"use_parallel_residual": False, "layer_norm_eps": 0.3}),
    ("gpt_neox", {"tie_word_embeddings": True, "hidden_act": "relu"}),
    ("gpt_neox", {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}),
    ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "head_dim": 16, "rms_norm_eps": 0.3}),
    ("llama", {"attention_bias": True, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LINEAR}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    ("qwen2", {"rope_parameters": LINEAR}),
    ("gemma2", {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": False}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"num_key_value_heads": 4, "rope_parameters": LLAMA3}),
    ("gemma2", {"layer_types": ["full_attention"] * 2, "hidden_activation": "silu"}),
    ("bloom", {"n_head": 8, "tie_word_embeddings": False, "layer_norm_epsilon": 0.3}),
    ("olmo2", {"num_key_value_heads": 2, "attention_bias": True}),
    ("olmo2", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
]


def _name(value):
    return value if isinstance(value, str) else "+".join(value) or "plain"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("from_hf opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@torch.no_grad()
def _logits(model, tokens):
    out = model(tokens)
    return getattr(out, "logits", out)


def _quietly(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hooked_from_hf(*args, **kwargs)


# What it computes -----------------------------------------------------------------------------


@needs_hooked
@pytest.mark.parametrize(("family", "settings"), VARIANTS, ids=_name)
def test_it_computes_what_huggingface_computes(family, settings):
    hf = families.hf_model(family, **settings)
    tokens = families.tiny_tokens(hf, pos=20)
    expected = _logits(hf, tokens)
    raw = _logits(_quietly(hf, **RAW), tokens)
    assert (raw - expected).abs().max() <= 5e-6 * expected.abs().max()
    processed = _logits(_quietly(hf), tokens).log_softmax(-1)
    torch.testing.assert_close(processed, expected.log_softmax(-1), atol=1e-5, rtol=0)


@needs_hooked
@pytest.mark.parametrize("family", FAMILIES)
def test_the_huggingface_model_is_left_as_it_was(family):
    hf = families.hf_model(family)
    before = {name: value.clone() for name, value in hf.state_dict().items()}
    model = _quietly(hf)
    assert all(torch.equal(value, before[name]) for name, value in hf.state_dict().items())
    assert all(p.requires_grad for p in hf.parameters())
    theirs = {p.data_ptr() for p in hf.parameters()}
    assert theirs.isdisjoint(p.data_ptr() for p in model.parameters())


@needs_hooked
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_load_and_process_state_dict(family):
    from transformer_lens import HookedTransformer

    hf = families.hf_model(family)
    raw, processed = _quietly(hf, **RAW), _quietly(hf)
    reference = HookedTransformer(raw.cfg)
    allowed = loading._allowed_processing(raw.cfg, dict.fromkeys(RAW, True))
    reference.load_and_process_state_dict(raw.state_dict(), **allowed)
    expected = reference.state_dict()
    # to rounding: the weights lie differently in memory when they are processed
    torch.testing.assert_close(dict(processed.state_dict()), dict(expected), atol=1e-6, rtol=0)
    assert processed.cfg.normalization_type == reference.cfg.normalization_type
    assert processed.hook_dict.keys() == reference.hook_dict.keys()


@needs_hooked
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_tokenizer_from_a_folder(family, tmp_path):
    hf = families.hf_model(family)
    model = _quietly(hf, families.tiny_tokenizer(tmp_path))
    tokens = model.to_tokens("w4 w5 w6 w7", prepend_bos=True)
    assert tokens.tolist() == [[1, 4, 5, 6, 7]]
    expected = tokens
    for _ in range(6):  # across Gemma 2's window of 4
        following = _logits(hf, expected)[:, -1:].argmax(-1)
        expected = torch.cat([expected, following], dim=1)
    options = {"max_new_tokens": 6, "do_sample": False, "stop_at_eos": False, "verbose": False}
    assert torch.equal(model.generate(tokens, **options), expected)


@needs_hooked
def test_precision_follows_the_model_unless_told_otherwise():
    hf = families.hf_model("gpt2", dtype=torch.float64)
    tokens = families.tiny_tokens(hf)
    model = hooked_from_hf(hf, **RAW)
    assert model.cfg.dtype == torch.float64
    torch.testing.assert_close(_logits(model, tokens), _logits(hf, tokens), atol=1e-12, rtol=0)
    assert _logits(hooked_from_hf(hf, dtype=torch.float32), tokens).dtype == torch.float32
    half = hooked_from_hf(families.hf_model("gpt2", dtype=torch.bfloat16), **RAW)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@needs_hooked
def test_the_class_asked_for_is_returned():
    from transformer_lens import HookedTransformer

    class Mine(HookedTransformer):
        pass

    hf = families.hf_model("gpt2")
    assert type(hooked_from_hf(hf, model_class=Mine)) is Mine
    assert type(hooked_from_hf(hf)) is HookedTransformer
    assert not hooked_from_hf(hf).training


def test_a_bridged_model_is_refused_by_its_name():
    hf = families.hf_model("llama")
    TangentBridge.from_hf(hf)
    with pytest.raises(TangentValueError, match="already part of a bridge"):
        TangentBridge.from_hf(hf)


@needs_hooked
def test_config_overrides():
    hf = families.hf_model("gpt2")
    model = hooked_from_hf(hf, n_ctx=16, n_layers=1, default_prepend_bos=False)
    assert (model.cfg.n_ctx, len(model.blocks), model.cfg.default_prepend_bos) == (16, 1, False)
    with pytest.raises(TangentValueError, match=r"no field 'n_contexts'. Close: n_ctx"):
        hooked_from_hf(hf, n_contexts=16)
    with pytest.raises(TangentValueError, match=r"pos_embed.W_pos"):
        hooked_from_hf(hf, n_ctx=64)


# Processing that an architecture does not allow -----------------------------------------------


@needs_hooked
@pytest.mark.parametrize(
    ("family", "dropped"),
    [
        ("gpt2", []),
        ("gpt_neox", []),
        ("bloom", []),
        ("llama", ["center_writing_weights"]),
        ("qwen2", ["center_writing_weights"]),
        ("gemma2", ["center_writing_weights", "center_unembed"]),
        ("olmo2", ["fold_ln", "center_writing_weights"]),
    ],
    ids=_name,
)
def test_dropped_processing_is_named_in_one_warning(family, dropped):
    hf = families.hf_model(family)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        hooked_from_hf(hf)
        hooked_from_hf(hf, **RAW)
    ours = [w for w in caught if "switched off" in str(w.message)]
    assert len(ours) == bool(dropped)
    for warning in ours:
        assert warning.filename == __file__
        assert all(name in str(warning.message) for name in dropped)


@needs_hooked
@pytest.mark.parametrize(("family", "change"), [("gemma2", 1e-2), ("olmo2", 1.0)])
def test_without_the_guards_the_model_would_change(family, change, monkeypatch):
    hf = families.hf_model(family)
    tokens = families.tiny_tokens(hf)
    monkeypatch.setattr(loading, "_allowed_processing", lambda cfg, requested: requested)
    unguarded = _logits(hooked_from_hf(hf), tokens).log_softmax(-1)
    assert (unguarded - _logits(hf, tokens).log_softmax(-1)).abs().max() > change


# What is refused ------------------------------------------------------------------------------

ROPE = {"rope_theta": 100.0}
REFUSED = [
    ("gpt2", {"activation_function": "tanh"}, "activation='tanh'"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias=False"),
    ("gpt_neox", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.4}}, "partial_rotary"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
    ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("llama", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ("gemma2", {"rope_parameters": LINEAR}, "accepted: default, llama3"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("bloom", {"n_head": 6, "hidden_size": 36}, "n_head=6"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm=True"),
    ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "pretraining_tp=2"),
]


@needs_hooked
@pytest.mark.parametrize(
    ("family", "settings", "message"), REFUSED, ids=[f"{f}-{m}" for f, _, m in REFUSED]
)
def test_what_cannot_be_represented_is_refused_by_name(family, settings, message):
    with pytest.raises(TangentValueError, match=message) as raised:
        hooked_from_hf(families.hf_model(family, **settings))
    assert "TangentBridge" in str(raised.value)


@needs_hooked
def test_unsupported_models_are_refused():
    with pytest.raises(TangentValueError, match=r"'bert'.*Supported: bloom, gemma2.*TangentBridge"):
        hooked_from_hf(families.hf_model("bert"))
    headless = families.hf_model("llama").model
    with pytest.raises(TangentValueError, match=r"must be a LlamaForCausalLM.*is a LlamaModel"):
        hooked_from_hf(headless)
    with pytest.raises(TangentValueError, match=r"model_type None"):
        hooked_from_hf(torch.nn.Linear(2, 2))


@needs_hooked
def test_adapters_and_quantised_weights_are_refused():
    hf = families.hf_model("llama")
    hf.model.layers[0].self_attn.q_proj.lora_A = torch.nn.Linear(32, 2, bias=False)
    with pytest.raises(TangentValueError, match=r"q_proj.lora_A"):
        hooked_from_hf(hf)
    hf = families.hf_model("llama")
    weight = hf.model.layers[1].mlp.up_proj.weight.to(torch.int8)
    hf.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(TangentValueError, match=r"layers.1.mlp.up_proj.weight.*packed integer"):
        hooked_from_hf(hf)


@needs_hooked
def test_a_tokenizer_without_a_folder_is_refused(tmp_path):
    core = families.tiny_tokenizer(tmp_path).backend_tokenizer
    in_memory = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>")
    with pytest.raises(TangentValueError, match=r"save_pretrained"):
        hooked_from_hf(families.hf_model("gpt2"), in_memory)


@pytest.mark.skipif(families.HAS_HOOKED_TRANSFORMER, reason="transformer-lens<4 has the class")
def test_transformer_lens_4_says_what_to_install():
    with pytest.raises(TangentImportError, match=r"hooked.*TangentBridge"):
        hooked_from_hf(families.hf_model("gpt2"))
