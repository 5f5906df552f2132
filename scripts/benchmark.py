"""What the hook points cost: ratios to the plain forward pass, in alternation, in one run.

    python scripts/benchmark.py                 12 layers x 768, 4 x 128 tokens, 48 sites
    python scripts/benchmark.py --layers 2 --d-model 64 --repeats 3      a quick look

Every row is timed in turn with the plain pass, round after round, and its ratio is formed within
the round, so that a drifting machine moves both sides alike. Rows marked "instead" are what one
would write without this package.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tl_tangent as tt
from tl_tangent.hooks import compat

LEAVES = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out")
GOALS = {
    "inactive": 1.01,
    "read coordinates": 1.05,
    "zero the tangent part": 1.08,
    "fit (exact second moments)": 1.25,
}


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = build(options)
    tokens = torch.randint(0, 50257, (options.batch, options.pos))
    sites = [f"blocks.{layer}.{leaf}" for layer in range(options.layers) for leaf in LEAVES]
    subspaces = tt.fit_subspaces(model, tokens, sites, options.rank)
    jobs = make_jobs(model, tokens, sites, subspaces)
    print(
        f"{options.layers} layers x {options.d_model}, {options.batch} x {options.pos} tokens, "
        f"{len(sites)} sites, rank {options.rank}, {torch.get_num_threads()} threads, "
        f"{options.repeats} rounds"
    )
    report(measure(jobs, options.repeats), options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in [
        ("layers", 12),
        ("d-model", 768),
        ("batch", 4),
        ("pos", 128),
        ("rank", 32),
        ("repeats", 15),
        ("threads", 0),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bridge", action="store_true", help="measure a TransformerBridge")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    return parser.parse_args()


def build(options: argparse.Namespace) -> Any:
    """A random GPT-2-shaped model: speed does not depend on the weights."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if options.bridge or not compat.has_hooked_transformer():
        return gpt2_bridge(options)
    from transformer_lens import HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=options.layers,
        d_model=options.d_model,
        n_ctx=max(options.pos, 128),
        d_head=64,
        n_heads=max(options.d_model // 64, 1),
        d_mlp=4 * options.d_model,
        d_vocab=50257,
        act_fn="gelu_new",
        normalization_type="LNPre",
        seed=0,
    )
    return tt.TangentHookedTransformer(config).eval()


def gpt2_bridge(options: argparse.Namespace) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=options.layers, n_embd=options.d_model, n_head=max(options.d_model // 64, 1)
    )
    return tt.TangentBridge.from_hf(GPT2LMHeadModel(config).eval())


def make_jobs(
    model: Any, tokens: Tensor, sites: list[str], subspaces: tt.SubspaceSet
) -> dict[str, Callable[[], None]]:
    """Every row as a function that runs one forward pass; all leave the model as it was."""
    dense = {site: s.basis @ s.basis.T for site, s in subspaces.items()}

    def plain() -> None:
        model(tokens)

    def without_unembedding() -> None:
        model(tokens, return_type=None)

    def inactive() -> None:
        with model.tangents(subspaces):
            model(tokens)

    def read() -> None:
        names = [f"{site}.hook_coords" for site in sites]
        with model.hooks(fwd_hooks=[(name, lambda a, hook: None) for name in names]):
            model(tokens)

    def zero() -> None:
        model(tokens)

    def fit() -> None:
        tt.collect(model, tokens, sites)  # needs no logits, and computes none

    def project(x: Tensor, hook: Any) -> Tensor:
        subspace = subspaces[hook.name]
        return x - (x - subspace.mean) @ dense[hook.name]

    def dense_projector() -> None:
        with model.hooks(fwd_hooks=[(site, project) for site in sites]):
            model(tokens)

    def cache_then_project() -> None:
        _, cache = model.run_with_cache(tokens, names_filter=sites)
        for site in sites:
            (cache[site] - subspaces[site].mean) @ subspaces[site].basis

    def cache_then_multiply() -> None:
        _, cache = model.run_with_cache(tokens, names_filter=sites)
        for site in sites:
            rows = cache[site].flatten(0, 1)
            rows.T @ rows

    return {
        "plain": plain,
        "inactive": attached(model, subspaces, inactive_in=plain),
        "read coordinates": attached(model, subspaces, inactive_in=read),
        "zero the tangent part": ablated(model, subspaces, zero),
        "fit (exact second moments)": fit,
        "plain, without unembedding": without_unembedding,
        "attach, run, detach": inactive,
        "instead: dense projectors, zeroing": dense_projector,
        "instead: cache, then coordinates": cache_then_project,
        "instead: cache, then x^T x in float32": cache_then_multiply,
    }


def attached(model: Any, subspaces: Any, inactive_in: Callable[[], None]) -> Callable[[], None]:
    """Run with the hook points in place; putting them there is not part of the timing."""
    return Prepared(lambda: model.tangents(subspaces), inactive_in)


def ablated(model: Any, subspaces: Any, run: Callable[[], None]) -> Callable[[], None]:
    return Prepared(lambda: model.ablating(subspaces), run)


class Prepared:
    """A job whose context is entered before the clock starts and left after it stops."""

    def __init__(self, context: Callable[[], Any], run: Callable[[], None]):
        self.context, self.run = context, run

    def __call__(self) -> None:
        with self.context():
            self.run()


def seconds(job: Callable[[], None]) -> float:
    if isinstance(job, Prepared):
        with job.context():
            return seconds(job.run)
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def measure(
    jobs: dict[str, Callable[[], None]], repeats: int, *, grad: bool = False
) -> dict[str, list[float]]:
    """Ratios to the plain pass, one a round: each job runs between two plain passes."""
    ratios: dict[str, list[float]] = {name: [] for name in jobs}
    with torch.set_grad_enabled(grad):
        for job in jobs.values():
            job()  # warm up
        for _ in range(repeats):
            gc.collect()
            before = seconds(jobs["plain"])
            for name, job in jobs.items():
                took = seconds(job)
                after = seconds(jobs["plain"])
                ratios[name].append(2 * took / (before + after))
                before = after
    return ratios


def report(
    ratios: dict[str, list[float]], options: argparse.Namespace, goals: dict[str, float] = GOALS
) -> None:
    rows = []
    print(f"\n{'':40}{'median':>9}{'quartiles':>17}{'goal':>8}")
    for name, values in ratios.items():
        low, median, high = statistics.quantiles(values, n=4)
        goal = goals.get(name)
        shown = f"<= {goal}" if goal else ""
        print(f"{name:40}{median:9.3f}{low:9.3f}-{high:.3f}{shown:>10}")
        rows.append({"row": name, "median": median, "q1": low, "q3": high, "goal": goal})
    if options.json:
        versions = {
            name: importlib.metadata.version(name) for name in ("torch", "transformer-lens")
        }
        setting = {k: v for k, v in vars(options).items() if k != "json"}
        options.json.write_text(
            json.dumps({"setting": setting, "versions": versions, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
