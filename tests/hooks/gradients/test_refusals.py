"""Models whose gradients would be misread are refused, and the message says what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tl_tangent as tt
from tests import families
from tests.hooks.gradients.cases import build, fresh
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.weight import out_in

FOLDED = "the norms of this model are folded.*fold_ln=False, or a bridge without compatibility"


def refused(model, told: str) -> None:
    with pytest.raises(tt.TangentValueError, match=told):
        find_weights(model)


@pytest.mark.parametrize("family", ["falcon_alibi", "codegen"])
def test_fused_weights_of_unknown_order(family):
    kind = family.split("_")[0]
    refused(
        families.hf_model(family),
        f"how {kind} lays out queries, keys and values in .*TransformerBridge, which takes it",
    )


def test_latent_attention():
    refused(
        families.hf_model("deepseek"),
        r"linear layer model\.layers\.0\.self_attn\.q_a_proj of this DeepseekV2ForCausalLM is of "
        "no known kind.*q_proj",
    )
    refused(families.bridge("deepseek"), "layer 0 has a MLAAttentionBridge without linear q, k, v")


def test_an_unknown_linear_layer_in_a_block():
    model = fresh("hf", "llama")
    model.model.layers[1].mlp.extra = nn.Linear(4, 4)
    refused(model, r"linear layer model\.layers\.1\.mlp\.extra of this LlamaForCausalLM is of no")


def test_low_rank_adapters_are_unknown_linear_layers():
    model = fresh("hf", "llama")
    model.model.layers[0].mlp.up_proj.lora_A = nn.Linear(32, 2)
    refused(model, r"mlp\.up_proj\.lora_A of this LlamaForCausalLM is of no known kind")


@pytest.mark.parametrize("family", [name for name, _ in families.BRIDGE_FAMILIES[::2]])
def test_processed_bridges(family):
    model = families.bridge(family, compat=True)
    if family in families.NO_PROCESSING:  # renamed and not processed
        assert len(find_weights(model).weights) == 14
    else:
        refused(model, FOLDED)


@pytest.mark.parametrize(
    ("family", "normalization_type"), [("learned", "LNPre"), ("rotary_gqa", "RMSPre")]
)
def test_folded_hooked_transformers(family, normalization_type):
    refused(
        families.hooked_transformer(family, normalization_type=normalization_type, final_rms=False),
        FOLDED,
    )


@pytest.mark.parametrize(
    "flag", ["use_split_qkv_input", "use_attn_in", "ungroup_grouped_query_attention"]
)
def test_flags_that_copy_a_tensor_for_each_head(flag):
    grouped = flag.startswith("ungroup")
    model = families.hooked_transformer("rotary_gqa" if grouped else "learned")
    getattr(model, f"set_{flag}")(True)
    refused(model, rf"{flag} is on.*model\.set_{flag}\(False\)")
    getattr(model, f"set_{flag}")(False)
    assert find_weights(model).weights


@pytest.mark.parametrize("flag", ["use_split_qkv_input", "use_attn_in", "use_attn_result"])
def test_flags_of_a_bridge(flag):
    model = fresh("bridge", "llama")
    getattr(model, f"set_{flag}")(True)
    refused(model, rf"{flag} is on.*model\.set_{flag}\(False\)")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_quantized_weights(dtype):
    model = fresh("hf", "llama")
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    refused(model, rf"blocks\.1\.mlp\.W_out is stored as {dtype} .*without quantization")


def test_two_stacks_of_blocks():
    import transformers

    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4
    )
    refused(transformers.T5ForConditionalGeneration(config), "has 2 stacks of 4 blocks, and one is")


def test_no_stack_of_blocks():
    refused(nn.Sequential(nn.Linear(2, 2)), "this Sequential has 0 stacks")
    model = fresh("hf", "llama")
    refused(model.lm_head, "this Linear has 0 stacks")


def test_what_is_no_model():
    refused("gpt2", "a str has no gradients here.*Hugging Face model, a TransformerBridge")
    refused(SimpleNamespace(config=None), "a SimpleNamespace has no gradients here")


@pytest.mark.hooked
def test_other_classes_of_transformerlens():
    families.hooked_transformer("learned")  # skips where there is none
    from transformer_lens import HookedEncoder

    config = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "d_mlp": 8, "n_ctx": 8}
    encoder = HookedEncoder({**config, "act_fn": "gelu", "d_vocab": 16, "device": "cpu"})
    refused(encoder, "a HookedEncoder, or one with experts, is not known here")


def test_cross_attention():
    model = families.hf_model("bert", is_decoder=True, add_cross_attention=True)
    refused(model, r"blocks\.0\.attn\.W_. would name 2 matrices: cross-attention")


def test_layers_that_share_their_weights():
    model = fresh("hf", "llama")
    model.model.layers[1] = model.model.layers[0]
    refused(model, r"blocks\.1\.attn\.W_Q is the same parameter as in another layer")
    model = fresh("hf", "llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    refused(model, r"blocks\.1\.mlp\.W_in is the same parameter as in another layer")


def test_a_weight_without_a_gradient_says_so():
    weight = find_weights(build("hf", "llama")).weights[1]
    build("hf", "llama").zero_grad(set_to_none=True)
    with pytest.raises(tt.TangentRuntimeError, match=f"{weight.name} has no gradient.*backward"):
        weight.gradient()
    assert out_in()(torch.ones(2, 3)).shape == (2, 3)
