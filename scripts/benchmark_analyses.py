"""What the analyses cost: ratios to what they are made from.

    python scripts/benchmark_analyses.py            a model of the shape of SmolLM2-135M, 512 tokens
    python scripts/benchmark_analyses.py --layers 4 --repeats 3      a quick look

Splits of attention scores are held against a forward pass without unembedding, traces of the
residual stream against run_with_cache of the same sites. Measured in alternation like
scripts/benchmark.py, at 1 x 512 and at 4 x 128 tokens.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmark import measure, report
from torch import Tensor

import tl_tangent as tt
from tl_tangent.hooks import compat


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    model = build(options)
    for batch, pos in ((1, 512), (4, 128)):
        tokens = torch.randint(0, 49152, (batch, pos))
        print(f"\n{options.layers} layers x 576, {batch} x {pos} tokens, rank {options.rank}")
        for jobs in (score_jobs, trace_jobs):
            report(measure(jobs(model, tokens, options.rank), options.repeats), options, GOALS)


GOALS = {"shares of all terms": 1.5, "trace": 1.15}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in [("layers", 30), ("rank", 8), ("repeats", 9)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    return parser.parse_args()


def build(options: argparse.Namespace) -> Any:
    """A random Llama of the shape of SmolLM2-135M: speed does not depend on the weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    warnings.filterwarnings("ignore", category=DeprecationWarning)
    config = LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config).eval()
    if compat.has_hooked_transformer():
        return tt.TangentHookedTransformer.from_hf(made)
    return tt.TangentBridge.from_hf(made)


def score_jobs(model: Any, tokens: Tensor, rank: int) -> dict[str, Callable[[], Any]]:
    subspaces = tt.fit_subspaces(model, tokens, "blocks.*.attn.hook_in", rank)
    return {
        "plain": lambda: model(tokens, return_type=None),
        "shares of all terms": lambda: tt.attention_term_shares(model, tokens, subspaces),
        "shares, signed ones too": lambda: tt.attention_term_shares(
            model, tokens, subspaces, signed=True
        ),
        "patterns and divergences": lambda: tt.attention_pattern_divergence(
            model, tokens, subspaces
        ),
        "all terms kept": lambda: tt.split_attention_layers(model, tokens, subspaces),
    }


def trace_jobs(model: Any, tokens: Tensor, rank: int) -> dict[str, Callable[[], Any]]:
    fixed = tt.fit_subspaces(model, tokens, "blocks.1.hook_resid_post", rank)
    (subspace,) = fixed.values()
    sites = ["blocks.0.hook_resid_pre", "blocks.*.hook_resid_post"]
    own = tt.fit_subspaces(model, tokens, sites, rank)
    leaves = ("hook_embed", "hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post")

    def cached() -> None:
        model.run_with_cache(
            tokens, names_filter=lambda name: name.endswith(leaves), return_type=None
        )

    return {
        "plain": cached,
        "trace": lambda: tt.trace_residual(model, tokens, subspace, interference=False),
        "trace, a subspace at each depth": lambda: tt.trace_residual(model, tokens, own),
        "trace, all pairs of writes": lambda: tt.trace_residual(model, tokens, subspace),
        "trace, 3 controls": lambda: tt.trace_residual(model, tokens, subspace, n_controls=3),
        "trace, every head": lambda: tt.trace_residual(
            model, tokens, subspace, heads=True, interference=False
        ),
    }


if __name__ == "__main__":
    main()
