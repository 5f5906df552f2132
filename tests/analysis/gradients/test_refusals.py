"""What can't be measured is refused, and the message says what, and what to do."""

from __future__ import annotations

import pytest
import torch

import tl_tangent as tt
from tests import families
from tests.analysis.gradients.cases import (
    RANK,
    B,
    batches,
    build,
    fresh,
    llama,
    loss_of,
    measure,
    measured,
    random_subspace,
)
from tl_tangent.analysis.gradients.meter import GradientMeter
from tl_tangent.hooks.gradients.find import find_weights

D = families.D_MODEL
SITE = "blocks.1.mlp.hook_in"


def refused(told: str, *args, error=tt.TangentValueError, **options) -> None:
    with pytest.raises(error, match=told):
        measure(*args, **options)


# Subspaces ------------------------------------------------------------------------------------


def with_one(subspace: tt.TangentSubspace) -> dict[str, tt.TangentSubspace]:
    return dict(measured().subspaces) | {SITE: subspace}


def test_a_site_without_a_subspace():
    some = {site: q for site, q in measured().subspaces.items() if site != SITE}
    told = rf"blocks\.1\.mlp\.W_(gate|in) is compared at {SITE}, where there is no subspace"
    refused(told, None, batches(), some, error=tt.TangentKeyError)
    kinds = ("q", "k", "v", "o", "out", "embed", "unembed")
    assert measure(None, batches(), some, kinds=kinds).statistics.labels
    refused("there are none", None, batches(), {}, error=tt.TangentKeyError)


def test_a_subspace_of_another_width():
    told = (
        rf"blocks\.1\.mlp\.W_\w+ has {D} directions on its input side, and the subspace at {SITE}"
    )
    refused(told, None, batches(), with_one(random_subspace(D + 1)))


def test_a_subspace_with_heads():
    basis = torch.linalg.qr(torch.randn(4, 8, 2, generator=torch.Generator().manual_seed(0)))[0]
    refused("Fit one subspace of that width", None, batches(), with_one(tt.TangentSubspace(basis)))


def test_no_room_for_controls():
    told = rf"2 \* rank <= d, but 2 \* {D // 2 + 1} > {D}: truncate Q_T to rank {D // 2}"
    refused(told, None, batches(), with_one(random_subspace(D, D // 2 + 1)))
    refused(told, rank=D // 2 + 1, data=batches(4))
    frame = measure(data=batches(4), rank=D // 2 + 1, n_controls=0).to_dataframe()
    assert frame["energy_ratio_exact"].notna().all()  # no controls need no room


def test_a_rank_that_the_data_can_not_give():
    refused("rank", data=batches(1, batch=1, pos=4), rank=8)


# Weights --------------------------------------------------------------------------------------


def test_frozen_weights():
    model = fresh("hf", "llama")
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.requires_grad_(False)
    told = r"2 weights are frozen \(requires_grad=False\), first blocks\.0\.mlp\.W_in: thaw them"
    refused(told, model)
    assert len(measure(model, kinds=("q", "gate")).statistics.labels) == 4
    model.requires_grad_(False)
    refused("16 weights are frozen", model)


def test_kinds_and_layers_that_are_not_there():
    refused(r"kinds \['pos'\] are not in this model", kinds=("pos",))
    refused(r"layers \[5\] are not in this model of 2 layers", layers=[0, 5])


def test_folded_norms():
    refused("norms of this model are folded", families.bridge("llama", compat=True))


def test_a_weight_that_takes_no_part_in_the_loss():
    told = r"blocks\.1\.attn\.W_Q has no gradient.*takes part in the loss"

    def objective(model, batch):
        return model.model.layers[0](
            model.model.embed_tokens(batch.tokens),
            position_embeddings=model.model.rotary_emb(torch.zeros(1), torch.arange(9)[None]),
        ).mean()

    refused(
        told,
        kinds=("q",),
        objective=objective,
        error=tt.TangentRuntimeError,
        nulls=False,
    )


# Losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nulls", [True, False])
def test_a_loss_or_gradient_that_is_not_finite(nulls):
    def loss_is_nan(model, batch):
        return loss_of(model, batch.tokens) * torch.nan

    def gradient_is_nan(model, batch):
        loss = loss_of(model, batch.tokens)
        return loss + 0 * (loss - loss.detach()).sqrt()  # the root's slope at 0 is infinite

    options = {"error": tt.TangentRuntimeError, "nulls": nulls}
    refused("the loss of a batch is nan: look at its tokens", objective=loss_is_nan, **options)
    told = r"the gradient of embed\.W_E is not finite: its squared norm is nan\. Lower the loss"
    refused(told, objective=gradient_is_nan, **options)


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (lambda model, batch: 1.0, "this one float: return the mean loss"),
        (
            lambda model, batch: model(batch.tokens).logits,
            r"this one a tensor \[2, 9, 64\]: return",
        ),
        (
            lambda model, batch: loss_of(model, batch.tokens).detach(),
            r"this one a tensor \[\] without a graph",
        ),
        ("next", "objective 'next' is not 'causal', 'masked' or a callable"),
        ("masked", "a masked objective needs labels"),
    ],
)
def test_objectives_that_are_none(objective, told):
    refused(told, objective=objective)


def test_no_batches_and_no_tokens():
    with pytest.raises(tt.TangentValueError, match="there are no batches"):
        tt_gradient_energy([])
    with pytest.raises(tt.TangentValueError, match=r"got \[9\]"):
        tt_gradient_energy([batches(1)[0][0]])
    with pytest.raises(tt.TangentValueError, match="nothing is predicted"):
        tt_gradient_energy([batches(1, pos=1)[0]], subspaces=measured().subspaces)


def tt_gradient_energy(data, **options):
    from tl_tangent.analysis.gradients.gradient_energy import gradient_energy

    return gradient_energy(llama(), data, rank=RANK, n_controls=B, **options)


# Passes ---------------------------------------------------------------------------------------


def test_two_passes_a_batch_have_no_pairing_of_one():
    def twice(model, batch):
        return loss_of(model, batch.tokens) + loss_of(model, batch.tokens.flip(1))

    told = "was passed twice before its gradient was recorded: run one forward and backward pass"
    refused(told, objective=twice, error=tt.TangentRuntimeError)
    result = measure(objective=twice, nulls=False)  # the gradient itself is no less right
    row = [label.name for label in result.statistics.labels].index("blocks.0.mlp.W_in")
    found = result.statistics.totals[row, 0]
    model, expected = llama(), 0.0
    for tokens in batches():
        (loss_of(model, tokens) + loss_of(model, tokens.flip(1))).backward()
        expected += float(model.model.layers[0].mlp.up_proj.weight.grad.square().sum())
        model.zero_grad(set_to_none=True)
    assert float(found) == pytest.approx(expected, rel=1e-9)


def test_a_map_that_is_passed_by_is_noticed():
    """A weight that is used without its module: there is a gradient, and no pair for the nulls."""
    model = fresh("hf", "llama")
    model.model.layers[0].mlp.forward = _functional(model.model.layers[0].mlp)
    told = r"blocks\.0\.mlp\.W_\w+ has a gradient, but no pass through its map was seen"
    refused(told, model, batches(), measured().subspaces, error=tt.TangentRuntimeError)
    assert measure(model, batches(), measured().subspaces, nulls=False).statistics.labels


def _functional(mlp):
    def forward(x):
        gate = torch.nn.functional.silu(x @ mlp.gate_proj.weight.T)
        return (gate * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T

    return forward


def test_a_meter_that_did_not_watch_has_no_nulls():
    model = build("hf", "llama")
    meter = GradientMeter(find_weights(model), measured().subspaces, n_controls=B)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(tt.TangentRuntimeError, match=r"no pass.*inside of watching\(\)"):
        meter.record()
    model.zero_grad(set_to_none=True)


def test_a_table_by_something_else():
    with pytest.raises(tt.TangentValueError, match="by is 'weight', 'kind', 'layer' or 'side'"):
        measured().to_dataframe("head")
