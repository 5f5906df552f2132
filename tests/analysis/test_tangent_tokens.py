"""The logit lens of a subspace against the derivative of the model's own last steps."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests.hooks import helpers
from tl_tangent.analysis.tangent_tokens import DirectionTokens, _scores

EVERY = pytest.mark.parametrize("spec", helpers.MODELS, ids=helpers.IDS)
D = 32


def directions(model, n: int = 4) -> torch.Tensor:
    d = model.W_U.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(d, n, generator=generator))[0]


@EVERY
def test_scores_are_the_derivative_of_the_logits_at_right_angles(spec):
    """At a centred point at right angles, d logits = W_U^T (w * q) / rms, without a soft cap."""
    model = helpers.build(spec)
    basis = directions(model)
    found = _scores(model, basis)
    point = torch.randn(model.W_U.shape[0], generator=torch.Generator().manual_seed(1))
    span = torch.linalg.qr(torch.cat([torch.ones(len(point), 1), basis], dim=1))[0]
    point = point - span @ (span.mT @ point)
    point = point.double().to(model.W_U)
    rms = point.square().mean().sqrt()
    for i in range(basis.shape[1]):
        q, step = basis[:, i].to(model.W_U), 1e-3 * rms
        ahead, behind = (model.ln_final((point + s * step * q)[None, None]) for s in (1, -1))
        wanted = ((ahead - behind)[0, 0] @ model.W_U * rms / (2 * step)).double()
        wanted = wanted - wanted.mean()
        assert float((found[i] - wanted).norm()) < 5e-3 * float(wanted.norm())


def test_both_signs_places_and_p_values():
    scores = torch.tensor([[3.0, -1.0, -2.0], [0.5, 0.25, -0.75]]).double()
    controls = torch.tensor([[1.0, 0.0, -1.0], [0.5, -2.0, 1.5]]).double()
    found = DirectionTokens.of(scores, controls, k=2)
    assert found.tokens.tolist() == [[[0, 1], [2, 1]], [[0, 1], [2, 1]]]
    assert found.scores[0].tolist() == [[3.0, -1.0], [2.0, 1.0]]
    assert sorted(found.controls.tolist()) == [1.0, 1.0, 1.5, 2.0]
    result = tt.TangentTokens({"a": found}, None, {"n_controls": 2})
    frame = result.to_dataframe()
    assert len(frame) == 2 * 2 * 2
    assert frame["p_value"].tolist()[:4] == [1 / 5, 1.0, 2 / 5, 1.0]
    assert "4 directions and signs" in result.headline()
    assert "'0' '1'" in repr(result)


def test_a_direction_of_the_unembedding_writes_its_token():
    model = helpers.build(helpers.MODELS[0])
    token = 7
    weights = model.W_U - model.W_U.mean(1, keepdim=True)
    q = weights[:, token : token + 1] / weights[:, token].norm()
    scale = model.ln_final.w if hasattr(model.ln_final, "w") else None
    if scale is not None:
        q = q / scale[:, None]
    subspace = tt.TangentSubspace(q / q.norm(), site="blocks.0.hook_resid_post")
    frame = tt.tangent_tokens(model, subspace, k=1, n_controls=5).to_dataframe()
    assert frame[frame["sign"] == "+"]["token_id"].tolist() == [token]


def test_what_has_no_logits_is_refused():
    model = helpers.build(helpers.MODELS[0])
    with pytest.raises(tt.TangentValueError, match="residual stream is"):
        tt.tangent_tokens(model, tt.TangentSubspace(torch.eye(3)[:, :1]))
    with pytest.raises(tt.TangentValueError, match="there is no subspace"):
        tt.tangent_tokens(model, {})
    with pytest.raises(tt.TangentValueError, match="k is"):
        tt.tangent_tokens(model, tt.TangentSubspace(directions(model)), k=0)
