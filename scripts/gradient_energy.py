"""Where the weight gradients of SmolLM2-135M lie: the tables and the picture of the docs.

    python scripts/gradient_energy.py             8,192 tokens, all layers and weights, some minutes

Into --out go weights.csv, kinds.csv, summary.md and gradients.png. The model and the text come with
the pinned environment.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import pandas as pd
from attention_terms import markdown

import tl_tangent as tt
from tl_tangent.assets import (
    embedded_smollm2,
    language_reference,
    split_disjoint,
    token_batches,
)

COLUMNS = {
    "energy_ratio_exact": ("ratio", ".2f"),
    "p_value_mean": ("mean p", ".3f"),
    "efficiency": ("of the most", ".2f"),
    "pairing_ratio": ("paired at random", ".2f"),
    "excess_pairing": ("excess", ".2f"),
    "sign_flip_ratio": ("random signs", ".2f"),
    "activation_ratio": ("activations", ".1f"),
    "mean_part": ("mean part", ".2f"),
    "energy_ratio_centred": ("centred", ".2f"),
    "isoscore": ("IsoScore", ".4f"),
    "delta_tangent": ("Δ w/o Q_T", "+.4f"),
    "delta_normal": ("Δ w/o normal", "+.4f"),
}


def main() -> None:
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    smol = embedded_smollm2()
    wanted = options.tokens // options.seq_len, options.fit_tokens // options.seq_len
    rows = token_batches(smol.tokenizer, language_reference(), seq_len=options.seq_len)
    fit, measured = split_disjoint(rows, fit_rows=wanted[1], eval_rows=wanted[0], seed=0)
    started = time.perf_counter()
    found = tt.gradient_energy(
        smol.hf_model,
        measured.split(options.batch_rows),
        fit_batches=fit.split(options.batch_rows),
        rank=options.rank,
        n_controls=options.controls,
        moments=True,
        progress=True,
    )
    frame, kinds = found.to_dataframe(), found.to_dataframe("kind")
    seconds = time.perf_counter() - started
    frame.to_csv(options.out / "weights.csv", index=False)
    kinds.to_csv(options.out / "kinds.csv", index=False)
    found.plot().savefig(options.out / "gradients.png", dpi=110, bbox_inches="tight")
    summary = f"{table(kinds)}\n\n{found.headline()}\n"
    (options.out / "summary.md").write_text(summary, encoding="utf-8")
    print(summary)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    tokens = found.conventions["tokens"]
    print(f"{tokens} tokens, {len(frame)} weights: {seconds:.0f} s, peak {peak:.1f} GiB")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("out/gradients"))
    for name, default in [
        ("rank", 8),
        ("controls", 20),
        ("tokens", 8192),
        ("fit-tokens", 8192),
        ("seq-len", 256),
        ("batch-rows", 4),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def table(kinds: pd.DataFrame) -> str:
    shown = {"weights": kinds["kind"] + " (" + kinds["weights"].astype(str) + ")"}
    for column, (name, spec) in COLUMNS.items():
        shown[name] = kinds[column].map(lambda value, spec=spec: format(value, spec))
    return markdown(pd.DataFrame(shown).set_index("weights"), "")


if __name__ == "__main__":
    main()
