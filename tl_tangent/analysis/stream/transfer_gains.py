"""What a change in the tangent or the normal part of the residual stream becomes, layers later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_tangent.analysis.stream.followed import BatchPositions, follow, followed_rows
from tl_tangent.analysis.stream.transfer_directions import Directions, check_count, check_directions
from tl_tangent.analysis.stream.transfer_result import MEANING, TransferGains
from tl_tangent.analysis.stream.transfer_sums import Input, TransferSums, gain_rows
from tl_tangent.errors import TangentValueError
from tl_tangent.hooks.fit import listed, shown
from tl_tangent.hooks.numbers import whole, whole_seed, wholes
from tl_tangent.hooks.positions import PositionMask, Positions, run_of_forward
from tl_tangent.hooks.stream.inputs import (
    check_no_dropout,
    check_same_again,
    ordinary_input,
    stream_input,
)
from tl_tangent.hooks.stream.jvp import Stretch, Through, check_through, mode_for, side_by_side
from tl_tangent.hooks.stream.writes import LayerWrites, check_has_stream, watching_writes


def transfer_gains(
    model: Any,
    batches: Any,
    subspaces: Any,
    start: Iterable[int] | int | None,
    stop: int | None = None,
    *,
    n_directions: int = 8,
    directions: str = "random",
    through: Through = "both",
    n_controls: int = 0,
    positions: Positions | None = None,
    seed: int = 0,
    any_model: bool = False,
    progress: bool = False,
) -> TransferGains:
    """Measure how layers pass on small changes of the tangent and of the normal part.

    With J the Jacobian of the residual stream at depth ``stop`` by the stream at depth ``start``
    (depth l is in front of layer l), over all followed tokens at once, the gain from one part to
    another is ``||P_out J P_in||_F / sqrt(dim P_in)``: the root of the mean energy that a random
    unit change in the one part has in the other. It is 1 within a part, and 0 between two, where
    the layers only copy and both depths have one subspace. J is never formed: it is applied to
    random directions (Hutchinson 1990; Avron & Toledo 2011), by forward-mode differentiation in one
    pass of the model each.

    Args:
        model: a HookedTransformer or a TransformerBridge of a decoder.
        batches: tokens ``[batch, pos]``, a mapping of keyword arguments with an ``input``, or an
            iterable of such batches.
        subspaces: one subspace for every depth, or a set that has one at every start and stop (at
            ``blocks.l.hook_resid_pre`` or ``blocks.{l-1}.hook_resid_post``).
        start: a depth, several, or None for every layer one by one.
        stop: a later depth, for every start; by default the one behind it.
        n_directions: how many random directions each part is tried with, in each batch; two or
            more for a standard error, which is NaN with one.
        directions: "random"; "data", each token's own part, all tokens at once; or "all", every
            direction of the part at every token, which is exact and only for tiny models.
        through: "both" branches, "attention" or "mlp" alone, or "neither", which leaves the copy;
            what the other branches write stands still.
        n_controls: how many matched random normals are put in place of the subspaces.
        positions: which tokens are changed and read; by default those the subspaces were fitted on.
            A mapping among the batches may have its own, under ``positions``.
        seed: of directions and controls.
        any_model: accept subspaces that were fitted on a model of another name.
        progress: show a progress bar.

    Raises:
        TangentKeyError: a depth without a subspace.
        TangentValueError: a depth that the model does not have, or in no order; unknown directions
            or branches; too many directions for "all"; subspaces of another width, of other folding
            of the norms or of different positions; a batch with a key-value cache that is not
            frozen; a model that drops entries out; no token that counts.
        TangentRuntimeError: a layer whose writes do not add up (BERT norms the sum); a hook that
            drops derivatives; forward-mode differentiation around this call.
    """
    check_has_stream(model)
    check_no_dropout(model)
    check_through(through)
    n_directions = check_directions(directions, n_directions)
    n_controls, seed = whole("n_controls", n_controls, at_least=0), whole_seed(seed)
    stretches = _stretches(model.cfg.n_layers, start, stop)
    depths = [depth for stretch in stretches for depth in (stretch.start, stretch.stop)]
    followed = follow(model, subspaces, sorted(depths), n_controls, seed, any_model=any_model)
    mask = BatchPositions(followed.positions if positions is None else positions)
    plan = _Plan(stretches, mask, directions, n_directions, seed)
    sums = TransferSums(followed, 1 + n_controls, through)
    with torch.inference_mode(False):
        n_tokens, mode = plan.run(model, shown(listed(batches), progress, "pushing"), sums)
    if n_tokens == 0:
        raise TangentValueError(
            "no token counts under these positions, or there was no batch. Give longer rows, or "
            "other positions."
        )
    conventions = {
        "model": getattr(model.cfg, "model_name", None),
        **followed.described(),
        "directions": directions,
        "n_directions": n_directions if directions == "random" else None,
        "through": through,
        "positions": mask.description,
        "n_tokens": n_tokens,
        "n_controls": n_controls,
        "seed": seed,
        "derivative": mode,
        "meaning": MEANING,
    }
    return TransferGains(tuple(gain_rows(sums, stretches, exact=directions == "all")), conventions)


@dataclass(frozen=True)
class _Plan:
    """Where and how the stream is changed."""

    stretches: list[Stretch]
    positions: BatchPositions
    kind: str
    n: int
    seed: int

    def run(self, model: Any, batches: Iterable[Any], sums: TransferSums) -> tuple[int, str]:
        """Returns how many tokens were followed, and how derivatives were found."""
        n_tokens, mode, groups = 0, None, side_by_side(self.stretches)
        for number, batch in enumerate(batches):
            given, options = stream_input(batch, max(s.stop for s in self.stretches))
            check_same_again(options)
            given = ordinary_input(given)
            options = {name: ordinary_input(value) for name, value in options.items()}
            rows = self._rows(model, given, options, self.positions.of(options))
            if not bool(rows.any()):
                continue
            n_tokens += int(rows.sum())
            directions = Directions(self.kind, self.n, self.seed, number, rows)
            check_count(directions, sums.followed)
            mode = mode or mode_for(model, given, options, groups[0])
            for group in groups:
                sums.add(model, Input(given, options, directions, mode), group)
        return n_tokens, mode.name if mode else ""

    def _rows(
        self, model: Any, given: Any, options: dict[str, Any], mask: PositionMask
    ) -> Bool[Tensor, "batch pos"]:
        """The tokens that count, from a pass in which every layer's writes are checked."""
        run = run_of_forward(model, (given,), options)
        last = max(stretch.stop for stretch in self.stretches)
        found: list[Tensor] = []

        def receive(writes: LayerWrites) -> None:
            if writes.layer < 0:
                found.append(followed_rows(run, mask, writes.after))

        with torch.no_grad(), watching_writes(model, receive, last - 1, run=run):
            model(given, return_type=None, stop_at_layer=last, **options)
        return found[0]


def _stretches(n_layers: int, start: Any, stop: int | None) -> list[Stretch]:
    if start is None and stop is not None:
        raise TangentValueError(
            f"start=None is every layer one by one, each with its own end, and stop is {stop}. "
            "Give one of them."
        )
    starts = list(range(n_layers)) if start is None else wholes("start", start)
    stop = None if stop is None else whole("stop", stop, at_least=1)
    found = [Stretch(one, one + 1 if stop is None else stop) for one in starts]
    bad = [one for one in found if not 0 <= one.start < one.stop <= n_layers]
    if bad:
        raise TangentValueError(
            f"from {bad[0].start} to {bad[0].stop} is no stretch of this model: depths are 0 (in "
            f"front of layer 0) to {n_layers} (behind the last), and start < stop."
        )
    return found
