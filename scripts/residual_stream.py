"""How tangent and normal parts travel through SmolLM2-135M: the tables and the picture of the docs.

    python scripts/residual_stream.py             # the trained and an untrained model, some minutes

Into --out go stream.csv, writes.csv, gains.csv and recovery.csv (each with a column "model"),
summary.md, and ledger.png. The model and the text come with the pinned environment.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
from attention_terms import markdown
from torch import Tensor

import tl_tangent as tt
from tl_tangent.assets import (
    embedded_smollm2,
    language_reference,
    split_disjoint,
    token_batches,
)

SITES = ["blocks.0.hook_resid_pre", "blocks.*.hook_resid_post"]
FIXED = "blocks.15.hook_resid_post"


def main() -> None:
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    smol = embedded_smollm2()
    model = tt.TangentHookedTransformer.from_hf(smol.hf_model, smol.tokenizer)
    rows = token_batches(smol.tokenizer, language_reference(), seq_len=128, n_tokens=12288)
    fit, evaluation = split_disjoint(rows, fit_rows=64, eval_rows=16, seed=0)
    measured = {"trained": measure(model, fit, evaluation, options, recover=True)}
    fresh = tt.untrained(model)
    measured["untrained"] = measure(fresh, fit, evaluation, options, recover=False)
    for name in ("stream", "writes", "gains", "recovery"):
        frames = [m[name].assign(model=which) for which, m in measured.items() if name in m]
        pd.concat(frames).to_csv(options.out / f"{name}.csv", index=False)
    measured["trained"]["trace"].plot().savefig(
        options.out / "ledger.png", dpi=110, bbox_inches="tight"
    )
    summary = "\n\n".join(f"### {which}\n\n{tables(m)}" for which, m in measured.items())
    (options.out / "summary.md").write_text(summary + "\n", encoding="utf-8")
    print(summary)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("out/stream"))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--controls", type=int, default=3)
    parser.add_argument("--directions", type=int, default=4)
    return parser.parse_args()


def measure(
    model: Any, fit: Tensor, evaluation: Tensor, options: argparse.Namespace, recover: bool
) -> dict[str, Any]:
    """Trace, transfer gains and, where asked for, the recovery of a removed part."""
    own = tt.fit_subspaces(model, fit.split(8), SITES, options.rank, progress=True)
    shared: dict[str, Any] = {"n_controls": options.controls, "progress": True}
    trace = tt.trace_residual(model, evaluation.split(4), own, **shared)
    found: dict[str, Any] = {
        "trace": trace,
        "stream": trace.stream(),
        "writes": trace.writes(),
        "gains": tt.transfer_gains(
            model, evaluation[:2], own[FIXED], None, n_directions=options.directions, **shared
        ).to_dataframe(),
    }
    if recover:
        found["recovery"] = pd.concat(
            tt.part_recovery(model, evaluation[:4], own[FIXED], 10, part=part, **shared)
            .to_dataframe()
            .assign(removed=part)
            for part in ("tangent", "normal")
        )
    return found


def tables(measured: dict[str, Any]) -> str:
    stream, gains = measured["stream"], measured["gains"]
    by_part = {part: frame.set_index("depth") for part, frame in stream.groupby("part")}
    columns = {}
    for part, frame in by_part.items():
        for name in ("gain", "kept"):
            columns[f"{part} {name}"] = frame[name]
            columns[f"{part} {name}, control"] = frame[f"control_{name}_mean"]
    ledger = pd.DataFrame(columns).dropna()
    gains["pair"] = gains["source"] + " to " + gains["target"]
    causal = gains.pivot_table(index="start", columns="pair", values="gain", sort=False)
    control = gains.pivot_table(index="start", columns="pair", values="control_gain_mean")
    causal = pd.concat([causal, control.add_suffix(", control")], axis=1)
    error = measured["trace"].closing_error
    return (
        f"The ledger closes to {error:.1e}. Ledger, one subspace at each depth:\n\n"
        f"{markdown(ledger)}\n\nTransfer gains, one subspace for all depths:\n\n{markdown(causal)}"
    )


if __name__ == "__main__":
    main()
