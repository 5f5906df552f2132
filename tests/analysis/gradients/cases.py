"""What the tests of gradient energies share: models, batches, and dense linear algebra."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import tl_tangent as tt
from tests import families
from tl_tangent.analysis.gradients.gradient_energy import GradientEnergy, gradient_energy
from tl_tangent.geometry.token_energies import KINDS

MODELS = [
    ("hf", "llama"),
    ("hf", "gpt2"),
    ("bridge", "llama"),
    *([("hooked", "rotary_gqa")] if families.HAS_HOOKED_TRANSFORMER else []),
]
IDS = ["-".join(spec) for spec in MODELS]
RANK, B = 4, 3
KIND = {name: row for row, name in enumerate(KINDS)}


def fresh(kind: str, family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A model that may be changed."""
    if kind == "hooked":
        return families.hooked_transformer(family, dtype, **settings)
    make = families.hf_model if kind == "hf" else families.bridge
    return make(family, dtype=dtype, **settings)


@functools.cache
def build(kind: str, family: str) -> Any:
    return fresh(kind, family)


def llama() -> Any:
    return build("hf", "llama")


def batches(n: int = 2, *, batch: int = 2, pos: int = 9) -> list[Tensor]:
    return [families.tiny_tokens(batch=batch, pos=pos, seed=seed) for seed in range(n)]


def measure(model: Any = None, data: Any = None, *args: Any, **options: Any) -> GradientEnergy:
    """Gradient energies with the suite's small rank and number of controls."""
    settings = {"rank": RANK, "n_controls": B, **options}
    return gradient_energy(model or llama(), data or batches(), *args, **settings)


@functools.cache
def measured(kind: str = "hf", family: str = "llama") -> GradientEnergy:
    """One result that is looked at by many tests, with everything in it."""
    return measure(build(kind, family), moments=True)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The mean loss of the next token, by hand: Hugging Face's own is float32."""
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)[:, :-1].log_softmax(-1)
    return -logits.gather(-1, tokens[:, 1:, None]).mean()


def gradients_of(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter, by autograd alone."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss_of(model, tokens), list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def row_of(result: GradientEnergy, name: str) -> int:
    return [label.name for label in result.statistics.labels].index(name)


def bases(result: GradientEnergy, site: str, rank: int = RANK) -> Iterable[Tensor]:
    """Q_T and its normals at a site, one by one, in float64."""
    return result.stacks[site].double().split(rank, dim=1)


def random_subspace(d: int, rank: int = RANK, seed: int = 0, **fields: Any) -> tt.TangentSubspace:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(d, rank, generator=generator, dtype=torch.float64)
    mean = torch.randn(d, generator=generator, dtype=torch.float64)
    return tt.TangentSubspace(basis, mean, orthonormalize=True, **fields)


def assert_close(found: Tensor, expected: Tensor, rtol: float = 1e-10, atol: float = 0.0) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


def assert_same_statistics(one: GradientEnergy, other: GradientEnergy, rtol: float) -> None:
    """All sums of two results agree; what is zero but for rounding counts as equal."""
    for name in ("energies", "totals"):
        found, expected = getattr(one.statistics, name), getattr(other.statistics, name)
        assert_close(found, expected, rtol, atol=rtol * float(expected.nan_to_num().max()) * 1e-6)
