"""How tangent and normal parts travel through the residual stream: what is written, and kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tl_tangent.analysis.stream.followed import BatchPositions, followed_rows
from tl_tangent.analysis.stream.frames import Reference, reference_of
from tl_tangent.analysis.stream.trace_result import ResidualTrace
from tl_tangent.analysis.stream.trace_sums import Tokens, TraceSums
from tl_tangent.analysis.stream.trace_words import MEANING
from tl_tangent.errors import TangentValueError
from tl_tangent.hooks.fit import listed, shown
from tl_tangent.hooks.numbers import whole, whole_seed
from tl_tangent.hooks.positions import PositionMask, Positions, Run, run_of_forward
from tl_tangent.hooks.stream.inputs import stream_input
from tl_tangent.hooks.stream.writes import LayerWrites, watching_writes


def trace_residual(
    model: Any,
    batches: Any,
    subspaces: Any,
    *,
    n_controls: int = 0,
    heads: bool = False,
    interference: bool = True,
    positions: Positions | None = None,
    seed: int = 0,
    any_model: bool = False,
    progress: bool = False,
) -> ResidualTrace:
    """Follow the tangent and the normal part of the residual stream through depth, write by write.

    The stream in front of layer l, around the mean of the reference, is the sum of what the
    embeddings and every attention and MLP so far wrote to it (and of minus that mean); tangent and
    normal part are the sums of the tangent and normal parts of those writes. With one subspace for
    the whole depth that is all. With a subspace a layer, looking at the same stream in the next
    layer's subspace moves something from one part to the other, and its mean is another one: both
    stand in the ledger as writes of their own, ``"subspace"`` and ``"mean"``.

    Args:
        model: a HookedTransformer or a TransformerBridge of a decoder.
        batches: tokens ``[batch, pos]``, a mapping of keyword arguments with an ``input``, or an
            iterable of such batches.
        subspaces: one subspace for every depth (a fixed reference), or a set that has one for the
            stream in front of every layer and behind the last: at ``blocks.l.hook_resid_pre`` or
            ``blocks.{l-1}.hook_resid_post``, the two names of one place.
        n_controls: how many matched random normals are followed beside it. All depths draw from the
            same numbers, so that the control of a changing subspace changes no more than it does.
        heads: take the attention's write apart into that of every head and of its bias.
        interference: with a fixed reference, also the inner products between all pairs of writes.
        positions: which tokens are followed; by default those the subspaces were fitted on. A
            mapping among the batches may have its own, under ``positions``.
        seed: of the controls.
        any_model: accept subspaces that were fitted on a model of another name.
        progress: show a progress bar.

    Raises:
        TangentKeyError: a depth without a subspace.
        TangentValueError: a model without one stream of blocks; subspaces of another width, with a
            basis a head, of other folding of the norms or of different positions; no token that
            counts.
        TangentRuntimeError: a layer whose writes do not add up (BERT norms the sum); a stream that
            is edited between layers, or not finite.
    """
    n_controls, seed = whole("n_controls", n_controls, at_least=0), whole_seed(seed)
    reference = reference_of(model, subspaces, n_controls, seed, any_model=any_model)
    followed = BatchPositions(reference.positions if positions is None else positions)
    sums = TraceSums(reference, heads=heads, pairs=interference and reference.fixed)
    with torch.no_grad():
        for batch in shown(listed(batches), progress, "tracing"):
            _trace_batch(model, batch, sums, followed, heads)
    if sums.n_tokens == 0:
        raise TangentValueError(
            "no token counts under these positions, or there was no batch. Give longer rows, or "
            "other positions."
        )
    conventions = _conventions(model, reference, followed, n_controls, seed)
    return ResidualTrace(sums.result(), conventions)


def _trace_batch(
    model: Any, batch: Any, sums: TraceSums, followed: BatchPositions, heads: bool
) -> None:
    given, options = stream_input(batch, model.cfg.n_layers)
    mask = followed.of(options)
    run = run_of_forward(model, (given,), options)
    ids = None
    if isinstance(given, Tensor) and not given.is_floating_point():
        ids = given if given.ndim == 2 else given[None]
    taken: list[Tokens] = []

    def receive(found: LayerWrites) -> None:
        if found.layer < 0:
            taken[:] = [_tokens(run, mask, found.after, ids)]
            sums.begin(taken[0])
        sums.add(model, found)

    with watching_writes(model, receive, heads=heads, run=run):
        model(given, return_type=None, **options)
    sums.end()


def _tokens(run: Run, mask: PositionMask, stream: Tensor, ids: Tensor | None) -> Tokens:
    batch, length = stream.shape[:2]
    rows = followed_rows(run, mask, stream)
    position = run.absolute(length).expand(batch, length).to(stream.device)
    tokens = torch.full_like(position, -1) if ids is None else ids.to(stream.device)
    return Tokens(rows, position[rows].cpu(), tokens[rows].cpu())


def _conventions(
    model: Any, reference: Reference, followed: BatchPositions, n_controls: int, seed: int
) -> dict[str, Any]:
    first = reference.subspaces[0]
    return {
        "model": getattr(model.cfg, "model_name", None),
        "reference": "one subspace for every depth" if reference.fixed else "one at each depth",
        "sites": [subspace.site for subspace in reference.subspaces],
        "rank": first.rank,
        "method": first.method,
        "positions": followed.description,
        "n_controls": n_controls,
        "seed": seed,
        "meaning": MEANING,
    }
