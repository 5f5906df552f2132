"""Fits do not depend on cuts, shards or dtypes, and say what the data cannot give."""

from __future__ import annotations

import math
import pickle
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import SubspaceFitter, choose_rank
from tl_tangent.geometry.eigen import eigen_of
from tl_tangent.geometry.moments import BUFFER_ROWS

D, HEADS = 12, 3
REFUSED = (TangentValueError, TypeCheckError)  # the second where the shape checker runs


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@cache
def cloud(n: int = 2500, d: int = D, seed: int = 0) -> torch.Tensor:
    """Float32 rows with a massive mean and one outlier dimension a hundred times the others."""
    scales = torch.arange(d, 0, -1, dtype=torch.float64) + 1
    x = randn(n, d, seed=seed) * scales @ torch.linalg.qr(randn(d, d, seed=99))[0]
    x[:, 3] *= 100
    x += 1e4 * randn(d, seed=98)
    return x.float()


def fitted(x: torch.Tensor, cuts: list[int] | None = None, **options: object) -> SubspaceFitter:
    fitter = SubspaceFitter(x.shape[-1], heads=x.shape[1] if x.ndim == 3 else None, **options)
    for part in x.tensor_split(cuts or []):
        fitter.update(part)
    return fitter


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


class TestStatistics:
    def test_moments_are_those_of_all_rows(self) -> None:
        x = cloud()
        fitter = fitted(x, [3, 700, 701, 2400])
        assert fitter.n_rows == len(x)
        assert relative(fitter.mean, x.double().mean(0)) < 1e-7
        assert relative(fitter.covariance(), torch.cov(x.double().T)) < 1e-6

    def test_small_directions_survive_a_massive_mean_and_outlier(self) -> None:
        """Every entry is accurate relative to the scales of its own two coordinates."""
        x = cloud()
        expected = torch.cov(x.double().T)
        scales = expected.diagonal().sqrt()
        error = (fitted(x).covariance() - expected) / (scales[:, None] * scales)
        assert error.abs().max() < 1e-5

    @given(cuts=st.lists(st.integers(0, 2500), max_size=6), read_at=st.integers(0, 6))
    @settings(max_examples=8, deadline=None)
    def test_independent_of_batch_cuts(self, cuts: list[int], read_at: int) -> None:
        x = cloud()
        whole, cut = fitted(x), SubspaceFitter(D)
        for i, part in enumerate(x.tensor_split(sorted(cuts))):
            cut.update(part)
            if i == read_at and cut.n_rows > 1:
                cut.covariance()  # reading in between changes nothing
        assert relative(cut.covariance(), whole.covariance()) < 1e-6
        assert relative(cut.mean, whole.mean) < 1e-6
        angles = cut.fit(4).principal_angles(whole.fit(4))
        assert angles.max() < 1e-5

    @given(first=st.integers(1, 2499), second=st.integers(1, 2499))
    @settings(max_examples=8, deadline=None)
    def test_merged_shards_equal_one_pass(self, first: int, second: int) -> None:
        x = cloud()
        shards = [fitted(part) for part in x.tensor_split(sorted((first, second)))]
        merged = shards[0].merge(shards[1]).merge(shards[2])
        assert merged is shards[0] and merged.n_rows == len(x)
        assert relative(merged.covariance(), fitted(x).covariance()) < 1e-6
        assert relative(merged.mean, fitted(x).mean) < 1e-6

    def test_merging_leaves_the_other_and_goes_on(self) -> None:
        x = cloud()
        first, second = SubspaceFitter(D), fitted(x[:1000])
        before = second.covariance()
        first.merge(second).merge(SubspaceFitter(D))
        first.update(x[1000:])
        assert torch.equal(second.covariance(), before) and second.n_rows == 1000
        assert relative(first.covariance(), fitted(x).covariance()) < 1e-6

    def test_float64_rows_are_summed_in_float64(self) -> None:
        x = cloud().double()
        assert relative(fitted(x).covariance(), torch.cov(x.T)) < 1e-12
        assert fitted(x).fit(2).basis.dtype == torch.float64

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_fits_as_its_float32_copy(self, dtype: torch.dtype) -> None:
        x = randn(500, D).mul(torch.arange(D, 0, -1)).to(dtype)
        half, full = fitted(x), fitted(x.float())
        assert torch.equal(half.covariance(), full.covariance())
        assert half.fit(3).principal_angles(full.fit(3)).max() < 1e-6
        assert half.fit(3).basis.dtype == torch.float32

    def test_memory_does_not_grow_with_rows(self) -> None:
        short, long = fitted(cloud(1500)), fitted(cloud(8 * BUFFER_ROWS + 5))
        assert abs(len(pickle.dumps(long)) - len(pickle.dumps(short))) < 100

    def test_under_inference_mode_and_autocast(self) -> None:
        x = cloud()
        with torch.inference_mode():
            fitter = fitted(x[:1200])
            fitter.covariance()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fitter.update(x[1200:].clone().requires_grad_())
        assert relative(fitter.covariance(), fitted(x).covariance()) < 1e-6
        assert not fitter.fit(2).basis.is_inference()

    def test_blocks_of_a_wide_site_make_one_symmetric_matrix(self) -> None:
        x = randn(300, 777).float()
        covariance = fitted(x).covariance()
        assert torch.equal(covariance, covariance.T)
        assert relative(covariance, torch.cov(x.double().T)) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fit_on_a_gpu_is_the_fit_on_the_cpu() -> None:
    x = cloud()
    on_gpu = fitted(x.cuda()).fit(3)
    assert on_gpu.basis.is_cuda
    assert on_gpu.principal_angles(fitted(x).fit(3)).max() < 1e-3
    torch.testing.assert_close(on_gpu.tangent(x), fitted(x).fit(3).tangent(x), rtol=1e-3, atol=1)


class TestHeads:
    def test_each_head_is_fitted_alone(self) -> None:
        x = randn(600, HEADS, D).mul(torch.arange(1, D + 1)).float() + randn(HEADS, D).float()
        together = fitted(x, [100, 101]).fit(4)
        assert together.heads == HEADS and together.spectrum.shape == (HEADS, D)
        for head in range(HEADS):
            alone = fitted(x[:, head]).fit(4)
            assert together.head(head).principal_angles(alone).max() < 1e-5
            torch.testing.assert_close(together.head(head).mean, alone.mean)
            assert together.head(head).explained == pytest.approx(alone.explained)

    def test_merge_and_rank_rules(self) -> None:
        x = randn(600, HEADS, D)
        x[:, 1] *= torch.arange(1, D + 1).pow(2)
        merged = fitted(x[:200]).merge(fitted(x[200:]))
        assert relative(merged.covariance(), fitted(x).covariance()) < 1e-6
        ranks = [fitted(x[:, head]).fit(0.8).rank for head in range(HEADS)]
        assert merged.fit(0.8).rank == max(ranks) > min(ranks)


class TestCentering:
    def test_group_centering_removes_drifting_means(self) -> None:
        x = randn(900, D) * torch.arange(D, 0, -1)
        drift = 1e3 * torch.eye(D, dtype=torch.float64)[D - 1]
        groups = [x[i::3] + i * drift for i in range(3)]
        fitter = SubspaceFitter(D, centering="group")
        for start in range(0, 300, 77):  # groups take turns
            for i, rows in enumerate(groups):
                fitter.update(rows[start : start + 77], group=i)
        within = sum(torch.cov(rows.T) * (len(rows) - 1) for rows in groups) / (900 - 3)
        assert relative(fitter.covariance(), within) < 1e-10
        mean = torch.cat(groups).mean(0)
        torch.testing.assert_close(fitter.fit(2).mean, mean)
        pooled = fitted(torch.cat(groups)).fit(1)
        assert pooled.basis[D - 1].abs() > 0.99 > 0.1 > fitter.fit(1).basis[D - 1].abs()

    def test_groups_merge_across_shards(self) -> None:
        x = randn(600, D)
        one, first, second = (SubspaceFitter(D, centering="group") for _ in range(3))
        for i in range(3):
            rows = x[i::3] + 50 * i
            one.update(rows, group=i)
            first.update(rows[:80], group=i)
            if i != 1:
                second.update(rows[80:], group=i)
        second.update(x[1::3][80:] + 50, group=1)
        first.merge(second)
        assert relative(first.covariance(), one.covariance()) < 1e-10
        torch.testing.assert_close(first.mean, one.mean)

    def test_no_centering(self) -> None:
        x = randn(400, D) + 3
        fitter = fitted(x, centering="none")
        torch.testing.assert_close(fitter.covariance(), x.T @ x / 400)
        assert not fitter.fit(2).mean.any()


class TestSketch:
    def test_exact_where_the_data_are_low_rank(self) -> None:
        x = randn(800, 5) @ randn(5, 60, seed=1) + 10
        exact, sketched = fitted(x), fitted(x, max_exact_width=59, sketch_width=20)
        subspace = sketched.fit(5)
        assert subspace.principal_angles(exact.fit(5)).max() < 1e-5
        torch.testing.assert_close(
            subspace.spectrum[:5], exact.fit(5).spectrum[:5], rtol=1e-5, atol=0
        )
        assert subspace.metadata["captured_trace_error_bound"] < 1e-6

    @given(seed=st.integers(0, 1000), decay=st.floats(0.2, 2), rank=st.integers(1, 8))
    @settings(max_examples=8, deadline=None)
    def test_states_a_bound_that_holds(self, seed: int, decay: float, rank: int) -> None:
        x = randn(300, 50, seed=seed) * torch.arange(1, 51).double().pow(-decay)
        best = fitted(x).fit(rank).explained
        subspace = fitted(x, max_exact_width=49, sketch_width=16, seed=seed).fit(rank)
        covariance = torch.cov(x.T)
        captured = (subspace.basis.T @ covariance @ subspace.basis).trace() / covariance.trace()
        assert subspace.explained <= float(captured) + 1e-9  # what it claims is there
        bound = subspace.metadata["captured_trace_error_bound"]
        assert best - float(captured) <= bound and 0 < bound < 1

    def test_shards_share_the_sketch(self) -> None:
        x = cloud(2000, 40)
        options = {"max_exact_width": 30, "sketch_width": 12}
        merged = fitted(x[:700], **options).merge(fitted(x[700:], **options))
        one = fitted(x, [44], **options)
        torch.testing.assert_close(merged.fit(4).spectrum, one.fit(4).spectrum, rtol=1e-4, atol=0)
        with pytest.raises(TangentValueError, match="beyond max_exact_width"):
            one.covariance()
        with pytest.raises(TangentValueError, match="exact spectrum"):
            one.fit("parallel")
        with pytest.raises(TangentValueError, match="sketch shows numerical rank"):
            one.fit(13)
        with pytest.raises(TangentValueError, match="only like fitters merge"):
            one.merge(fitted(x, seed=1, **options))

    def test_heads(self) -> None:
        x = randn(300, HEADS, 3) @ randn(3, 30, seed=1)
        sketched = fitted(x, max_exact_width=29, sketch_width=8).fit(3)
        assert sketched.principal_angles(fitted(x).fit(3)).max() < 1e-5


class TestRank:
    def planted(self) -> SubspaceFitter:
        """Three strong directions over a flat floor."""
        return fitted(randn(4000, 30) * torch.tensor([9.0, 7, 5] + [1] * 27) @ self.turn())

    def turn(self) -> torch.Tensor:
        return torch.linalg.qr(randn(30, 30, seed=1))[0]

    @pytest.mark.parametrize("rule", ["broken-stick", "parallel"])
    def test_rules_find_planted_directions(self, rule: str) -> None:
        subspace = self.planted().fit(rule)
        assert subspace.rank == 3 and subspace.metadata["rank_rule"] == rule
        truth = subspace.replace(basis=self.turn().T[:, :3], spectrum=None)
        assert subspace.principal_angles(truth).max() < 0.1

    def test_parallel_analysis_is_seeded_and_covers_few_rows(self) -> None:
        few = fitted(randn(20, 30) * torch.tensor([30.0] + [1] * 29) @ self.turn())
        assert few.fit("parallel").rank == few.fit("parallel").rank == 1

    def test_rules_refuse_noise(self) -> None:
        noise = fitted(randn(4000, 30))
        for rule in ("broken-stick", "parallel"):
            with pytest.raises(TangentValueError, match="no direction above chance"):
                noise.fit(rule)

    @pytest.mark.parametrize(
        ("share", "rank"), [(0.01, 1), (0.5, 1), (0.50001, 2), (0.75, 2), (0.76, 3), (0.9999, 4)]
    )
    def test_energy_share_takes_the_fewest_that_reach_it(self, share: float, rank: int) -> None:
        eigen = eigen_of(torch.tensor([4.0, 2, 1, 1]).double().diag(), torch.float64)
        assert choose_rank(share, eigen, 100, 0) == rank

    def test_broken_stick_by_hand(self) -> None:
        """For d = 3 the pieces are 11/18, 5/18 and 2/18."""
        for shares, rank in (([12, 5.1, 0.9], 2), ([12, 4.9, 1.1], 1)):
            eigen = eigen_of(torch.tensor(shares).double().diag(), torch.float64)
            assert choose_rank("broken-stick", eigen, 100, 0) == rank

    def test_spectrum_is_kept_whole(self) -> None:
        fitter = self.planted()
        subspace = fitter.fit(2)
        expected = torch.linalg.eigvalsh(fitter.covariance()).flip(0)
        torch.testing.assert_close(subspace.spectrum, expected)
        assert subspace.explained == pytest.approx(float(expected[:2].sum() / expected.sum()))

    @pytest.mark.parametrize("rank", [0, -1, 1.0, 1.5, 0.0, math.nan, True, "elbow", None])
    def test_what_is_no_rank(self, rank: object) -> None:
        with pytest.raises(REFUSED, match=r"(?s)rank|share"):
            self.planted().fit(rank)  # type: ignore[arg-type]


class TestRefusals:
    def test_rank_above_that_of_the_data(self) -> None:
        x = (randn(500, 3) @ randn(3, D, seed=1)).float()
        assert fitted(x).fit(3).rank == 3
        with pytest.raises(TangentValueError, match=r"rank 4 .* rank 3 "):
            fitted(x).fit(4)
        with pytest.raises(TangentValueError, match=r"rank 4 .* rank 3 \(4 rows of width 12\)"):
            fitted(randn(4, D)).fit(4)

    def test_bad_rows_are_counted_and_not_added(self) -> None:
        x = cloud(50)
        fitter = fitted(x)
        before = fitter.covariance()
        bad = x.clone()
        bad[4, 1], bad[9, 0], bad[9, 2] = math.nan, math.inf, -math.inf
        with pytest.raises(TangentValueError, match="2 of 50 rows"):
            fitter.update(bad)
        assert fitter.n_rows == 50 and torch.equal(fitter.covariance(), before)

    def test_large_finite_rows_are_welcome(self) -> None:
        x = torch.full((4, 2), 6e4).half()
        x[0, 0] = 1
        assert fitted(x).fit(1).rank == 1

    def test_rows_that_do_not_vary(self) -> None:
        for value in (0.0, 3.3, 1e4):
            with pytest.raises(TangentValueError, match="3000 rows do not vary"):
                fitted(torch.full((3000, D), value)).fit(1)
        x = randn(100, HEADS, D)
        x[:, 1] = 2.5
        with pytest.raises(TangentValueError, match="head 1 do not vary"):
            fitted(x).fit(1)

    def test_too_few_rows(self) -> None:
        for x in (cloud(0), cloud(1)):
            with pytest.raises(
                TangentValueError, match=f"at least 2 rows are needed, got {len(x)}"
            ):
                fitted(x).fit(1)
        lonely = SubspaceFitter(D, centering="group")
        for i, row in enumerate(cloud(4)):
            lonely.update(row[None], group=i)
        with pytest.raises(TangentValueError, match="4 rows in 4 groups"):
            lonely.fit(1)

    def test_shapes_and_names(self) -> None:
        with pytest.raises(TangentValueError, match=r"\[\.\.\., 12\]"):
            SubspaceFitter(D).update(torch.zeros(3, D + 1))
        with pytest.raises(TangentValueError, match="one leading axis"):
            SubspaceFitter(D).update(torch.zeros(2, 3, D))
        with pytest.raises(TangentValueError, match=r"'pcaa'; there are pca, svd"):
            fitted(cloud(9)).fit(1, "pcaa")
        with pytest.raises(REFUSED):
            SubspaceFitter(D, centering="median")  # type: ignore[arg-type]
        with pytest.raises(TangentValueError, match="1 or more"):
            SubspaceFitter(0)
        with pytest.raises(TangentValueError, match="only like fitters merge"):
            SubspaceFitter(D).merge(SubspaceFitter(D, keep_sample=True))


def test_labels_travel_to_the_subspace() -> None:
    subspace = fitted(cloud(100)).fit(
        2, site="hook_embed", model="gpt2", positions="all", metadata={"note": 1}
    )
    assert (subspace.site, subspace.model, subspace.positions) == ("hook_embed", "gpt2", "all")
    assert subspace.n_tokens == 100 and subspace.method == "pca"
    assert subspace.metadata["note"] == 1 and subspace.metadata["centering"] == "global"
