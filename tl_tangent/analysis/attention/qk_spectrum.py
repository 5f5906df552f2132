"""What the query-key form M of each head does inside of Q_T: its spectrum there, from weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.analysis.attention.conventions import SPACES
from tl_tangent.analysis.attention.shares import controls_of
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import TangentSubspace
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.linalg import one_thread
from tl_tangent.hooks.attention import rotary
from tl_tangent.hooks.attention.choose import Chosen, choose
from tl_tangent.hooks.attention.circuit import Projection
from tl_tangent.hooks.attention.norms import FrozenNorm
from tl_tangent.hooks.attention.observe import Observed
from tl_tangent.hooks.attention.pass_over import Pass, pass_over
from tl_tangent.hooks.attention.split import Space, source_of

if TYPE_CHECKING:
    import pandas as pd

MEANING = {
    "M": (
        "scale * L W_Q R (L W_K)^T, so that x_i^T M x_j is the bilinear part of a score; L the "
        "norm's gain and centring in residual space and the identity in input space, R the "
        "rotation between a key and a query `offset` positions after it; gains of the norms of "
        "queries and keys are in W_Q and W_K"
    ),
    "left_out": "biases, soft caps, and the frozen scales of all norms, which differ by token",
    "share": "||Q^T M Q||_F^2 / ||M||_F^2",
    "expected_share": (
        "its mean over uniformly random subspaces of the rank, exact: a + b (tr M^2 + (tr M)^2) / "
        "||M||_F^2 with a = r (r (d + 1) - 2) / (d (d - 1) (d + 2)), b = r (d - r) / (d (d - 1) "
        "(d + 2)). Near (r / d)^2 only where M has little trace; one subspace on both sides meets "
        "more of an M that compares a token with itself"
    ),
    "controls": "matched random normals: random subspaces of the rank, orthogonal to Q_T",
    "singular_values": "of Q^T M Q, descending; restricted_top is the largest",
    "top_singular_value": "the largest of M, to which no subspace is restricted",
    "norm": "||M||_F",
}


def qk_spectrum(
    model: Any,
    subspaces: Any,
    layers: int | Iterable[int] | None = None,
    *,
    offset: int = 0,
    n_controls: int = 5,
    space: Space | None = None,
    seed: int = 0,
    any_model: bool = False,
) -> QKSpectrum:
    """Restrict each head's query-key form M to Q_T on both sides: the M of ``v^T M v``.

    All comes from the weights, in float64; M itself is never formed. What M is, and which share of
    it random subspaces would hold, is told in the result's ``conventions["meaning"]``. One pass
    over ``offset + 1`` placeholder tokens shows the angles of a rotation, and whether the norm of
    the block is in front of its attention; nothing else depends on it.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        subspaces: a set with a subspace for each layer, or one subspace for all of them; with one
            basis, or one a query head.
        layers: which; by default all that there is a subspace for.
        offset: how many positions the key is before the query; 0 for no rotation between them.
        n_controls: how many matched random normals each subspace is compared with.
        space, any_model: see :func:`split_attention_scores`.
        seed: of the controls; each layer draws from a seed of its own.

    Raises:
        TangentKeyError, TangentValueError, TangentRuntimeError: see
            :func:`split_attention_scores`; an offset that is negative or beyond the model's
            positions, a negative number of controls, or ``2 * rank > d`` where a control is asked
            for.
    """
    if n_controls < 0:
        raise TangentValueError(f"n_controls is {n_controls}; it must be 0 or more.")
    chosen = choose(model, subspaces, layers, space=space, any_model=any_model)
    shown = _shown(model, chosen, offset)
    found = {}
    with torch.no_grad(), one_thread():
        for one in chosen:
            form = _form(one, shown[one.layer], offset)
            drawn = [control.subspace for control in controls_of(one, n_controls, seed)]
            made = _conventions(model, one, offset, n_controls, seed)
            found[one.layer] = _spectrum(form, one, drawn, made)
    return QKSpectrum(tuple(found[layer] for layer in sorted(found)))


@dataclass(frozen=True)
class _Form:
    """``M = A B^T`` of each query head, in float64; heads of one group share B."""

    query: Float[Tensor, "head d_model d_head"]
    key: Float[Tensor, "kv_head d_model d_head"]

    @property
    def _group(self) -> int:
        return self.query.shape[0] // self.key.shape[0]

    def singular_values(self) -> Float[Tensor, "head d_head"]:
        """All of M's, descending: those of ``R_A R_B^T`` from the QR factors of A and B."""
        query, key = (torch.linalg.qr(x, mode="r").R for x in (self.query, self.key))
        return torch.linalg.svdvals(query @ key.repeat_interleave(self._group, 0).mT)

    def restricted(self, subspace: TangentSubspace) -> Float[Tensor, "head rank rank"]:
        """Return ``Q^T M Q``."""
        basis, _ = subspace.on(self.query.device, torch.float64)
        key = self.key
        if subspace.heads is not None:
            key = key.repeat_interleave(self._group, 0)
        seen = basis.mT @ key
        return (basis.mT @ self.query) @ seen.repeat_interleave(len(self.query) // len(seen), 0).mT

    def random_share(self, rank: int) -> Float[Tensor, " head"]:
        """Return the mean of ``||Q^T M Q||_F^2 / ||M||_F^2`` over Haar subspaces.

        With P the projector, ``E[P_ij P_kl] = a d_ij d_kl + b (d_ik d_jl + d_il d_jk)``, whose a
        and b follow from ``tr P = tr P^2 = r``; contracted in ``tr(P M P M^T)``.
        """
        d = self.query.shape[1]
        inner = self.key.repeat_interleave(self._group, 0).mT @ self.query  # tr M^n = tr inner^n
        trace, trace_of_square = _trace(inner), _trace(inner @ inner)
        whole = d * (d - 1) * (d + 2)
        a, b = rank * (rank * (d + 1) - 2) / whole, rank * (d - rank) / whole
        return a + b * (trace_of_square + trace.square()) / self.singular_values().square().sum(-1)


def _trace(matrix: Float[Tensor, "head n n"]) -> Float[Tensor, " head"]:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


@dataclass(frozen=True)
class _Shown:
    """What a pass shows of a layer: its rotation, and the norm between Q_T and W_Q, W_K."""

    rotation: rotary.Rotation | None
    norm: FrozenNorm | None


def _shown(model: Any, chosen: list[Chosen], offset: int) -> dict[int, _Shown]:
    """Run the model on placeholder tokens.

    Raises:
        TangentValueError: positions that the model does not have.
    """
    last = getattr(model.cfg, "n_ctx", offset + 1) - 1
    if not 0 <= offset <= last:
        raise TangentValueError(
            f"offset={offset}: a key is 0 to {last} positions before its query in this model."
        )
    by_layer, found = {one.layer: one for one in chosen}, {}

    def receive(observed: Observed, about: Pass) -> None:
        one, rotation = by_layer[observed.layer], observed.rotate
        assert rotation is None or isinstance(rotation, rotary.Rotation)
        found[one.layer] = _Shown(rotation, source_of(one.circuit, observed, one.space).norm)

    device = next(model.parameters()).device
    tokens = torch.ones(1, offset + 1, dtype=torch.long, device=device)
    pass_over(model, {"input": tokens, "attention_mask": tokens}, sorted(by_layer), receive)
    return found


def _form(chosen: Chosen, shown: _Shown, offset: int) -> _Form:
    """Put scale, norms and rotation into the weights."""
    circuit = chosen.circuit
    query, key = (_weight(one, shown.norm) for one in (circuit.query, circuit.key))
    query, key = _turned(query, shown.rotation, offset), _turned(key, shown.rotation, 0)
    return _Form(query * circuit.scale, key)


def _weight(
    projection: Projection, in_front: FrozenNorm | None
) -> Float[Tensor, "head d_model d_head"]:
    """Return ``L W G``: the norm in front, the projection, and the gain of the norm behind it."""
    weight = projection.weight.double()
    if in_front is not None:
        weight = _behind(in_front, weight)
    norm = projection.norm
    if norm is None:
        return weight
    if projection.norm_over_heads:
        flat = norm.linear(weight.permute(1, 0, 2).flatten(1))
        return flat.unflatten(-1, (projection.heads, -1)).permute(1, 0, 2)
    if norm.gain is not None and norm.gain.ndim == 2:  # a gain a head
        norm = replace(norm, gain=norm.gain[:, None])
    return norm.linear(weight)


def _behind(norm: FrozenNorm, weight: Tensor) -> Float[Tensor, "head d_model d_head"]:
    """Return the map ``x -> norm.linear(x) W`` as a matrix: C diag(gain) W, C symmetric."""
    if norm.gain is not None:
        weight = norm.gain[:, None] * weight
    return weight - weight.mean(-2, keepdim=True) if norm.centred else weight


def _turned(
    weight: Tensor, rotation: rotary.Rotation | None, position: int
) -> Float[Tensor, "head d_model d_head"]:
    if rotation is None:
        return weight
    cos, sin = (x[:, :, [position]].double() for x in (rotation.cos, rotation.sin))
    return replace(rotation, cos=cos, sin=sin)(weight[None])[0]


def _conventions(
    model: Any, chosen: Chosen, offset: int, n_controls: int, seed: int
) -> dict[str, Any]:
    return {
        "model": getattr(model.cfg, "model_name", None),
        "attention": chosen.circuit.kind,
        "layer": chosen.layer,
        "site": chosen.subspace.site,
        "space": chosen.space,
        "rank": chosen.subspace.rank,
        "method": chosen.subspace.method,
        "per_head": chosen.subspace.heads is not None,
        "scale": chosen.circuit.scale,
        "offset": offset,
        "n_controls": n_controls,
        "seed": seed,
        "meaning": {"space": SPACES[chosen.space], **MEANING},
    }


def _spectrum(
    form: _Form, chosen: Chosen, controls: list[TangentSubspace], made: Mapping[str, Any]
) -> LayerSpectrum:
    own = form.singular_values()
    size = own.square().sum(-1)
    drawn = [form.restricted(one).square().sum((-2, -1)) / size for one in controls]
    restricted = form.restricted(chosen.subspace)
    return LayerSpectrum(
        layer=chosen.layer,
        singular_values=torch.linalg.svdvals(restricted),
        full_singular_values=own,
        share=restricted.square().sum((-2, -1)) / size,
        expected_share=form.random_share(chosen.subspace.rank),
        control_shares=torch.stack(drawn) if drawn else own.new_empty(0, len(own)),
        conventions=made,
    )


@dataclass(frozen=True, eq=False)
class LayerSpectrum:
    """The spectra of one layer's heads, in float64.

    Attributes:
        layer: its number.
        singular_values: of ``Q^T M Q``, descending.
        full_singular_values: of M, descending.
        share: of the square of M's Frobenius norm that is inside of Q_T on both sides.
        expected_share: its mean over random subspaces.
        control_shares: that of each matched random normal.
        conventions: how the numbers came about.
    """

    layer: int
    singular_values: Float[Tensor, "head rank"]
    full_singular_values: Float[Tensor, "head d_head"]
    share: Float[Tensor, " head"]
    expected_share: Float[Tensor, " head"]
    control_shares: Float[Tensor, "control head"]
    conventions: Mapping[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a head."""
        columns = {"share": self.share, "expected_share": self.expected_share}
        if len(self.control_shares):
            columns |= {
                "control_share_mean": self.control_shares.mean(0),
                "control_share_min": self.control_shares.amin(0),
                "control_share_max": self.control_shares.amax(0),
            }
        columns |= {
            "norm": self.full_singular_values.square().sum(-1).sqrt(),
            "top_singular_value": self.full_singular_values[:, 0],
            "restricted_top": self.singular_values[:, 0],
        }
        return [
            {"layer": self.layer, "head": head, **{k: float(x[head]) for k, x in columns.items()}}
            for head in range(len(self.share))
        ]


@dataclass(frozen=True, eq=False, repr=False)
class QKSpectrum:
    """What each head's query-key form does inside of Q_T, by layer and head.

    Attributes:
        layers: one entry a layer, ascending.
    """

    layers: tuple[LayerSpectrum, ...]

    @property
    def singular_values(self) -> dict[int, Float[Tensor, "head rank"]]:
        """Singular values of ``Q^T M Q``, descending, by layer."""
        return {one.layer: one.singular_values for one in self.layers}

    @property
    def conventions(self) -> dict[int, Mapping[str, Any]]:
        """How the numbers of each layer came about."""
        return {one.layer: one.conventions for one in self.layers}

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a layer and head; singular values and ``norm``, M's Frobenius norm, are in
        scores a squared unit of the activations.
        """
        import pandas as pd

        return pd.DataFrame([row for one in self.layers for row in one.rows()])

    def headline(self) -> str:
        """State the share of M inside of Q_T, beside that of random subspaces."""
        frame = self.to_dataframe()
        made = self.layers[0].conventions
        control = ""
        if "control_share_mean" in frame:
            control = f", matched random subspaces {frame['control_share_mean'].mean():.3%}"
        best = frame.loc[frame["share"].idxmax()]
        return (
            f"Of ||M||^2, Q_T (rank {made['rank']}, {made['space']} space) holds "
            f"{frame['share'].mean():.3%} on both sides (a random subspace "
            f"{frame['expected_share'].mean():.3%}{control}), mean over {len(frame)} heads of "
            f"{len(self.layers)} layers; most at layer {int(best['layer'])}, head "
            f"{int(best['head'])}: {best['share']:.2%}."
        )

    def __repr__(self) -> str:
        return f"QKSpectrum({len(self.layers)} layers): {self.headline()}"

    def _repr_html_(self) -> str:
        frame = self.to_dataframe().groupby("layer").mean().drop(columns="head").reset_index()
        rows = [
            {str(k): v if k == "layer" else f"{v:.4g}" for k, v in row.items()}
            for row in frame.to_dict("records")
        ]
        return html_table(rows, self.headline())
