"""The main job: load a model, read a text, fit Q_T at every layer, ablate it, write and resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_tangent.analysis import LayerAblation, SiteLosses
from tl_tangent.analysis.conventions import conventions_of
from tl_tangent.analysis.site_fit import fit_sites
from tl_tangent.analysis.site_losses import ablate_sites
from tl_tangent.analysis.staged import BATCH_TOKENS
from tl_tangent.assets import language_reference, read_text, split_disjoint, token_batches
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import SubspaceSet
from tl_tangent.geometry.rank import Rank
from tl_tangent.hooks.fit import fit_subspaces
from tl_tangent.hooks.positions import Positions
from tl_tangent.loading import LoadedModel, load_model
from tl_tangent.run_folder import RunFolder

SUBSPACES, TABLE, PICTURE, REPORT = (
    "subspaces.safetensors",
    "layers.csv",
    "layers.png",
    "report.json",
)
REPEATED = (
    "a row that begins with the same token twice is left out: its position 1 sees what position 0 "
    "sees, so that it carries the massive activation of position 0 too"
)


@dataclass(frozen=True)
class ReportOptions:
    """What to measure, as the command line names it.

    Attributes:
        model: hub name or local folder; None for the embedded SmolLM2-135M.
        text: a UTF-8 file; None for the language reference of this Python.
        sites, layers, rank, method, controls, positions, seed: see
            :func:`~tl_tangent.analysis.layer_ablation`.
        tokens: evaluation tokens, rounded up to whole rows of ``seq_len``.
        fit_tokens: tokens to fit on, likewise; never the same rows.
        device, dtype, bridge: see :func:`~tl_tangent.loading.load_model`.
        out: the folder of the results.
        html: also write ``report.html``; see :func:`~tl_tangent.report_page.write_page`.
        progress: show progress bars on stderr.
    """

    out: Path
    model: str | None = None
    text: str | None = None
    sites: tuple[str, ...] = ("blocks.*.hook_resid_post",)
    layers: tuple[int, ...] | None = None
    rank: Rank = 8
    method: str = "pca"
    controls: int = 5
    positions: Positions = "not_first"
    tokens: int = 512
    fit_tokens: int = 8192
    seq_len: int = 128
    device: str | None = None
    dtype: str = "float32"
    seed: int = 0
    bridge: bool = False
    progress: bool = True
    html: bool = False


def run_report(options: ReportOptions, command: str | None = None) -> LayerAblation:
    """Measure, or go on where an interrupted run of the same options stood, and write the results.

    Into ``options.out`` go ``layers.csv``, ``layers.png``, ``subspaces.safetensors`` and
    ``report.json``, beside ``configuration.json`` and ``finished.jsonl`` from which it resumes.

    Raises:
        TangentValueError: the folder holds a run of other options; the message names them.
        TangentError: whatever the options name can't be had; see the functions that are called.
    """
    loaded = load_model(
        options.model, bridge=options.bridge, device=options.device, dtype=options.dtype
    )
    text = language_reference() if options.text is None else read_text(options.text)
    rows, left_out = _rows(options, loaded, text)
    n_fit, n_evaluation = (-(-n // options.seq_len) for n in (options.fit_tokens, options.tokens))
    fit, evaluation = split_disjoint(rows, n_fit, n_evaluation, options.seed)
    conventions = _conventions(options, loaded, fit, evaluation)
    conventions["text"] = {
        "name": options.text or "the language reference of this Python",
        "sha256": sha256(text.encode()).hexdigest(),
        "rows_left_out": left_out,
        "why": REPEATED,
    }
    folder = RunFolder(options.out, conventions)
    subspaces = _subspaces(folder, options, loaded, fit)
    losses = {item.site: item for item in _losses(folder, options, loaded, subspaces, evaluation)}
    result = LayerAblation(subspaces, tuple(sorted(losses.values(), key=_depth)), conventions)
    _write(folder, result, command)
    if options.html:
        from tl_tangent.report_page import write_page  # the one step up a floor

        write_page(folder, loaded, result, evaluation[:1], _fitter(options, loaded, fit), command)
    return result


def _rows(
    options: ReportOptions, loaded: LoadedModel, text: str
) -> tuple[Int[Tensor, "row pos"], int]:
    """Cut the text into rows; returns those that can be used, and how many can't."""
    context = getattr(loaded.model.cfg, "n_ctx", None)
    if options.seq_len < 2 or (context and options.seq_len > context):
        raise TangentValueError(
            f"seq_len={options.seq_len}: this model takes rows of 2 to {context} tokens"
        )
    if min(options.tokens, options.fit_tokens) < 1:
        raise TangentValueError(
            f"tokens={options.tokens} and fit_tokens={options.fit_tokens} must be 1 or more"
        )
    rows = token_batches(loaded.tokenizer, text, seq_len=options.seq_len, bos=loaded.bos)
    usable = rows[rows[:, 0] != rows[:, 1]]
    return usable, len(rows) - len(usable)


def _measured(options: ReportOptions) -> dict[str, Any]:
    return {
        "n_controls": options.controls,
        "positions": options.positions,
        "seed": options.seed,
    }


def _fitted(options: ReportOptions) -> dict[str, Any]:
    return {
        "rank": options.rank,
        "method": options.method,
        "layers": options.layers,
        **_measured(options),
    }


def _conventions(
    options: ReportOptions, loaded: LoadedModel, fit: Tensor, evaluation: Tensor
) -> dict[str, Any]:
    made = conventions_of(loaded.model, [fit], evaluation, sites=options.sites, **_fitted(options))
    return {
        **made,
        "model": loaded.name,
        "weights": {
            "fingerprint": loaded.fingerprint,
            "processing": "none: as trained, nothing folded or centred",
        },
        "device": str(next(loaded.model.parameters()).device.type),
        "bos": loaded.bos,
        "seq_len": options.seq_len,
    }


def _subspaces(
    folder: RunFolder, options: ReportOptions, loaded: LoadedModel, fit: Tensor
) -> SubspaceSet:
    """Read the subspaces of an earlier run of this configuration, or fit and save them."""
    if (folder.path / SUBSPACES).exists():
        return SubspaceSet.load(folder.path / SUBSPACES)
    batches = fit.split(max(1, BATCH_TOKENS // options.seq_len))
    fitted = fit_sites(
        loaded.model, batches, options.sites, progress=options.progress, **_fitted(options)
    )
    fitted.save(folder.path / SUBSPACES)
    return fitted


def _fitter(
    options: ReportOptions, loaded: LoadedModel, fit: Tensor
) -> Callable[[list[str]], SubspaceSet]:
    """What fits subspaces at other sites as those of the run are fitted."""
    batches = fit.split(max(1, BATCH_TOKENS // options.seq_len))
    return lambda sites: fit_subspaces(
        loaded.model,
        batches,
        sites,
        options.rank,
        options.method,
        positions=options.positions,
        seed=options.seed,
        progress=options.progress,
    )


def _losses(
    folder: RunFolder,
    options: ReportOptions,
    loaded: LoadedModel,
    subspaces: SubspaceSet,
    evaluation: Tensor,
) -> Iterator[SiteLosses]:
    """Yield what is finished already, then the rest, which is put on disk site by site."""
    done = [
        SiteLosses(**{**piece, "controls": tuple(piece["controls"])}) for piece in folder.finished()
    ]
    if done:
        _say(
            f"{len(done)} of {len(subspaces)} sites in {folder.path} were finished by an earlier "
            "run and are kept; delete the folder to measure them again"
        )
    yield from done
    for item in ablate_sites(
        loaded.model,
        subspaces,
        evaluation,
        done=[item.site for item in done],
        progress=options.progress,
        **_measured(options),
    ):
        folder.finish(asdict(item))
        yield item


def _say(text: str) -> None:
    print(f"tl-tangent: {text}", file=sys.stderr)


def _depth(item: SiteLosses) -> int:
    return -1 if item.layer is None else item.layer


def _write(folder: RunFolder, result: LayerAblation, command: str | None) -> None:
    frame, figure = result.to_dataframe(), result.plot()
    folder.write(TABLE, lambda path: frame.to_csv(path, index=False))
    folder.write(PICTURE, lambda path: figure.savefig(path, dpi=130, format="png"))
    told = {
        "command": command,
        "headline": result.headline(),
        "position_0": result.position_0_note(),
        "files": {"table": TABLE, "picture": PICTURE, "subspaces": SUBSPACES},
        "conventions": result.conventions,
    }
    folder.write_text(REPORT, json.dumps(told, indent=2) + "\n")
