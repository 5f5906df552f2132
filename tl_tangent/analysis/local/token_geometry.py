"""The local geometry of activations around token types, beside what flat clouds would show."""

from __future__ import annotations

import sys
from typing import Any

from tl_tangent.analysis.local.base_point import Centre
from tl_tangent.analysis.local.occurrences import Chosen, Corpus
from tl_tangent.analysis.local.token_cloud import Options, measure_cloud
from tl_tangent.analysis.local.token_result import TokenGeometry, TokenType
from tl_tangent.analysis.local.token_words import MEANING
from tl_tangent.analysis.local.types import chosen_types, text_of
from tl_tangent.analysis.local.vectors import collect_vectors
from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.dimension import distinct_rows
from tl_tangent.geometry.subspace_io import package_versions
from tl_tangent.hooks.fit import shown
from tl_tangent.hooks.numbers import whole, whole_seed
from tl_tangent.hooks.positions import NOT_FIRST, PositionMask, Positions
from tl_tangent.hooks.sites import Sites, expected_shape, find_sites


def token_geometry(
    model: Any,
    batches: Any,
    tokens: Any,
    sites: Sites = "blocks.*.hook_resid_post",
    *,
    rank: int = 2,
    centre: Centre = "fitted",
    n_types: int = 20,
    max_occurrences: int = 2000,
    positions: Positions = NOT_FIRST,
    n_controls: int = 20,
    bins: int = 8,
    level: float = 0.95,
    k: int = 10,
    dimension_points: int = 500,
    slow_controls: int = 3,
    equal_n: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> TokenGeometry:
    """Measure how the occurrences of token types lie around a point of their own, at every site.

    Radius, tangent directions, the order of the normal part, the second fundamental form, the
    evenness of directions and the intrinsic dimension, each beside nulls: Gaussian clouds with
    exactly the mean and covariance of the measured points, which have no curvature; random tangent
    spaces; permuted and flipped normal parts. A slope means nothing without them: that of a flat
    cloud depends on its covariance, and is far from 0 for most.

    The batches are read three times, twice without the model: to count types and to choose the
    occurrences (those with the lowest scrambled numbers, a uniform sample whatever the order). In
    memory lie at most ``sites * types * max_occurrences * d`` numbers of the model's dtype.

    Args:
        model: a HookedTransformer, a TransformerBridge, or any HookedRootModule.
        batches: tokens or text; see :func:`tl_tangent.collect`.
        tokens: a token id, a string of one token, or several of these; or a rule over the types
            that have as many occurrences as the fit needs: "frequent", "rare", "bands" (half of
            them the most frequent, half the rarest), or "spread" over the ranks of frequency.
        sites: names, patterns, or a predicate; with one vector a token.
        rank: m, the assumed dimension of the tangent space.
        centre: "fitted", a point of the manifold estimated by a quadratic fit, or "mean".
        n_types: how many types a rule takes.
        max_occurrences: most occurrences of a type that are taken.
        positions: which positions enter; padding never does.
        n_controls: B, draws of each null; below 19 no p-value reaches 0.05.
        bins: of the slope's picture, which decide the fewest points it takes.
        level: of its interval.
        k: neighbours of Levina & Bickel's dimension.
        dimension_points: most points of a cloud whose dimension is estimated; 0 for none.
        slow_controls: Gaussian clouds whose dimension and visibility are measured too; each takes
            as long as the cloud itself.
        equal_n: measure as many vectors of each type at a site, at random, as the type with the
            fewest has of those that have enough. Estimates and the power of tests depend on their
            number, so that without this frequent types can't be held against rare ones.
        seed: of the sample, the halves and the nulls.
        progress: show progress bars.

    Raises:
        TangentKeyError: a site that the model does not have.
        TangentRuntimeError: a site that never fired.
        TangentValueError: a token that never occurs, or less often than the fit needs; no token
            types in the batches; a rank that leaves no normal part; options out of range.
    """
    options = Options(
        rank=whole("rank", rank, at_least=1),
        centre=centre,
        n_controls=whole("n_controls", n_controls, at_least=0),
        bins=whole("bins", bins, at_least=3),
        level=level,
        k=whole("k", k, at_least=3),
        dimension_points=whole("dimension_points", dimension_points, at_least=0),
        slow_controls=whole("slow_controls", slow_controls, at_least=0),
        equal_n=equal_n,
        seed=whole_seed(seed),
    )
    _check(options, whole("max_occurrences", max_occurrences, at_least=2))
    asked = find_sites(model, sites)
    _check_width(options.rank, {site.name: expected_shape(model, site)[1] for site in asked})
    corpus = Corpus(model, batches, PositionMask(positions))
    ids = chosen_types(model, corpus, tokens, n_types, options.fewest)
    chosen = Chosen.of(corpus, ids, max_occurrences, options.seed)
    vectors = collect_vectors(model, corpus, chosen, asked, progress=progress)
    _check_width(options.rank, {site: rows[0].shape[1] for site, rows in vectors.items()})
    taken = [len(one) for one in next(iter(vectors.values()))]
    distinct = {site: [distinct_rows(one) for one in vectors.pop(site)] for site in list(vectors)}
    most = {site: _most([len(one) for one in rows], options) for site, rows in distinct.items()}
    cells = [(site, i) for site in distinct for i in range(len(ids))]
    clouds = {
        (site, ids[i]): measure_cloud(
            distinct[site][i],
            taken[i] - len(distinct[site][i]),
            most[site],
            options,
            f"{site}:{ids[i]}",
        )
        for site, i in shown(cells, progress, "measuring")
    }
    types = {one: _type(model, corpus, one) for one in ids}
    made = {
        "model": getattr(model.cfg, "model_name", None),
        "model_class": type(model).__name__,
        "tokens": tokens if isinstance(tokens, str) else list(ids),
        "positions": PositionMask(positions).description,
        "corpus_tokens": corpus.total,
        "max_occurrences": max_occurrences,
        **options._asdict(),
        "fewest": options.fewest,
        "meaning": dict(MEANING),
        "versions": {**package_versions(), "python": sys.version.split()[0]},
    }
    return TokenGeometry(clouds, types, made)


def _most(counts: list[int], options: Options) -> int:
    """How many vectors of each type are measured at a site."""
    enough = [n for n in counts if n >= options.fewest]
    return min(enough) if options.equal_n and enough else max(counts)


def _type(model: Any, corpus: Corpus, token: int) -> TokenType:
    count = corpus.count(token)
    return TokenType(token, text_of(model, token), count, count / corpus.total)


def _check(options: Options, max_occurrences: int) -> None:
    if options.centre not in ("fitted", "mean"):
        raise TangentValueError(f"centre is 'fitted' or 'mean', got {options.centre!r}")
    if not 0 < options.level < 1:
        raise TangentValueError(f"an interval needs a level in (0, 1), got {options.level}")
    if max_occurrences < options.fewest:
        raise TangentValueError(
            f"max_occurrences={max_occurrences} is less than the {options.fewest} that a fit of "
            f"rank {options.rank} needs: raise it, or lower rank or bins"
        )
    points = min(options.dimension_points, options.fewest)
    if options.dimension_points and options.k >= points:
        raise TangentValueError(
            f"k={options.k} neighbours take more than {points} points: lower k, raise "
            "dimension_points, or give dimension_points=0 to leave the dimension out"
        )


def _check_width(rank: int, widths: dict[str, int | None]) -> None:
    for site, d in widths.items():
        if d is not None and rank >= d:
            raise TangentValueError(
                f"rank={rank} leaves no normal part at {site}, which is {d} wide: give 1 to {d - 1}"
            )
