"""What carries the attention scores of SmolLM2-135M: the tables and the picture of the docs.

    python scripts/attention_terms.py              # everything, a few minutes on two cores
    python scripts/attention_terms.py --layers 2 17 --no-losses

Into --out go shares.csv, patterns.csv, losses.csv, orders.csv, spectrum.csv, induction.csv, tables
in summary.md, and shares.png. The model and the text come with the pinned environment.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

import tl_tangent as tt
from tl_tangent.assets import (
    embedded_smollm2,
    language_reference,
    split_disjoint,
    token_batches,
)
from tl_tangent.geometry.score_terms import GROUPS

TERMS = ["constant", "linear", "tangent", "cross", "normal"]
SIDES = {"input": "blocks.*.attn.hook_in", "residual": "blocks.*.hook_resid_pre"}


def main() -> None:
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    smol = embedded_smollm2()
    model = tt.TangentHookedTransformer.from_hf(smol.hf_model, smol.tokenizer)
    rows = token_batches(smol.tokenizer, language_reference(), seq_len=128, n_tokens=12288)
    fit, evaluation = split_disjoint(rows, fit_rows=64, eval_rows=16, seed=0)
    layers = options.layers if options.layers is not None else list(range(model.cfg.n_layers))
    summary = [shares(model, fit, evaluation, layers, options)]
    subspaces = fitted(model, fit, "input", 8)
    summary.append(patterns(model, subspaces, evaluation[:4], layers, options))
    summary.append(orders(model, subspaces, evaluation, layers, options))
    summary.append(spectrum(model, subspaces, layers, options))
    summary.append(induction(model, subspaces, options))
    if options.losses:
        summary.append(losses(model, subspaces, evaluation[:4], layers[:: options.every], options))
    (options.out / "summary.md").write_text("\n\n".join(summary) + "\n", encoding="utf-8")
    print("\n\n".join(summary))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("out/attention"))
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--controls", type=int, default=3)
    parser.add_argument("--every", type=int, default=5, help="losses at every so many layers")
    parser.add_argument("--no-losses", dest="losses", action="store_false")
    return parser.parse_args()


def fitted(model: Any, fit: Tensor, space: str, rank: int) -> tt.SubspaceSet:
    return tt.fit_subspaces(model, fit.split(8), SIDES[space], rank, progress=True)


def grouped(frame: pd.DataFrame, value: str) -> pd.DataFrame:
    """Sum a column over the terms of each group; mean over heads, one row a layer."""
    group = frame["term"].map(group_of)
    summed = frame.groupby(["layer", "head", group], sort=False)[value].sum()
    return summed.groupby(level=[0, 2], sort=False).mean().unstack()[TERMS]


def group_of(term: str) -> str:
    found = {name: group for group, names in GROUPS.items() for name in names}
    return found[term]


def shares(model: Any, fit: Tensor, evaluation: Tensor, layers: list[int], options: Any) -> str:
    frames, tables = [], []
    for space, rank in (("input", 8), ("input", 32), ("residual", 8), ("residual", 32)):
        found = tt.attention_term_shares(
            model, evaluation.split(4), fitted(model, fit, space, rank), layers,
            n_controls=options.controls, signed=True, progress=True,
        )  # fmt: skip
        frame = found.to_dataframe().assign(space=space, rank=rank, error=found.error)
        frames.append(frame)
        if (space, rank) == ("input", 8):
            found.plot().savefig(options.out / "shares.png", dpi=120, bbox_inches="tight")
        tables.append(share_table(frame, f"{space} space, rank {rank}", found.error))
    pd.concat(frames).to_csv(options.out / "shares.csv", index=False)
    return "\n\n".join(tables)


def share_table(frame: pd.DataFrame, title: str, error: float) -> str:
    size = grouped(frame, "variance_share")
    size["tangent, control"] = grouped(frame, "control_variance_share_mean")["tangent"]
    signed = grouped(frame, "score_share").add_prefix("signed ")
    signed["signed tangent, control"] = grouped(frame, "control_score_share_mean")["tangent"]
    table = pd.concat([size, signed], axis=1)
    mean = pd.DataFrame(table.mean()).T.set_axis(["mean"])
    return f"### {title} (terms and scores agree to {error:.1e})\n\n" + markdown(
        pd.concat([table, mean])
    )


def patterns(model: Any, subspaces: Any, rows: Tensor, layers: list[int], options: Any) -> str:
    found = tt.attention_pattern_divergence(
        model, rows, subspaces, layers, n_controls=options.controls, progress=True
    )
    found.to_dataframe().to_csv(options.out / "patterns.csv", index=False)
    table = found.to_dataframe().groupby("terms", sort=False).mean(numeric_only=True)
    return f"### patterns from some terms\n\n{markdown(table.drop(columns=['layer', 'head']))}"


def orders(model: Any, subspaces: Any, rows: Tensor, layers: list[int], options: Any) -> str:
    found = tt.attention_term_orders(
        model, rows.split(4), subspaces, layers, n_controls=options.controls, progress=True
    )
    found.to_dataframe().to_csv(options.out / "orders.csv", index=False)
    table = found.to_dataframe().groupby("term", sort=False).mean(numeric_only=True)
    columns = [name for name in table if "slope" in name or "expected" in name]
    return f"### orders in t\n\n{markdown(table[columns])}"


def spectrum(model: Any, subspaces: Any, layers: list[int], options: Any) -> str:
    found = tt.qk_spectrum(model, subspaces, layers)
    found.to_dataframe().to_csv(options.out / "spectrum.csv", index=False)
    table = found.to_dataframe().groupby("layer").mean(numeric_only=True).drop(columns="head")
    return f"### M restricted to Q_T\n\n{markdown(table)}"


def losses(model: Any, subspaces: Any, rows: Tensor, layers: list[int], options: Any) -> str:
    found = tt.attention_term_losses(model, rows, subspaces, layers, n_controls=options.controls)
    frame = found.to_dataframe()
    frame.to_csv(options.out / "losses.csv", index=False)
    return f"### dropping terms, one layer at a time\n\n{loss_table(frame)}"


def loss_table(frame: pd.DataFrame) -> str:
    table = frame.pivot(index="layer", columns="dropped", values="increase")
    control = frame.pivot(index="layer", columns="dropped", values="control_increase_mean")
    return markdown(pd.concat([table, control.add_suffix(", control")], axis=1), "+.3f")


def induction(model: Any, subspaces: Any, options: Any, half: int = 64, n_rows: int = 4) -> str:
    """Find the induction heads on repeated random tokens, and what draws them to their key."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(1000, model.cfg.d_vocab, (n_rows, half), generator=generator)
    tokens = torch.cat([first, first], dim=1)
    keys = torch.full_like(tokens, -1)
    keys[:, half:] = torch.arange(1, half + 1)
    frames = []
    for layer in tqdm(range(model.cfg.n_layers), desc="induction", unit="layer"):
        split = tt.split_attention_scores(model, tokens, layer, subspaces)
        pattern = split.scores.softmax(-1).gather(-1, keys.clamp(min=0)[:, None, :, None].expand(
            -1, split.scores.shape[1], -1, 1))[..., 0]  # fmt: skip
        score = pattern[:, :, half:].mean(dim=(0, 2))
        control = tt.split_attention_scores(
            model, tokens, layer, random_normal(subspaces, layer), positions="all"
        ).advantage(keys)
        frame = split.advantage(keys)
        frame["control_share"] = control["share"]
        frame["induction_score"] = score[frame["head"].to_numpy()].tolist()
        frames.append(frame)
    every = pd.concat(frames)
    every.to_csv(options.out / "induction.csv", index=False)
    every["name"] = "L" + every["layer"].astype(str) + "H" + every["head"].astype(str)
    best = every.drop_duplicates("name").nlargest(5, "induction_score")["name"]
    some = every[every["name"].isin(best)]
    table = some.pivot_table(index=["name", "induction_score"], columns="term", values="share",
                             sort=False)  # fmt: skip
    table = table.sort_index(level=1, ascending=False).reset_index(level=1)
    tangent = some[some["term"] == "tangent_tangent"].set_index("name")["control_share"]
    table["tangent_tangent, control"] = tangent
    return f"### induction heads: shares of the advantage of the induction key\n\n{markdown(table)}"


def random_normal(subspaces: tt.SubspaceSet, layer: int) -> tt.TangentSubspace:
    return subspaces.random_normals(1, seed=0)[0][f"blocks.{layer}.attn.hook_in"]


def markdown(table: pd.DataFrame, form: str = ".3f") -> str:
    """A table with its index first, three decimals."""
    head = [str(table.index.name or ""), *map(str, table.columns)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in table.iterrows():
        lines.append("| " + " | ".join([str(name), *(format(x, form) for x in row)]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
