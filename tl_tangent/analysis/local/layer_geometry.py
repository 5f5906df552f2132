"""Dimension, entropy and isotropy of activations site by site."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tl_tangent.analysis.local.layer_result import MEANING, LayerGeometry
from tl_tangent.analysis.local.site_geometry import site_geometry
from tl_tangent.analysis.local.twins import seed_of
from tl_tangent.errors import TangentKeyError, TangentValueError
from tl_tangent.geometry import SubspaceFitter, SubspaceSet, TangentSubspace
from tl_tangent.geometry.rank import Rank
from tl_tangent.geometry.subspace_io import package_versions
from tl_tangent.hooks.fit import collect, shown
from tl_tangent.hooks.numbers import whole, whole_seed
from tl_tangent.hooks.positions import NOT_FIRST, PositionMask, Positions
from tl_tangent.hooks.sites import Sites


def layer_geometry(
    model: Any,
    batches: Any,
    sites: Sites = "blocks.*.hook_resid_post",
    *,
    subspaces: Mapping[str, TangentSubspace] | None = None,
    rank: Rank = 8,
    n_points: int = 2000,
    positions: Positions = NOT_FIRST,
    k: int = 10,
    n_controls: int = 3,
    seed: int = 0,
    progress: bool = False,
) -> LayerGeometry:
    """Measure how many dimensions activations fill at each site, and how evenly.

    Covariances are streamed over all tokens. Neighbours are those of a uniform sample of tokens,
    the same ones at every site, and stand beside Gaussian clouds with exactly the mean and
    covariance of the sample: a dimension or an entropy that these have too is the covariance's.

    Args:
        model: a HookedTransformer, a TransformerBridge, or any HookedRootModule. For checkpoints,
            call this for each.
        batches: tokens or text; see :func:`tl_tangent.collect`. They are read once.
        sites: names, patterns, or a predicate; with one vector a token.
        subspaces: Q_T at each site; by default fitted by PCA on the same tokens.
        rank: of that fit.
        n_points: n, most tokens of the sample. Each estimate compares all pairs of them.
        positions: which positions enter; padding never does.
        k: neighbours of entropies and of Levina & Bickel's dimension.
        n_controls: Gaussian clouds at each site; each takes as long as the sample itself.
        seed: of the sample and the clouds.
        progress: show progress bars.

    Raises:
        TangentKeyError: a site that the model does not have, or that has no given subspace.
        TangentRuntimeError: a site that never fired.
        TangentValueError: a rank that the data can't give or a given subspace of another width;
            too few distinct vectors; a site with heads.
    """
    k, seed = whole("k", k, at_least=3), whole_seed(seed)
    n_points = whole("n_points", n_points, at_least=k + 2)
    n_controls = whole("n_controls", n_controls, at_least=0)
    fitters = collect(
        model,
        batches,
        sites,
        positions=positions,
        keep_sample=True,
        sample_rows=n_points,
        seed=seed,
        progress=progress,
    )
    _check_heads(fitters)
    given = subspaces is not None
    chosen = _given(fitters, subspaces) if subspaces is not None else _fitted(fitters, rank)
    found = {
        site: site_geometry(
            fitter.covariance(),
            fitter.n_rows,
            _sample(fitter),
            chosen[site],
            site,
            k=k,
            n_controls=n_controls,
            seed=seed_of(seed, site),
        )
        for site, fitter in shown(list(fitters.items()), progress, "measuring")
    }
    made = {
        "model": getattr(model.cfg, "model_name", None),
        "model_class": type(model).__name__,
        "subspaces": "given" if given else "PCA of the same tokens",
        "positions": PositionMask(positions).description,
        "n_points": n_points,
        "k": k,
        "n_controls": n_controls,
        "seed": seed,
        "meaning": dict(MEANING),
        "versions": {**package_versions(), "python": sys.version.split()[0]},
    }
    return LayerGeometry(found, SubspaceSet(chosen), made)


def _check_heads(fitters: Mapping[str, SubspaceFitter]) -> None:
    heads = [site for site, fitter in fitters.items() if fitter.heads is not None]
    if heads:
        raise TangentValueError(
            f"{heads[0]} has a vector for each head, not one a token: take a site of the residual "
            "stream, or what an attention or MLP writes to it"
        )


def _sample(fitter: SubspaceFitter) -> Any:
    rows, _ = fitter.parts["sample"].rows()  # type: ignore[union-attr]
    return rows


def _fitted(fitters: Mapping[str, SubspaceFitter], rank: Rank) -> dict[str, TangentSubspace]:
    return {site: fitter.fit(rank, site=site) for site, fitter in fitters.items()}


def _given(
    fitters: Mapping[str, SubspaceFitter], subspaces: Mapping[str, TangentSubspace]
) -> dict[str, TangentSubspace]:
    for site, fitter in fitters.items():
        if site not in subspaces:
            raise TangentKeyError(
                f"no subspace is given for {site}; given are {', '.join(subspaces) or 'none'}"
            )
        if subspaces[site].heads is not None or subspaces[site].d != fitter.d:
            raise TangentValueError(
                f"the subspace for {site} is {subspaces[site].d} wide"
                f"{' a head' if subspaces[site].heads else ''}, and the site {fitter.d}: fit it "
                "there"
            )
    return {site: subspaces[site] for site in fitters}
