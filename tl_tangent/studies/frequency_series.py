"""Frequency against the spread of token types, at the checkpoints of one training run."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import torch

from tl_tangent.analysis.frequency.frequency_dispersion import frequency_dispersion
from tl_tangent.analysis.frequency.frequency_result import FrequencyDispersion
from tl_tangent.hooks.fit import listed, shown
from tl_tangent.hooks.models import TangentBridge
from tl_tangent.hooks.sites import Sites
from tl_tangent.loading import weights_fingerprint
from tl_tangent.studies.checkpoints import Checkpoint, CheckpointSeries

if TYPE_CHECKING:
    import pandas as pd


def frequency_over_checkpoints(
    series: CheckpointSeries,
    batches: Any,
    sites: Sites = "blocks.*.hook_resid_post",
    *,
    device: str | None = None,
    progress: bool = False,
    **options: Any,
) -> pd.DataFrame:
    """Measure :func:`~tl_tangent.frequency_dispersion` at every checkpoint, one after the other.

    One model is in memory at a time. Checkpoints are read with the same tokens, so that their rows
    belong together; they are no independent samples.

    Args:
        series: the checkpoints; they are loaded as bridges.
        batches: token ids, as that function takes them. They are kept and read at each checkpoint.
        sites: names, patterns, or a predicate.
        device: where models are put; a GPU by default if there is one.
        progress: show a progress bar over checkpoints.
        options: the other arguments of that function.

    Returns:
        One row a checkpoint and site: the step and the columns of
        :meth:`~tl_tangent.FrequencyDispersion.to_dataframe`, with the static embeddings as sites,
        which have a norm and a distance to their mean and no spread. ``attrs["conventions"]``,
        which is JSON-able, says how the numbers came about.

    Raises:
        TangentFileError: a checkpoint that can't be loaded.
        TangentKeyError: a site that the model does not have.
        TangentValueError: neighbouring checkpoints with the same weights; as that function.
    """
    import pandas as pd

    data, frames, fingerprints = list(listed(batches)), [], {}
    conventions: dict[str, Any] = {}
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for one in shown(series.checkpoints, progress, "checkpoints"):
        found, fingerprints[one.step] = _measured(one, series, data, sites, where, options)
        gc.collect()  # a bridge and its parts hold each other
        series.check_different(fingerprints)
        frames.append(found.to_dataframe().assign(step=one.step))
        conventions = {**found.conventions, "model": series.name}
    frame = pd.concat(frames, ignore_index=True)
    frame.insert(0, "step", frame.pop("step"))
    told = {"checkpoints": list(map(str, series.checkpoints)), "note": series.note}
    frame.attrs["conventions"] = json.loads(json.dumps({**conventions, **told}))
    return frame


def _measured(
    checkpoint: Checkpoint,
    series: CheckpointSeries,
    data: list[Any],
    sites: Sites,
    device: str,
    options: dict[str, Any],
) -> tuple[FrequencyDispersion, str]:
    """Load one checkpoint and measure it."""
    hf_model = checkpoint.load(series.objective, device)
    fingerprint = weights_fingerprint(hf_model)
    model = TangentBridge.from_hf(hf_model, device=device).eval()
    return frequency_dispersion(model, data, sites, **options), fingerprint
