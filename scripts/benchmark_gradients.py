"""What gradient energies cost beside a training step, and IsoScore beside its first package.

    python scripts/benchmark_gradients.py            10 layers as SmolLM2-135M has, 4 x 512 tokens
    python scripts/benchmark_gradients.py --layers 2 --repeats 3 --isoscore 768      a quick look

Measured in alternation like scripts/benchmark.py. A pass is one forward and one backward; a step
also updates the weights by AdamW. IsoScore is timed from a covariance at hand, in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from benchmark import Prepared, measure, report
from torch import Tensor

import tl_tangent as tt
from tl_tangent.analysis.gradients.activations import fit_at_weights
from tl_tangent.analysis.gradients.meter import GradientMeter
from tl_tangent.hooks.gradients.find import find_weights
from tl_tangent.hooks.gradients.objectives import Batch

GOALS = {
    "energies, 20 normals": 1.10,
    "energies and second moments": 1.25,
    "energies and nulls of each token": 1.10,
    "recorder": 1.05,
    "recorder, nulls of each token": 1.10,
}


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = build(options)
    tokens = torch.randint(0, options.vocabulary, (4, 512))
    print(
        f"{options.layers} layers x 576, 4 x 512 tokens, rank 8, {torch.get_num_threads()} threads"
    )
    for unit, jobs in (("a pass", pass_jobs), ("a training step", step_jobs)):
        print(f"\nRatios to {unit}")
        report(measure(jobs(model, tokens), options.repeats, grad=True), options, GOALS)
    for d in options.isoscore:
        print(f"\nRatios to IsoScore in closed form, d = {d}")
        report(measure(score_jobs(d), 3), options, {})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in [("layers", 10), ("vocabulary", 8192), ("repeats", 7), ("threads", 0)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--isoscore", type=int, nargs="*", default=[768, 4096], help="widths")
    parser.set_defaults(json=None)
    return parser.parse_args()


def build(options: argparse.Namespace) -> Any:
    """A random Llama with the blocks of SmolLM2-135M: speed does not depend on the weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=options.layers,
            hidden_size=576,
            intermediate_size=1536,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=options.vocabulary,
            max_position_embeddings=512,
        )
    )


def one_pass(model: Any, tokens: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(input_ids=tokens, labels=tokens).loss.backward()


def pass_jobs(model: Any, tokens: Tensor) -> dict[str, Callable[[], Any]]:
    weights = find_weights(model)
    subspaces = fit_at_weights(model, weights, [Batch(tokens)], 8)

    def measured(**options: bool) -> Callable[[], None]:
        meter = GradientMeter(weights, subspaces, **options)

        def run() -> None:
            with meter.watching():
                one_pass(model, tokens)
            meter.record()

        return run

    return {
        "plain": lambda: one_pass(model, tokens),
        "energies, 20 normals": measured(nulls=False),
        "energies and second moments": measured(nulls=False, moments=True),
        "energies and nulls of each token": measured(nulls=True),
    }


def step_jobs(model: Any, tokens: Tensor) -> dict[str, Callable[[], Any]]:
    weights = find_weights(model)
    subspaces = fit_at_weights(model, weights, [Batch(tokens)], 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        one_pass(model, tokens)
        optimizer.step()

    def recorded(**options: Any) -> Prepared:
        recorder = tt.GradientRecorder(model, **options)
        counter = iter(range(10**9))

        def run() -> None:
            one_pass(model, tokens)
            recorder.record(next(counter))
            optimizer.step()

        return Prepared(lambda: recorder, run)

    return {
        "plain": step,
        "recorder": recorded(subspaces=subspaces),
        "recorder, nulls of each token": recorded(subspaces=subspaces, nulls=True),
    }


def score_jobs(d: int) -> dict[str, Callable[[], Any]]:
    x = torch.randn(2 * d, d) * torch.arange(1, d + 1).rsqrt()
    covariance = torch.cov(x.T)
    jobs: dict[str, Callable[[], Any]] = {
        "plain": lambda: tt.isoscore_from_covariance(covariance),
        "singular values": lambda: torch.linalg.svdvals(covariance),
        "eigenvalues": lambda: torch.linalg.eigvalsh(covariance),
    }
    try:
        from IsoScore.IsoScore import IsoScore_cov
    except ImportError as error:
        print(f"the package IsoScore is not installed ({error}); pip install IsoScore")
        return jobs
    return {**jobs, "the package IsoScore": lambda: IsoScore_cov(covariance)}


if __name__ == "__main__":
    main()
