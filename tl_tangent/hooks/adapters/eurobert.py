"""EuroBERT: Llama's blocks, seen from both sides."""

from __future__ import annotations

from typing import Any

from transformer_lens.model_bridge.generalized_components import (
    BlockBridge,
    EmbeddingBridge,
    LinearBridge,
    PositionEmbeddingsAttentionBridge,
    RMSNormalizationBridge,
    RotaryEmbeddingBridge,
    UnembeddingBridge,
)

from tl_tangent.hooks.adapters.encoder import MaskedLMAdapter


class EuroBertAdapter(MaskedLMAdapter):
    """``EuroBertForMaskedLM``: pre-norm blocks with RMSNorm, rotary positions and a gated MLP.

    As TransformerLens' Llama adapter, but for an attention that is told not to be causal: with no
    padding Hugging Face passes no mask at all, and a bridge would then make a causal one.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._set_rms_rotary_defaults()
        self.weight_processing_conversions = {**self._qkvo_weight_conversions()}
        attn = PositionEmbeddingsAttentionBridge(
            name="self_attn",
            config=self.cfg,
            submodules={x: LinearBridge(name=f"{x}_proj") for x in ("q", "k", "v", "o")},
            is_causal=False,
        )
        self.component_mapping = {
            "embed": EmbeddingBridge(name="model.embed_tokens"),
            "rotary_emb": RotaryEmbeddingBridge(name="model.rotary_emb"),
            "blocks": BlockBridge(
                name="model.layers",
                submodules={
                    "ln1": RMSNormalizationBridge(name="input_layernorm", config=self.cfg),
                    "ln2": RMSNormalizationBridge(name="post_attention_layernorm", config=self.cfg),
                    "attn": attn,
                    "mlp": self._gated_mlp(),
                },
            ),
            "ln_final": RMSNormalizationBridge(name="model.norm", config=self.cfg),
            "unembed": UnembeddingBridge(name="lm_head", config=self.cfg),
        }
