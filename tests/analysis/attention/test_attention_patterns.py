"""Patterns from some of the terms: against a softmax written out, and where the answer is known."""

from __future__ import annotations

import math

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.hooks.helpers import IDS, MODELS, build
from tl_tangent.analysis.attention.patterns import TERM_SETS, divergences
from tl_tangent.geometry.score_terms import KEY_CONSTANT, TERMS

FAMILIES = pytest.mark.parametrize("spec", MODELS, ids=IDS)


def some_subspace(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(model.cfg.d_model, 3, generator=generator, dtype=torch.float64)
    mean = torch.randn(model.cfg.d_model, generator=generator, dtype=torch.float64)
    return tt.TangentSubspace(basis, mean, orthonormalize=True)


@FAMILIES
def test_against_a_softmax_of_the_maps(spec):
    model, tokens = build(spec, torch.float64), families.tiny_tokens()
    subspace = some_subspace(model)
    found = tt.attention_pattern_divergence(model, tokens, subspace, 1, space="input")
    split = tt.split_attention_scores(model, tokens, 1, subspace, space="input")
    frame = found.to_dataframe().set_index(["terms", "head"])
    mask = ~split.seen[:, None]
    real = split.scores
    if not split.scores_are_pattern:
        real = real.masked_fill(mask, -torch.inf).softmax(-1)
    asked = torch.ones_like(split.seen[..., 0])
    asked[:, 0] = False  # position 0 is left out
    asked &= split.seen.sum(-1) > 1
    for name, terms in TERM_SETS.items():
        scores = split.sum_of(*terms)
        if split.cap is not None:
            scores = split.cap * torch.tanh(scores / split.cap)
        if "position" in split.terms:
            scores = scores + split.terms["position"]
        other = scores.masked_fill(mask, -torch.inf).softmax(-1)
        ratio = torch.where(mask | (real == 0), 0.0, real * (real / other).log())
        kl = ratio.sum(-1).transpose(0, 1)[:, asked].mean(-1)
        distance = (real - other).abs().sum(-1).transpose(0, 1)[:, asked].mean(-1) / 2
        for head in range(model.cfg.n_heads):
            row = frame.loc[(name, head)]
            assert row["kl"] == pytest.approx(float(kl[head]), rel=1e-5, abs=1e-9)
            assert row["total_variation"] == pytest.approx(float(distance[head]), abs=1e-6)


@FAMILIES
def test_all_terms_give_the_real_pattern(spec):
    model, tokens = build(spec, torch.float64), families.tiny_tokens()
    found = tt.attention_pattern_divergence(
        model, tokens, some_subspace(model), term_sets={"all": TERMS}, space="residual", layers=[0]
    )
    frame = found.to_dataframe()
    assert float(frame[frame["terms"] == "all"]["kl"].abs().max()) < 1e-10
    assert float(frame[frame["terms"] == "uniform"]["kl"].min()) > 1e-3


def test_what_the_softmax_can_not_see():
    """Terms that are the same at every key change nothing, and under rotary positions they do."""
    tokens = families.tiny_tokens()
    unrotated, rotated = (
        tt.attention_pattern_divergence(
            model, tokens, some_subspace(model), term_sets={"rest": rest()}, space="input"
        ).to_dataframe()
        for model in (families.bridge("gpt2", dtype=torch.float64),
                      families.bridge("llama", dtype=torch.float64))
    )  # fmt: skip
    assert float(unrotated[unrotated["terms"] == "rest"]["kl"].abs().max()) < 1e-12
    assert float(rotated[rotated["terms"] == "rest"]["kl"].min()) > 1e-4


def rest():
    return [name for name in TERMS if name not in KEY_CONSTANT]


def test_a_pattern_that_knows_nothing():
    """Of n keys, the divergence of a one-hot pattern from a uniform one is log n."""
    n = 8
    one_hot = torch.full((1, 1, 1, n), -1e4, dtype=torch.float64).index_fill(
        -1, torch.tensor([3]), 0.0
    )
    uniform = torch.full_like(one_hot, -math.log(n))
    seen, asking = torch.ones(1, 1, n, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)
    kl, distance = divergences(one_hot, uniform, seen, asking)[:, 0]
    assert float(kl) == pytest.approx(math.log(n))
    assert float(distance) == pytest.approx(1 - 1 / n)


def test_batches_are_averaged_and_controls_stand_beside():
    model = families.bridge("llama", dtype=torch.float64)
    tokens, subspace = families.tiny_tokens(batch=4), some_subspace(model)
    options = {"space": "input", "n_controls": 2, "layers": [1]}
    whole = tt.attention_pattern_divergence(model, tokens, subspace, **options).to_dataframe()
    parts = tt.attention_pattern_divergence(
        model, tokens.split(1), subspace, **options
    ).to_dataframe()
    columns = ["kl", "total_variation", "control_kl_mean", "control_kl_min", "control_kl_max"]
    torch.testing.assert_close(
        torch.tensor(whole[columns].to_numpy()),
        torch.tensor(parts[columns].to_numpy()),
        equal_nan=True,
    )
    known = whole[whole["terms"] != "uniform"]
    assert (known["control_kl_min"] <= known["control_kl_max"]).all()
    assert known["control_kl_mean"].notna().all()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"term_sets": {"uniform": ["tangent"]}},
            tt.TangentValueError,
            "stands beside them anyway",
        ),
        ({"term_sets": {"mine": ["tangents"]}}, tt.TangentKeyError, "'tangents' is not a term"),
        ({"positions": [0]}, tt.TangentValueError, "no query with 2 keys or more"),
    ],
)
def test_what_can_not_be_is_refused(options, error, says):
    model = build(MODELS[0], torch.float64)
    with pytest.raises(error, match=says):
        tt.attention_pattern_divergence(
            model, families.tiny_tokens(), some_subspace(model), space="input", **options
        )
