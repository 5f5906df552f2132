"""The sampling side of SmolLM2-135M: the tables and the pictures of the docs.

    python scripts/sampling_side.py                     all three parts, half an hour on two cores
    python scripts/sampling_side.py --parts layers      one of frequency, tokens, layers

Reads docstrings of the installed packages (--tokens of them). "frequency" correlates how often a
token type occurs with the spread of its activations, by layer. "tokens" measures the local geometry
around frequent and rare token types. "layers" measures entropy and dimension by layer. Into --out
go a table (csv), its words (txt) and a picture (png) of each. The model comes with the pinned
environment.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

import tl_tangent as tt
from tl_tangent.assets import embedded_smollm2, token_batches
from tl_tangent.assets.docstrings import PACKAGES, read_documents

TOKEN_LAYERS = (0, 7, 14, 21, 29)


def main() -> None:
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    smol = embedded_smollm2()
    bridge = tt.TangentBridge.from_hf(smol.hf_model, smol.tokenizer)
    text = "\n\n".join(read_documents(PACKAGES))
    rows = token_batches(smol.tokenizer, text, seq_len=options.seq_len, n_tokens=options.tokens)
    print(f"{rows.numel()} tokens in rows of {options.seq_len}")
    for part in options.parts:
        started = time.perf_counter()
        found = PARTS[part](bridge, list(rows.split(options.batch_rows)), options.seed)
        write(options.out, part, found)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        took = (time.perf_counter() - started) / 60
        print(f"{found.headline()}\n{part}: {took:.1f} minutes, {peak:.1f} GiB at the most\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-rows", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/sampling"))
    return parser.parse_args()


def frequency(bridge: Any, batches: list[Tensor], seed: int) -> Any:
    """All types that occur ten times or more, and equal samples of ten of each."""
    return tt.frequency_dispersion(
        bridge, batches, min_count=10, equal_n=10, seed=seed, progress=True
    )


def tokens(bridge: Any, batches: list[Tensor], seed: int) -> Any:
    """Ten frequent types and ten rare ones, equally many vectors of each."""
    sites = [f"blocks.{layer}.hook_resid_post" for layer in TOKEN_LAYERS]
    return tt.token_geometry(bridge, batches, "bands", sites, n_types=20, seed=seed, progress=True)


def layers(bridge: Any, batches: list[Tensor], seed: int) -> Any:
    """Every layer, on a quarter of the tokens."""
    quarter = batches[: max(1, len(batches) // 4)]
    return tt.layer_geometry(bridge, quarter, seed=seed, progress=True)


PARTS: dict[str, Callable[[Any, list[Tensor], int], Any]] = {
    "frequency": frequency,
    "tokens": tokens,
    "layers": layers,
}


def write(out: Path, part: str, found: Any) -> None:
    found.to_dataframe().to_csv(out / f"{part}.csv", index=False)
    (out / f"{part}.txt").write_text(f"{found!r}\n", encoding="utf-8")
    found.plot().savefig(out / f"{part}.png", dpi=110)


if __name__ == "__main__":
    main()
