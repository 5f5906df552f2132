"""The command line: ``tl-tangent report``, ``tl-tangent align`` and ``tl-tangent study``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_tangent.cli_align import add_align, print_cautions, print_tables
from tl_tangent.cli_values import DTYPES, METHODS, positions, rank
from tl_tangent.errors import TangentError

if TYPE_CHECKING:
    from tl_tangent.report import ReportOptions


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
    add_align(commands)
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
    add("--rank", type=rank, default=8, help="number, share of the variance, or rule")
    add("--method", choices=METHODS, default="pca", help="how Q_T is fitted")
    add("--controls", type=int, default=5, help="matched random subspaces a site")
    add("--positions", type=positions, default="not_first", help="'not_first', 'all', or a list")
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
    add("--steps", type=int, default=500, help="updates of each run, 2 or more")
    add("--rank", type=int, default=8, help="of Q_T")
    add("--controls", type=int, default=20, help="matched random subspaces a site")
    add("--rows", type=int, default=64, help="validation rows gradients are measured on")
    add("--seed", type=int, default=0, help="of weights, order of rows, shuffles")
    add("--out", type=Path, default=Path("out/study"), help="folder of the results")
    add("--no-progress", action="store_true", help="no progress bars")
    command.set_defaults(run=study)


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


def study(options: argparse.Namespace, command: str) -> int:
    """Train and test, then print the finding, the tables and the files."""
    from tl_tangent.studies.small_options import SmallRunOptions
    from tl_tangent.studies.small_study import small_study

    warmup = min(SmallRunOptions.warmup, options.steps // 2)
    found = small_study(
        options.out,
        SmallRunOptions(steps=options.steps, warmup=warmup, seed=options.seed),
        rank=options.rank,
        n_controls=options.controls,
        rows=options.rows,
        progress=not options.no_progress,
    )
    print(found.headline(), end="\n\n")
    print_cautions(found.alignment)
    print_tables(found.alignment)
    files = [str(path.relative_to(options.out)) for path in found.save(options.out, command)]
    print(f"Written to {options.out}: {', '.join(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
