"""The loss without terms: against runs by hand, and where nothing can change."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tl_tangent.analysis.attention.shares import controls_of
from tl_tangent.hooks.attention.choose import choose


def model_and_subspaces(family="llama"):
    model = families.bridge(family, dtype=torch.float64)
    tokens = families.tiny_tokens(batch=3)
    return model, tt.fit_subspaces(model, tokens, "blocks.*.attn.hook_in", rank=3)


def cross_entropy(model, tokens):
    logits = model(tokens)
    predicted = logits[:, :-1].log_softmax(-1)
    return float(-predicted.gather(-1, tokens[:, 1:, None]).mean())


@torch.no_grad()
def test_against_runs_by_hand():
    model, subspaces = model_and_subspaces()
    tokens = families.tiny_tokens(batch=2, seed=1)
    found = tt.attention_term_losses(
        model, tokens, subspaces, drop={"mine": ["cross", "mean_mean"]}, n_controls=2,
        progress=False,
    )  # fmt: skip
    assert [row["layer"] for row in found.rows] == [0, 1]
    baseline = cross_entropy(model, tokens)
    for row, one in zip(found.rows, choose(model, subspaces), strict=True):
        controls = [c.subspace for c in controls_of(one, 2, 0)]
        losses = []
        for subspace in (one.subspace, *controls):
            options = {"drop": ["cross", "mean_mean"], "layers": one.layer, "space": "input"}
            with tt.attention_terms(model, subspace, **options):
                losses.append(cross_entropy(model, tokens))
        assert row["loss"] == pytest.approx(baseline, abs=1e-9)
        assert row["loss_dropped"] == pytest.approx(losses[0], abs=1e-9)
        assert row["increase"] == pytest.approx(losses[0] - baseline, abs=1e-9)
        assert row["control_increase_min"] == pytest.approx(min(losses[1:]) - baseline, abs=1e-9)
        assert row["control_increase_max"] == pytest.approx(max(losses[1:]) - baseline, abs=1e-9)


def test_what_does_not_depend_on_the_subspace_costs_the_control_as_much():
    """The mean is that of the subspace in its controls too: terms with it do not know Q."""
    model, subspaces = model_and_subspaces()
    tokens = families.tiny_tokens(batch=2, seed=1)
    found = tt.attention_term_losses(
        model, tokens, subspaces, n_controls=2, progress=False,
        drop={"linear": "linear", "bilinear": ["tangent", "cross", "normal"]},
    ).to_dataframe()  # fmt: skip
    assert (found["increase"].abs() > 1e-5).all()
    for edge in ("min", "max"):
        difference = found["increase"] - found[f"control_increase_{edge}"]
        assert float(difference.abs().max()) < 1e-9


def test_what_the_softmax_can_not_see_costs_nothing():
    model, subspaces = model_and_subspaces("gpt2")
    tokens = families.tiny_tokens(batch=2, seed=1)
    drop = {"unseen": ["mean_mean", "tangent_mean", "normal_mean"], "seen": ["mean_tangent"]}
    found = tt.attention_term_losses(
        model, tokens, subspaces, drop=drop, n_controls=1, positions="all", progress=False
    ).to_dataframe()
    by_set = found.groupby("dropped")["increase"].apply(lambda x: float(x.abs().max()))
    assert by_set["unseen"] < 1e-9 < by_set["seen"]


def test_what_can_not_be_is_refused():
    model, subspaces = model_and_subspaces()
    with pytest.raises(tt.TangentValueError, match="n_controls is 0"):
        tt.attention_term_losses(model, families.tiny_tokens(), subspaces, n_controls=0)
    encoder = families.bridge("bert", dtype=torch.float64)
    with pytest.raises(tt.TangentValueError, match="reads ahead"):
        tt.attention_term_losses(
            encoder, families.tiny_tokens(), subspaces, space="input", progress=False
        )
