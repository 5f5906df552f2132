"""ModernBERT: rotary pre-norm blocks with local attention, fused QKV and a fused gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformer_lens.model_bridge.generalized_components import (
    BlockBridge,
    EmbeddingBridge,
    JointGateUpMLPBridge,
    JointQKVPositionEmbeddingsAttentionBridge,
    LinearBridge,
    NormalizationBridge,
    RotaryEmbeddingBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from tl_tangent.hooks.adapters.encoder import MaskedLMAdapter


class ModernBertAdapter(MaskedLMAdapter):
    """``ModernBertForMaskedLM``, which ModernCamemBERT is too.

    Block 0 has no attention norm (``ln1`` is the identity there), so that norms can't be folded.
    Which layers attend locally, and with which angles, comes from Hugging Face with every pass.
    """

    supports_fold_ln = False

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.cfg.normalization_type = "LN"
        self.cfg.uses_rms_norm = False
        self.cfg.final_rms = False
        self.cfg.positional_embedding_type = "rotary"
        self.cfg.gated_mlp = True
        self.cfg.attn_only = False
        self.weight_processing_conversions = {**self._qkvo_weight_conversions()}
        self.component_mapping = {
            "embed": EmbeddingBridge(name="model.embeddings.tok_embeddings"),
            "embed_ln": self._norm("model.embeddings.norm"),
            "rotary_emb": RotaryEmbeddingBridge(name="model.rotary_emb"),
            "blocks": BlockBridge(
                name="model.layers",
                submodules={
                    "ln1": self._norm("attn_norm"),
                    "ln2": self._norm("mlp_norm"),
                    "attn": ModernBertAttention(name="attn", config=self.cfg),
                    "mlp": ModernBertMLP(name="mlp", config=self.cfg),
                },
            ),
            "ln_final": self._norm("model.final_norm"),
            "prediction_head": GeneralizedComponent(name="head"),
            "unembed": UnembeddingBridge(name="decoder"),
        }

    def _norm(self, name: str) -> NormalizationBridge:
        return NormalizationBridge(name, self.cfg, use_native_layernorm_autograd=True)


class ModernBertAttention(JointQKVPositionEmbeddingsAttentionBridge):
    """ModernBERT's attention from its own Q, K and V, with Hugging Face's arithmetic.

    Queries and keys are rotated and the softmax is taken in float32, whatever the model's dtype.
    """

    def __init__(self, name: str, config: Any) -> None:
        submodules = {"qkv": LinearBridge(name="Wqkv"), "o": LinearBridge(name="Wo")}
        super().__init__(name, config, split_qkv_matrix=split_qkv, submodules=submodules)
        self.is_causal = False

    def _apply_rotary_pos_emb(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        from transformers.models.modernbert import modeling_modernbert as hf

        q, k = hf.apply_rotary_pos_emb(q, k, cos, sin)
        return self.hook_rot_q(q), self.hook_rot_k(k)

    def _softmax_dropout_pattern(
        self,
        attn_scores: Tensor,
        target_dtype: torch.dtype | None = None,
        upcast_to_fp32: bool = True,
    ) -> Tensor:
        target_dtype = target_dtype or attn_scores.dtype
        return super()._softmax_dropout_pattern(attn_scores, target_dtype, upcast_to_fp32)

    def _apply_attn_dropout(self, attn_weights: Tensor) -> Tensor:
        attn: Any = self.original_component
        return dropout(attn_weights, p=attn.attention_dropout, training=attn.training)

    def _reconstruct_attention(self, *args: Any, **kwargs: Any) -> tuple:
        attn: Any = self.original_component
        output, pattern = super()._reconstruct_attention(*args, **kwargs)
        return attn.out_drop(output), pattern


class ModernBertMLP(JointGateUpMLPBridge):
    """ModernBERT's gated MLP: the first half of ``Wi`` is the gate, the second the linear part."""

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config, submodules={"out": LinearBridge(name="Wo")}, fused_attr="Wi")

    def set_original_component(self, original_component: nn.Module) -> None:
        super().set_original_component(original_component)
        mlp: Any = original_component
        # to drop entries of act(gate) is to drop those of act(gate) * up
        self._activation_fn = nn.Sequential(mlp.act, mlp.drop)


def split_qkv(attn: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """Return W_Q, W_K and W_V of a ModernBERT attention as modules that share ``Wqkv``'s memory."""
    weights = attn.Wqkv.weight.chunk(3)
    biases = (None, None, None) if attn.Wqkv.bias is None else attn.Wqkv.bias.chunk(3)
    query, key, value = (_linear(w, b) for w, b in zip(weights, biases, strict=True))
    return query, key, value


def _linear(weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None) -> nn.Linear:
    made = torch.nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias is not None)
    made.weight = nn.Parameter(weight)
    made.bias = None if bias is None else nn.Parameter(bias)
    return made
