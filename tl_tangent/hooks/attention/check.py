"""Whether the parts of queries and keys add up to the scores that the model computed."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentRuntimeError
from tl_tangent.geometry.score_terms import SideParts, capped, scores
from tl_tangent.hooks.attention.choose import Chosen
from tl_tangent.hooks.attention.observe import Observed
from tl_tangent.hooks.attention.split import projection_error

CHECKED_QUERIES = 16
# by bytes a number: what the host's own arithmetic leaves in its scores, with room
_TOLERANCE = {1: 0.3, 2: 0.1, 4: 5e-3, 8: 1e-5}


def rebuilt(
    chosen: Chosen, observed: Observed, parts: tuple[SideParts, SideParts], rows: slice
) -> Float[Tensor, "batch head query key"]:
    """Return the scores of some queries from the parts: capped, with positions, not masked."""
    query, key = (side.total for side in parts)
    total = capped(scores(query[:, :, rows], key), chosen.circuit.cap)
    return total if observed.position is None else total + observed.position[..., rows, :]


def spread_rows(observed: Observed) -> slice:
    """Return some queries spread over a pass, the last one among them, to check the sum at."""
    n = observed.scores.shape[-2]
    step = max(1, n // CHECKED_QUERIES)
    return slice((n - 1) % step, None, step)


def checked_error(
    chosen: Chosen,
    observed: Observed,
    parts: tuple[SideParts, SideParts],
    rows: slice = slice(None),
) -> Float[Tensor, " head"]:
    """Compare the sum of the terms with what the model computed, and refuse a real difference.

    Returns:
        For each head the largest difference over unmasked cells, over the head's largest score;
        where the host shows the pattern in place of the scores, the largest difference of patterns.
    """
    total = rebuilt(chosen, observed, parts, rows)
    seen = observed.seen[:, None, rows].expand_as(total)
    model = observed.scores[:, :, rows].to(total.dtype)
    if observed.scores_are_pattern:
        total = torch.softmax(total.masked_fill(~seen, -torch.inf), dim=-1).nan_to_num(0.0)
        largest = torch.ones(total.shape[1], dtype=total.dtype, device=total.device)
    else:
        largest = model.masked_fill(~seen, 0.0).abs().amax(dim=(0, 2, 3))
    error = (total - model).masked_fill(~seen, 0.0).abs().amax(dim=(0, 2, 3))
    error = error / largest.clamp(min=torch.finfo(total.dtype).tiny)
    projected = projection_error(chosen.circuit, observed, rows)
    _refuse_difference(chosen, error, projected, observed.attn_input.dtype)
    return error


def _refuse_difference(chosen: Chosen, error: Tensor, projected: float, dtype: torch.dtype) -> None:
    accepted, circuit = _TOLERANCE[dtype.itemsize], chosen.circuit
    if not projected <= accepted:
        raise TangentRuntimeError(
            f"layer {circuit.layer}: hook_q and hook_k are not the projections of attn.hook_in "
            f"(largest difference {projected:.1e} of the largest entry, accepted {accepted:.0e}). "
            "Take off the hook or the ablation that edits queries or keys."
        )
    if bool((error <= accepted).all()):
        return
    clips = " The model clips queries and keys, and some were clipped." if circuit.clips else ""
    raise TangentRuntimeError(
        f"layer {circuit.layer}, head {int(error.argmax())}: the terms add up to something else "
        f"than the model's own scores (largest difference {float(error.max()):.1e} of the largest "
        f"score, accepted {accepted:.0e}).{clips} Either a hook edits queries, keys or scores, or "
        f"the {circuit.kind} of this model computes them in a way that is not known here."
    )
