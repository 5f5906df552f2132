"""The page of the main job: what cutting Q_T costs, attention heads split, the stream's ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_tangent.analysis import LayerAblation
from tl_tangent.analysis.attention.scores import split_attention_layers
from tl_tangent.analysis.stream.residual_trace import trace_residual
from tl_tangent.errors import TangentError
from tl_tangent.geometry import SubspaceSet
from tl_tangent.loading import LoadedModel
from tl_tangent.run_folder import RunFolder
from tl_tangent.views.head_gallery import HeadGallery
from tl_tangent.views.html_report import html_report

HEADS, PAGE = "attention.safetensors", "report.html"
CONTROLS = 3  # of the ledger
LAYERS_SHOWN = 3

Fit = Callable[[list[str]], SubspaceSet]


def write_page(
    folder: RunFolder,
    loaded: LoadedModel,
    result: LayerAblation,
    row: Int[Tensor, "1 pos"],
    fit: Fit,
    command: str | None,
) -> Path:
    """Write ``report.html`` beside the other results.

    The heads of three layers and the ledger are those of one evaluation row. What a model can't
    give is said in the place where it would stand.

    Args:
        folder: of the run; the subspaces of the heads are kept there.
        loaded, result: of the run.
        row: which tokens are shown.
        fit: fits subspaces at some sites on the tokens that the run was fitted on.
        command: that was given, shown on the page.
    """
    parts: dict[str, Any] = {"What cutting Q_T costs": result}
    missing: list[str] = []
    for more in (_heads, _ledger):
        try:
            parts |= dict(more(folder, loaded, result, row, fit))
        except TangentError as error:
            missing.append(f"{more.__name__.strip('_')}: {error}")
    about = " ".join([_about(result, command), *(f"Left out: {one}" for one in missing)])
    return folder.write(
        PAGE, lambda path: html_report(parts, path, title=result.title(), about=about)
    )


def _about(result: LayerAblation, command: str | None) -> str:
    made = result.conventions
    said = f"{command}. " if command else ""
    return (
        f"{said}{made['model_class']}; {made['fit_tokens']} tokens fitted, "
        f"{made['evaluation_tokens']} others evaluated, of {made['text']['name']}; positions "
        f"{made['positions']}; rank {made['rank']} by {made['method']}; seed {made['seed']}."
    )


def _heads(
    folder: RunFolder, loaded: LoadedModel, result: LayerAblation, row: Tensor, fit: Fit
) -> Iterator[tuple[str, Any]]:
    layers = _spread([one.layer for one in result.losses if one.layer is not None])
    sites = [f"blocks.{layer}.attn.hook_in" for layer in layers]
    path = folder.path / HEADS
    known = SubspaceSet.load(path) if path.exists() else None
    if known is None or list(known) != sites:
        known = fit(sites)
        folder.write(HEADS, known.save)
    splits = split_attention_layers(loaded.model, row, known, layers)
    labels = [loaded.tokenizer.decode([int(token)]) for token in row[0]]
    yield "Attention heads, split", HeadGallery.of(splits.values(), labels)


def _ledger(
    folder: RunFolder, loaded: LoadedModel, result: LayerAblation, row: Tensor, fit: Fit
) -> Iterator[tuple[str, Any]]:
    stream = [site for site in result.subspaces if site.endswith(".hook_resid_post")]
    if not stream:
        return
    site = stream[len(stream) // 2]
    trace = trace_residual(loaded.model, row, result.subspaces[site], n_controls=CONTROLS)
    yield f"The residual stream in Q_T of {site}", trace
    depth = int(site.split(".")[1]) + 1
    yield "Tokens by their normal share", trace.show_tokens(loaded.tokenizer.decode, depth)


def _spread(layers: list[int]) -> list[int]:
    """Three of the layers, from the early, the middle and the late ones."""
    known = sorted(set(layers))
    places = {(2 * i + 1) * len(known) // (2 * LAYERS_SHOWN) for i in range(LAYERS_SHOWN)}
    return [known[place] for place in sorted(places)]
