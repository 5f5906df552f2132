"""What an alignment test says in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LOOK = (
    "look whether the text, the tokenizer and the objective are those of the training, and the "
    "checkpoints of one run"
)


def cautions(name: str, losses: Mapping[str, float], conventions: Mapping[str, Any]) -> list[str]:
    """Return what the losses of a model give reason to doubt.

    Args:
        name: of the model.
        losses: means over the checkpoints of either phase, in nats a predicted token.
        conventions: of the model.
    """
    found = []
    early, late = losses["early"], losses["late"]
    if late > early:
        found.append(
            f"the mean loss of {name} rises from {early:.3g} early to {late:.3g} late: {LOOK}"
        )
    n, known = conventions.get("vocabulary"), conventions["objective"] in ("causal", "masked")
    if n and known and late > (guess := math.log(n)):
        found.append(
            f"the mean loss of {name} late, {late:.3g} nats a token, is above the {guess:.3g} of a "
            f"blind guess among {n} token ids: {LOOK}"
        )
    return found
