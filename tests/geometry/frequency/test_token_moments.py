"""Moments of token types against two passes over all vectors, however the stream is cut."""

from __future__ import annotations

import math

import pytest
import torch

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency import EqualSample, TokenMoments

D, TYPES, N = 5, 9, 400


def stream(seed: int = 0, n: int = N, far: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors around a centre of their type; type 7 comes once, type 8 never."""
    generator = torch.Generator().manual_seed(seed)
    types = torch.randint(0, 7, (n,), generator=generator)
    types[n // 2] = 7
    centres = far + torch.randn(TYPES, D, generator=torch.Generator().manual_seed(99)).double()
    return centres[types] + torch.randn(n, D, generator=generator).double(), types


def of(*pieces: tuple[torch.Tensor, torch.Tensor], **options: torch.dtype) -> TokenMoments:
    made = TokenMoments(D, TYPES, **options)
    for vectors, types in pieces:
        made.update(vectors, types)
    return made


def assert_close(a: TokenMoments, b: TokenMoments, rtol: float = 1e-12) -> None:
    assert torch.equal(a.counts, b.counts)
    torch.testing.assert_close(a.centres, b.centres, rtol=rtol, atol=0)
    torch.testing.assert_close(a.spreads, b.spreads, rtol=rtol, atol=1e-12)


class TestUpdate:
    @pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
    def test_types_are_numbers_in_any_dtype(self, dtype: torch.dtype) -> None:
        """Torch takes no int8 for indices."""
        x, types = stream()
        assert torch.equal(of((x, types.to(dtype))).spreads, of((x, types)).spreads)
        one, same = (EqualSample(TYPES, 4) for _ in range(2))
        one.offer(types.to(dtype), torch.arange(N))
        same.offer(types, torch.arange(N))
        assert torch.equal(one.lowest, same.lowest)

    def test_is_that_of_two_passes(self) -> None:
        x, types = stream()
        found = of((x, types))
        for w in range(7):
            own = x[types == w]
            assert int(found.counts[w]) == len(own)
            assert torch.allclose(found.centres[w], own.mean(0), rtol=1e-13)
            spread = (own - own.mean(0)).square().sum()
            assert float(found.spreads[w]) == pytest.approx(float(spread), rel=1e-12)
        assert torch.equal(found.centres[7], x[N // 2]) and float(found.spreads[7]) == 0
        assert int(found.counts[8]) == 0 and not found.centres[8].any()
        assert found.n_tokens == N

    @pytest.mark.parametrize("size", [1, 7, 128])
    def test_cuts_and_order_do_not_matter(self, size: int) -> None:
        x, types = stream()
        pieces = list(zip(x.split(size), types.split(size), strict=True))
        assert_close(of(*pieces), of((x, types)))
        assert_close(of(*pieces[::-1]), of((x, types)))

    def test_a_far_mean_costs_no_precision(self) -> None:
        """Sums of squares around the origin would lose 14 digits of 16."""
        x, types = stream(far=1e7)
        found = of(*zip(x.split(50), types.split(50), strict=True))
        near = of((x - 1e7, types))
        torch.testing.assert_close(found.spreads, near.spreads, rtol=1e-7, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_equal_vectors_have_no_spread_at_all(self, dtype: torch.dtype) -> None:
        """Sums of 0.1 round, and a logarithm would see what is left."""
        static = torch.randn(TYPES, D, generator=torch.Generator().manual_seed(0)) + 0.1
        types = stream()[1]
        pieces = [(static[piece], piece) for piece in types.split(37)]
        found = of(*pieces, dtype=dtype)
        assert not found.spreads.any()
        assert torch.equal(found.centres[:8], static[:8].to(dtype))

    def test_half_precision_and_gradients_are_left_behind(self) -> None:
        x, types = stream()
        lifted = of((x.bfloat16().double(), types))
        with torch.inference_mode():
            found = of((x.bfloat16(), types.int()))
        assert_close(found, lifted)
        found.update(x, types)  # goes on outside of it
        leaf = x.requires_grad_()
        assert not of((leaf, types)).centres.requires_grad

    def test_no_tokens_change_nothing(self) -> None:
        found, alone = of(stream()), of(stream())
        found.update(torch.empty(0, D), torch.empty(0, dtype=torch.int64))
        assert_close(found, alone, rtol=0)


class TestMerge:
    def test_is_one_stream(self) -> None:
        pieces = [stream(seed) for seed in range(3)]
        merged = of(pieces[0])
        for piece in pieces[1:]:
            other = of(piece)
            kept = other.spreads.clone()
            merged.merge(other)
            assert torch.equal(other.spreads, kept)
        assert_close(merged, of(*pieces))

    def test_with_nothing(self) -> None:
        full = of(stream())
        full.merge(of())
        assert_close(full, of(stream()), rtol=0)
        empty = of()
        empty.merge(full)
        assert_close(empty, full, rtol=0)
        empty.update(*stream(1))
        assert_close(full, of(stream()), rtol=0)  # the two share no memory

    def test_only_like_moments(self) -> None:
        for other in (TokenMoments(D, 3), TokenMoments(2, TYPES), of(dtype=torch.float32)):
            with pytest.raises(TangentValueError, match="only like moments do"):
                of().merge(other)


class TestFloat32:
    def test_centres_round_and_spreads_hardly(self) -> None:
        x, types = stream(n=4000)
        pieces = list(zip(x.split(20), types.split(20), strict=True))
        short, exact = of(*pieces, dtype=torch.float32), of(*pieces)
        assert short.centres.dtype == torch.float32 and short.spreads.dtype == torch.float64
        torch.testing.assert_close(short.centres.double(), exact.centres, rtol=1e-5, atol=0)
        torch.testing.assert_close(short.spreads, exact.spreads, rtol=1e-6, atol=1e-9)

    def test_memory_is_what_is_said(self) -> None:
        for dtype, item in ((torch.float64, 8), (torch.float32, 4)):
            found = of(stream(), stream(1), dtype=dtype)
            assert found.nbytes == TYPES * (D * item + 16)
        assert round(50_000 * (768 * 8 + 16) / 1e6) == 308
        assert round(50_000 * (768 * 4 + 16) / 1e6) == 154


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x, t: (x, t + 2), r"lie in \[0, 9\), got from 2 to 9"),
            (lambda x, t: (x, t - 1), r"got from -1 to"),
            (lambda x, t: (x.where(t[:, None] != 7, math.nan), t), "1 of 400 vectors hold NaN"),
        ],
    )
    def test_and_nothing_is_added(self, change, message: str) -> None:
        found = of(stream())
        with pytest.raises(TangentValueError, match=message):
            found.update(*change(*stream(1)))
        assert_close(found, of(stream()), rtol=0)

    def test_width(self) -> None:
        x, types = stream()
        with pytest.raises(TangentValueError, match=r"shape \[400, 5\], got \[400, 4\]"):
            of((x[:, :4], types))

    def test_sizes_and_precision(self) -> None:
        with pytest.raises(TangentValueError, match="d=0, n_types=3"):
            TokenMoments(0, 3)
        with pytest.raises(TangentValueError, match="float32 or float64, got torch.bfloat16"):
            TokenMoments(2, 3, dtype=torch.bfloat16)

    def test_large_vectors_are_finite(self) -> None:
        """The sum of a batch leaves the range of float32 where no entry does."""
        x = torch.full((4, D), 3e38)
        assert torch.equal(of((x, torch.zeros(4).long())).centres[0], x[0].double())
