"""Fitters come back from a file bit for bit, and pieces that met on disk are one stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.geometry import SubspaceFitter, SubspaceSet
from tl_tangent.geometry.fitter_io import load_fitters, merge_fitters, save_fitters
from tl_tangent.geometry.moments import BUFFER_ROWS

D, HEADS, N = 12, 3, BUFFER_ROWS + 300  # one buffer is summed, the second is not full
KINDS = {
    "plain": {},
    "group": {"centering": "group"},
    "heads": {"heads": HEADS},
    "sample": {"keep_sample": True, "sample_rows": 40, "seed": 3},
    "sketch": {"max_exact_width": D - 1, "sketch_width": 8, "seed": 5},
    "none": {"centering": "none"},
}


def rows(seed: int = 0, heads: int | None = None, n: int = N) -> torch.Tensor:
    """Float32 rows of uneven scales around a mean that is far off and always the same."""
    lead = (n,) if heads is None else (n, heads)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*lead, D, generator=generator) * torch.arange(D, 0, -1) + 100


def seen(draw: int = 0, group: object = "g", **options: object) -> SubspaceFitter:
    fitter = SubspaceFitter(D, **options)
    fitter.update(rows(draw, fitter.heads), group=group)
    return fitter


def through(path: Path, fitter: SubspaceFitter) -> SubspaceFitter:
    save_fitters(path, {"site": fitter})
    return load_fitters(path)["site"]


def assert_equal_fits(a: SubspaceFitter, b: SubspaceFitter, method: str = "pca") -> None:
    one, two = a.fit(3, method), b.fit(3, method)
    for name in ("basis", "mean", "spectrum"):
        first, second = getattr(one, name), getattr(two, name)
        assert first.dtype == second.dtype and torch.equal(first, second), name
    assert one.metadata == two.metadata and one.n_tokens == two.n_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_fitter_comes_back_bit_for_bit_and_goes_on_so(kind: str, tmp_path: Path) -> None:
    fitter = seen(**KINDS[kind])
    back = through(tmp_path / "f", fitter)
    assert back.config == fitter.config and back.n_rows == fitter.n_rows == N
    for one in (fitter, back):  # what waited in the buffer waits in it still
        one.update(rows(1, fitter.heads), group="h")
        one.update(rows(2, fitter.heads), group="g")
    assert_equal_fits(fitter, back)
    if kind == "sample":
        assert_equal_fits(fitter, back, "kmeans")


def test_saving_changes_nothing(tmp_path: Path) -> None:
    saved, alone = seen(), seen()
    save_fitters(tmp_path / "f", {"site": saved})
    for one in (saved, alone):
        one.update(rows(1), group="g")
    assert_equal_fits(saved, alone)


def test_a_fitter_comes_back_after_it_was_fitted(tmp_path: Path) -> None:
    """A fit moves the shifts to the means, in float64."""
    fitter = seen(centering="group")
    fitter.fit(2)
    assert_equal_fits(fitter, through(tmp_path / "f", fitter))


def test_float64_and_no_rows_at_all(tmp_path: Path) -> None:
    fitter = SubspaceFitter(D)
    assert through(tmp_path / "f", fitter).n_rows == 0
    fitter.update(rows().double())
    back = through(tmp_path / "f", fitter)
    assert back.fit(2).basis.dtype == torch.float64
    assert_equal_fits(fitter, back)


@pytest.mark.parametrize("kind", ["plain", "group", "heads", "sketch"])
def test_merged_from_disk_is_one_fitter_to_rounding(kind: str, tmp_path: Path) -> None:
    paths, whole = [], SubspaceFitter(D, **KINDS[kind])
    for i, group in enumerate(("a", "b", "a")):
        paths.append(tmp_path / str(i))
        save_fitters(paths[-1], {"site": seen(i, group, **KINDS[kind])})
        whole.update(rows(i, whole.heads), group=group)
    merged = merge_fitters(paths)["site"]
    assert merged.n_rows == whole.n_rows == 3 * N
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-6, atol=0)  # float32 buffers
    if kind != "sketch":  # entries as small as rounding next to products of scales up to 12 * 12
        torch.testing.assert_close(merged.covariance(), whole.covariance(), rtol=1e-4, atol=1e-4)
    cosines = torch.linalg.svdvals(merged.fit(2).basis.mT @ whole.fit(2).basis)
    assert float(cosines.min()) > 1 - 1e-5


def test_what_is_not_such_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with pytest.raises(FileNotFoundError):
        load_fitters(path)
    save_fitters(path, {"site": seen()})
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(TangentFileError, match="altered"):
        load_fitters(path)
    path.write_bytes(data[:200])
    with pytest.raises(TangentFileError, match="truncated"):
        load_fitters(path)
    SubspaceSet({"site": seen().fit(2)}).save(path)
    with pytest.raises(TangentFileError, match="holds a SubspaceSet"):
        load_fitters(path)


def test_only_like_pieces_merge(tmp_path: Path) -> None:
    save_fitters(tmp_path / "a", {"site": seen()})
    save_fitters(tmp_path / "b", {"other": seen()})
    save_fitters(tmp_path / "c", {"site": seen(centering="none")})
    with pytest.raises(TangentFileError, match="about other, but"):
        merge_fitters([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(TangentValueError, match="only like fitters merge"):
        merge_fitters([tmp_path / "a", tmp_path / "c"])
    with pytest.raises(TangentValueError, match="no files"):
        merge_fitters([])


def test_a_group_that_a_file_would_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TangentValueError, match=r"named \(1, 2\)"):
        save_fitters(tmp_path / "f", {"site": seen(group=(1, 2), centering="group")})
    assert not list(tmp_path.iterdir())
