"""A small Llama with seeded weights, its tokenizer, and its checkpoints on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tl_tangent.assets.docstrings import END, TOKENIZER, VOCABULARY
from tl_tangent.errors import TangentFileError, TangentValueError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class SmallShape:
    """The shape of a Llama: rotary positions, RMSNorm, a gated MLP, untied embeddings, no biases.

    The defaults make 1.4 million parameters, 0.5 million of them in the embeddings.
    """

    n_layers: int = 4
    d_model: int = 128
    n_heads: int = 4
    d_mlp: int = 384
    n_ctx: int = 128
    vocabulary: int = VOCABULARY


def small_model(shape: SmallShape, seed: int) -> LlamaForCausalLM:
    """Return a float32 ``LlamaForCausalLM`` with the weights that ``seed`` draws, in training mode.

    Matrices are normal with standard deviation 0.02. Torch's global generator is left as it was.

    Raises:
        TangentValueError: ``d_model`` can't be cut into ``n_heads`` heads of even width.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape.d_model % (2 * shape.n_heads):
        raise TangentValueError(
            f"d_model={shape.d_model} and n_heads={shape.n_heads}: rotary positions turn pairs, so "
            f"d_model must be a multiple of {2 * shape.n_heads}"
        )
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_mlp,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_heads,
        max_position_embeddings=shape.n_ctx,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,  # the first token of the tokenizer
        use_cache=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).train()


def small_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer that :func:`tl_tangent.assets.installed_docstrings` left in ``folder``.

    It adds no special tokens of its own; its end-of-text token separates documents.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER), eos_token=END)


def save_small(
    model: LlamaForCausalLM, folder: Path, tokenizer: PreTrainedTokenizerFast | None
) -> None:
    """Write ``model`` and ``tokenizer`` into ``folder``, for any ``from_pretrained``."""
    from safetensors.torch import save_file

    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / WEIGHTS, metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def load_small(folder: Path) -> LlamaForCausalLM:
    """Return the model that :func:`save_small` wrote, on the CPU and in evaluation mode.

    Raises:
        TangentFileError: ``folder`` holds no such model, or a broken one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    try:
        config = LlamaConfig.from_pretrained(folder, local_files_only=True)
        state = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise TangentFileError(
            f"{folder} holds no checkpoint that can be read ({error}); train again"
        ) from error
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()
