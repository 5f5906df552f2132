"""A bridged encoder computes what Hugging Face's own class does, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.hooks.adapters import builders
from tests.hooks.adapters.builders import MASK, N_LAYERS, SETTINGS, Pair

FAMILIES = list(SETTINGS)
PADDINGS = ["none", "ones", "right", "left"]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {family: builders.pair(family) for family in FAMILIES}


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


# Forwards -------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_patterns_and_logits(pairs, family, padding):
    batch, made = builders.padded(padding), pairs[family]
    given = builders.as_hf(family, batch)
    hf = made.hf(**given, output_hidden_states=True, output_attentions=True)
    logits, cache = made.bridge.run_with_cache(**batch)
    assert_same(logits, hf.logits)
    pre_norm = family in builders.PRE_NORM
    last = "ln_final.hook_out" if pre_norm else f"blocks.{N_LAYERS - 1}.hook_resid_post"
    sites = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(N_LAYERS)), last]
    for site, expected in zip(sites, hf.hidden_states, strict=True):
        assert_same(cache[site], expected)
    for layer, expected in enumerate(hf.attentions):
        assert_same(cache[f"blocks.{layer}.attn.hook_pattern"], expected)


@torch.no_grad()
@pytest.mark.parametrize("family", builders.PRE_NORM)
def test_without_biases_as_the_published_models_are(family):
    names = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias", "decoder_bias")
    off = {name: False for name in names if name in builders.SETTINGS[family] or "decoder" in name}
    made = builders.pair(family, **off)
    assert not any("bias" in name for name, _ in made.hf.named_parameters())
    assert_same(made.bridge(builders.tokens()), made.hf(builders.tokens()).logits)


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "ones"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_token_moves_the_first_logits(pairs, family, padding):
    batch, made = builders.padded(padding), pairs[family]
    other = batch["input"].clone()
    other[:, -1] = MASK
    moved = made.bridge(**{**batch, "input": other}) - made.bridge(**batch)
    assert moved[:, 0].abs().amax(-1).min() > 0.01  # logits are of size 3


@torch.no_grad()
def test_local_layers_see_as_far_as_the_window():
    local = ["sliding_attention"] * N_LAYERS
    made = builders.pair("ModernBert", layer_types=local, local_attention=4)  # two to either side
    given, other = builders.tokens(), builders.tokens()
    other[:, -1] = MASK
    logits, cache = made.bridge.run_with_cache(given)
    assert_same(logits, made.hf(given).logits)
    distance = (torch.arange(12)[:, None] - torch.arange(12)).abs()
    for layer in range(N_LAYERS):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        assert torch.equal(pattern > 0, (distance <= 2).expand_as(pattern))
    moved = (made.bridge(other) - logits).abs().amax((0, 2))
    reach = 2 * N_LAYERS
    assert moved[: -1 - reach].max() == 0 and moved[-1 - reach :].min() > 1e-6


@torch.no_grad()
def test_global_and_local_layers_turn_by_their_own_angles():
    made = builders.pair("ModernBert")
    assert made.hf.config.layer_types == ["full_attention", *["sliding_attention"] * 2]
    _, cache = made.bridge.run_with_cache(builders.tokens())
    cos = [cache[f"blocks.{layer}.attn.hook_cos"] for layer in range(N_LAYERS)]
    assert torch.equal(cos[1], cos[2]) and (cos[0] - cos[1]).abs().max() > 0.01


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_beyond_the_window(side):
    """Some pads see no token at all, which is NaN in Hugging Face's own pass in float64."""
    made = builders.pair("ModernBert", torch.float32, local_attention=4)
    batch = builders.padded(side)
    real = batch["attention_mask"].bool()
    found, expected = made.bridge(**batch), made.hf(**builders.as_hf("ModernBert", batch)).logits
    # float32: products of the parts of Wqkv and of Wi are summed in another order
    torch.testing.assert_close(found[real], expected[real], atol=2e-5, rtol=0)
    found[real].square().sum().backward()
    gradients = [p.grad for p in made.bridge.parameters() if p.grad is not None]
    assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients)


# Backwards ------------------------------------------------------------------------------------


def masked_batch(padding: str) -> tuple[dict, Tensor]:
    """Return a batch with some masked tokens, and what they were; -100 elsewhere."""
    batch = builders.padded(padding)
    hidden = torch.zeros_like(batch["input"], dtype=torch.bool)
    hidden[:, [4, 6, 7]] = True
    labels = batch["input"].masked_fill(~hidden, -100)
    return {**batch, "input": batch["input"].masked_fill(hidden, MASK)}, labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The masked-language-model loss, which Hugging Face itself would take in float32."""
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def reassembled(made: Pair, name: str) -> Tensor | None:
    """The gradient of one of Hugging Face's parameters, out of the bridge's parts of it."""
    path, _, kind = name.rpartition(".")
    parts = {"Wqkv": ("q", "k", "v"), "Wi": ("gate", "in")}.get(path.rpartition(".")[2])
    if parts is None:
        return made.bridged[name].grad
    assert made.bridged[name].grad is None
    block = made.bridge.blocks[int(name.split(".")[2])]
    owner = block.attn if "Wqkv" in name else block.mlp
    linear = [owner.get_submodule(part).original_component for part in parts]
    return torch.cat([getattr(module, kind).grad for module in linear])


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_masked_loss(pairs, family, padding):
    made = pairs[family]
    made.bridge.zero_grad()
    made.hf.zero_grad()
    batch, labels = masked_batch(padding)
    loss = loss_of(made.hf(**builders.as_hf(family, batch)).logits, labels)
    loss.backward()
    found = loss_of(made.bridge(**batch), labels)
    found.backward()
    assert_same(found, loss)
    expected = {name: p.grad for name, p in made.hf.named_parameters() if p.grad is not None}
    assert len(expected) == len(list(made.hf.parameters()))
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-9 or "key.bias" in name  # softmax does not see it
        assert_same(reassembled(made, name), gradient)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_the_optimizer_is_that_of_huggingface(family):
    made = builders.pair(family)
    batch, labels = masked_batch("right")
    given = builders.as_hf(family, batch)
    before = made.hf(**given).logits.detach()
    for parameters, loss in (
        (made.hf.parameters(), loss_of(made.hf(**given).logits, labels)),
        (made.bridge.parameters(), loss_of(made.bridge(**batch), labels)),
    ):
        optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)
        loss.backward()
        optimizer.step()
    after = made.hf(**given).logits
    assert (after - before).abs().max() > 0.01
    assert_same(made.bridge(**batch), after)


@pytest.mark.parametrize("family", builders.PRE_NORM)
def test_dropout_drops_what_huggingface_drops(family):
    rates = {"attention_dropout": 0.3}
    if family == "ModernBert":
        rates |= {"mlp_dropout": 0.3, "embedding_dropout": 0.3}
    made = builders.pair(family, **rates)
    given = builders.tokens()
    calm = made.hf(given).logits
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        expected = made.hf.train()(given).logits
        torch.manual_seed(1)
        found = made.bridge.train()(given)
    assert (expected - calm).abs().max() > 0.1
    assert_same(found, expected)
