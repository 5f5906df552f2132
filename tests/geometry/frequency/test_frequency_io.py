"""Statistics of token types come back from a file bit for bit and go on so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tl_tangent.errors import TangentFileError
from tl_tangent.geometry.frequency import (
    EqualSample,
    TokenMoments,
    load_equal_sample,
    load_token_moments,
    save_equal_sample,
    save_token_moments,
)


def piece(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(50, 4, generator=generator), torch.randint(0, 6, (50,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments(dtype: torch.dtype, tmp_path: Path) -> None:
    moments = TokenMoments(4, 6, dtype=dtype)
    moments.update(*piece(0))
    save_token_moments(tmp_path / "m", moments)
    back = load_token_moments(tmp_path / "m")
    for one in (moments, back):
        one.update(*piece(1))
    assert back.centres.dtype == dtype and (back.d, back.n_types, back.n_tokens) == (4, 6, 100)
    for name in ("counts", "centres", "spreads"):
        assert torch.equal(getattr(back, name), getattr(moments, name))


def test_sample(tmp_path: Path) -> None:
    sample = EqualSample(6, 5, seed=2**40)
    sample.offer(piece(0)[1], torch.arange(50))
    save_equal_sample(tmp_path / "s", sample)
    back = load_equal_sample(tmp_path / "s")
    for one in (sample, back):
        one.offer(piece(1)[1], torch.arange(50, 100))
    assert torch.equal(back.lowest, sample.lowest)
    assert (back.size, back.seed) == (sample.size, sample.seed)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_token_moments(tmp_path / "m")
    save_equal_sample(tmp_path / "s", EqualSample(3, 2))
    with pytest.raises(TangentFileError, match="holds a EqualSample, not a TokenMoments"):
        load_token_moments(tmp_path / "s")
    data = bytearray((tmp_path / "s").read_bytes())
    data[-1] ^= 1
    (tmp_path / "s").write_bytes(data)
    with pytest.raises(TangentFileError, match="altered"):
        load_equal_sample(tmp_path / "s")
