"""Every method ends in an orthonormal basis of the right span, canonical in sign and order."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry import (
    EXTRACTORS,
    SubspaceFitter,
    TangentSubspace,
    subspace_from_dictionary,
)
from tl_tangent.geometry.factorization import semi_nmf
from tl_tangent.geometry.sampling import RowSample

D, RANK = 10, 3
METHODS = sorted(set(EXTRACTORS) - {"dictionary"})


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sources(n: int = 300) -> torch.Tensor:
    """Three skewed nonnegative sources along random nonnegative directions, and a small floor."""
    parts = randn(n, RANK).square() * torch.tensor([9.0, 4, 2])
    return parts @ randn(RANK, D, seed=1).abs() + 0.1 * randn(n, D, seed=2).abs()


def fitted(x: torch.Tensor, **options: object) -> SubspaceFitter:
    fitter = SubspaceFitter(x.shape[-1], keep_sample=True, **options)
    fitter.update(x)
    return fitter


def gap(first: TangentSubspace, second: TangentSubspace) -> float:
    return float(first.principal_angles(second).max())


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
class TestEveryMethod:
    @pytest.mark.parametrize("method", METHODS)
    def test_contract(self, method: str) -> None:
        fitter = fitted(sources())
        subspace, again = fitter.fit(RANK, method), fitter.fit(RANK, method)
        identity = torch.eye(RANK, dtype=torch.float64)
        torch.testing.assert_close(subspace.basis.T @ subspace.basis, identity)
        assert torch.equal(subspace.basis, again.basis)
        peak = subspace.basis.gather(0, subspace.basis.abs().argmax(0, keepdim=True))
        assert bool((peak > 0).all())
        assert subspace.method == method and 0 < subspace.explained <= 1

    @pytest.mark.parametrize("method", METHODS)
    def test_order_is_that_of_captured_variance(self, method: str) -> None:
        x = sources()
        subspace = fitted(x).fit(RANK, method)
        centered = x - subspace.mean
        moments = centered.T @ centered / (len(x) - bool(subspace.mean.any()))
        inside = subspace.basis.T @ moments @ subspace.basis
        torch.testing.assert_close(inside, subspace.spectrum[:RANK].diag(), rtol=1e-6, atol=1e-6)
        assert bool((subspace.spectrum[:RANK].diff() <= 0).all())
        share = float(inside.trace() / moments.trace())
        assert subspace.explained == pytest.approx(share, rel=1e-6)

    @pytest.mark.parametrize("method", METHODS)
    def test_none_captures_more_than_the_best_of_its_kind(self, method: str) -> None:
        fitter = fitted(sources())
        subspace = fitter.fit(RANK, method)
        best = fitter.fit(RANK, "pca" if subspace.mean.any() else "svd")
        assert 0.8 * best.explained < subspace.explained <= best.explained + 1e-12

    @pytest.mark.parametrize("method", METHODS)
    def test_heads_are_independent(self, method: str) -> None:
        x = torch.stack([sources(), sources().flip(1)], 1)
        heads = SubspaceFitter(D, heads=2, keep_sample=True)
        heads.update(x)
        together = heads.fit(2, method)
        for head in range(2):
            assert gap(together.head(head), fitted(x[:, head]).fit(2, method)) < 1e-6

    @pytest.mark.parametrize("method", ["ica", "nmf", "seminmf", "kmeans"])
    def test_without_a_sample(self, method: str) -> None:
        fitter = SubspaceFitter(D)
        fitter.update(sources())
        with pytest.raises(TangentValueError, match="keep_sample=True"):
            fitter.fit(RANK, method)


class TestSpans:
    def test_pca_is_the_span_of_centred_singular_vectors(self) -> None:
        x = sources()
        vectors = torch.linalg.svd(x - x.mean(0), full_matrices=False)[2]
        assert gap(fitted(x).fit(RANK), TangentSubspace(vectors[:RANK].T)) < 1e-9

    def test_svd_is_the_span_of_uncentred_singular_vectors(self) -> None:
        x = sources() + 5
        subspace = fitted(x).fit(RANK, "svd")
        vectors = torch.linalg.svd(x, full_matrices=False)[2]
        assert gap(subspace, TangentSubspace(vectors[:RANK].T)) < 1e-9
        assert not subspace.mean.any()
        assert gap(subspace, fitted(x).fit(RANK)) > 0.1

    @pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
    @pytest.mark.parametrize("sample_rows", [4096, 100])
    def test_ica_span_is_pca_span(self, sample_rows: int) -> None:
        fitter = fitted(sources(), sample_rows=sample_rows)
        assert gap(fitter.fit(RANK, "ica"), fitter.fit(RANK)) < 1e-9

    def test_nmf_finds_planted_parts(self) -> None:
        atoms = torch.eye(D, dtype=torch.float64)[:RANK] + torch.eye(D).double()[RANK : 2 * RANK]
        x = randn(400, RANK).abs() @ atoms
        assert gap(fitted(x).fit(RANK, "nmf"), subspace_from_dictionary(atoms)) < 1e-3
        with pytest.raises(TangentValueError, match="method='seminmf'"):
            fitted(x - 1).fit(RANK, "nmf")

    def test_kmeans_spans_the_offsets_of_planted_clusters(self) -> None:
        centers = 50 * randn(RANK + 1, D)
        labels = torch.arange(400) % (RANK + 1)
        x = centers[labels] + 0.01 * randn(400, D, seed=4)
        subspace = fitted(x).fit(RANK, "kmeans")
        offsets = centers - centers.mean(0)
        assert gap(subspace, subspace_from_dictionary(offsets, rank=RANK)) < 1e-3
        moved = fitted(x + 1000).fit(RANK, "kmeans")
        assert gap(subspace, moved) < 1e-6  # moving the cloud does not turn its subspace

    def test_duplicate_rows(self) -> None:
        """Four distinct points hold three directions, however often they are repeated."""
        fitter = fitted(torch.eye(D, dtype=torch.float64)[:4].repeat(50, 1))
        for method in ("pca", "ica", "kmeans"):
            assert gap(fitter.fit(3, method), fitter.fit(3)) < 1e-6
            with pytest.raises(TangentValueError, match=r"rank 4 .* rank 3 "):
                fitter.fit(4, method)

    def test_group_centred_samples(self) -> None:
        """The drift between groups is no direction of any centred method."""
        drift = 100 * torch.eye(D, dtype=torch.float64)[D - 1]
        fitter = SubspaceFitter(D, centering="group", keep_sample=True)
        for i in range(4):
            fitter.update(randn(200, D, seed=i) * torch.arange(D, 0, -1) + i * drift, group=i)
        assert fitter.fit(2, "kmeans").basis[D - 1].abs().max() < 0.3


class TestSemiNMF:
    def test_weights_are_nonnegative_and_the_fit_is_good(self) -> None:
        rows = randn(200, RANK).abs() @ randn(RANK, D, seed=1)
        weights, dictionary = semi_nmf(rows, RANK, seed=0, tol=1e-8)
        assert bool((weights >= 0).all())
        assert float((rows - weights @ dictionary).norm() / rows.norm()) < 0.02

    def test_steps_never_raise_the_error(self) -> None:
        rows = randn(60, D)
        errors = []
        for steps in (1, 2, 4, 8, 16, 32):
            weights, dictionary = semi_nmf(rows, RANK, seed=0, max_iter=steps, tol=0)
            errors.append(float((rows - weights @ dictionary).square().sum()))
        assert errors == sorted(errors, reverse=True) and errors[-1] < 0.95 * errors[0]

    def test_one_atom_more_represents_pca_and_mean(self) -> None:
        """PCA(k) plus the mean is a semi-nonnegative factorisation with k + 1 atoms."""
        plane = torch.linalg.qr(randn(D, 2))[0].T
        rows = randn(500, 2) @ plane + 20 * randn(D, seed=3)
        subspace = fitted(rows).fit(3, "seminmf")
        centred = fitted(rows).fit(2)
        assert centred.principal_angles(subspace).max() < 1e-3


class TestDictionary:
    def test_span_of_atoms_of_any_scale_order_and_number(self) -> None:
        atoms = randn(4, D)
        subspace = subspace_from_dictionary(atoms)
        repeated = torch.cat([1e-4 * atoms, 1e3 * atoms.flip(0), torch.zeros(2, D)])
        assert subspace.rank == subspace_from_dictionary(repeated).rank == 4
        assert gap(subspace, subspace_from_dictionary(repeated)) < 1e-9
        assert gap(subspace, TangentSubspace(atoms.T, orthonormalize=True)) < 1e-9

    def test_ordered_by_captured_variance(self) -> None:
        x, atoms = sources(), randn(5, D)
        covariance = torch.cov(x.T)
        subspace = subspace_from_dictionary(atoms, x.mean(0), covariance=covariance, site="here")
        inside = subspace.basis.T @ covariance @ subspace.basis
        torch.testing.assert_close(inside, subspace.spectrum.diag())
        assert subspace.site == "here" and torch.equal(subspace.mean, x.mean(0))
        leading = subspace_from_dictionary(atoms, rank=2, covariance=covariance)
        torch.testing.assert_close(leading.basis, subspace.truncate(2).basis)
        torch.testing.assert_close(leading.explained, subspace.truncate(2).explained)

    def test_overcomplete_atoms_ordered_by_variance_are_pca(self) -> None:
        fitter = fitted(sources())
        subspace = fitter.fit(RANK, "dictionary", dictionary=randn(40, D))
        torch.testing.assert_close(subspace.basis, fitter.fit(RANK).basis)
        torch.testing.assert_close(subspace.mean, fitter.fit(RANK).mean)
        assert fitter.fit(method="dictionary", dictionary=randn(4, D)).rank == 4

    def test_too_few_directions(self) -> None:
        atoms = randn(2, D)
        with pytest.raises(TangentValueError, match=r"rank 3 .* only 2"):
            subspace_from_dictionary(torch.cat([atoms, atoms]), rank=3)
        with pytest.raises(TangentValueError, match=r"rank 3 .* only 2"):
            fitted(sources()).fit(3, "dictionary", dictionary=atoms)
        with pytest.raises(TangentValueError, match="only 0"):
            subspace_from_dictionary(torch.zeros(2, D))
        with pytest.raises(TangentValueError, match="needs dictionary="):
            fitted(sources()).fit(3, "dictionary")
        with pytest.raises(TangentValueError, match="NaN"):
            subspace_from_dictionary(torch.full((2, D), torch.nan))


class TestSample:
    def test_independent_of_cuts_and_bounded(self) -> None:
        rows = torch.arange(1000.0)[:, None]
        whole, cut = RowSample(50, seed=3), RowSample(50, seed=3)
        whole.update(rows)
        for part in rows.tensor_split([1, 18, 33, 500]):
            cut.update(part)
        assert torch.equal(whole.rows()[0], cut.rows()[0]) and len(whole.rows()[0]) == 50

    def test_every_row_is_as_likely(self) -> None:
        rows = torch.arange(20.0)[:, None]
        counts = torch.zeros(20)
        for seed in range(400):
            shards = [RowSample(5, seed), RowSample(5, seed + 10_000)]
            shards[0].update(rows[:12])
            shards[1].update(rows[12:], group="b")
            shards[0].merge(shards[1])
            taken, groups = shards[0].rows()
            assert [group == "b" for group in groups] == (taken[:, 0] >= 12).tolist()
            counts[taken[:, 0].long()] += 1
        assert float((counts / 400 - 5 / 20).abs().max()) < 0.08


def test_import_stays_light() -> None:
    """Only what needs scikit-learn, pandas or a plot loads it."""
    heavy = {"sklearn", "pandas", "matplotlib", "scipy", "transformer_lens"}
    code = (
        "import sys, torch, jaxtyping; before = set(sys.modules)\n"
        "import types; stub = types.ModuleType('tl_tangent')\n"
        "stub.__path__ = sys.argv[1:]; sys.modules['tl_tangent'] = stub\n"
        "import tl_tangent.geometry\n"
        f"loaded = {heavy!r} & (set(sys.modules) - before)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    import tl_tangent

    done = subprocess.run(
        [sys.executable, "-c", code, *tl_tangent.__path__], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
