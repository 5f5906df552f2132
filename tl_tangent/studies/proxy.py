"""Q_T of a recorder: as it was given, or fitted again on the activations that pass in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.gradients.activations import ActivationMeter, chosen_rows
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import SubspaceFitter, SubspaceSet, TangentSubspace
from tl_tangent.geometry.extractors import EXTRACTORS, SAMPLED
from tl_tangent.hooks.gradients.weight import Weights
from tl_tangent.hooks.positions import PositionMask, Run

Kind = Literal["frozen", "follow", "early"]


@dataclass(frozen=True)
class ProxyOptions:
    """When Q_T is fitted, and on what; see :class:`~tl_tangent.GradientRecorder`.

    Raises:
        TangentValueError: options that contradict each other or are out of range.
    """

    kind: Kind
    rank: int
    method: str
    refit_every: int
    freeze_at: int | None
    activations_every: int

    def __post_init__(self) -> None:
        if self.kind not in ("frozen", "follow", "early"):
            raise TangentValueError(f"proxy is 'frozen', 'follow' or 'early', got {self.kind!r}")
        if (self.kind == "early") != (self.freeze_at is not None):
            raise TangentValueError(
                f"proxy={self.kind!r} with freeze_at={self.freeze_at}: the two go together"
            )
        streamed = [name for name in EXTRACTORS if name not in (*SAMPLED, "dictionary")]
        if self.method not in streamed:
            raise TangentValueError(
                f"method={self.method!r}: a recorder keeps no rows of activations, so it fits by "
                f"{' or '.join(streamed)}; give subspaces= of another method to a frozen proxy"
            )
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise TangentValueError(
                f"rank={self.rank!r}: the steps of a run are held against subspaces of one rank, "
                "so give it as a whole number, 1 or more"
            )

    def check(self, subspaces: Mapping[str, TangentSubspace] | None) -> None:
        """Check that subspaces are given exactly where they are not fitted here."""
        if (self.kind == "frozen") != (subspaces is not None):
            raise TangentValueError(
                "a frozen proxy is given by subspaces=, one that follows is fitted here: with "
                f"proxy={self.kind!r} subspaces are {'missing' if subspaces is None else 'given'}"
            )


class Proxy:
    """When to look at activations, what of them to keep, and when to fit.

    Args:
        weights: at whose sites Q_T is fitted.
        mask: the positions that enter.
        options: when.

    Attributes:
        last_fit: the step behind which Q_T was fitted last; -1 before that.
        calls: steps that were watched so far.
        fitters: what the next fit adds to; None where nothing has passed yet.
    """

    def __init__(self, weights: Weights, mask: PositionMask, options: ProxyOptions) -> None:
        self._weights, self._mask, self._options = weights, mask, options
        self.last_fit, self.calls = -1, 0
        self._meter: ActivationMeter | None = None

    @property
    def stays(self) -> bool:
        """Whether Q_T is fitted no more."""
        freeze_at = self._options.freeze_at
        if freeze_at is None:
            return self._options.kind == "frozen"
        return self.last_fit >= freeze_at

    @property
    def looks(self) -> bool:
        """Whether the activations of the coming step are looked at."""
        waits = self._options.kind != "frozen" and self.last_fit < 0
        return waits or self.calls % self._options.activations_every == 0

    @property
    def fitters(self) -> dict[str, SubspaceFitter] | None:
        return None if self._meter is None else self._meter.fitters

    def take_up(self, last_fit: int, calls: int, fitters: dict[str, SubspaceFitter] | None) -> None:
        """Go on where an earlier run stood."""
        self.last_fit, self.calls = last_fit, calls
        if fitters is not None and not self.stays:
            self._meter = self._new_meter()
            self._meter.fitters = fitters

    def take_in(self, site: str, x: Float[Tensor, "batch pos d"]) -> Float[Tensor, "row d"]:
        """Take in the activations at one site, and return those at the positions that enter."""
        rows = chosen_rows(x, self._mask, Run(length=x.shape[1]))
        if not self.stays:
            if self._meter is None:
                self._meter = self._new_meter()
            self._meter.fitters[site].update(rows, group=self._group)
        return rows

    @property
    def _group(self) -> int:
        """Activations between two fits have a mean of their own."""
        return (self.last_fit + 1) // self._options.refit_every

    def due(self, step: int) -> bool:
        """Whether Q_T is fitted behind this step; a fit waits until something was looked at."""
        if self.stays or self._meter is None:
            return False
        freeze_at, every = self._options.freeze_at, self._options.refit_every
        frozen = freeze_at is not None and step >= freeze_at
        return self.last_fit < 0 or frozen or (step + 1) // every > (self.last_fit + 1) // every

    def fit(self, step: int, model: str | None) -> SubspaceSet:
        """Fit Q_T behind a step; what follows adds to it in the early phase, or begins anew."""
        assert self._meter is not None
        fitted = self._meter.fit(self._options.rank, self._options.method, model=model)
        self.last_fit = step
        if self.stays or self._options.kind == "follow":
            self._meter = None
        return fitted

    def _new_meter(self) -> ActivationMeter:
        return ActivationMeter(self._weights, positions=self._mask.rule, centering="group")
