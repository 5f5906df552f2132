"""From a stream of activations to a subspace: statistics that update, merge and are then fitted."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_tangent.errors import TangentValueError
from tl_tangent.geometry.checks import check_activations, check_finite
from tl_tangent.geometry.dictionaries import explained_share, span
from tl_tangent.geometry.eigen import Eigen
from tl_tangent.geometry.extractors import EXTRACTORS, SAMPLED, UNCENTERED, Evidence
from tl_tangent.geometry.gram import BlockGram, Gram, SketchGram
from tl_tangent.geometry.linalg import exact_math
from tl_tangent.geometry.moments import Centering, Moments
from tl_tangent.geometry.rank import ACCEPTED, Rank, choose_rank
from tl_tangent.geometry.sampling import RowSample
from tl_tangent.geometry.subspace import TangentSubspace


class SubspaceFitter:
    """Streaming statistics of the activations at one site, from which subspaces are fitted.

    Memory does not grow with the number of rows, results do not depend on how rows were cut into
    batches, and fitters that saw different rows merge into what one would have seen. Statistics
    live on the device of the first rows. Up to ``max_exact_width`` the second moments are exact;
    wider sites keep a seeded random sketch of them, and fits then state in their metadata how much
    of the variance the sketch may have missed.

    Args:
        d: width of the activations (``d_head`` with ``heads``).
        heads: number of heads, each with statistics and a basis of its own.
        centering: ``"global"`` removes the mean of all rows; ``"group"`` the mean of each group of
            rows (checkpoints that are pooled, say); ``"none"`` nothing.
        max_exact_width: largest ``d`` with exact second moments (``4 * d**2`` to ``8 * d**2``
            bytes).
        sketch_width: number of random directions beyond that; must exceed the rank by a margin.
        sample_rows: size of the uniform sample of rows that some methods need.
        keep_sample: keep that sample.
        seed: seed of the sketch, the sample and the methods; shards to be merged share it.

    Raises:
        TangentValueError: if a size is below 1 or ``centering`` is none of the three.
    """

    def __init__(
        self,
        d: int,
        *,
        heads: int | None = None,
        centering: Centering = "global",
        max_exact_width: int = 4096,
        sketch_width: int = 256,
        sample_rows: int = 4096,
        keep_sample: bool = False,
        seed: int = 0,
    ) -> None:
        if centering not in ("global", "group", "none"):
            raise TangentValueError(f"centering is 'global', 'group' or 'none', got {centering!r}")
        if min(d, heads or 1, max_exact_width, sketch_width, sample_rows) < 1:
            raise TangentValueError("d, heads, widths and sample_rows must be 1 or more")
        self.d, self.heads, self.centering, self.seed = d, heads, centering, seed
        self.sketch_width = None if d <= max_exact_width else min(sketch_width, d)
        self._shape = (d,) if heads is None else (heads, d)
        self.sample_rows = sample_rows if keep_sample else None
        self._moments: Moments | None = None
        self._sample = RowSample(sample_rows, seed) if keep_sample else None

    def update(self, x: Float[Tensor, "row *head d"], group: Hashable = None) -> None:
        """Add rows ``[n, d]`` or ``[n, head, d_head]`` of any float dtype on any device.

        Args:
            x: activations, one row a token.
            group: which group they belong to; told apart with ``centering="group"`` only.

        Raises:
            TangentValueError: if the shape is wrong, or rows are NaN or infinite; the message says
                how many, and nothing is added.
        """
        check_activations(x, self._shape)
        if x.ndim != len(self._shape) + 1:
            raise TangentValueError(f"give rows with one leading axis, got shape {list(x.shape)}")
        group = group if self.centering == "group" else None
        with exact_math(x.device):
            if self._moments is None:
                self.begin(x.device, x.dtype)
            assert self._moments is not None
            rows = x.detach().to(self._moments.device)
            self._moments.update(rows, group)
            if self._sample is not None:
                self._sample.update(rows, group)

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        """Start empty statistics for rows of ``dtype``; the first rows do so themselves."""
        if device.type == "mps":  # has no float64
            device = torch.device("cpu")
        gram: Gram
        if self.sketch_width is None:
            gram = BlockGram(self.d, self.heads, device)
        else:
            gram = SketchGram(self.d, self.heads, device, width=self.sketch_width, seed=self.seed)
        self._moments = Moments(gram, self._shape, device, dtype)

    def merge(self, other: SubspaceFitter) -> SubspaceFitter:
        """Add the rows that ``other`` saw, and return self; ``other`` keeps its own.

        Raises:
            TangentValueError: if the two are not configured alike.
        """
        if self.config != other.config:
            raise TangentValueError(
                f"only like fitters merge: this one has {self.config}, the other {other.config}"
            )
        if other._moments is None:
            return self
        with exact_math(other._moments.device):
            if self._moments is None:
                self.begin(other._moments.device, other._moments.precision)
            assert self._moments is not None
            self._moments.merge(other._moments)
            if self._sample is not None and other._sample is not None:
                self._sample.merge(other._sample)
        return self

    @property
    def config(self) -> dict[str, Any]:
        """What must be the same in fitters that are merged."""
        names = ("d", "heads", "centering", "sketch_width", "sample_rows", "seed")
        return {name: getattr(self, name) for name in names}

    @property
    def parts(self) -> dict[str, Moments | RowSample]:
        """What is kept of the rows so far: their moments and, where it was asked for, a sample."""
        named = {"moments": self._moments, "sample": self._sample}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def n_rows(self) -> int:
        """Number of rows so far."""
        return 0 if self._moments is None else self._moments.n

    @property
    def mean(self) -> Float[Tensor, "*head d"]:
        """Mean of all rows, in float64.

        Raises:
            TangentValueError: if there are no rows.
        """
        moments = self._seen()
        with exact_math(moments.device):
            return moments.mean()

    def covariance(self) -> Float[Tensor, "*head d d"]:
        """Return the centred second moments in float64, divided by the degrees of freedom.

        These are ``n - 1`` (``n`` minus the number of groups, ``n``) for global (group, no)
        centering.

        Raises:
            TangentValueError: if there are too few rows or only a sketch is kept.
        """
        moments = self._seen()
        with exact_math(moments.device):
            gram, freedom = moments.scatter(self.centering)
            self._check_freedom(freedom)
            if not isinstance(gram, BlockGram):
                raise TangentValueError(
                    f"width {self.d} is beyond max_exact_width, and a sketch has no covariance: "
                    "raise max_exact_width"
                )
            return gram.dense() / freedom

    def fit(
        self,
        rank: Rank | None = None,
        method: str = "pca",
        *,
        site: str | None = None,
        model: str | None = None,
        positions: Any = None,
        metadata: Mapping[str, Any] | None = None,
        dictionary: Float[Tensor, "atom d"] | None = None,
    ) -> TangentSubspace:
        """Fit a subspace to the rows so far; more rows may follow.

        Args:
            rank: an int, a share of the variance in (0, 1), ``"broken-stick"`` or ``"parallel"``.
                With heads, a rule takes the largest of what the heads ask for.
            method: a name in :data:`~tl_tangent.geometry.extractors.EXTRACTORS`. ``svd``, ``nmf``
                and ``seminmf`` see uncentred rows, and their subspaces have mean zero.
            site, model, positions, metadata: kept on the subspace.
            dictionary: atoms of the method ``"dictionary"``.

        Raises:
            TangentValueError: if there are too few rows, if they do not vary, if the rank exceeds
                that of the data, or if the method needs a sample and none was kept.
        """
        if method not in EXTRACTORS:
            raise TangentValueError(f"no method {method!r}; there are {', '.join(EXTRACTORS)}")
        moments = self._seen()
        centering: Centering = "none" if method in UNCENTERED else self.centering
        with exact_math(moments.device):
            rows = self._sampled(method, centering)
            eigens = self._eigens(moments, centering)
            if method == "dictionary":
                dictionary = self._checked_dictionary(dictionary)
                rank = span(dictionary.double().mT).shape[1] if rank is None else rank
            chosen = self._chosen_rank(rank, eigens)
            evidence = [
                Evidence(eigen, rows[i] if rows is not None else None, self.seed, dictionary)
                for i, eigen in enumerate(eigens)
            ]
            found = [EXTRACTORS[method](part, chosen) for part in evidence]
            explained = [explained_share(*pair) for pair in zip(found, eigens, strict=True)]
            return TangentSubspace(
                self._stacked([part.basis for part in found]).to(moments.precision),
                None if centering == "none" else moments.mean(),
                site=site,
                model=model,
                method=method,
                spectrum=self._stacked([part.variances for part in found]),
                explained=explained,
                positions=positions,
                n_tokens=self.n_rows,
                metadata={**self._provenance(rank, centering, eigens), **(metadata or {})},
            )

    def _seen(self) -> Moments:
        if self._moments is None or self._moments.n < 2:
            raise TangentValueError(f"at least 2 rows are needed, got {self.n_rows}: update first")
        return self._moments

    def _eigens(self, moments: Moments, centering: Centering) -> list[Eigen]:
        """Decompose the second moments of each head (of the one site without heads)."""
        gram, freedom = moments.scatter(centering)
        self._check_freedom(freedom)
        eigens = gram.eigen(1 / freedom, moments.precision)
        self._check_varies(eigens)
        return eigens

    def _check_freedom(self, freedom: int) -> None:
        if freedom < 1:
            raise TangentValueError(
                f"{self.n_rows} rows in {self.n_rows - freedom} groups leave nothing to vary "
                "within a group: give each group 2 rows or more"
            )

    def _check_varies(self, eigens: list[Eigen]) -> None:
        """Refuse a spectrum that is only the rounding of rows that are all alike."""
        assert self._moments is not None
        means = self._moments.mean().reshape(len(eigens), -1)
        eps = torch.finfo(self._moments.precision).eps
        for head, (eigen, mean) in enumerate(zip(eigens, means, strict=True)):
            if float(eigen.values[0]) <= (eps * float(mean.norm())) ** 2:
                where = "" if self.heads is None else f" at head {head}"
                raise TangentValueError(
                    f"the {self.n_rows} rows{where} do not vary: there is no direction to find"
                )

    def _checked_dictionary(self, dictionary: Tensor | None) -> Tensor:
        if dictionary is None:
            raise TangentValueError("method='dictionary' needs dictionary=, a tensor [atom, d]")
        check_finite("dictionary", dictionary)
        check_activations(dictionary, (self.d,))
        return dictionary.detach()

    def _chosen_rank(self, rank: Rank | None, eigens: list[Eigen]) -> int:
        if rank is None:
            raise TangentValueError(f"rank must be {ACCEPTED}, got None")
        chosen = max(choose_rank(rank, eigen, self.n_rows, self.seed) for eigen in eigens)
        return max(choose_rank(chosen, eigen, self.n_rows, self.seed) for eigen in eigens)

    def _sampled(self, method: str, centering: Centering) -> Float[Tensor, "head row d"] | None:
        """Return the sampled rows around the centre, if ``method`` needs them."""
        if method not in SAMPLED:
            return None
        if self._sample is None:
            raise TangentValueError(
                f"method {method!r} works on sampled rows, and this fitter kept none: make it "
                "with keep_sample=True and update it again"
            )
        assert self._moments is not None
        rows, groups = self._sample.rows()
        rows = rows.to(self._moments.precision)
        if centering == "global":
            rows = rows - self._moments.mean()
        elif centering == "group":
            rows = rows - torch.stack([self._moments.group_mean(group) for group in groups])
        return rows.double().reshape(len(rows), -1, self.d).movedim(0, 1)

    def _stacked(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if self.heads is None else torch.stack(parts)

    def _provenance(self, rank: Rank | None, centering: str, eigens: list[Eigen]) -> dict[str, Any]:
        """Return how the fit was made, for the metadata."""
        made: dict[str, Any] = {"centering": centering, "seed": self.seed}
        if isinstance(rank, float | str):
            made["rank_rule"] = rank
        missed = [eigen.missed for eigen in eigens if eigen.missed is not None]
        if missed:
            made["sketch_width"] = self.sketch_width
            made["captured_trace_error_bound"] = max(missed)
        return made
