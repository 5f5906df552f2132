"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT's blocks under other names."""

from __future__ import annotations

from typing import Any

from transformer_lens.model_bridge.supported_architectures.bert import BertArchitectureAdapter

from tl_tangent.hooks.adapters.encoder import MaskedLMAdapter

_HEAD = {
    "mlm_head": "lm_head.dense",
    "ln_final": "lm_head.layer_norm",
    "unembed": "lm_head.decoder",
}


class RobertaAdapter(MaskedLMAdapter, BertArchitectureAdapter):
    """``RobertaForMaskedLM`` and its two copies: post-norm blocks, as TransformerLens maps BERT's.

    ``hook_attn_out`` lies behind the first norm and ``hook_mlp_out`` in front of the second, so the
    streams of a block do not add up. Attention is Hugging Face's own: its pattern can be read, not
    edited.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        for name, part in self.components.items():
            part.name = _HEAD.get(name) or f"roberta.{str(part.name).removeprefix('bert.')}"

    def prepare_model(self, hf_model: Any) -> None:
        """Read the usable context: the position table starts with ``padding_idx + 1`` idle rows."""
        super().prepare_model(hf_model)
        table = hf_model.roberta.embeddings.position_embeddings
        self.cfg.n_ctx = table.num_embeddings - (table.padding_idx + 1)
