"""How tangent and normal parts travel through SmolLM2-135M: the tables and the picture of the docs.

    python scripts/residual_stream.py             # the trained and an untrained model, some minutes

Into --out go stream.csv, light.csv (the same without massive tokens), writes.csv (without them),
gains.csv and recovery.csv, each with a column "model", the pictures, and summary.md with all tables
of the docs. The model and the text come with the pinned environment.
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
CUT, SHOWN = 10, [11, 15, 20, 25, 30]  # depths
PARTS = {"T": "tangent", "N": "normal"}
PAIRS = {"T→T": ("tangent", "tangent"), "N→N": ("normal", "normal"), "N→T": ("normal", "tangent")}


def main() -> None:
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    smol = embedded_smollm2()
    model = tt.TangentHookedTransformer.from_hf(smol.hf_model, smol.tokenizer)
    rows = token_batches(smol.tokenizer, language_reference(), seq_len=128, n_tokens=12288)
    fit, evaluation = split_disjoint(rows, fit_rows=64, eval_rows=16, seed=0)
    measured = {"trained": measure(model, fit, evaluation, options, recover=True)}
    trace = measured["trained"]["trace"]
    trace.plot().savefig(options.out / "ledger.png", dpi=110, bbox_inches="tight")
    heavy = trace.ledger.ids[trace.massive()].tolist()
    summary = [f"Massive tokens: {[smol.tokenizer.decode(i) for i in heavy]}"]
    measured["untrained"] = measure(tt.untrained(model), fit, evaluation, options, recover=False)
    for name in ("stream", "light", "writes", "gains", "recovery"):
        frames = [m[name].assign(model=which) for which, m in measured.items() if name in m]
        pd.concat(frames).to_csv(options.out / f"{name}.csv", index=False)
    summary += [f"### {which}\n\n{tables(m)}" for which, m in measured.items()]
    (options.out / "summary.md").write_text("\n\n".join(summary) + "\n", encoding="utf-8")
    print("\n\n".join(summary))


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
    """Trace, transfer gains and, where asked for, the recovery of a removed part.

    Subspaces are the model's own: around the mean of another model, the stream is mostly that mean.
    """
    own = tt.fit_subspaces(model, fit.split(8), SITES, options.rank, progress=True)
    shared: dict[str, Any] = {"n_controls": options.controls, "progress": True}
    trace = tt.trace_residual(model, evaluation.split(4), own, **shared)
    light = trace.select(~trace.massive())
    gains = tt.transfer_gains(
        model, evaluation[:2], own[FIXED], None, n_directions=options.directions, **shared
    )
    found: dict[str, Any] = {
        "trace": trace,
        "stream": trace.stream(),
        "light": light.stream(),
        "writes": light.writes(),
        "gains": gains.to_dataframe(),
        "words": [trace.headline(), light.headline(), gains.headline()],
    }
    if recover:
        gains.plot().savefig(options.out / "gains.png", dpi=90)
        found["recovery"] = recovered(model, evaluation[:4], own, found["words"], options, shared)
    return found


def recovered(
    model: Any,
    rows: Tensor,
    own: tt.SubspaceSet,
    words: list[str],
    options: argparse.Namespace,
    shared: dict[str, Any],
) -> pd.DataFrame:
    frames = []
    for reference, given in (("fixed", own[FIXED]), ("own", own)):
        for part in PARTS.values():
            result = tt.part_recovery(model, rows, given, CUT, part=part, **shared)
            result.plot().savefig(options.out / f"recovery_{reference}_{part}.png", dpi=90)
            words.append(result.headline())
            frames.append(result.to_dataframe().assign(reference=reference, cut=part))
    return pd.concat(frames)


# The tables of the docs ---------------------------------------------------------------------------


def tables(measured: dict[str, Any]) -> str:
    found = {
        "Medians over the inner layers (light: without the massive tokens)": medians(measured),
        "By layer (writes without the massive tokens)": layer_table(measured),
    }
    if "recovery" in measured:
        found[f"Recovery of a part removed in front of layer {CUT}"] = recovery_table(
            measured["recovery"]
        )
    said = [f"{title}:\n\n{markdown(table, '')}" for title, table in found.items()]
    return "\n\n".join([*measured["words"], *said])


def beside(rows: pd.DataFrame, name: str) -> pd.Series:
    """A column with the mean of its controls in brackets."""
    control = rows[f"control_{name}_mean"].map("{:.2f}".format)
    return rows[name].map("{:.2f}".format) + " (" + control + ")"


def by_layer(frame: pd.DataFrame, part: str) -> pd.DataFrame:
    rows = frame[(frame["part"] == part) & frame["gain"].notna()]
    return rows.set_index(rows["depth"].rename("layer"))


def layer_table(measured: dict[str, Any]) -> pd.DataFrame:
    """One row a layer: the median token beside its controls, pooled, written, and passed on."""
    columns: dict[str, pd.Series] = {}
    for name in ("gain", "kept"):
        tangent, normal = (by_layer(measured["stream"], part) for part in PARTS.values())
        columns[f"{name} T (control)"] = beside(tangent, f"{name}_median")
        columns[f"{name} T, pooled"] = tangent[name].map("{:.2f}".format)
        columns[f"{name} N"] = normal[f"{name}_median"].map("{:.2f}".format)
    writes = measured["writes"].dropna(subset="layer").astype({"layer": int})
    for short, part in PARTS.items():
        wide = writes[writes["part"] == part].pivot(
            index="layer", columns="writer", values="written"
        )
        sizes = wide[["attn", "mlp"]].map("{:.2f}".format)
        columns[f"attn, MLP write {short}"] = sizes["attn"] + ", " + sizes["mlp"]
    gains = measured["gains"]
    for name, (source, target) in PAIRS.items():
        rows = gains[(gains["source"] == source) & (gains["target"] == target)]
        columns[f"{name} (control)"] = beside(rows.set_index("start"), "gain")
    for short, part in PARTS.items():
        rows = gains[(gains["source"] == part) & (gains["target"] == part)]
        columns[f"along itself {short} (control)"] = beside(rows.set_index("start"), "aligned")
    return pd.DataFrame(columns).rename_axis("layer")


def recovery_table(recovery: pd.DataFrame) -> pd.DataFrame:
    rows = recovery[recovery["removed"] & recovery["depth"].isin(SHOWN)]
    rows = rows.set_index("part").rename_axis("removed")
    return pd.DataFrame(
        {
            "subspace": rows["reference"],
            "depth": rows["depth"],
            "common": rows["common_share"].map("{:.2f}".format),
            "back (control)": beside(rows, "coefficient"),
            "unchanged": rows["coefficient_unchanged"].map("{:.2f}".format),
            "centred: back (control)": beside(rows, "coefficient_centred"),
            "unchanged ": rows["coefficient_centred_unchanged"].map("{:.2f}".format),
        }
    )


def medians(measured: dict[str, Any]) -> pd.DataFrame:
    """Medians over the layers without the first and the last; how often above all controls."""
    found = {}
    for short, part in PARTS.items():
        for which in ("stream", "light"):
            rows = by_layer(measured[which], part).iloc[1:-1]
            for name in ("gain_median", "gain", "kept_median", "kept"):
                found[f"{which} {short} {name}"] = summed_up(rows, name)
    gains = measured["gains"]
    gains = gains[gains["start"].between(1, gains["start"].max() - 1)]
    for pair, (source, target) in PAIRS.items():
        rows = gains[(gains["source"] == source) & (gains["target"] == target)]
        found[pair] = summed_up(rows, "gain")
        if source == target:
            found[f"along itself {pair}"] = summed_up(rows, "aligned")
    return pd.DataFrame(found).T.rename_axis("quantity")


def summed_up(rows: pd.DataFrame, name: str) -> dict[str, str]:
    above = (rows[name] > rows[f"control_{name}_max"]).sum()
    below = (rows[name] < rows[f"control_{name}_min"]).sum()
    return {
        "median": f"{rows[name].median():.3f}",
        "control": f"{rows[f'control_{name}_mean'].median():.3f}",
        "above all controls": f"{above} of {len(rows)}",
        "below all": f"{below} of {len(rows)}",
    }


if __name__ == "__main__":
    main()
