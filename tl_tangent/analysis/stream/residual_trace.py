"""How tangent and normal parts travel through the residual stream: what is written, and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.stream.followed import followed_rows
from tl_tangent.analysis.stream.frames import Reference, reference_of
from tl_tangent.analysis.stream.trace_rows import stream_rows, write_rows
from tl_tangent.analysis.stream.trace_sums import Tokens, TraceSums
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.display import html_table
from tl_tangent.hooks.fit import batch_input, listed, shown
from tl_tangent.hooks.positions import PositionMask, Positions, Run, run_of_forward
from tl_tangent.hooks.stream.writes import LayerWrites, watching_writes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


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
        positions: which tokens are followed; by default those the subspaces were fitted on.
        seed: of the controls.
        any_model: accept subspaces that were fitted on a model of another name.
        progress: show a progress bar.

    Raises:
        TangentKeyError: a depth without a subspace.
        TangentValueError: a model without one stream of blocks; subspaces of another width or with
            a basis a head; no token that counts.
        TangentRuntimeError: a layer whose writes do not add up (BERT norms the sum).
    """
    reference = reference_of(model, subspaces, n_controls, seed, any_model=any_model)
    mask = PositionMask(reference.positions if positions is None else positions)
    sums = TraceSums(reference, heads=heads, pairs=interference and reference.fixed)
    with torch.no_grad():
        for batch in shown(listed(batches), progress, "tracing"):
            _trace_batch(model, batch, sums, mask, heads)
    if sums.n_tokens == 0:
        raise TangentValueError(
            "no token counts under these positions, or there was no batch. Give longer rows, or "
            "other positions."
        )
    conventions = _conventions(model, reference, mask, n_controls, seed)
    return ResidualTrace(sums.result(), conventions)


def _trace_batch(model: Any, batch: Any, sums: TraceSums, mask: PositionMask, heads: bool) -> None:
    given, options = batch_input(batch)
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

    with watching_writes(model, receive, heads=heads):
        model(given, return_type=None, **options)
    sums.end()


def _tokens(run: Run, mask: PositionMask, stream: Tensor, ids: Tensor | None) -> Tokens:
    batch, length = stream.shape[:2]
    rows = followed_rows(run, mask, stream)
    position = run.absolute(length).expand(batch, length).to(stream.device)
    tokens = torch.full_like(position, -1) if ids is None else ids.to(stream.device)
    return Tokens(rows, position[rows].cpu(), tokens[rows].cpu())


def _conventions(
    model: Any, reference: Reference, mask: PositionMask, n_controls: int, seed: int
) -> dict[str, Any]:
    first = reference.subspaces[0]
    return {
        "model": getattr(model.cfg, "model_name", None),
        "reference": "one subspace for every depth" if reference.fixed else "one at each depth",
        "sites": [subspace.site for subspace in reference.subspaces],
        "rank": first.rank,
        "method": first.method,
        "positions": mask.description,
        "n_controls": n_controls,
        "seed": seed,
        "meaning": MEANING,
    }


MEANING = {
    "energy": "mean over tokens of the squared norm of a part (tangent or normal)",
    "gain": "square root of the energy behind the layer over that in front of it",
    "cosine": "inner product of the part in front of and behind the layer, over both root energies",
    "interference": (
        "twice the mean inner product of a write with that part of the stream as it was before it: "
        "energies add up only with it; attention is written before the MLP also where both run in "
        "parallel"
    ),
    "written": "root energy of a write over that of the part in front of its layer",
    "kept": (
        "mean inner product of a part behind the layer with itself in front of it, over its energy "
        "in front: 1 for a pure copy, whatever is added at right angles"
    ),
    "mean": "the reference's mean is taken out of the stream; it stands in the ledger as a write",
    "control": "the same around the same mean for matched random normals, mean and extremes",
    "mechanical": (
        "a random write of energy e puts e * rank / d into any subspace; of the stream of a model, "
        "whose writes are far from random, only the difference to the controls says something"
    ),
}


@dataclass(frozen=True, eq=False, repr=False)
class ResidualTrace:
    """The ledger of the residual stream.

    Attributes:
        ledger: per-token energies and inner products, see :class:`TraceSums`.
        conventions: how the numbers came about.
    """

    ledger: Any
    conventions: Mapping[str, Any]

    @property
    def closing_error(self) -> float:
        """The largest norm, over tokens and depths, of stream minus sum of writes, in its tangent
        or its normal part, over the norm of the stream."""
        return self.ledger.closing_error

    @property
    def pairs(self) -> Mapping[str, Float[Tensor, "writer writer"]] | None:
        """Mean inner products between all pairs of writes, for "tangent" and "normal"."""
        return self.ledger.pairs

    @property
    def writers(self) -> tuple[str, ...]:
        """Names of the writes, in order: ``"mean"``, ``"embed"``, ``"0.attn"``, ``"0.mlp"``, ..."""
        return self.ledger.writers

    def stream(
        self, by: str | None = None, counts: Mapping[int, int] | None = None
    ) -> pd.DataFrame:
        """Return one row a depth and part: energies, gains, cosines, what is kept, and controls.

        Args:
            by: also by "position", "token" or "frequency" (quartiles of the counts of the tokens).
            counts: how often each token id occurs, for "frequency"; by default in what was traced.
        """
        return stream_rows(self.ledger, by, counts)

    def writes(
        self, by: str | None = None, counts: Mapping[int, int] | None = None
    ) -> pd.DataFrame:
        """Return one row a write and part: energy, interference, size over what was carried.

        Arguments are those of :meth:`stream`.
        """
        return write_rows(self.ledger, by, counts)

    def to_dataframe(self) -> pd.DataFrame:
        """Return :meth:`writes`."""
        return self.writes()

    def headline(self) -> str:
        """State how both parts grow and what is kept of them, beside the controls."""
        table = self.stream()
        inner = table[table["gain"].notna()]
        words = []
        for part, rows in inner.groupby("part", sort=False):
            control = ""
            if "control_gain_mean" in rows:
                control = f", control {_geometric(rows['control_gain_mean']):.2f}"
            words.append(
                f"{part} grows by {_geometric(rows['gain']):.2f} a layer{control} and keeps "
                f"{rows['kept'].median():.2f} of itself"
            )
        return (
            f"Over {self.conventions['model']}'s {inner['depth'].nunique()} layers the "
            f"{'; the '.join(words)}. The ledger closes to {self.closing_error:.1e}."
        )

    def plot(self) -> Figure:
        """Draw both parts through depth: energies, gains and what is written, with controls."""
        from tl_tangent.views.ledger_figure import draw_ledger  # the one step up a floor

        return draw_ledger(self)

    def __repr__(self) -> str:
        return f"ResidualTrace({self.ledger.n_tokens} tokens): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.stream().round(4).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())


def _geometric(values: Any) -> float:
    return float(torch.tensor(values.to_numpy()).log().mean().exp())
