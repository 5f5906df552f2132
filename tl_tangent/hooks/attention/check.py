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
        For each head the largest difference over unmasked cells of the rows, over the head's
        largest score; where the host shows the pattern in place of the scores, the largest
        difference of patterns. At least that between queries or keys (at every position) and the
        projections of the input.

    Raises:
        TangentRuntimeError: scores that are not finite or masked otherwise in some heads, queries
            or keys that are not the projections of the input, or terms that do not add up.
    """
    with torch.no_grad():
        seen = observed.seen[:, None, rows]
        model = observed.scores[:, :, rows].detach()
        _check_cells(chosen, observed, model, seen)
        projected = _check_projections(chosen, observed)
        total = rebuilt(chosen, observed, parts, rows)
        seen, model = seen.expand_as(total), model.to(total.dtype)
        if observed.scores_are_pattern:
            total = torch.softmax(total.masked_fill(~seen, -torch.inf), dim=-1).nan_to_num(0.0)
            largest = torch.ones(total.shape[1], dtype=total.dtype, device=total.device)
        else:
            largest = model.masked_fill(~seen, 0.0).abs().amax(dim=(0, 2, 3))
        error = (total - model).masked_fill(~seen, 0.0).abs().amax(dim=(0, 2, 3))
        error = error / largest.clamp(min=torch.finfo(total.dtype).tiny)
        _check_sum(chosen, observed, error)
    return error.clamp(min=projected)


def _accepted(observed: Observed) -> float:
    """The tolerance of the least precise number that enters the host's scores."""
    device = observed.scores.device.type
    sizes = [x.dtype.itemsize for x in (observed.attn_input, observed.query, observed.scores)]
    return _TOLERANCE[min(2, *sizes) if torch.is_autocast_enabled(device) else min(sizes)]


def _check_cells(chosen: Chosen, observed: Observed, model: Tensor, seen: Tensor) -> None:
    """Refuse NaN in rows that are not padding, and a mask that is not that of every head."""
    asking = seen.any(-1, keepdim=True) | ~torch.isnan(model).all(dim=(1, -1), keepdim=True)
    if bool((torch.isnan(model) & asking).any()):
        raise TangentRuntimeError(
            f"layer {chosen.layer}: the model's own scores are NaN at tokens that are not padding. "
            "Look at its weights and at its input."
        )
    if observed.scores_are_pattern:
        return
    alike = (model > observed.masked_at / 2) == seen
    if not bool((alike | ~asking | ~seen.any(-1, keepdim=True)).all()):
        raise TangentRuntimeError(
            f"layer {chosen.layer}: some heads are masked where others are not, so a hook takes "
            "out cells of hook_attn_scores. Take it off: a split has one mask for all heads."
        )


def _check_projections(chosen: Chosen, observed: Observed) -> float:
    accepted, found = _accepted(observed), projection_error(chosen.circuit, observed)
    if not found <= accepted:
        raise TangentRuntimeError(
            f"layer {chosen.layer}: hook_q and hook_k are not the projections of attn.hook_in "
            f"(largest difference {found:.1e} of the largest entry, accepted {accepted:.0e}). "
            "Take off the hook or the ablation that edits queries or keys."
        )
    return found


def _check_sum(chosen: Chosen, observed: Observed, error: Tensor) -> None:
    accepted, circuit = _accepted(observed), chosen.circuit
    if bool((error <= accepted).all()):
        return
    clips = " The model clips queries and keys, and some were clipped." if circuit.clips else ""
    raise TangentRuntimeError(
        f"layer {circuit.layer}, head {int(error.argmax())}: the terms add up to something else "
        f"than the model's own scores (largest difference {float(error.max()):.1e} of the largest "
        f"score, accepted {accepted:.0e}).{clips} Either a hook edits queries, keys or scores; or "
        "the subspace's mean is so large that this dtype can't hold the sum; or the "
        f"{circuit.kind} of this model computes its scores in a way that is not known here."
    )
