"""The few tokens whose activations are so large that they decide every pooled number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Bool, Float
from torch import Tensor

from tl_tangent.analysis.stream.trace_rows import PARTS
from tl_tangent.errors import TangentValueError

if TYPE_CHECKING:
    from tl_tangent.analysis.stream.trace_sums import Ledger

TIMES = 20.0  # the median token's energy; others reach a few times that


def massive_tokens(ledger: Ledger, times: float = TIMES) -> Bool[Tensor, " token"]:
    """Which tokens hold, at some depth, more than ``times`` the energy of the median token.

    Raises:
        TangentValueError: ``times`` is not above 1.
    """
    if not times > 1:
        raise TangentValueError(f"times is {times}; give more than 1 times the median energy.")
    energy = ledger.stream.double().sum(1)
    return (energy > times * energy.median(-1, keepdim=True).values).any(0)


def heaviest(ledger: Ledger) -> str:
    """State how much of a part's energy they carry, at the depth and in the part where it is most;
    nothing where there are none."""
    tokens = massive_tokens(ledger)
    if not bool(tokens.any()):
        return ""
    share = _carried(ledger.stream.double(), tokens)
    depth, part = divmod(int(share.argmax()), len(PARTS))
    return (
        f"{int(tokens.sum())} of {ledger.n_tokens} tokens have massive activations and carry "
        f"{float(share.max()):.0%} of the {PARTS[part]} energy in front of layer {depth}"
    )


def _carried(
    stream: Float[Tensor, "depth part token"], tokens: Bool[Tensor, " token"]
) -> Float[Tensor, "depth part"]:
    return stream[..., tokens].sum(-1) / stream.sum(-1)
