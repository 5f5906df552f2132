"""The terms add up to the model's own scores on every unmasked cell, in every family."""

from __future__ import annotations

import functools

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks import helpers
from tests.hooks.attention import cases
from tl_tangent.analysis.attention.scores import split_attention_layers
from tl_tangent.geometry.score_terms import POSITION, TERMS

BOTH_SPACES = pytest.mark.parametrize("space", cases.SPACES)
CAPPED = ("softcap", "gemma2")
ADDITIVE = ("alibi", "bloom", "mpt", "falcon_alibi")
SHOWS_PATTERN = ("bert", "roberta", "gptj", "gpt_neo", "opt")


def check(model, space: str, family: str, tolerance: float | None = None, tokens=None) -> None:
    """Split every layer, and compare sums and masks with what the model itself has."""
    tokens = families.tiny_tokens(model) if tokens is None else tokens
    tolerance = cases.tolerance(family) if tolerance is None else tolerance
    found = split_attention_layers(model, tokens, cases.subspaces(model, space))
    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in found]
    shown = cases.captured(model, tokens, names)
    for name, split in zip(names, found.values(), strict=True):
        assert torch.equal(split.scores, shown[name])
        assert cases.difference(split) < tolerance
        assert split.error < tolerance
        assert (split.cap is not None) == (family in CAPPED)
        assert split.scores_are_pattern == (family in SHOWS_PATTERN)
        assert tuple(split.terms) == ((*TERMS, POSITION) if family in ADDITIVE else TERMS)
        assert all(float(term.abs().max()) > 1e-3 for term in split.terms.values())


@BOTH_SPACES
@pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
def test_every_model_of_the_suite(spec, space):
    check(helpers.build(spec, torch.float64), space, spec[1])


# HookedTransformer: settings that change how scores come about ------------------------------------

HOOKED = {
    "qk_norm": ("rotary_gqa", {"use_qk_norm": True}),
    "adjacent_pairs": ("rotary_gqa", {"rotary_adjacent_pairs": True}),
    "adjacent_pairs_partial": ("rotary_parallel", {"rotary_adjacent_pairs": True}),
    "ntk": ("rotary_gqa", {"use_NTK_by_parts_rope": True}),
    "ungrouped": ("rotary_gqa", {"ungroup_grouped_query_attention": True}),
    "sinks": ("rotary_gqa", {"use_attention_sinks": True}),
    "scale_by_layer": ("learned", {"scale_attn_by_inverse_layer_idx": True}),
    "no_scale": ("learned", {"use_attn_scale": False}),
    "own_scale": ("learned", {"attn_scale": 3.0}),
    "bidirectional": ("learned", {"attention_dir": "bidirectional"}),
    "window": ("learned", {"use_local_attn": True, "window_size": 3, "attn_types": ["local"] * 2}),
    "no_norm": ("learned", {"normalization_type": None}),
    "wide_clip": ("learned", {"clip_qkv": 50.0}),
}


@BOTH_SPACES
@pytest.mark.parametrize("name", HOOKED)
def test_settings_of_a_hooked_transformer(name, space):
    family, settings = HOOKED[name]
    check(families.hooked_transformer(family, torch.float64, **settings), space, family)


@BOTH_SPACES
@pytest.mark.parametrize("refactored", [False, True])
@pytest.mark.parametrize("family", families.HOOKED_FAMILIES)
def test_processed_weights(family, refactored, space):
    if refactored and families._HOOKED[family].get("positional_embedding_type") == "rotary":
        pytest.skip("You can't refactor the QK circuit when using rotary embeddings")
    model = families.hooked_transformer(family, torch.float64)
    model.load_and_process_state_dict(
        model.state_dict(), refactor_factored_attn_matrices=refactored
    )
    check(model, space, family)


@BOTH_SPACES
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "qwen2", "gpt_neox", "gemma2", "olmo2", "bloom"]
)
def test_from_hf_with_folded_norms_or_not(family, folded, space):
    if not families.HAS_HOOKED_TRANSFORMER:
        pytest.skip("HookedTransformer needs transformer-lens<4")
    options = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    model = tt.TangentHookedTransformer.from_hf(
        families.hf_model(family, torch.float64),
        None,
        dtype=torch.float64,
        **dict.fromkeys(options, folded),
    )
    check(model, space, family)


def test_shortformer_adds_positions_behind_the_norm():
    settings = {"positional_embedding_type": "shortformer"}
    model = families.hooked_transformer("learned", torch.float64, **settings)
    check(model, "input", "learned")
    with pytest.raises(tt.TangentRuntimeError, match=r"layer 0: .* does not read the norm of"):
        check(model, "residual", "learned")


# Bridges: attention that is made in some other way ------------------------------------------------

BRIDGES = [
    "qwen2",
    "qwen3",
    "gemma3",
    "gpt_neox_sequential",
    "glm",
    "cohere",
    "phi",
    "gptj",
    "codegen",
    "gpt_neo",
    "opt",
    "falcon_alibi",
    "mpt",
]


@functools.cache
def runs(family: str, compat: bool, dtype: torch.dtype) -> str | None:
    """The host's own error, where it can't even run such a model; None where it can."""
    try:
        model = families.bridge(family, compat, dtype)
        model(families.tiny_tokens(model))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


@BOTH_SPACES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("compat", [False, True], ids=["plain", "compat"])
@pytest.mark.parametrize("family", BRIDGES)
def test_other_bridges(family, compat, dtype, space):
    if (error := runs(family, compat, dtype)) is not None:
        pytest.skip(f"TransformerLens can't run it: {error}")
    model = helpers.build(("bridge", family, compat), dtype)
    check(model, space, family, 1e-4 if dtype == torch.float32 else None)


@BOTH_SPACES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "olmo2", "codegen", "gptj"])
def test_half_precision(family, dtype, space):
    """A ten-thousandth in float32 is a hundredth here: that is the host's own rounding."""
    model = helpers.build(("bridge", family, False), dtype)
    found = split_attention_layers(
        model, families.tiny_tokens(model), cases.subspaces(model, space)
    )
    assert all(0 < split.error < 0.03 for split in found.values())
    assert all(split.tangent.dtype == torch.float32 for split in found.values())


@BOTH_SPACES
def test_a_half_precision_hooked_transformer(space):
    model = families.hooked_transformer("rotary_gqa", torch.bfloat16)
    found = split_attention_layers(
        model, families.tiny_tokens(model), cases.subspaces(model, space)
    )
    assert all(0 < split.error < 0.03 for split in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_short_batch_after_a_long_one(dtype):
    """Tables of positions are kept by the host from the longest batch on."""
    family = "alibi" if families.HAS_HOOKED_TRANSFORMER else "bloom"
    made = families.hooked_transformer if family == "alibi" else families.bridge
    model = made(family, dtype=dtype)  # its own, which keeps its table to itself
    model(families.tiny_tokens(model, pos=20))
    tolerance = 1e-4 if dtype == torch.float32 else None
    check(model, "input", family, tolerance, families.tiny_tokens(model, pos=5))


# Refused by name ----------------------------------------------------------------------------------


@BOTH_SPACES
def test_latent_attention_is_refused_by_name(space):
    model = families.bridge("deepseek", dtype=torch.float64)
    with pytest.raises(tt.TangentValueError, match="MLAAttentionBridge.*latent attention"):
        check(model, space, "deepseek")


def test_queries_and_keys_that_were_clipped_are_refused():
    model = families.bridge("olmo_clipped", dtype=torch.float64)
    with pytest.raises(tt.TangentRuntimeError, match="clips queries and keys, and some were"):
        check(model, "input", "olmo_clipped")


def test_a_norm_a_head_is_split_or_refused_by_name():
    model = families.bridge("stablelm_qk_norm", dtype=torch.float64)
    try:
        check(model, "input", "stablelm_qk_norm")
    except tt.TangentValueError as error:
        assert "norm" in str(error)
