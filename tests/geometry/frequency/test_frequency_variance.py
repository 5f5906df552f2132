"""The frequency-variance statistic: its trap, what is planted found again, and equal samples."""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import TypeCheckError

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency import (
    EqualSample,
    TokenMoments,
    TypeStatistics,
    frequency_variance,
    pearson,
    spearman,
)

D = 64
ZIPF = (2000 / torch.arange(1, 2001)).long()  # half of the types come once


def moments_of(counts: torch.Tensor, scales: torch.Tensor, seed: int = 0, d: int = D):
    """Occurrences of each type around 0 with a standard deviation of its own."""
    generator = torch.Generator().manual_seed(seed)
    moments = TokenMoments(d, len(counts))
    types = torch.arange(len(counts)).repeat_interleave(counts)
    for piece in types.split(4096):
        x = torch.randn(len(piece), d, generator=generator)
        moments.update(x * scales[piece, None], piece)
    return moments


@pytest.fixture(scope="module")
def even() -> TypeStatistics:
    """One variance for all types, whatever their frequency."""
    return moments_of(ZIPF, torch.ones(2000)).statistics()


@pytest.fixture(scope="module")
def planted() -> TypeStatistics:
    """``V_w ~ f^-0.4``."""
    return moments_of(ZIPF, ZIPF.double().pow(-0.2).float()).statistics()


class TestTrap:
    def test_dividing_by_n_correlates_by_itself(self, even: TypeStatistics) -> None:
        naive = frequency_variance(even, measure="naive", scale="plain", min_count=1)
        assert naive.pearson.r == pytest.approx(0.81, abs=0.02)
        assert naive.pearson.low > 0.78
        dropped = frequency_variance(even, measure="naive")
        assert dropped.pearson.r > 0.5 and dropped.spearman.r > 0.8

    @pytest.mark.parametrize("scale", ["log", "plain"])
    def test_dividing_by_n_less_1_does_not(self, even: TypeStatistics, scale: str) -> None:
        found = frequency_variance(even, scale=scale)
        assert abs(found.pearson.r) < 0.05 and abs(found.spearman.r) < 0.05
        assert found.pearson.low < 0 < found.pearson.high
        assert abs(found.exponent) < 4 * found.exponent_error

    def test_leaving_one_out_errs_the_other_way(self, even: TypeStatistics) -> None:
        found = frequency_variance(even, measure="leave_one_out")
        assert found.pearson.r < -0.5 and found.spearman.r < -0.8

    def test_a_norm_of_noise_looks_longer_in_rare_types(self, even: TypeStatistics) -> None:
        found = frequency_variance(even, measure="centre_norm", min_count=1)
        assert found.pearson.r < -0.95
        assert found.exponent == pytest.approx(-1, abs=0.03)


class TestPlanted:
    def test_exponent_is_found(self, planted: TypeStatistics) -> None:
        found = frequency_variance(planted)
        assert found.exponent == pytest.approx(-0.4, abs=4 * found.exponent_error)
        assert found.exponent_error < 0.01
        assert found.pearson.high < -0.5 and found.spearman.high < -0.4

    def test_trap_hides_part_of_it(self, planted: TypeStatistics) -> None:
        assert frequency_variance(planted, measure="naive").exponent > -0.2

    def test_is_that_of_the_columns(self, planted: TypeStatistics) -> None:
        found = frequency_variance(planted, min_count=5, level=0.8)
        counted = ZIPF >= 5
        f, v = ZIPF[counted].double().log(), planted.dispersion[counted]
        assert found.pearson == pearson(f, v.sqrt().log(), level=0.8)
        assert found.spearman == spearman(f, v.sqrt().log(), level=0.8)
        plain = frequency_variance(planted, min_count=5, scale="plain")
        assert plain.pearson.r == pearson(f, v.sqrt()).r != found.pearson.r
        assert plain.spearman.r == found.spearman.r
        assert found.n_types == int(counted.sum())

    def test_units_do_not_matter(self, planted: TypeStatistics) -> None:
        scaled = TypeStatistics(planted.counts, 1e6 * planted.spreads, planted.centre_norm)
        found = frequency_variance(scaled, frequencies=ZIPF / 1e9)
        alone = frequency_variance(planted)
        assert found.pearson.r == pytest.approx(alone.pearson.r, abs=1e-6)
        assert found.exponent == pytest.approx(alone.exponent, abs=1e-6)

    def test_bootstrap_over_types(self, planted: TypeStatistics) -> None:
        found = frequency_variance(planted, interval="bootstrap", draws=200)
        assert found.pearson.interval == "bootstrap"
        assert found.pearson.low < found.pearson.r < found.pearson.high < -0.5


def test_equal_samples_show_what_is_planted_with_any_measure() -> None:
    """At one n for all types even the trap cannot correlate, and what is there stays."""
    counts, size = ZIPF[ZIPF >= 8], 8
    types = torch.arange(len(counts)).repeat_interleave(counts)
    at = torch.arange(len(types))
    sample = EqualSample(len(counts), size)
    sample.offer(types, at)
    taken = types[sample.taken(types, at)]
    x = torch.randn(len(taken), D, generator=torch.Generator().manual_seed(0))
    for power, low, high in ((0.0, -0.15, 0.15), (-0.2, -1, -0.8)):
        moments = TokenMoments(D, len(counts))
        moments.update(x * counts[taken, None].float().pow(power), taken)
        found = [
            frequency_variance(
                moments.statistics(),
                frequencies=counts.double(),
                measure=measure,
                chosen=sample.complete,
            ).pearson.r
            for measure in ("dispersion", "naive", "leave_one_out")
        ]
        assert low < found[0] < high
        assert found[1:] == pytest.approx([found[0]] * 2, abs=1e-12)


class TestWhichTypesCount:
    def test_a_distance_of_0_has_no_logarithm(self, even: TypeStatistics) -> None:
        spreads = torch.where(torch.arange(2000) % 10 == 0, 0.0, even.spreads)
        still = TypeStatistics(even.counts, spreads, even.centre_norm)
        found = frequency_variance(still)
        assert (found.n_types, found.without_spread) == (900, 100)
        assert "100 without spread left out" in str(found)
        plain = frequency_variance(still, scale="plain")
        assert (plain.n_types, plain.without_spread) == (1000, 0)
        assert math.isnan(plain.exponent)

    def test_chosen(self, even: TypeStatistics) -> None:
        chosen = torch.arange(2000) < 500
        assert frequency_variance(even, chosen=chosen).n_types == 500

    def test_prints(self, even: TypeStatistics) -> None:
        shown = str(frequency_variance(even)).splitlines()
        assert shown[0] == (
            "dispersion (log) and log frequency of 1000 types with 2 occurrences or more"
        )
        assert "pearson" in shown[1] and "spearman" in shown[2] and "~ f^" in shown[3]


class TestRefused:
    def test_too_few_types(self, even: TypeStatistics) -> None:
        with pytest.raises(TangentValueError, match="3 types count, and a correlation takes 4"):
            frequency_variance(even, chosen=torch.arange(2000) < 3)

    def test_frequencies(self, even: TypeStatistics) -> None:
        with pytest.raises(TangentValueError, match="1 of 1000 types that count have a frequency"):
            frequency_variance(even, frequencies=ZIPF.double() % 2000)
        with pytest.raises(TangentValueError, match=r"2000 types take as many .* shape \[7\]"):
            frequency_variance(even, frequencies=torch.ones(7))

    def test_chosen(self, even: TypeStatistics) -> None:
        for chosen in (torch.ones(7, dtype=torch.bool), torch.ones(2000, dtype=torch.int64)):
            with pytest.raises((TangentValueError, TypeCheckError)):
                frequency_variance(even, chosen=chosen)

    @pytest.mark.parametrize(("measure", "least"), [("dispersion", 2), ("naive", 1)])
    def test_min_count(self, even: TypeStatistics, measure: str, least: int) -> None:
        with pytest.raises(TangentValueError, match=f"{least} occurrences or more, got min_count"):
            frequency_variance(even, measure=measure, min_count=least - 1)

    def test_names(self, even: TypeStatistics) -> None:
        for options in ({"measure": "variance"}, {"scale": "linear"}):
            with pytest.raises((TangentValueError, TypeCheckError)):
                frequency_variance(even, **options)
