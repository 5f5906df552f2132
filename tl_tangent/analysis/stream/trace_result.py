"""The ledger of a residual trace, and the tables, pictures and words that are made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.analysis.stream.massive import TIMES, massive_tokens
from tl_tangent.analysis.stream.trace_rows import stream_rows, write_rows
from tl_tangent.analysis.stream.trace_sums import Ledger
from tl_tangent.analysis.stream.trace_words import headline
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.display import html_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from tl_tangent.views.widgets import Widget


@dataclass(frozen=True, eq=False, repr=False)
class ResidualTrace:
    """The ledger of the residual stream.

    Attributes:
        ledger: energies and inner products by token, with their shapes: see :class:`Ledger`.
        conventions: how the numbers came about.
    """

    ledger: Ledger
    conventions: Mapping[str, Any]

    @property
    def closing_error(self) -> float:
        """The largest norm, over tokens and depths, of stream minus sum of writes, over the norm of
        the stream; no part of the stream is missing more."""
        return self.ledger.closing_error

    @property
    def pairs(self) -> Mapping[str, Float[Tensor, "writer writer"]] | None:
        """Mean inner products between all pairs of writes, for "tangent" and "normal": both axes in
        the order of :attr:`writers`. None with a subspace a depth, and for a selection of tokens.
        """
        return self.ledger.pairs

    @property
    def writers(self) -> tuple[str, ...]:
        """Names of the writes, in order: ``"mean"``, ``"embed"``, ``"0.attn"``, ``"0.mlp"``, ..."""
        return self.ledger.writers

    def massive(self, times: float = TIMES) -> Bool[Tensor, " token"]:
        """Return which of the followed tokens have massive activations (Sun et al. 2024).

        Here: at some depth, more than ``times`` the energy of the median token around the mean.
        Every pooled number is mostly theirs. ``trace.select(~trace.massive())`` is without them.

        Raises:
            TangentValueError: ``times`` is not above 1.
        """
        return massive_tokens(self.ledger, times)

    def select(self, tokens: Bool[Tensor, " token"]) -> ResidualTrace:
        """Return the trace of some of the followed tokens, whose order ``ledger.position`` and
        ``ledger.ids`` tell; ``pairs``, which are not kept by token, are None in it.

        Raises:
            TangentValueError: no boolean of every followed token, or none is True.
        """
        n = self.ledger.n_tokens
        mask = torch.as_tensor(tokens)
        if mask.dtype != torch.bool or mask.shape != (n,) or not bool(mask.any()):
            raise TangentValueError(
                f"tokens is {mask.dtype} of shape {tuple(mask.shape)}; give a boolean for each of "
                f"the {n} followed tokens, one at least True."
            )
        chosen = self.ledger.select(mask.cpu())
        made = {**self.conventions, "tokens": f"{chosen.n_tokens} selected of {n}"}
        return ResidualTrace(chosen, made)

    def stream(
        self,
        by: str | None = None,
        counts: Mapping[int, int] | None = None,
        *,
        label: Callable[[int], str] | None = None,
    ) -> pd.DataFrame:
        """Return one row a depth and part: energies, gains, cosines, what is kept, and controls.

        Columns are as in ``conventions["meaning"]``.

        Args:
            by: also by "position", "token" or "frequency" (quartiles of the counts of the tokens).
            counts: how often each token id occurs, for "frequency"; by default in what was traced.
            label: for by="token", from an id to its text, such as ``model.tokenizer.decode``.

        Raises:
            TangentValueError: another ``by``; "token" or "frequency" of a trace of text or
                embeddings, which has no token ids; a ``label`` for anything but "token".
        """
        return stream_rows(self.ledger, by, counts, label)

    def writes(
        self,
        by: str | None = None,
        counts: Mapping[int, int] | None = None,
        *,
        label: Callable[[int], str] | None = None,
    ) -> pd.DataFrame:
        """Return one row a write and part: energy, interference, size over what was carried.

        Arguments and errors are those of :meth:`stream`.
        """
        return write_rows(self.ledger, by, counts, label)

    def to_dataframe(self) -> pd.DataFrame:
        """Return :meth:`writes`."""
        return self.writes()

    def headline(self) -> str:
        """State how both parts grow and what is kept of them, beside the controls."""
        return headline(self.ledger, self.stream(), self.conventions["model"])

    def plot(self) -> Figure:
        """Draw both parts through depth: energies, gains and what is written, with controls."""
        from tl_tangent.views.ledger_figure import draw_ledger  # the one step up a floor

        return draw_ledger(self)

    def show_tokens(
        self,
        label: Callable[[int], str],
        depth: int,
        later: int | None = None,
        *,
        tokens: slice | None = None,
    ) -> Widget:
        """Show the followed tokens, coloured by the share of each one's energy that is normal.

        Args:
            label: from a token id to its text, such as ``model.tokenizer.decode``.
            depth: in front of this layer; the number of layers for behind the last.
            later: colour by how that share changes up to this depth instead.
            tokens: which stretch of the followed tokens, such as ``slice(127, 254)``.

        Raises:
            TangentValueError: a depth that is not there, a stretch without tokens, labels that are
                no strings; a trace of text or embeddings, which has no token ids.
        """
        from tl_tangent.views import token_strip

        if later is None:
            return token_strip.show_tokens(self, label, depth, tokens=tokens)
        return token_strip.show_token_changes(self, label, depth, later, tokens=tokens)

    def __repr__(self) -> str:
        return f"ResidualTrace({self.ledger.n_tokens} tokens): {self.headline()}"

    def _repr_html_(self) -> str:
        rows = self.stream().round(4).to_dict("records")
        return html_table([{str(k): v for k, v in row.items()} for row in rows], self.headline())
