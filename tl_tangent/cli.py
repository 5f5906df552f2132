"""The command line: ``tl-tangent report``, ``tl-tangent align`` and ``tl-tangent study``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_tangent.errors import TangentError

if TYPE_CHECKING:
    from tl_tangent.report import ReportOptions
    from tl_tangent.studies.align_run import AlignOptions
    from tl_tangent.studies.alignment_result import AlignmentTest

METHODS = ("pca", "svd", "ica", "nmf", "seminmf", "kmeans")
DTYPES = ("float32", "float64", "bfloat16", "float16")
BRIEF = ("weights", "energy_ratio_exact", "excess_pairing", "p_value", "delta_tangent")
LISTS = ("folder", "hub", "revisions", "kinds", "layers")  # options of align that take several


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for an error, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(arguments)
    try:
        return options.run(options, shlex.join(["tl-tangent", *arguments]))
    except TangentError as error:
        print(f"tl-tangent: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\ntl-tangent: interrupted; the same command goes on with what is finished",
            file=sys.stderr,
        )
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="tl-tangent", description="Tangent subspaces of language models, on the command line."
    )
    commands = top.add_subparsers(dest="command", required=True)
    _add_report(commands)
    _add_align(commands)
    _add_study(commands)
    return top


def _add_report(commands: Any) -> None:
    command = commands.add_parser(
        "report",
        help="fit Q_T at every layer and measure what cutting it costs, beside matched controls",
        description="Fit the tangent subspace Q_T at every layer of a causal language model, and "
        "measure the loss without it, without matched random subspaces, and with it alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.set_defaults(run=report)
    _add_what(command)
    _add_how(command)


def _add_what(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("what is measured").add_argument
    add("--model", help="hub name or local folder (default: the embedded SmolLM2-135M)")
    add("--bridge", action="store_true", help="TangentBridge, not TangentHookedTransformer")
    add("--text", help="UTF-8 file (default: the language reference of this Python)")
    add("--sites", nargs="+", default=["blocks.*.hook_resid_post"], help="names or patterns")
    add("--layers", nargs="+", type=int, help="only these layers (default: all)")
    add("--rank", type=_rank, default=8, help="number, share of the variance, or rule")
    add("--method", choices=METHODS, default="pca", help="how Q_T is fitted")
    add("--controls", type=int, default=5, help="matched random subspaces a site")
    add("--positions", type=_positions, default="not_first", help="'not_first', 'all', or a list")
    add("--tokens", type=int, default=512, help="evaluation tokens")
    add("--fit-tokens", type=int, default=8192, help="tokens to fit on, of other rows")
    add("--seq-len", type=int, default=128, help="tokens a row")
    add("--seed", type=int, default=0, help="of rows, fit and controls")


def _add_how(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("how").add_argument
    add("--out", type=Path, default=Path("out/report"), help="folder of the results")
    add("--html", action="store_true", help="also one page to look at and to mail: report.html")
    add("--device", help="such as cpu or cuda (default: a GPU if there is one)")
    add("--dtype", choices=DTYPES, default="float32", help="of the model")
    add("--no-progress", action="store_true", help="no progress bars")


def _add_align(commands: Any) -> None:
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
    add("--folder", nargs="+", help="with sub-folders step-N; one a model")
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
    add("--text", help="UTF-8 file (default: the language reference of this Python)")
    add("--tokens", type=int, default=2048, help="of the text")
    add("--seq-len", type=int, default=128, help="tokens a row")
    add("--batch", type=int, default=4, help="rows in a backward pass")
    add("--kinds", nargs="+", help="of weights, such as q k v o in out (default: all)")
    add("--layers", nargs="+", type=int, help="only these layers (default: all)")
    add("--rank", type=_rank, default=8, help="number, share of the variance, or rule")
    add("--method", choices=METHODS, default="pca", help="how Q_T is fitted")
    add("--controls", type=int, default=20, help="matched random subspaces a site")
    add("--positions", type=_positions, default="not_first", help="that Q_T is fitted on")
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


def _add_study(commands: Any) -> None:
    command = commands.add_parser(
        "study",
        help="train a small model twice, once on shuffled labels, and run the test on both",
        description="Train a small language model on the docstrings of the installed packages, "
        "once as it should be and once on shuffled labels, record the gradients of every step, and "
        "run the alignment test on the checkpoints of both. A study that was stopped goes on by "
        "the same command.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = command.add_argument
    add("--steps", type=int, default=500, help="updates of each run")
    add("--rank", type=int, default=8, help="of Q_T")
    add("--controls", type=int, default=20, help="matched random subspaces a site")
    add("--rows", type=int, default=64, help="validation rows gradients are measured on")
    add("--seed", type=int, default=0, help="of weights, order of rows, shuffles")
    add("--out", type=Path, default=Path("out/study"), help="folder of the results")
    add("--no-progress", action="store_true", help="no progress bars")
    command.set_defaults(run=study)


def _rank(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _positions(text: str) -> str | list[int]:
    """A rule by name, or absolute positions such as ``1,2,5``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return text


def report(options: argparse.Namespace, command: str) -> int:
    """Run the main job, then print its table, its finding and its files."""
    from tl_tangent.report import run_report
    from tl_tangent.views.table import format_table

    result = run_report(_report_options(options), command)
    made = result.conventions
    print(f"{result.title()}, {made['model_class']}")
    print(
        f"{made['fit_tokens']} tokens fitted, {made['evaluation_tokens']} others evaluated, "
        f"positions {made['positions']}; {made['text']['rows_left_out']} rows that begin with a "
        f"repeated token left out; loss with nothing cut {result.losses[0].baseline:.3f} nats a "
        "token\n"
    )
    print(format_table(result.to_dataframe()), end="\n\n")
    print(result.headline())
    note = result.position_0_note()
    if note:
        print(note)
    files = ["layers.csv", "layers.png", "subspaces.safetensors", "report.json"]
    print(f"\nWritten to {options.out}: {', '.join(files + ['report.html'] * options.html)}")
    return 0


def _report_options(given: argparse.Namespace) -> ReportOptions:
    from tl_tangent.report import ReportOptions

    values: dict[str, Any] = dict(vars(given))
    values["progress"] = not values.pop("no_progress")
    values["sites"] = tuple(values["sites"])
    values["layers"] = None if values["layers"] is None else tuple(values["layers"])
    del values["command"], values["run"]
    return ReportOptions(**values)


def align(options: argparse.Namespace, command: str) -> int:
    """Run the test, then print its tables, its finding and its files."""
    from tl_tangent.studies.align_run import run_align
    from tl_tangent.studies.alignment_result import FILES

    found = run_align(_align_options(options), command)
    _print_tables(found)
    print(found.headline())
    print(f"\nWritten to {options.out}: {', '.join(FILES)}")
    return 0


def _print_tables(found: AlignmentTest) -> None:
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


def study(options: argparse.Namespace, command: str) -> int:
    """Train and test, then print the tables, the finding and the files."""
    from tl_tangent.studies.small_options import SmallRunOptions
    from tl_tangent.studies.small_study import small_study

    found = small_study(
        options.out,
        SmallRunOptions(steps=options.steps, seed=options.seed),
        rank=options.rank,
        n_controls=options.controls,
        rows=options.rows,
        progress=not options.no_progress,
    )
    _print_tables(found.alignment)
    print(found.headline())
    files = [str(path.relative_to(options.out)) for path in found.save(options.out, command)]
    print(f"\nWritten to {options.out}: {', '.join(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
