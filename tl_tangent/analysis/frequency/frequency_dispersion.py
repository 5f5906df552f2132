"""Do frequent tokens concentrate: frequency against the spread of a token type's activations."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_tangent.analysis.frequency.collecting import Moments, collect_types
from tl_tangent.analysis.frequency.frequency_result import (
    WORDS,
    FrequencyDispersion,
    SiteTypes,
    StaticTypes,
)
from tl_tangent.analysis.frequency.token_rows import TokenRows, chosen_rows, token_batches
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.frequency import EqualSample
from tl_tangent.geometry.subspace_io import package_versions
from tl_tangent.hooks.fit import listed, shown
from tl_tangent.hooks.numbers import whole, whole_seed
from tl_tangent.hooks.positions import NOT_FIRST, PositionMask, Positions
from tl_tangent.hooks.sites import Sites

Frequencies = Tensor | Mapping[int, float] | None


def frequency_dispersion(
    model: Any,
    batches: Any,
    sites: Sites = "blocks.*.hook_resid_post",
    *,
    positions: Positions = NOT_FIRST,
    frequencies: Frequencies = None,
    min_count: int = 2,
    equal_n: int | None = None,
    shuffled: bool = True,
    static: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    progress: bool = False,
) -> FrequencyDispersion:
    """Measure the spread of each token type's activations around their centre, and correlate.

    Activations are streamed into a count, a centre and a spread for every type; memory is that of
    the types (``d * 8`` bytes each, a site) and does not grow with the tokens read. A first pass
    over the token ids alone finds the types that occur often enough; batches that can be read only
    once get a row for every id of the vocabulary.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        batches: token ids ``[batch, pos]``, or mappings with them under ``input`` and an
            ``attention_mask``; without one, leading or trailing pad tokens are padding.
        sites: where there is one vector a token.
        positions: which positions count; padding never does.
        frequencies: of the tokens: a tensor ``[vocabulary]`` or a mapping from ids, in any unit,
            NaN (or missing) where unknown; by default the counts of all real tokens of the batches.
            See :mod:`tl_tangent.analysis.frequency.sources` for files and word lists.
        min_count: fewest occurrences that a type counts from, 2 or more.
        equal_n: also measure over exactly this many occurrences of each type that has as many.
        shuffled: also measure with types permuted among the tokens of each batch: what the
            statistic gives where no type differs from another.
        static: also correlate frequency with norm and distance to the mean of the embeddings.
        dtype: of the centres: float64, or float32 for half the memory.
        seed: of the permutations and the equal sample.
        progress: show a progress bar.

    Raises:
        TangentKeyError: a site that the model does not have.
        TangentValueError: strings instead of ids; too few types; ``equal_n`` of batches that can be
            read only once; frequencies of another size.
    """
    min_count, seed = whole("min_count", min_count, at_least=2), whole_seed(seed)
    equal_n = None if equal_n is None else whole("equal_n", equal_n, at_least=2)
    vocabulary, mask = _vocabulary(model), PositionMask(positions)
    data = listed(batches)
    once = isinstance(data, Iterator)
    if once and (equal_n is not None or frequencies is None):
        raise TangentValueError(
            "these batches can be read only once: counting tokens for frequencies=None or equal_n "
            "takes a pass before. Give a list, or frequencies and no equal_n"
        )
    ids, counts = torch.arange(vocabulary), None
    if not once:
        data = list(data)
        counts, chosen = _counted(model, data, mask, vocabulary)
        ids = (chosen >= min_count).nonzero().flatten()
    told = counts if frequencies is None else _told(frequencies, vocabulary)
    assert told is not None
    if len(ids) < 4:
        raise TangentValueError(
            f"{len(ids)} types occur {min_count} times or more at the chosen positions, and a "
            "correlation takes 4: read more tokens"
        )
    equal = None if equal_n is None else EqualSample(len(ids), equal_n, seed)
    if equal is not None:
        _offer(model, equal, data, mask, ids, vocabulary)
    rows = TokenRows(ids, vocabulary, mask, shuffled=shuffled, equal=equal, seed=seed)
    found = collect_types(model, shown(data, progress, "types"), sites, rows, len(ids), dtype)
    conventions = {
        "model": getattr(model.cfg, "model_name", None),
        "model_class": type(model).__name__,
        "positions": mask.description,
        "frequencies": "counts of all real tokens of these batches"
        if frequencies is None
        else "given",
        "min_count": min_count,
        "equal_n": equal_n,
        "dispersion": "root mean square distance to the centre, divided by n - 1",
        "seed": seed,
        "meaning": dict(WORDS),
        "versions": {**package_versions(), "python": sys.version.split()[0]},
    }
    complete = None if equal is None else equal.complete
    return FrequencyDispersion(
        {site: _statistics(one, complete) for site, one in found.items()},
        _static(model) if static else {},
        ids,
        told.double(),
        getattr(model, "tokenizer", None),
        conventions,
    )


def _vocabulary(model: Any) -> int:
    return int(model.cfg.d_vocab)


def _counted(
    model: Any, data: list[Any], mask: PositionMask, vocabulary: int
) -> tuple[Int[Tensor, " vocabulary"], Int[Tensor, " vocabulary"]]:
    """Count all real tokens, and those at the chosen positions."""
    every = torch.zeros(vocabulary, dtype=torch.int64)
    chosen = every.clone()
    for _, tokens, real in token_batches(data, model):
        flat = tokens.flatten()
        whole = flat if real is None else tokens[real]
        every += torch.bincount(whole, minlength=vocabulary)
        chosen += torch.bincount(flat[chosen_rows(mask, tokens, real)], minlength=vocabulary)
    return every, chosen


def _told(frequencies: Tensor | Mapping[int, float], vocabulary: int) -> Float[Tensor, " type"]:
    if isinstance(frequencies, Mapping):
        found = torch.full((vocabulary,), torch.nan, dtype=torch.float64)
        for token, frequency in frequencies.items():
            found[whole("a token id", token, at_least=0, at_most=vocabulary - 1)] = float(frequency)
    elif not isinstance(frequencies, Tensor) or frequencies.shape != (vocabulary,):
        shape = list(getattr(frequencies, "shape", [])) or type(frequencies).__name__
        raise TangentValueError(
            f"frequencies are a tensor with one for each of {vocabulary} token ids, or a mapping "
            f"from ids, got {shape}"
        )
    else:
        found = frequencies.detach().cpu().double()
    bad = int((found < 0).sum() + found.isinf().sum())
    if bad:
        raise TangentValueError(
            f"{bad} frequencies are negative or infinite: give them in a unit of their own, not as "
            "logarithms, and NaN where unknown"
        )
    return found


def _offer(
    model: Any,
    equal: EqualSample,
    data: list[Any],
    mask: PositionMask,
    ids: Tensor,
    vocabulary: int,
) -> None:
    place, seen = torch.full((vocabulary,), -1), 0
    place[ids] = torch.arange(len(ids))
    for _, tokens, real in token_batches(data, model):
        at = chosen_rows(mask, tokens, real)
        types = place[tokens.flatten()[at]]
        equal.offer(types[types >= 0], seen + at[types >= 0])
        seen += tokens.numel()


def _statistics(found: Moments, complete: Tensor | None) -> SiteTypes:
    parts = (found.every, found.shuffled, found.equal)
    every, shuffled, equal = (None if one is None else one.statistics() for one in parts)
    assert every is not None
    return SiteTypes(every, shuffled, equal, complete)


def _static(model: Any) -> dict[str, StaticTypes]:
    """The embedding and unembedding, one vector a token."""
    matrices = {"embed.W_E": model.W_E, "unembed.W_U": model.W_U.mT}
    return {name: StaticTypes.of(one.detach().cpu().double()) for name, one in matrices.items()}
