"""``tl-tangent align``: its options, and how what it finds is printed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_tangent.cli_values import DTYPES, METHODS, positions, rank

if TYPE_CHECKING:
    from tl_tangent.studies.align_run import AlignOptions
    from tl_tangent.studies.alignment_result import AlignmentTest

BRIEF = ("weights", "energy_ratio_exact", "excess_pairing", "p_value", "delta_tangent")
LISTS = ("folder", "hub", "revisions", "kinds", "layers")  # options that take several


def add_align(commands: Any) -> None:
    """Add the command to those of a parser."""
    command = commands.add_parser(
        "align",
        help="measure whether gradients lie in Q_T more in early than in late training",
        description="Fit Q_T on the activations of the early checkpoints of a run, freeze it, and "
        "measure the gradients of all checkpoints in it, in matched random subspaces, and under "
        "nulls that keep the activations. A run that was stopped goes on by the same command.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_checkpoints(command)
    _add_gradients(command)
    _add_workers(command)
    command.set_defaults(run=align)


def _add_checkpoints(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("checkpoints").add_argument
    add("--folder", nargs="+", help="with sub-folders step-N or checkpoints/step-N; one a model")
    add("--hub", nargs="+", help="repositories; one a model")
    add("--revisions", nargs="+", help="of each repository (default: all that tell a step)")
    add("--pattern", help="regular expression whose first group is the step of a revision")
    add("--thin", type=int, help="keep as many on a regular grid of steps (default: all)")
    add("--total-steps", type=int, help="of the whole run (default: the last checkpoint)")
    add("--boundary", type=float, default=0.3, help="share of the run that is early")
    add("--by", choices=("step", "index"), default="step", help="what that is a share of")


def _add_gradients(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("what is measured").add_argument
    add("--objective", choices=("causal", "masked"), default="causal", help="of the training")
    add("--tokenizer", help="name or folder of one (default: that of the last checkpoint)")
    add("--text", help="UTF-8 file (default: the language reference of this Python)")
    add("--tokens", type=int, default=2048, help="of the text")
    add("--seq-len", type=int, default=128, help="tokens a row")
    add("--batch", type=int, default=4, help="rows in a backward pass")
    add("--kinds", nargs="+", help="of weights, such as q k v o in out (default: all)")
    add("--layers", nargs="+", type=int, help="only these layers (default: all)")
    add("--rank", type=rank, default=8, help="number, share of the variance, or rule")
    add("--method", choices=METHODS, default="pca", help="how Q_T is fitted")
    add("--controls", type=int, default=20, help="matched random subspaces a site")
    add("--positions", type=positions, default="not_first", help="that Q_T is fitted on")
    add("--no-moments", action="store_true", help="leave IsoScore* out, which takes d^2 memory")
    add("--zeta", type=float, default=0.0, help="shrinkage of IsoScore*")
    add(
        "--within",
        choices=["token", "shuffled"],
        help="also pair at random among equal input tokens, or among groups of their sizes",
    )
    add("--seed", type=int, default=0, help="of the fit, the controls and the masks")


def _add_workers(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("how").add_argument
    add("--out", type=Path, default=Path("out/align"), help="folder of the results")
    add("--workers", type=int, help="local processes (default: none but this one)")
    add("--batches-per-piece", type=int, help="that a worker does at a time (default: all)")
    add("--device", help="such as cpu or cuda (default: a GPU if there is one)")
    add("--dtype", choices=DTYPES, default="float32", help="of the models")
    add("--attention", choices=("eager", "sdpa"), default="eager", help="how it is computed")
    add("--threads", type=int, default=1, help="of torch in each process")
    add("--no-progress", action="store_true", help="no progress bars")


def align(options: argparse.Namespace, command: str) -> int:
    """Run the test, then print its finding, its tables and its files."""
    from tl_tangent.studies.align_run import run_align
    from tl_tangent.studies.alignment_result import FILES

    found = run_align(_align_options(options), command)
    print(found.headline(), end="\n\n")
    print_cautions(found)
    print_tables(found)
    print(f"Written to {options.out}: {', '.join(FILES)}")
    return 0


def print_cautions(found: AlignmentTest) -> None:
    """Print what the losses give reason to doubt, beside the results."""
    for told in found.cautions():
        print(f"tl-tangent: warning: {told}", file=sys.stderr)


def print_tables(found: AlignmentTest) -> None:
    """Print all columns of the models, and a few of their kinds and sides."""
    number = "{:.4g}".format
    print(found.table().T.to_string(header=False, float_format=number), end="\n\n")
    for by in ("kind", "side"):
        table = found.table(by)
        shown = [name for name in table if name.startswith(("model", by, *BRIEF))]
        print(table[shown].to_string(index=False, float_format=number), end="\n\n")


def _align_options(given: argparse.Namespace) -> AlignOptions:
    from tl_tangent.studies.align_run import AlignOptions

    values: dict[str, Any] = dict(vars(given))
    values["progress"] = not values.pop("no_progress")
    values["moments"] = not values.pop("no_moments")
    values |= {name: None if values[name] is None else tuple(values[name]) for name in LISTS}
    del values["command"], values["run"]
    if values["pattern"] is None:
        del values["pattern"]
    return AlignOptions(**values)
