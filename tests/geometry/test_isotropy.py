"""IsoScore in closed form against its six steps, known spectra, and its invariances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from IsoScore import IsoScore
from jaxtyping import TypeCheckError

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import (
    effective_rank,
    effective_rank_from_eigenvalues,
    isoscore,
    isoscore_from_covariance,
    isoscore_from_eigenvalues,
    isoscore_star,
    mean_cosine,
    participation_ratio,
    participation_ratio_from_eigenvalues,
    remove_directions,
    removed_covariance_participation,
    shrink_covariance,
    stable_rank,
)
from tl_tangent.geometry.isotropy import isotropy_measures, rankme
from tl_tangent.geometry.partition import partition_isotropy

CLOUD = torch.tensor(
    [[1, 2, 3], [4, 5, 6], [7, 8, 10], [-1, 0, 2], [0.5, -2, 1]], dtype=torch.float64
)
SPECTRA = [
    ([1, 1, 1], 1),
    ([1, 0, 0], 0),
    ([1, 1, 0], 1 / 2),
    ([2, 1, 1], 5 / 6),
    ([3, 2, 1], 11 / 14),
    ([4, 1, 1, 1], 10 / 19),
    ([1, 1, 1, 0, 0, 0, 0, 0], 2 / 7),
    ([10] + [1] * 7, 0.24299065420560748),
    ([100] + [1] * 63, 0.026035973367783),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def six_steps(covariance: torch.Tensor) -> torch.Tensor:
    """IsoScore as Rudman et al. 2022, Algorithm 1, states it."""
    d = len(covariance)
    values = torch.linalg.svdvals(covariance)
    values = math.sqrt(d) * values / values.norm()
    defect = (values - 1).norm() / math.sqrt(2 * (d - math.sqrt(d)))
    share = (d - defect**2 * (d - math.sqrt(d))) ** 2 / d**2
    return (d * share - 1) / (d - 1)


class TestIsoScore:
    @pytest.mark.parametrize(("spectrum", "expected"), SPECTRA)
    def test_known_spectra(self, spectrum: list[float], expected: float) -> None:
        values = torch.tensor(spectrum, dtype=torch.float64)
        turn = torch.linalg.qr(randn(len(values), len(values)))[0]
        covariance = turn @ values.diag() @ turn.T
        assert float(isoscore_from_covariance(covariance)) == pytest.approx(expected, abs=1e-14)
        assert float(isoscore_from_eigenvalues(values)) == pytest.approx(expected, abs=1e-14)

    @pytest.mark.parametrize(
        ("power", "ratio", "score"),
        [
            (0.5, 44.946286, 0.697560),
            (1, 13.811268, 0.203353),
            (2, 2.453100, 0.023065),
        ],
    )
    def test_power_laws(self, power: float, ratio: float, score: float) -> None:
        covariance = torch.arange(1, 65, dtype=torch.float64).pow(-power).diag()
        assert float(participation_ratio(covariance)) == pytest.approx(ratio, abs=1e-6)
        assert float(isoscore_from_covariance(covariance)) == pytest.approx(score, abs=1e-6)

    def test_reference_cloud(self) -> None:
        assert float(isoscore(CLOUD)) == pytest.approx(0.02779529133155967, abs=1e-14)
        star = isoscore_star(CLOUD, "identity", zeta=0.2)
        assert float(star) == pytest.approx(0.040800173972852294, abs=1e-14)

    @given(seed=st.integers(0, 2**20), n=st.integers(2, 30), d=st.integers(2, 12))
    @settings(max_examples=40, deadline=None)
    def test_closed_form_is_the_six_steps(self, seed: int, n: int, d: int) -> None:
        x = randn(n, d, seed=seed) * randn(d, seed=seed + 1).abs()
        expected = float(six_steps(torch.cov(x.T).reshape(d, d)))
        assert float(isoscore(x)) == pytest.approx(expected, abs=1e-12)
        assert float(isoscore_from_covariance(torch.cov(x.T))) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
    @pytest.mark.parametrize("shape", [(40, 4), (60, 7), (200, 64)])
    def test_the_package_of_its_authors(self, shape: tuple[int, int]) -> None:
        """Theirs takes the root of d in float32, so that more digits than six are not to be had."""
        x, c0 = randn(*shape) * randn(shape[1], seed=1), torch.cov(randn(500, shape[1], seed=2).T)
        covariance = torch.cov(x.T)
        assert float(isoscore(x)) == pytest.approx(float(IsoScore.IsoScore(x)), abs=1e-6)
        theirs = float(IsoScore.IsoScore_cov(covariance))
        assert float(isoscore_from_covariance(covariance)) == pytest.approx(theirs, abs=1e-6)
        for zeta in (0.0, 0.2, 0.75, 1.0):
            theirs = float(IsoScore.IsoScore_star(x, c0, zeta))
            assert float(isoscore_star(x, c0, zeta)) == pytest.approx(theirs, abs=1e-6)

    def test_points_and_dimensions_take_different_routes_to_one_number(self) -> None:
        x = randn(6, 6)
        padded = torch.cat([x, torch.zeros(6, 1)], 1)  # 6 points in 7 dimensions
        ratio = float(isoscore(x)) * 5 + 1
        assert float(isoscore(padded)) == pytest.approx((ratio - 1) / 6, abs=1e-13)

    def test_invariances(self) -> None:
        x = randn(40, 6) * torch.arange(1, 7)
        turn = torch.linalg.qr(randn(6, 6, seed=2))[0]
        for same in (x @ turn, 1e-7 * x, x + 5, x.flip(0)):
            assert float(isoscore(same)) == pytest.approx(float(isoscore(x)), abs=1e-9)

    def test_gradient_formula(self) -> None:
        covariance = torch.cov(randn(5, 30)).requires_grad_()
        isoscore_from_covariance(covariance).backward()
        c = covariance.detach()
        trace, square = c.trace(), c.square().sum()
        expected = (trace / square * torch.eye(5) - trace**2 / square**2 * c) * 2 / 4
        torch.testing.assert_close(covariance.grad, expected)

    def test_gradient_through_the_cloud(self) -> None:
        for shape in ((7, 4), (3, 6)):
            x = randn(*shape).requires_grad_()
            assert torch.autograd.gradcheck(isoscore, x)
            target = torch.cov(randn(shape[1], 20))
            assert torch.autograd.gradcheck(lambda y, c=target: isoscore_star(y, c, 0.3), x)

    @pytest.mark.parametrize(("n", "expected"), [(33, 0.3196), (257, 0.7944)])
    def test_finite_sample_bias(self, n: int, expected: float) -> None:
        scores = [float(isoscore(randn(n, 64, seed=seed))) for seed in range(30)]
        assert sum(scores) / 30 == pytest.approx(expected, abs=0.005)

    def test_half_precision_is_lifted(self) -> None:
        x = 300 * randn(50, 8)  # squares overflow float16
        for dtype in (torch.float16, torch.bfloat16):
            expected = float(isoscore(x.to(dtype).double()))
            assert float(isoscore(x.to(dtype))) == pytest.approx(expected, abs=1e-4)
            assert float(effective_rank(torch.eye(4).to(dtype))) == pytest.approx(4, abs=1e-3)

    def test_tiny_gradients_in_float32(self) -> None:
        x = randn(50, 8) * torch.arange(1, 9)
        tiny = (1e-15 * x).float()  # fourth powers are below the range of float32
        assert float(isoscore(tiny)) == pytest.approx(float(isoscore(x)), abs=1e-6)
        assert float(isoscore_star(tiny)) == pytest.approx(float(isoscore_star(x)), abs=1e-6)
        covariance = torch.cov(tiny.T)
        assert float(isoscore_from_covariance(covariance)) == pytest.approx(
            float(isoscore(x)), abs=1e-4
        )

    @pytest.mark.parametrize(
        "cloud",
        [
            torch.zeros(5, 3),
            torch.full((5, 3), 3.3),
            torch.ones(1, 3),
            torch.tensor([[1.0, math.nan], [0.0, 1.0]]),
            torch.randn(5, 1),
        ],
        ids=["zero", "constant", "one point", "nan", "one dimension"],
    )
    def test_undefined_clouds(self, cloud: torch.Tensor) -> None:
        with pytest.raises(TangentValueError):
            isoscore(cloud)

    @pytest.mark.parametrize("score", [participation_ratio, effective_rank, stable_rank])
    @pytest.mark.parametrize("bad", [torch.zeros(3, 3), torch.full((3, 3), math.nan)])
    def test_undefined_covariances(self, score: object, bad: torch.Tensor) -> None:
        with pytest.raises(TangentValueError, match="positive and finite"):
            score(bad)  # type: ignore[operator]
        with pytest.raises((TangentValueError, TypeCheckError)):
            score(torch.ones(2, 3))  # type: ignore[operator]


class TestShrinkage:
    @pytest.mark.parametrize("shape", [(30, 6), (4, 6)])
    @pytest.mark.parametrize("zeta", [0.0, 0.2, 0.75, 1.0])
    def test_is_the_score_of_the_shrunk_covariance(
        self, shape: tuple[int, int], zeta: float
    ) -> None:
        x, target = randn(*shape) * 3, torch.cov(randn(6, 50, seed=1))
        covariance = torch.cov(x.T)
        for c0 in (None, "identity", target):
            expected = isoscore_from_covariance(shrink_covariance(covariance, c0, zeta))
            torch.testing.assert_close(isoscore_star(x, c0, zeta), expected)
        mixed = (1 - zeta) * covariance + zeta * target
        torch.testing.assert_close(isoscore_star(x, target, zeta), six_steps(mixed))

    def test_zeta_is_the_weight_of_the_target(self) -> None:
        target = torch.diag(torch.tensor([1.0, 1, 0]))
        torch.testing.assert_close(isoscore_star(CLOUD, target, 0.0), isoscore(CLOUD))
        assert float(isoscore_star(CLOUD, target, 1.0)) == pytest.approx(0.5, abs=1e-12)

    def test_default_target_is_free_of_scale_and_the_plain_identity_is_not(self) -> None:
        tiny = CLOUD * 1e-5
        torch.testing.assert_close(isoscore_star(tiny), isoscore_star(CLOUD))
        assert float(isoscore_star(tiny, "identity")) > 0.999

    def test_closed_form_of_the_default_target(self) -> None:
        """1/PR_zeta = (1-zeta)^2 / PR_0 + (1 - (1-zeta)^2) / d."""
        own = (1 - 0.3) ** 2
        plain = float(isoscore(CLOUD)) * 2 + 1
        shrunk = 1 / (own / plain + (1 - own) / 3)
        assert float(isoscore_star(CLOUD, zeta=0.3)) == pytest.approx((shrunk - 1) / 2, abs=1e-12)

    def test_divisor_matters_beside_a_fixed_target(self) -> None:
        by_n = isoscore_star(CLOUD, "identity", 0.2, ddof=0)
        covariance = torch.cov(CLOUD.T, correction=0)
        torch.testing.assert_close(
            by_n, isoscore_from_covariance(shrink_covariance(covariance, "identity", 0.2))
        )
        assert abs(float(by_n - isoscore_star(CLOUD, "identity", 0.2))) > 1e-4

    @pytest.mark.parametrize(
        ("c0", "says"),
        [
            (torch.diag(torch.tensor([1.0, 1, -0.1])), "semi-definite"),
            (torch.tensor([[1.0, 1, 0], [0, 1, 0], [0, 0, 1]]), "symmetric"),
            (torch.full((3, 3), math.nan), "finite"),
            ("unit", "'identity'"),
        ],
    )
    def test_targets_that_are_no_covariance(self, c0: object, says: str) -> None:
        with pytest.raises((TangentValueError, TypeCheckError), match=rf"(?s){says}|c0"):
            isoscore_star(CLOUD, c0)  # type: ignore[arg-type]

    @pytest.mark.parametrize("zeta", [-0.1, 1.1, math.nan])
    def test_zeta_outside_its_range(self, zeta: float) -> None:
        with pytest.raises(TangentValueError, match=r"\[0, 1\]"):
            isoscore_star(CLOUD, zeta=zeta)


class TestRemoval:
    def test_removing_the_spike_and_removing_bulk(self) -> None:
        covariance = torch.tensor([100.0] + [1] * 63, dtype=torch.float64).diag()
        axes = torch.eye(64, dtype=torch.float64)
        spike = float(removed_covariance_participation(covariance, axes[:, :1]))
        assert (spike - 1) / 63 == pytest.approx(62 / 63, abs=1e-13)
        assert (spike - 1) / 62 == pytest.approx(1, abs=1e-13)
        bulk = float(removed_covariance_participation(covariance, axes[:, 1:2]))
        assert (bulk - 1) / 63 == pytest.approx(0.025527, abs=1e-6)

    def test_equals_the_projector_way_and_traces_add(self) -> None:
        covariance, basis = torch.cov(randn(9, 40)), torch.linalg.qr(randn(9, 3, seed=1))[0]
        projector = torch.eye(9) - basis @ basis.T
        left = remove_directions(covariance, basis)
        torch.testing.assert_close(left, projector @ covariance @ projector)
        inside = (basis.T @ covariance @ basis).trace()
        torch.testing.assert_close(left.trace() + inside, covariance.trace())

    def test_accurate_when_nearly_all_of_the_variance_goes(self) -> None:
        turn = torch.linalg.qr(randn(8, 8))[0]
        values = torch.tensor([1e9, 4, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
        covariance = turn @ values.diag() @ turn.T
        left = float(removed_covariance_participation(covariance, turn[:, :1]))
        assert left == pytest.approx(10**2 / (16 + 6), rel=1e-5)

    @given(place=st.integers(0, 9))
    @settings(max_examples=10, deadline=None)
    def test_an_eigendirection_raises_the_ratio_iff_its_share_is_large(self, place: int) -> None:
        """Removing a share p of the trace raises PR iff p > 2 / (PR + 1)."""
        values = torch.arange(1, 11, dtype=torch.float64).pow(-1.5)
        before = float(participation_ratio_from_eigenvalues(values))
        axis = torch.eye(10, dtype=torch.float64)[:, place : place + 1]
        after = float(removed_covariance_participation(values.diag(), axis))
        assert (after > before) == (float(values[place] / values.sum()) > 2 / (before + 1))

    def test_nothing_left(self) -> None:
        covariance = torch.diag(torch.tensor([1.0, 2, 0, 0]))
        with pytest.raises(TangentValueError, match="nothing is left"):
            removed_covariance_participation(covariance, torch.eye(4, 2))


class TestRelated:
    @pytest.mark.parametrize(
        ("power", "of_values", "of_roots"),
        [(0.5, 54.990364, 62.037091), (1, 29.117882, 54.990364), (2, 4.667760, 29.117882)],
    )
    def test_effective_rank_of_power_laws(
        self, power: float, of_values: float, of_roots: float
    ) -> None:
        values = torch.arange(1, 65, dtype=torch.float64).pow(-power)
        assert float(effective_rank(values.diag())) == pytest.approx(of_values, abs=1e-6)
        roots = effective_rank_from_eigenvalues(values.sqrt())
        assert float(roots) == pytest.approx(of_roots, abs=1e-6)

    def test_stable_rank_and_the_order_of_the_three(self) -> None:
        harmonic = (1 / torch.arange(1, 65, dtype=torch.float64)).diag()
        assert float(stable_rank(harmonic)) == pytest.approx(4.743891, abs=1e-6)
        covariance = torch.cov(randn(7, 20))
        assert (
            stable_rank(covariance) < participation_ratio(covariance) < effective_rank(covariance)
        )

    def test_mean_cosine_is_the_mean_over_pairs(self) -> None:
        x = randn(12, 5) + 1
        units = x / x.norm(dim=-1, keepdim=True)
        pairs = (units @ units.T)[~torch.eye(12, dtype=torch.bool)]
        torch.testing.assert_close(mean_cosine(x), pairs.mean())
        torch.testing.assert_close(mean_cosine(x * torch.arange(1, 13)[:, None]), pairs.mean())
        with pytest.raises(TangentValueError, match="1 of 12 rows are zero"):
            mean_cosine(x * (torch.arange(12) > 0)[:, None])


class TestRankMe:
    @staticmethod
    def with_singular_values(values: torch.Tensor, n: int = 100) -> torch.Tensor:
        d = len(values)
        left, right = (torch.linalg.qr(randn(k, d, seed=k))[0] for k in (n, d))
        return left * values @ right.T

    @pytest.mark.parametrize(
        ("power", "expected"), [(0.5, 62.037091), (1, 54.990364), (2, 29.117882)]
    )
    def test_power_laws_of_the_second_moment(self, power: float, expected: float) -> None:
        """The paper's 1e-7 on each share moves these by 64e-7 * log 64 and a little more."""
        values = torch.arange(1, 65, dtype=torch.float64).pow(-power)
        z = self.with_singular_values(values.sqrt())
        assert float(rankme(z)) == pytest.approx(expected, rel=1e-4)

    def test_share_of_silent_directions(self) -> None:
        """k equal singular values of n: each of the others adds ``1e-7 log 1e7``."""
        z = self.with_singular_values(torch.tensor([2.0, 2, 2, 0, 0, 0]).double(), n=6)
        silent = math.exp(3 * 1e-7 * math.log(1e7) + 3 * 1e-7 * (math.log(3) - 1))
        assert float(rankme(z)) == pytest.approx(3 * silent, rel=1e-10)

    def test_is_not_centred_and_free_of_scale_rotation_and_order(self) -> None:
        x = randn(40, 6)
        assert float(rankme(x + 100)) < 1.5 < 5 < float(rankme(x))
        turn = torch.linalg.qr(randn(6, 6, seed=2))[0]
        for same in (x @ turn, 1e-9 * x, x.flip(0)):
            assert float(rankme(same)) == pytest.approx(float(rankme(x)), rel=1e-10)

    @pytest.mark.parametrize("bad", [torch.zeros(3, 2), torch.full((3, 2), math.inf)])
    def test_undefined(self, bad: torch.Tensor) -> None:
        with pytest.raises(TangentValueError, match="all 3 rows are zero|6 NaN or infinite"):
            rankme(bad)


class TestMeasures:
    @pytest.mark.parametrize("shape", [(50, 6), (5, 9)])
    def test_are_those_of_each_function(self, shape: tuple[int, int]) -> None:
        x = randn(*shape) * torch.arange(1, shape[1] + 1) + 0.5
        covariance = torch.cov(x.T)
        found = isotropy_measures(x, zeta=0.4)
        assert found.isoscore == pytest.approx(float(six_steps(covariance)), abs=1e-12)
        assert found.isoscore_star == float(isoscore_star(x, zeta=0.4))
        assert found.participation_ratio == pytest.approx(float(participation_ratio(covariance)))
        assert found.effective_rank == pytest.approx(float(effective_rank(covariance)))
        assert found.stable_rank == pytest.approx(float(stable_rank(covariance)))
        assert found.rankme == float(rankme(x))
        assert found.mean_cosine == float(mean_cosine(x))
        assert found.partition == float(partition_isotropy(x))
        assert found.zeta == 0.4

    def test_disagree_on_an_even_cloud_off_the_origin(self) -> None:
        """Centred measures see an even cloud; mean cosine, RankMe and I(W) see its mean."""
        found = isotropy_measures(randn(2000, 4) + torch.tensor([9.0, 0, 0, 0]))
        assert found.isoscore > 0.99 and found.participation_ratio > 3.9
        assert found.mean_cosine > 0.9 and found.rankme < 2.8 and found.partition < 1e-6

    def test_rows_without_a_direction(self) -> None:
        with pytest.raises(TangentValueError, match="1 of 5 rows are zero"):
            isotropy_measures(CLOUD * (torch.arange(5) > 0)[:, None])
