"""A frozen mapping from site names to subspaces."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from tl_tangent.errors import TangentFileError, TangentKeyError, TangentValueError, nearest
from tl_tangent.geometry.angles import overlap
from tl_tangent.geometry.display import html_table
from tl_tangent.geometry.subspace import TangentSubspace
from tl_tangent.geometry.subspace_io import Record, read_records, write_records

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class SubspaceSet(Mapping[str, TangentSubspace]):
    """Subspaces by the name of their site, in the order given.

    Args:
        subspaces: a mapping from site to subspace (a subspace without a site is given the name), or
            an iterable of subspaces that know their site.

    Raises:
        TangentValueError: if a subspace has no site, or two have the same.
    """

    __slots__ = ("_subspaces",)
    _subspaces: dict[str, TangentSubspace]

    def __init__(
        self, subspaces: Mapping[str, TangentSubspace] | Iterable[TangentSubspace] = ()
    ) -> None:
        named: dict[str, TangentSubspace] = {}
        for site, subspace in _pairs(subspaces):
            if site in named:
                raise TangentValueError(f"two subspaces for the site {site!r}: give one a site")
            named[site] = subspace if subspace.site is not None else subspace.replace(site=site)
        object.__setattr__(self, "_subspaces", named)

    def __getitem__(self, site: str) -> TangentSubspace:
        if site not in self._subspaces:
            raise TangentKeyError(
                f"no subspace for {site!r}; nearest here: {nearest(str(site), self._subspaces)}"
            )
        return self._subspaces[site]

    def __contains__(self, site: object) -> bool:
        return site in self._subspaces

    def __iter__(self) -> Iterator[str]:
        return iter(self._subspaces)

    def __len__(self) -> int:
        return len(self._subspaces)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a SubspaceSet is frozen: make a new one")

    def __reduce__(self) -> tuple[type[SubspaceSet], tuple[dict[str, TangentSubspace]]]:
        return SubspaceSet, (self._subspaces,)

    def truncate(self, rank: int) -> SubspaceSet:
        """Keep the ``rank`` leading directions of every subspace.

        Raises:
            TangentValueError: if a subspace has fewer.
        """
        return SubspaceSet({site: subspace.truncate(rank) for site, subspace in self.items()})

    def random_normals(self, n: int, seed: int) -> list[SubspaceSet]:
        """Draw ``n`` sets of matched controls, each site from a seed of its own.

        Raises:
            TangentValueError: if ``2 * rank > d`` at a site.
        """
        draws = {
            site: subspace.random_normals(n, _seed_of(site, seed))
            for site, subspace in self.items()
        }
        return [SubspaceSet({site: drawn[i] for site, drawn in draws.items()}) for i in range(n)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all subspaces to one safetensors file, atomically.

        Raises:
            TangentValueError: if metadata or positions are not JSON-able, or there is nothing.
        """
        if not self:
            raise TangentValueError("an empty SubspaceSet holds nothing to save")
        records = [_named(site, subspace.to_record()) for site, subspace in self.items()]
        write_records(path, records, kind="SubspaceSet")

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, model: str | None = None, d: int | None = None
    ) -> SubspaceSet:
        """Read a set, optionally checking the model name and width it is meant for.

        Raises:
            FileNotFoundError: if there is no such file.
            TangentFileError: if the file is truncated, altered or foreign, or if a subspace was
                fitted on another model or width.
        """
        named = {}
        for record in read_records(path, kind="SubspaceSet"):
            fields = dict(record.fields)
            site = fields.pop("key")
            named[site] = TangentSubspace.from_record(Record(record.tensors, fields), path)
            named[site].check_fits(f"{site} in {path}", model, d)
        if not named:
            raise TangentFileError(f"{path} holds no subspace")
        return cls(named)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row a site: site, layer (if its name has one), sizes, method, share."""
        import pandas as pd

        return pd.DataFrame(
            [{"site": site, "layer": _layer(site), **_row(sub)} for site, sub in self.items()]
        )

    def overlaps(self, other: Mapping[str, TangentSubspace] | None = None) -> pd.DataFrame:
        """Return a matrix: how far the subspaces of two sites are the same, from 0 to 1.

        The mean squared cosine of the principal angles. Random subspaces of rank k and l in R^d
        give max(k, l) / d on average.

        Args:
            other: the columns, such as the subspaces of another checkpoint; by default this set.

        Raises:
            TangentValueError: subspaces with heads, or of different widths.
        """
        import pandas as pd

        beside = self if other is None else other
        _check_comparable([*self.items(), *beside.items()])
        table = [
            [float(overlap(one.basis, two.basis)) for two in beside.values()]
            for one in self.values()
        ]
        return pd.DataFrame(table, index=list(self), columns=list(beside))

    def plot(self, other: Mapping[str, TangentSubspace] | None = None) -> Figure:
        """Draw spectra with the rank, and :meth:`overlaps`; a matplotlib figure.

        Raises:
            TangentValueError: as :meth:`overlaps`.
        """
        from tl_tangent.views.subspace_figure import draw_subspaces  # some steps up

        beside = self if other is None else other
        matrix = self.overlaps(other)
        chance = (
            max(one.rank for one in [*self.values(), *beside.values()])
            / next(iter(self.values())).d
        )
        return draw_subspaces(self, matrix, chance)

    def __repr__(self) -> str:
        ranks = sorted({subspace.rank for subspace in self.values()})
        shown = ", ".join([*list(self)[:3], *(["..."] if len(self) > 3 else [])])
        return f"SubspaceSet({len(self)} site{'s' * (len(self) != 1)}, ranks {ranks}: {shown})"

    def _repr_html_(self) -> str:
        rows = [{"site": site, **_row(subspace)} for site, subspace in self.items()]
        return html_table(rows, caption=f"SubspaceSet, {len(self)} sites")


def _pairs(
    subspaces: Mapping[str, TangentSubspace] | Iterable[TangentSubspace],
) -> Iterator[tuple[str, TangentSubspace]]:
    if isinstance(subspaces, Mapping):
        yield from subspaces.items()
        return
    for subspace in subspaces:
        if subspace.site is None:
            raise TangentValueError(f"{subspace!r} has no site: give a mapping from site to it")
        yield subspace.site, subspace


def _check_comparable(named: list[tuple[str, TangentSubspace]]) -> None:
    if not named:
        raise TangentValueError("an empty SubspaceSet has nothing to compare")
    first, one = named[0]
    for site, subspace in named:
        if subspace.heads is not None or subspace.d != one.d:
            raise TangentValueError(
                f"{site} is {subspace!r} and {first} is {one!r}: subspaces compare where they have "
                "one width and no heads, such as those of the residual stream"
            )


def _row(subspace: TangentSubspace) -> dict[str, Any]:
    names = ("d", "heads", "rank", "method", "explained", "n_tokens", "positions")
    return {name: getattr(subspace, name) for name in names}


def _named(site: str, record: Record) -> Record:
    return Record(record.tensors, {**record.fields, "key": site})


def _layer(site: str) -> int | None:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", site)
    return int(found[1]) if found else None


def _seed_of(site: str, seed: int) -> int:
    """Return a seed that differs by site and is the same in every process."""
    return int.from_bytes(sha256(f"{seed}:{site}".encode()).digest()[:6])
