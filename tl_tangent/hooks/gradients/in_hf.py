"""The weights of a plain Hugging Face model, recognised by the names of its linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks.gradients.assemble import Assembly, is_conv1d, is_linear
from tl_tangent.hooks.gradients.weight import Weights, block_parts, head_parts

# the end of a linear layer's name within its block -> kinds of the weight, in the order of its
# parts. The longest match counts.
LEAVES: dict[str, tuple[str, ...]] = {
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "o_proj": ("o",),
    "out_proj": ("o",),
    "self.query": ("q",),
    "self.key": ("k",),
    "self.value": ("v",),
    "attention.output.dense": ("o",),
    "intermediate.dense": ("in",),
    "output.dense": ("out",),
    "self_attn.dense": ("o",),
    "attention.dense": ("o",),
    "self_attention.dense": ("o",),
    "query_key_value": ("q", "k", "v"),
    "c_attn": ("q", "k", "v"),
    "attn.c_proj": ("o",),
    "c_fc": ("in",),
    "mlp.c_proj": ("out",),
    "Wqkv": ("q", "k", "v"),
    "attn.Wo": ("o",),
    "mlp.Wi": ("gate", "in"),
    "mlp.Wo": ("out",),
    "qkv_proj": ("q", "k", "v"),
    "gate_up_proj": ("gate", "in"),
    "gate_proj": ("gate",),
    "up_proj": ("in",),
    "down_proj": ("out",),
    "fc1": ("in",),
    "fc2": ("out",),
    "fc_in": ("in",),
    "fc_out": ("out",),
    "dense_h_to_4h": ("in",),
    "dense_4h_to_h": ("out",),
}
BY_HEAD = ("gpt_neox", "bloom")  # q, k and v of each head side by side
IN_ORDER = ("gpt2", "mpt", "modernbert", "phi3")  # all of q, then all of k, then all of v


def hf_weights(model: Any) -> Weights:
    """Return the weights of a Hugging Face model.

    Raises:
        TangentValueError: no single stack of blocks, or a linear layer of unknown meaning in it.
    """
    name, layers = _stack(model)
    made = Assembly()
    made.embedding("embed", model.get_input_embeddings())
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in path.replace("wpe", "position"):
            made.embedding("pos", module)
    for layer, block in enumerate(layers):
        made.block(layer, block)
        for leaf, module in _linears(block):
            kinds = _kinds(model, f"{name}.{layer}.{leaf}", leaf)
            for kind, features in zip(kinds, _parts(model, module, leaf, kinds), strict=True):
                made.linear(kind, layer, module, features)
    made.unembedding(model.get_output_embeddings())
    return made.finished(model)


def _stack(model: Any) -> tuple[str, nn.ModuleList]:
    """Find the one list of blocks."""
    config = getattr(model, "config", None)
    depth = getattr(config, "num_hidden_layers", None)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth and any(_linears(module[0]))
    ]
    if config is None or len(found) != 1:
        raise TangentValueError(
            f"this {type(model).__name__} has {len(found)} stacks of {depth} blocks, and one is "
            "needed: a Hugging Face language model with a stack of encoder or decoder blocks"
        )
    return found[0]


def _linears(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in block.named_modules() if is_linear(module))


def _kinds(model: Any, path: str, leaf: str) -> tuple[str, ...]:
    found = [end for end in LEAVES if f".{leaf}".endswith(f".{end}")]
    if not found:
        raise TangentValueError(
            f"the linear layer {path} of this {type(model).__name__} is of no known kind, so its "
            "gradient would be left out. Known names end in " + ", ".join(LEAVES)
        )
    return LEAVES[max(found, key=len)]


def _parts(model: Any, module: Any, leaf: str, kinds: tuple[str, ...]) -> Sequence[Tensor | None]:
    """Which features of a fused weight belong to each of its kinds."""
    if len(kinds) == 1:
        return [None]
    out = module.weight.shape[1 if is_conv1d(module) else 0]
    config = model.config
    heads = config.num_attention_heads
    grouped = getattr(config, "num_key_value_heads", None) or heads
    if kinds == ("gate", "in"):
        return block_parts([out // 2] * 2)
    if config.model_type in BY_HEAD:
        return head_parts(heads, 3, out // heads // 3)
    if config.model_type not in IN_ORDER:
        raise TangentValueError(
            f"how {config.model_type} lays out queries, keys and values in {leaf} is not known "
            f"here. Known: {', '.join(BY_HEAD + IN_ORDER)}. Pass a TransformerBridge, which takes "
            "it apart."
        )
    width = out // (heads + 2 * grouped)
    return block_parts([heads * width, grouped * width, grouped * width])
