"""The weights of a HookedTransformer, by the names of its parameters."""

from __future__ import annotations

from typing import Any

from tl_tangent.errors import TangentValueError
from tl_tangent.hooks import compat
from tl_tangent.hooks.gradients.assemble import FIRST_STREAM, block_weight, embedding_weight
from tl_tangent.hooks.gradients.weight import (
    UNEMBED_SITE,
    Tap,
    Weight,
    Weights,
    head_in_out,
    head_out,
    in_out,
)


def hooked_weights(model: Any) -> Weights:
    """Return the weights of a HookedTransformer.

    Its embedding and unembedding are two parameters, also where they were one in training.

    Raises:
        TangentValueError: a model of another class, or mixtures of experts.
    """
    if not compat.is_hooked_transformer(model) or model.cfg.num_experts:
        raise TangentValueError(
            f"a {type(model).__name__}, or one with experts, is not known here. Accepted: a "
            "HookedTransformer with dense blocks, a bridge, a Hugging Face model."
        )
    bare = not model.cfg.post_embedding_ln  # else what the embedding puts out is normed
    found = [embedding_weight("embed", model.embed.W_E, model.embed, bare=bare)]
    if model.cfg.positional_embedding_type in ("standard", "shortformer"):
        found.append(embedding_weight("pos", model.pos_embed.W_pos, model.pos_embed, bare=bare))
    sites = {FIRST_STREAM: Tap(model.blocks[0], 0)}
    for layer, block in enumerate(model.blocks):
        sites[f"blocks.{layer}.hook_resid_post"] = Tap(block)
        found += _attention(layer, block.attn)
        if not model.cfg.attn_only:
            found += _mlp(layer, block.mlp)
    unembed = Tap(model.unembed, 0)
    found.append(
        Weight(
            "unembed.W_U",
            "unembed",
            None,
            model.cfg.d_model,
            UNEMBED_SITE,
            model.unembed.W_U,
            in_out(),
            unembed,
            Tap(model.unembed),
        )
    )
    for weight in found:
        if weight.side == "input" and weight.reads is not None:
            sites[weight.site] = weight.reads
    taken = {id(weight.parameter) for weight in found}
    left = [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in taken and name.rpartition(".")[2].lstrip("_").startswith("W_")
    ]
    return Weights(tuple(found), sites, tuple(left))


def _attention(layer: int, attn: Any) -> list[Weight]:
    grouped = hasattr(attn, "_W_K")
    readers = {"q": attn.W_Q, "k": attn.W_K, "v": attn.W_V}
    if grouped:
        readers |= {"k": attn._W_K, "v": attn._W_V}
    names = {"q": "query_input", "k": "key_input", "v": "value_input"}
    points = {"q": attn.hook_q, "k": attn.hook_k, "v": attn.hook_v}
    found = [
        block_weight(
            kind,
            layer,
            parameter,
            head_in_out,
            Tap(attn, names[kind]),
            Tap(points[kind], axes=2),
        )
        for kind, parameter in readers.items()
    ]
    return [
        *found,
        block_weight("o", layer, attn.W_O, head_out, Tap(attn.hook_z, axes=2), Tap(attn)),
    ]


def _mlp(layer: int, mlp: Any) -> list[Weight]:
    gated = hasattr(mlp, "W_gate")
    into = mlp.hook_pre_linear if gated else mlp.hook_pre
    found = [
        block_weight("in", layer, mlp.W_in, in_out(), Tap(mlp, 0), Tap(into)),
        block_weight("out", layer, mlp.W_out, in_out(), Tap(mlp.hook_post), Tap(mlp)),
    ]
    gate = (
        [block_weight("gate", layer, mlp.W_gate, in_out(), Tap(mlp, 0), Tap(mlp.hook_pre))]
        if gated
        else []
    )
    return [*gate, *found]
