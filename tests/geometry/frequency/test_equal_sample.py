"""Equal samples of token types: exact in number, even over sets, blind to order and cut."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from scipy import stats

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency import EqualSample, TokenMoments
from tl_tangent.geometry.frequency.equal_sample import scrambled

N, TYPES, SIZE = 600, 8, 20


def corpus(seed: int = 0) -> torch.Tensor:
    """Types of a stream; 6 of them often, type 6 five times, type 7 never."""
    generator = torch.Generator().manual_seed(seed)
    types = torch.randint(0, 6, (N,), generator=generator)
    types[torch.randperm(N, generator=generator)[:5]] = 6
    return types


def offered(*pieces: torch.Tensor, types: torch.Tensor | None = None, seed: int = 0) -> EqualSample:
    types = corpus() if types is None else types
    sample = EqualSample(TYPES, SIZE, seed)
    for piece in pieces or (torch.arange(len(types)),):
        sample.offer(types[piece], piece)
    return sample


class TestSample:
    def test_takes_exactly_so_many_and_all_of_fewer(self) -> None:
        types = corpus()
        sample = offered()
        taken = sample.taken(types, torch.arange(N))
        assert torch.bincount(types[taken], minlength=TYPES).tolist() == [SIZE] * 6 + [5, 0]
        assert sample.complete.tolist() == [True] * 6 + [False] * 2

    def test_those_of_the_lowest_priorities(self) -> None:
        types, drawn = corpus(), scrambled(torch.arange(N), 0)
        taken = offered().taken(types, torch.arange(N))
        for w in range(7):
            own = drawn[types == w].sort().values[:SIZE]
            assert torch.equal(drawn[taken & (types == w)].sort().values, own)

    def test_order_cut_and_repetition_do_not_matter(self) -> None:
        whole = offered().lowest
        order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
        assert torch.equal(offered(order).lowest, whole)
        assert torch.equal(offered(*order.split(7)).lowest, whole)
        assert torch.equal(offered(torch.arange(N), order).lowest, whole)  # each one twice
        twice = torch.arange(N).repeat_interleave(2)
        assert torch.equal(offered(twice).lowest, whole)

    def test_pieces_merge_to_the_whole(self) -> None:
        first, second = offered(torch.arange(250)), offered(torch.arange(200, N))
        kept = second.lowest.clone()
        first.merge(second)
        assert torch.equal(first.lowest, offered().lowest)
        assert torch.equal(second.lowest, kept)

    def test_equal_seeds_take_the_same_and_others_do_not(self) -> None:
        types, at = corpus(), torch.arange(N)
        one, two, other = (offered(seed=s).taken(types, at) for s in (0, 0, -1))
        assert torch.equal(one, two)
        both = int((one & other).sum())
        assert both < 0.6 * int(one.sum())  # 5 of type 6 and a fifth of the others

    def test_goes_on_after_inference_mode(self) -> None:
        with torch.inference_mode():
            sample = offered(torch.arange(100))
        sample.offer(corpus()[100:], torch.arange(100, N))
        assert torch.equal(sample.lowest, offered().lowest)

    def test_second_pass_has_equal_counts(self) -> None:
        types, sample = corpus(), offered()
        x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
        moments = TokenMoments(3, TYPES)
        for piece in torch.arange(N).split(64):
            taken = sample.taken(types[piece], piece)
            moments.update(x[piece][taken], types[piece][taken])
        assert moments.counts[sample.complete].tolist() == [SIZE] * 6


class TestLaw:
    def test_every_set_is_equally_likely(self) -> None:
        """15 sets of 2 of 6 occurrences, over seeds."""
        types, at = torch.zeros(6, dtype=torch.int64), torch.arange(6)
        counts = dict.fromkeys(combinations(range(6), 2), 0)
        for seed in range(3000):
            sample = EqualSample(1, 2, seed)
            sample.offer(types, at)
            counts[tuple(sample.taken(types, at).nonzero().flatten().tolist())] += 1
        assert stats.chisquare(list(counts.values())).pvalue > 0.01

    def test_neighbours_in_the_stream_are_taken_independently(self) -> None:
        drawn = scrambled(torch.arange(20000), 3).numpy() / 2.0**64 + 0.5
        assert stats.kstest(drawn, "uniform").pvalue > 0.01
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(20000)

    def test_scrambling_is_that_of_splitmix64(self) -> None:
        """Its first number from the state 0 is e220a8397b1dcdaf, here of seed and of number."""
        first = torch.from_numpy(np.array([0xE220A8397B1DCDAF], dtype=np.uint64).view(np.int64))
        assert torch.equal(scrambled(first, 0), first)

    def test_different_numbers_have_different_priorities(self) -> None:
        numbers = torch.cat([torch.arange(-50000, 50000), 2**62 + torch.arange(1000)])
        assert len(scrambled(numbers, 5).unique()) == len(numbers)


class TestRefused:
    def test_sizes(self) -> None:
        with pytest.raises(TangentValueError, match="size=1 and n_types=3"):
            EqualSample(3, 1)

    def test_types_and_numbers(self) -> None:
        sample = EqualSample(3, 2)
        with pytest.raises(TangentValueError, match=r"lie in \[0, 3\), got from 1 to 3"):
            sample.offer(torch.tensor([1, 3]), torch.tensor([0, 1]))
        with pytest.raises((TangentValueError, TypeCheckError)):
            sample.offer(torch.tensor([1, 2]), torch.tensor([0]))
        assert not sample.complete.any()

    def test_only_like_samples_merge(self) -> None:
        for other in (EqualSample(3, 2, 1), EqualSample(3, 4), EqualSample(5, 2)):
            with pytest.raises(TangentValueError, match=r"into \(3, 2, 0\): give all pieces one"):
                EqualSample(3, 2).merge(other)
