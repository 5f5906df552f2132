"""Whether a subspace comes from a model like the one that it is used on."""

from __future__ import annotations

from typing import Any

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import TangentSubspace
from tl_tangent.hooks.attention.norms import norms_folded


def check_model_name(
    model: Any, subspace: TangentSubspace, *, subject: str = "the subspace"
) -> None:
    """Refuse a subspace of a model of another name, where both are known.

    Raises:
        TangentValueError: naming both models.
    """
    name = getattr(model.cfg, "model_name", None)
    if subspace.model is not None and name not in (None, subspace.model):
        raise TangentValueError(
            f"{subject} was fitted on {subspace.model!r} and this model is {name!r}. If that is "
            "meant, pass any_model=True."
        )


def check_norms_alike(model: Any, subspace: TangentSubspace, *, consequence: str) -> None:
    """Refuse a subspace of folded norms on a model that has them, and the other way round.

    Args:
        model, subspace: the two.
        consequence: what then differs, for the message.

    Raises:
        TangentValueError: saying which of the two is folded.
    """
    folded, here = subspace.metadata.get("norms_folded"), norms_folded(model)
    if None not in (folded, here) and folded != here:
        raise TangentValueError(
            f"the subspace was fitted where the norms' gains are{'' if folded else ' not'} folded "
            f"into the weights, and here they are{'' if here else ' not'}: {consequence}. Fit it "
            "on this model as it is. If it is meant all the same, pass any_model=True."
        )
