"""Statistics of token types, and how they go with frequency."""

from tl_tangent.geometry.frequency.correlation import Correlation, mid_ranks, pearson, spearman
from tl_tangent.geometry.frequency.equal_sample import EqualSample
from tl_tangent.geometry.frequency.frequency_io import (
    load_equal_sample,
    load_token_moments,
    save_equal_sample,
    save_token_moments,
)
from tl_tangent.geometry.frequency.frequency_variance import FrequencyVariance, frequency_variance
from tl_tangent.geometry.frequency.token_moments import TokenMoments
from tl_tangent.geometry.frequency.type_statistics import TypeStatistics

__all__ = [
    "Correlation",
    "EqualSample",
    "FrequencyVariance",
    "TokenMoments",
    "TypeStatistics",
    "frequency_variance",
    "load_equal_sample",
    "load_token_moments",
    "mid_ranks",
    "pearson",
    "save_equal_sample",
    "save_token_moments",
    "spearman",
]
