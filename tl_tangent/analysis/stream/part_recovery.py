"""What later layers rebuild of a part that was removed from the residual stream at one depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tl_tangent.analysis.stream.followed import BatchPositions, follow
from tl_tangent.analysis.stream.recovery_sums import RecoverySums
from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.display import html_table
from tl_tangent.hooks.ablation import Part
from tl_tangent.hooks.fit import listed, shown
from tl_tangent.hooks.numbers import whole, whole_seed
from tl_tangent.hooks.positions import Positions
from tl_tangent.hooks.stream.inputs import check_no_dropout, check_same_again, stream_input
from tl_tangent.hooks.stream.writes import check_has_stream

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def part_recovery(
    model: Any,
    batches: Any,
    subspaces: Any,
    depth: int,
    *,
    part: Part = "normal",
    n_controls: int = 3,
    positions: Positions | None = None,
    seed: int = 0,
    any_model: bool = False,
    progress: bool = False,
) -> PartRecovery:
    """Remove one part of the residual stream in front of a layer, and follow what comes back.

    At ``depth`` (in front of layer ``depth``) the stream ``x = mean + v + n`` becomes ``mean + v``
    for ``part="normal"``, or ``mean + n`` for ``part="tangent"``. At every later depth both parts
    of the run that goes on from there are compared with those of the clean run. A part that is
    only carried by the skip connections stays away; one that layers write again comes back.

    With one subspace for every depth the same part is followed throughout; what layers write to all
    tokens alike is then in its energy at later depths, and back at once. Read ``common_share`` and
    the ``_centred`` columns for the rest. A subspace a depth asks another question: what is back of
    the part as each depth's own fit tells it.

    Args:
        model: a HookedTransformer or a TransformerBridge of a decoder.
        batches: tokens ``[batch, pos]``, a mapping of keyword arguments with an ``input``, or an
            iterable of such batches. Each is run once clean, once without the part, and once more
            for every control.
        subspaces: one subspace for every depth, or a set that has one in front of every layer from
            ``depth`` on and behind the last.
        depth: 0 to ``n_layers - 1``.
        part: "normal" or "tangent".
        n_controls: how many matched random normals take the subspace's place: their tangent part is
            cut, or, for ``part="normal"``, nothing but their tangent part is kept.
        positions: which tokens are cut and followed; by default those of the subspaces' fit. A
            mapping among the batches may have its own, under ``positions``.
        seed: of the controls.
        any_model: accept subspaces that were fitted on a model of another name.
        progress: show a progress bar.

    Raises:
        TangentKeyError: a depth without a subspace.
        TangentValueError: an unknown part; a depth without a layer behind it; subspaces of another
            width, of other folding of the norms or of different positions; a batch with a key-value
            cache that is not frozen; a model that drops entries out; no token that counts.
        TangentRuntimeError: a layer whose writes do not add up (BERT norms the sum); a stream that
            something else edits between layers.
    """
    check_has_stream(model)
    check_no_dropout(model)
    n_layers = model.cfg.n_layers
    depth = _checked_depth(part, depth, n_layers)
    n_controls, seed = whole("n_controls", n_controls, at_least=0), whole_seed(seed)
    depths = range(depth, n_layers + 1)
    followed = follow(model, subspaces, depths, n_controls, seed, any_model=any_model)
    mask = BatchPositions(followed.positions if positions is None else positions)
    sums = RecoverySums(followed, depth, part, mask)
    for batch in shown(listed(batches), progress, "ablating"):
        given, options = stream_input(batch, n_layers)
        check_same_again(options)
        sums.add(model, given, options)
    if sums.n_tokens == 0:
        raise TangentValueError(
            "no token counts under these positions, or there was no batch. Give longer rows, or "
            "other positions."
        )
    conventions = {
        "model": getattr(model.cfg, "model_name", None),
        **followed.described(),
        "depth": depth,
        "part": part,
        "positions": mask.description,
        "n_tokens": sums.n_tokens,
        "n_controls": n_controls,
        "seed": seed,
        "meaning": MEANING,
    }
    return PartRecovery(tuple(sums.rows()), conventions)


def _checked_depth(part: str, depth: Any, n_layers: int) -> int:
    if part not in PARTS:
        raise TangentValueError(
            f"part={part!r} is not one of {', '.join(map(repr, reversed(PARTS)))}."
        )
    depth = whole("depth", depth, at_least=0)
    if depth >= n_layers:
        raise TangentValueError(
            f"depth is {depth}; a part is removed in front of a layer of this model, 0 to "
            f"{n_layers - 1}."
        )
    return depth


MEANING = {
    "removed": "whether this part is the one that was removed",
    "energy_clean, energy_ablated": (
        "mean over tokens of the squared norm of the part around the mean, in the run as it is and "
        "in that without the part"
    ),
    "energy_ratio": "energy_ablated over energy_clean",
    "cosine": (
        "summed inner product of the part in both runs, over both root energies; NaN where nothing "
        "is left"
    ),
    "coefficient": (
        "the same inner product over energy_clean: how much of the clean part is back, 1 for all "
        "of it, whatever else was written"
    ),
    "control": (
        "the same with a matched random normal Q in place of the subspace, in both the cut and the "
        "parts: for part='tangent' as many random directions are cut; for part='normal' only the "
        "random directions are kept, so nearly all of the stream is cut, the subspace too"
    ),
    "coefficient_unchanged": (
        "the coefficient if all later layers wrote what they write in the clean run: 1 minus that "
        "of what was removed"
    ),
    "common_share": (
        "share of energy_clean that is one vector, the same for all tokens: the mean of the part "
        "over them"
    ),
    "coefficient_centred, coefficient_centred_unchanged": (
        "both coefficients of what is left without that mean, in either run: of what differs "
        "between tokens; NaN where nothing does"
    ),
    "reference": (
        "around one fixed subspace the parts of later depths hold what its mean does not take out, "
        "above all a vector that layers write to all tokens whatever they read, and that counts as "
        "back; a subspace a depth takes out each depth's own mean, but its parts at two depths are "
        "those of two subspaces, so that layers that write nothing leave a coefficient too. The "
        "centred coefficients of a fixed subspace are of one part throughout, without that vector"
    ),
    "mechanical": (
        "later layers write into both parts also without the cut, so that a coefficient above 0 is "
        "no repair: above coefficient_unchanged they make up for what was removed, below it they "
        "fail to write what they otherwise would"
    ),
}


@dataclass(frozen=True, eq=False, repr=False)
class PartRecovery:
    """What comes back of a removed part, depth by depth.

    Attributes:
        rows: one a depth and part, see :meth:`to_dataframe`.
        conventions: how the numbers came about, JSON-able.
    """

    rows: tuple[Mapping[str, Any], ...]
    conventions: Mapping[str, Any]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a depth and part; columns as in ``conventions["meaning"]``."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def headline(self) -> str:
        """State what is back of the removed part behind the last layer, beside the controls."""
        last = [row for row in self.rows if row["removed"]][-1]
        control = ""
        if "control_coefficient_mean" in last:
            control = (
                f"; of the controls' {last['control_coefficient_mean']:.2f} (energy "
                f"{last['control_energy_ratio_mean']:.2f})"
            )
        made = self.conventions
        centred = ""
        if not math.isnan(last["coefficient_centred"]):
            centred = (
                f"; of what differs between tokens {last['coefficient_centred']:.2f} "
                f"({last['coefficient_centred_unchanged']:.2f})"
            )
        return (
            f"Without its {made['part']} part in front of layer {made['depth']}, {made['model']} "
            f"has {last['coefficient']:.2f} of the clean one behind the last layer "
            f"({last['coefficient_unchanged']:.2f} if layers wrote as in the clean run; energy "
            f"{last['energy_ratio']:.2f}, cosine {last['cosine']:.2f}){centred}{control}."
        )

    def plot(self) -> Figure:
        """Draw what is back of both parts by depth, beside the controls and an unchanged model."""
        from tl_tangent.views.recovery_figure import draw_recovery  # the one step up a floor

        return draw_recovery(self)

    def __repr__(self) -> str:
        return f"PartRecovery({self.conventions['n_tokens']} tokens): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.to_dataframe().round(4).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())
