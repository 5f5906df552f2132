"""The closed form of gradient flow against integration, autograd and its crossing time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.energy import energies, total_energy
from tl_tangent.geometry.gradient_flow import (
    crossing_time,
    energy_ratio_at,
    gradient_flow_gradient,
    gradient_flow_weights,
)

OUT, RANK, D = 3, 2, 5
FLAT = {"tangent_variance": 0.5, "normal_variance": 0.05}
CROSSING = 5.11686


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


VARIANCE = torch.tensor([0.5] * RANK + [0.05] * (D - RANK), dtype=torch.float64)
START, TEACHER = randn(OUT, D), randn(OUT, D, seed=1)
BLOCKS = torch.eye(D, dtype=torch.float64).split([RANK, D - RANK], dim=1)
ERRORS = dict(
    zip(
        ("tangent_error", "normal_error"),
        ((START - TEACHER) @ q for q in BLOCKS),
        strict=True,
    )
)
NORMS = {name: float(error.norm()) for name, error in ERRORS.items()}


def measured_ratio(gradient: Tensor) -> float:
    tangent, normal = (float(energies(gradient, q, q.shape[1])) for q in BLOCKS)
    assert tangent + normal == pytest.approx(float(total_energy(gradient)))
    return tangent / normal


def whitened(n: int) -> Tensor:
    """Inputs whose second moment is exactly ``diag(VARIANCE)``."""
    return torch.linalg.qr(randn(n, D, seed=2))[0] * (n * VARIANCE).sqrt()


def autograd_gradient(weights: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``mean ||(W - W*) x||^2 / 2`` by backpropagation."""
    model = torch.nn.Linear(D, OUT, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(weights)
    residual = model(x) - x @ TEACHER.T
    (residual.square().sum() / (2 * len(x))).backward()
    assert model.weight.grad is not None
    return model.weight.grad


class TestWeights:
    def test_start_and_limit(self) -> None:
        args = (START, TEACHER, VARIANCE)
        torch.testing.assert_close(gradient_flow_weights(*args, 0), START)
        torch.testing.assert_close(gradient_flow_weights(*args, 2000), TEACHER)

    def test_solves_the_differential_equation(self) -> None:
        """Classical Runge-Kutta on dW/ds = -(W - W*) diag(variance); its error is ~ step^4."""

        def slope(w: Tensor) -> Tensor:
            return -(w - TEACHER) * VARIANCE

        w, step = START, 0.02
        for _ in range(200):
            a = slope(w)
            b = slope(w + step / 2 * a)
            c = slope(w + step / 2 * b)
            w = w + step / 6 * (a + 2 * b + 2 * c + slope(w + step * c))
        closed = gradient_flow_weights(START, TEACHER, VARIANCE, 4.0)
        torch.testing.assert_close(w, closed, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("s", [0.0, 1.0, 7.5])
    def test_gradient_is_that_of_the_loss_at_these_weights(self, s: float) -> None:
        weights = gradient_flow_weights(START, TEACHER, VARIANCE, s)
        expected = gradient_flow_gradient(START, TEACHER, VARIANCE, s)
        torch.testing.assert_close(autograd_gradient(weights, whitened(40)), expected)


class TestRatio:
    @pytest.mark.parametrize("s", [0.0, 2.0, 6.0, 20.0])
    def test_is_that_of_measured_energies(self, s: float) -> None:
        gradient = gradient_flow_gradient(START, TEACHER, VARIANCE, s)
        expected = energy_ratio_at(s, **FLAT, **NORMS)
        assert measured_ratio(gradient) == pytest.approx(expected, rel=1e-10)

    def test_gradient_descent_by_autograd_follows_it_from_above_one_to_below(self) -> None:
        """Full-batch descent with small steps; one step multiplies errors by 1 - variance * rate,
        which stays within rate * variance^2 / 2 a unit of time of the flow."""
        x, rate = whitened(40), 0.02
        weights, early, late = START, 1.0, 9.0
        found = {}
        for step in range(int(late / rate) + 1):
            gradient = autograd_gradient(weights, x)
            if step in (int(early / rate), int(late / rate)):
                found[step * rate] = measured_ratio(gradient)
            weights = weights - rate * gradient
        for s, ratio in found.items():
            assert ratio == pytest.approx(energy_ratio_at(s, **FLAT, **NORMS), rel=0.05)
        assert found[early] > 1 > found[late]

    def test_start_is_the_squared_ratio_of_variances(self) -> None:
        assert energy_ratio_at(0, **FLAT) == pytest.approx(100)
        assert energy_ratio_at(0, **FLAT, tangent_error=3, normal_error=2) == pytest.approx(225)

    def test_large_times_do_not_overflow(self) -> None:
        assert energy_ratio_at(1e4, **FLAT) == 0
        assert 0 < energy_ratio_at(300, **FLAT) < 1e-100


class TestCrossing:
    def test_reference_value(self) -> None:
        assert crossing_time(**FLAT) == pytest.approx(CROSSING, abs=5e-6)
        assert crossing_time(**FLAT) == pytest.approx(math.log(100) / 0.9)

    @pytest.mark.parametrize("errors", [{}, NORMS, {"tangent_error": 0.01}])
    def test_ratio_is_one_there_and_falls_through(self, errors: dict[str, float]) -> None:
        s = crossing_time(**FLAT, **errors)
        assert energy_ratio_at(s, **FLAT, **errors) == pytest.approx(1, abs=1e-12)
        assert (
            energy_ratio_at(s - 1, **FLAT, **errors) > 1 > energy_ratio_at(s + 1, **FLAT, **errors)
        )

    def test_before_the_start_where_the_tangent_was_learned_already(self) -> None:
        assert crossing_time(**FLAT, tangent_error=0.01) < 0
        assert energy_ratio_at(0, **FLAT, tangent_error=0.01) < 1

    def test_refusals(self) -> None:
        with pytest.raises(TangentValueError, match="both variances are 1"):
            crossing_time(tangent_variance=1, normal_variance=1)
        for bad in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(TangentValueError, match="positive and finite"):
                energy_ratio_at(0, tangent_variance=bad, normal_variance=1)
