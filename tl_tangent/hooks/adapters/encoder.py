"""What the adapters of masked language models have in common."""

from __future__ import annotations

from typing import Any

from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter

from tl_tangent.errors import TangentValueError


class MaskedLMAdapter(ArchitectureAdapter):
    """An encoder: it sees every position, has no next-token loss and generates nothing."""

    supports_generation = False
    supports_causal_loss = False

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.cfg.attention_dir = "bidirectional"

    def prepare_model(self, hf_model: Any) -> None:
        """Check the model's class, and keep the mask and the positions those of Hugging Face.

        Raises:
            TangentValueError: a model without its language modelling head.
        """
        wanted = self.cfg.architecture
        if wanted not in [base.__name__ for base in type(hf_model).__mro__]:
            raise TangentValueError(
                f"the model is a {type(hf_model).__name__}, and its configuration says {wanted}, "
                "which is what can be bridged. Load it with AutoModelForMaskedLM."
            )
        super().prepare_model(hf_model)
        # other implementations may apply a window of their own that no mask shows
        hf_model.set_attn_implementation("eager")
        _keep_positions(hf_model)


def _keep_positions(hf_model: Any) -> None:
    """Leave the position ids to ``hf_model``.

    Under left padding a bridge counts them from the attention mask, save for a model that has
    ``get_rope_index``. Rotary scores know differences of positions alone, and RoBERTa has ids of
    its own, from ``pad_token_id + 1`` on: counted from 0 they would read other rows of its table.
    """
    hf_model.get_rope_index = None
