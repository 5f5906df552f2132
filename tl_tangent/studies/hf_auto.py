"""The classes of transformers that load a language model, without their progress bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tl_tangent.hooks.gradients.objectives import Objective


def auto_class(objective: Objective) -> Any:
    """Return the class that loads a model: a masked one for "masked", a causal one for all else."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForMaskedLM if objective == "masked" else AutoModelForCausalLM


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep transformers from drawing a progress bar for every checkpoint."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
