"""Which tokens the directions of Q_T write to the logits: the logit lens of a subspace."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.subspace_io import package_versions
from tl_tangent.hooks.numbers import whole

if TYPE_CHECKING:
    import pandas as pd

SIGNS = {"+": 1.0, "-": -1.0}
STEP = 1e-2  # of the point that the final norm is asked at: its square is the error
MEANING = {
    "score": "logits, around their mean over the vocabulary, of one unit of the direction times "
    "the root mean square of the stream: what the final norm and W_U make of it at any point at "
    "right angles to it; without a soft cap",
    "control_mean": "the score of the top token of a random direction outside of Q_T, either sign, "
    "mean over controls",
    "control_max": "the largest of those",
    "p_value": "(1 + #{top scores of controls >= score}) / (1 + 2 n_controls)",
}


def tangent_tokens(
    model: Any,
    subspaces: TangentSubspace | Mapping[str, TangentSubspace],
    *,
    k: int = 10,
    n_controls: int = 20,
    seed: int = 0,
) -> TangentTokens:
    """Read each direction of Q_T through the final norm and the unembedding, in both signs.

    A token's score says what the direction would write if nothing came after it; what the layers
    between do to it, :func:`tl_tangent.transfer_gains` tells.

    Args:
        model: a HookedTransformer or a TransformerBridge with an unembedding.
        subspaces: of the residual stream: one, or several by site.
        k: tokens a direction and sign.
        n_controls: B, random directions at right angles to Q_T.
        seed: of those.

    Raises:
        TangentValueError: a subspace with heads or of another width than the stream; no final norm
            or unembedding; numbers out of range.
    """
    k, n_controls = whole("k", k, at_least=1), whole("n_controls", n_controls, at_least=1)
    named = _named(subspaces)
    _check(model, named)
    found = {}
    for site, subspace in named.items():
        normals = SubspaceSet({site: subspace.truncate(1)}).random_normals(n_controls, seed)
        control = torch.cat([_outside(one[site].basis[:, :1], subspace) for one in normals], dim=1)
        scores = _scores(model, subspace.basis)
        found[site] = DirectionTokens.of(scores, _scores(model, control), k)
    conventions = {
        "model": getattr(model.cfg, "model_name", None),
        "model_class": type(model).__name__,
        "k": k,
        "n_controls": n_controls,
        "seed": seed,
        "meaning": dict(MEANING),
        "versions": {**package_versions(), "python": sys.version.split()[0]},
    }
    return TangentTokens(found, getattr(model, "tokenizer", None), conventions)


def _named(
    subspaces: TangentSubspace | Mapping[str, TangentSubspace],
) -> dict[str, TangentSubspace]:
    if isinstance(subspaces, TangentSubspace):
        return {subspaces.site or "Q_T": subspaces}
    return {site: subspaces[site] for site in subspaces}


def _check(model: Any, named: Mapping[str, TangentSubspace]) -> None:
    missing = [name for name in ("ln_final", "W_U") if getattr(model, name, None) is None]
    if missing:
        raise TangentValueError(
            f"{type(model).__name__} has no {missing[0]}, so its directions have no logits; give a "
            "causal language model"
        )
    if not named:
        raise TangentValueError("there is no subspace: give one, or several by site")
    width = model.W_U.shape[0]
    for site, subspace in named.items():
        if subspace.heads is not None or subspace.d != width:
            raise TangentValueError(
                f"the subspace at {site} is {subspace!r}, and the residual stream is {width} wide: "
                "only directions of the stream have logits"
            )


def _outside(direction: Float[Tensor, "d 1"], subspace: TangentSubspace) -> Float[Tensor, "d 1"]:
    basis = subspace.basis
    left = direction - basis @ (basis.mT @ direction)
    return left / left.norm()


@torch.no_grad()
def _scores(model: Any, directions: Float[Tensor, "d n"]) -> Float[Tensor, "n vocabulary"]:
    """What the final norm and W_U make of each direction, around the mean over the vocabulary.

    At a centred point at right angles to a direction the norm divides both sides of it by the same
    number, so that half the difference is the direction times the norm's weights, whatever these
    are and however they are kept.
    """
    weights = model.W_U.detach()
    rows = directions.mT.to(weights)
    n, d = rows.shape
    point = torch.randn(n, d, generator=torch.Generator().manual_seed(0)).to(weights)
    point = point - (point * rows).sum(1, keepdim=True) * rows
    ones = torch.ones_like(rows) - rows.sum(1, keepdim=True) * rows  # at right angles to it too
    ones = ones / ones.norm(dim=1, keepdim=True)
    point = point - (point * ones).sum(1, keepdim=True) * ones
    point = point / point.square().mean(1, keepdim=True).sqrt()
    step = STEP * d**0.5
    ahead, behind = (model.ln_final((point + sign * step * rows)[None])[0] for sign in (1, -1))
    written = (ahead - behind).double() / (2 * step)
    scores = written @ weights.double()
    return (scores - scores.mean(1, keepdim=True)).cpu()


@dataclass(frozen=True, eq=False, repr=False)
class DirectionTokens:
    """The top tokens of every direction of one subspace.

    Attributes:
        tokens, scores: in both signs, + first.
        controls: the top score of each random direction, in both signs.
    """

    tokens: Int[Tensor, "direction sign k"]
    scores: Float[Tensor, "direction sign k"]
    controls: Float[Tensor, " control"]

    @classmethod
    def of(
        cls,
        scores: Float[Tensor, "direction vocabulary"],
        controls: Float[Tensor, "control vocabulary"],
        k: int,
    ) -> DirectionTokens:
        both = torch.stack([sign * scores for sign in SIGNS.values()], dim=1)
        top = both.topk(min(k, both.shape[-1]), dim=-1)
        beside = torch.cat([sign * controls for sign in SIGNS.values()]).amax(-1)
        return cls(top.indices, top.values, beside)


@dataclass(frozen=True, eq=False, repr=False)
class TangentTokens:
    """Top tokens of the directions of some subspaces.

    Attributes:
        found: by site.
        tokenizer: that names tokens; None for ids alone.
        conventions: how the numbers came about, JSON-able; ``meaning`` has the columns.
    """

    found: Mapping[str, DirectionTokens]
    tokenizer: Any
    conventions: Mapping[str, Any]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a site, direction, sign and token."""
        import pandas as pd

        return pd.DataFrame(
            [row for site, one in self.found.items() for row in self._rows(site, one)]
        )

    def _rows(self, site: str, one: DirectionTokens) -> list[dict[str, Any]]:
        rows = []
        beside = {
            "control_mean": float(one.controls.mean()),
            "control_max": float(one.controls.max()),
        }
        for direction in range(len(one.tokens)):
            for at, sign in enumerate(SIGNS):
                pairs = zip(
                    one.tokens[direction, at].tolist(),
                    one.scores[direction, at].tolist(),
                    strict=True,
                )
                for place, (token, score) in enumerate(pairs):
                    beyond = int((one.controls >= score).sum())
                    rows.append(
                        {
                            "site": site,
                            "direction": direction,
                            "sign": sign,
                            "place": place,
                            "token_id": token,
                            "token": self._text(token),
                            "score": score,
                            **beside,
                            "p_value": (1 + beyond) / (1 + len(one.controls)),
                        }
                    )
        return rows

    def _text(self, token: int) -> str:
        return str(token) if self.tokenizer is None else self.tokenizer.decode([token])

    def headline(self) -> str:
        """State how far the top scores are from those of random directions."""
        first = self.to_dataframe().query("place == 0")
        beyond = int((first["score"] > first["control_max"]).sum())
        return (
            f"Of {len(first)} directions and signs at {len(self.found)} sites {beyond} write a top "
            f"token with more than any of {self.conventions['n_controls']} random directions; the "
            f"median top score is {first['score'].median():.3g} (random: "
            f"{first['control_mean'].mean():.3g})."
        )

    def _words(self) -> list[dict[str, str]]:
        """A row a direction: its tokens in both signs."""
        frame = self.to_dataframe()
        rows = []
        for (site, direction), part in frame.groupby(["site", "direction"], sort=False):
            told = {"site": str(site), "direction": str(direction)}
            for sign in SIGNS:
                told[sign] = " ".join(repr(token) for token in part[part["sign"] == sign]["token"])
            rows.append(told)
        return rows

    def __repr__(self) -> str:
        lines = [
            f"  {row['site']} {row['direction']}  + {row['+']}\n    - {row['-']}"
            for row in self._words()
        ]
        return "\n".join([f"TangentTokens: {self.headline()}", *lines])

    def _repr_html_(self) -> str:
        return html_table(self._words(), self.headline())
