"""What an excess is made of: of the tokens that are read, and of how many make one gradient.

    make study && python scripts/gradient_nulls.py out/study

Takes the checkpoints, Q_T and validation tokens of a finished study and measures their gradients
again: in batches of several sizes, and all tokens as one batch, whose inputs and output gradients
are paired at random among the tokens with one input id, and among groups of the same sizes with
random members (a control of that one: as little is left to permute). Geometric means over weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch

import tl_tangent as tt
from tl_tangent.analysis.gradients.rows import geometric_mean
from tl_tangent.hooks.gradients.objectives import Batch
from tl_tangent.studies.batches import load_batches
from tl_tangent.studies.pieces import BATCHES, SUBSPACES
from tl_tangent.studies.small_run import CHECKPOINTS

ROWS = (4, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("study", type=Path, help="the folder that `make study` wrote")
    parser.add_argument("--run", default="trained")
    parser.add_argument("--batches", type=int, default=4, help="how many the study measured")
    parser.add_argument("--steps", type=int, nargs="*", default=[0, 8, 32, 50, 100, 150, 500])
    options = parser.parse_args()
    series = tt.CheckpointSeries.from_folder(options.study / options.run / CHECKPOINTS)
    folder = options.study / "alignment" / options.run
    subspaces = tt.SubspaceSet.load(folder / SUBSPACES)
    tokens = torch.cat([one.tokens for one in load_batches(folder / BATCHES, 0, options.batches)])
    chosen = [one for one in series.checkpoints if one.step in options.steps]
    rows = [{"step": one.step, **measured(one.load(), tokens, subspaces)} for one in chosen]
    print(pd.DataFrame(rows).round(2).to_string(index=False))


def measured(
    model: torch.nn.Module, tokens: torch.Tensor, subspaces: tt.SubspaceSet
) -> dict[str, float]:
    found = {}
    for size in ROWS:
        batches = [Batch(part) for part in tokens.split(size)]
        frame = tt.gradient_energy(model, batches, subspaces, n_controls=0).to_dataframe()
        found[f"excess, {size * tokens.shape[1]} tokens"] = mean(frame["excess_pairing"])
    for within in ("token", "shuffled"):
        frame = tt.gradient_energy(
            model, [Batch(tokens)], subspaces, n_controls=0, within=within
        ).to_dataframe()
        name = "within a token" if within == "token" else "within random groups"
        found[name] = mean(frame["excess_within_token"])
    return found


def mean(values: pd.Series) -> float:
    return geometric_mean(values.dropna().astype(float).tolist())


if __name__ == "__main__":
    main()
