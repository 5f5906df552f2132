"""Does balancing languages weaken the effect? Two small models on one content, in two mixtures.

    python scripts/language_balance.py pairs.tsv --out out/balance

``pairs.tsv`` has one sentence and its translation a line, with a tab between, and 100,000 words or
more of either. Every document, forty lines of it, is taken in one of the two languages: with
probability 1/2 in the first in the balanced mixture, and with --share in the other. So both models
read the same content under one tokenizer (trained on all of both languages), and only the frequency
of the languages' tokens differs. Both are measured on the same held-out documents, half of them in
either language. Several seeds draw weights, languages and the order of the rows; differences are
those of two models of one seed, with the t interval of their mean over seeds. A run that is
interrupted goes on where it stood.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import tl_tangent as tt
from tl_tangent.assets.docstrings import VOCABULARY, EncodedText, encode_documents, train_tokenizer
from tl_tangent.studies.small_options import SmallRunOptions
from tl_tangent.studies.small_run import CHECKPOINTS, SmallRun, train_small

LINES, HELD_OUT, ROWS, BATCH = 40, 0.05, 64, 16
SITES = "blocks.*.hook_resid_post"
WORDS = {
    "loss": "of the last checkpoint on the held-out rows, nats a token",
    "energy_ratio_early": "energy of early gradients in Q_T over that in a matched normal",
    "excess_early": "the same over what random pairing gives",
    "lead_excess": "that excess, early over late",
    "isoscore": "of the residual stream at the last checkpoint, mean over layers",
    "frequency_dispersion": "Pearson of log frequency in the training text with the log distance "
    "of a token's occurrences to their centre, mean over layers",
}
WEAKER = {"energy_ratio_early": -1, "excess_early": -1, "isoscore": 1, "frequency_dispersion": 1}


def main() -> None:
    options = parse()
    pairs = [line.split("\t")[:2] for line in options.pairs.read_text("utf-8").splitlines() if line]
    documents = [
        ["\n".join(line[side] for line in pairs[i : i + LINES]) for side in (0, 1)]
        for i in range(0, len(pairs), LINES)
    ]
    tokenizer = train_tokenizer(text for both in documents for text in both)
    held = max(2, round(len(documents) * HELD_OUT))
    rows = held_out_rows(tokenizer, documents[-held:])
    found = []
    for seed in range(options.seeds):
        for name, share in (("balanced", 0.5), ("unbalanced", options.share)):
            text = mixture(tokenizer, documents[:-held], share, seed)
            run_options = SmallRunOptions(
                steps=options.steps, seed=seed, warmup=options.steps // 10
            )
            run = train_small(options.out / f"{name}-{seed}", run_options, text=text)
            told = {"mixture": name, "share": share, "seed": seed, **measure(run, text, rows)}
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()})
            found.append(told)
            pd.DataFrame(found).to_csv(options.out / "runs.csv", index=False)
    summary = differences(pd.DataFrame(found))
    summary.to_csv(options.out / "differences.csv", index=False)
    (options.out / "conventions.json").write_text(
        json.dumps({"meaning": WORDS, **{k: str(v) for k, v in vars(options).items()}}, indent=1)
    )
    print("\n" + summary.to_string(index=False, float_format=lambda x: f"{x:.4g}"))
    print("\n" + verdict(summary))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pairs", type=Path, help="lines of a sentence, a tab, and its translation")
    parser.add_argument("--out", type=Path, default=Path("out/balance"))
    parser.add_argument("--share", type=float, default=0.95, help="of the first language")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    return parser.parse_args()


def mixture(tokenizer: Any, documents: list[list[str]], share: float, seed: int) -> EncodedText:
    """Every document in one of its languages; a seed has the same draws whatever the share."""
    draws = np.random.default_rng([seed, 7]).random(len(documents))
    order = np.random.default_rng([seed, 8]).permutation(len(documents))
    chosen = [documents[i][int(draws[i] >= share)] for i in order]
    tokens, starts = encode_documents(tokenizer, chosen)
    return EncodedText(
        torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(starts), VOCABULARY
    )


def held_out_rows(tokenizer: Any, documents: list[list[str]]) -> Tensor:
    """Rows of 128 tokens, as many of one language as of the other."""
    length, sides = 128, []
    for side in (0, 1):
        tokens, _ = encode_documents(tokenizer, [both[side] for both in documents])
        whole = torch.from_numpy(tokens.astype(np.int64))
        sides.append(whole[: len(whole) // length * length].view(-1, length))
    n = min(ROWS // 2, *(len(rows) for rows in sides))
    return torch.stack([rows[:n] for rows in sides], 1).flatten(0, 1)


def measure(run: SmallRun, text: EncodedText, rows: Tensor) -> dict[str, float]:
    series = replace(
        tt.CheckpointSeries.from_folder(run.folder / CHECKPOINTS), name=run.folder.name
    )
    test = tt.alignment_test(
        series,
        list(rows.split(BATCH)),
        moments=False,
        out=run.folder / "alignment",
        threads=torch.get_num_threads(),
    )
    row = test.table().iloc[0]
    last = series.checkpoints[-1].load()
    model = tt.TangentBridge.from_hf(last)
    removed = tt.removal_test(model, rows, sites=SITES, n_controls=0)
    counts = torch.bincount(text.tokens, minlength=VOCABULARY).double()
    frequency = tt.frequency_dispersion(
        model, list(rows.split(BATCH)), SITES, frequencies=counts, shuffled=False, static=False
    )
    with torch.no_grad():
        loss = float(last(input_ids=rows, labels=rows).loss)
    return {
        "loss": loss,
        "energy_ratio_early": float(row["energy_ratio_exact_early"]),
        "excess_early": float(row["excess_pairing_early"]),
        "lead_excess": float(row["lead_excess"]),
        "isoscore": float(removed.to_dataframe()["isoscore"].mean()),
        "frequency_dispersion": float(frequency.to_dataframe()["pearson"].mean()),
    }


def differences(runs: pd.DataFrame) -> pd.DataFrame:
    """Balanced less unbalanced within a seed, with the t interval of the mean."""
    from scipy import stats

    rows = []
    sides = {name: part.set_index("seed") for name, part in runs.groupby("mixture")}
    for name in WORDS:
        gaps = sides["balanced"][name] - sides["unbalanced"][name]
        half = float("nan")
        if len(gaps) > 1:
            half = float(stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5)
        rows.append(
            {
                "measure": name,
                "balanced": sides["balanced"][name].mean(),
                "unbalanced": sides["unbalanced"][name].mean(),
                "difference": gaps.mean(),
                "low": gaps.mean() - half,
                "high": gaps.mean() + half,
                "seeds": len(gaps),
            }
        )
    return pd.DataFrame(rows)


def verdict(summary: pd.DataFrame) -> str:
    """In words: which measures say that balance weakens the effect, and which say nothing."""
    lines = []
    for name, sign in WEAKER.items():
        row = summary[summary["measure"] == name].iloc[0]
        low, high = sorted((sign * row["low"], sign * row["high"]))
        said = "weaker with balance" if low > 0 else "stronger with balance" if high < 0 else "open"
        lines.append(
            f"{name}: {said} ({row['balanced']:.3g} against {row['unbalanced']:.3g}, difference "
            f"{row['difference']:+.3g}, 95 % {row['low']:+.3g} to {row['high']:+.3g})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
