"""Simulated concentration against closed forms: all measures of the theory on known manifolds."""

from __future__ import annotations

import math

import pytest

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.manifolds import Cylinder, Gaussian, Linear, Paraboloid, Sphere
from tl_tangent.studies.simulation import MEANING, Simulation, simulate

FEW = {"n": 4000, "factors": (1.0, 0.5, 0.25)}


def test_a_curved_surface_flattens_as_its_law_draws_together():
    found = simulate(Paraboloid((1.0, 0.5)), Gaussian(0.3), n=20_000, factors=(1, 0.5, 0.25, 0.1))
    assert found.order("per_sample_ratio") == pytest.approx(1, abs=0.05)
    assert found.order("gradient_ratio") == pytest.approx(1, abs=0.15)
    frame = found.to_dataframe()
    assert frame["isoscore"].iloc[-1] == pytest.approx(found.flat_isoscore, abs=2e-3)
    assert frame["isoscore"].iloc[0] > frame["isoscore"].iloc[-1] + 0.02
    assert frame["eta"].tolist() == pytest.approx((2 * (0.3 * frame["factor"]) ** 2).tolist())
    assert (frame["t"] ** 2).tolist() == pytest.approx(frame["eta"].tolist(), rel=0.1)
    errors = (frame["nonuniformity"] - frame["nonuniformity_predicted"]) / (
        frame["nonuniformity_error"]
    )
    assert (errors.abs() < 4).all()
    assert set(frame) - {"nonuniformity_error", "nonuniformity_predicted"} == set(MEANING)


def test_single_gradients_are_bounded_where_their_sum_is_not():
    """Constant upstream gradients: tangent parts cancel, so that the sum is nearly normal."""
    found = simulate(Sphere(2, 1.0), Gaussian(0.3), upstream="constant", **FEW)
    for row in found.rows:
        assert row["per_sample_ratio"] < row["t"]
        assert row["gradient_ratio"] > 4 * row["per_sample_ratio"]
    assert found.order("per_sample_ratio") == pytest.approx(1, abs=0.05)


def test_the_order_keeps_the_digits_of_the_rows():
    """Chords that differ in the sixth digit"""
    rows = tuple({"t": t, "gradient_ratio": t**1.5} for t in (1.0, 1 + 1e-6, 1 + 2e-6))
    assert Simulation((), rows, None, "random").order("gradient_ratio") == pytest.approx(1.5)


def test_noise_is_told_from_curvature_by_its_order():
    found = simulate(Linear(2), Gaussian(0.3), d=12, noise=0.01, **FEW)
    assert found.order("per_sample_ratio") == pytest.approx(-1, abs=0.05)


def test_a_linear_space_has_no_normal_parts():
    found = simulate(Linear(3), Gaussian(1.0), d=8, **FEW)
    assert math.isnan(found.order("gradient_ratio"))
    assert "no normal parts" in found.headline()
    assert "none stands out" in found.headline()
    assert found.flat_isoscore == pytest.approx(2 / 7)
    assert "nonuniformity" not in found.to_dataframe()


@pytest.mark.parametrize("manifold", [Cylinder(1.0), Sphere(2, 1.0), Paraboloid((1.0, -0.5, 0.3))])
def test_it_shows_itself(manifold, tmp_path):
    found = simulate(manifold, Gaussian(0.3), **FEW)
    assert repr(manifold) in repr(found)
    assert "<table" in found._repr_html_()
    figure = found.plot(at=-1)
    figure.savefig(tmp_path / "simulation.png")
    assert len(figure.axes) == 4
    assert (tmp_path / "simulation.png").stat().st_size > 10_000


def test_seeds():
    one, same, other = (
        simulate(Cylinder(1.0), Gaussian(0.3), n=100, factors=(1.0,), seed=seed)
        for seed in (1, 1, 2)
    )
    assert one.rows == same.rows != other.rows


def test_refusals():
    with pytest.raises(TangentValueError, match="no factors"):
        simulate(Linear(2), Gaussian(1.0), ())
    with pytest.raises(TangentValueError, match="'random' or 'constant', got 'even'"):
        simulate(Linear(2), Gaussian(1.0), upstream="even")  # type: ignore[arg-type]
    with pytest.raises(TangentValueError, match="needs 3 dimensions"):
        simulate(Cylinder(1.0), Gaussian(0.3), d=2)
