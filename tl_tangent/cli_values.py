"""Values of options that several commands take."""

from __future__ import annotations

METHODS = ("pca", "svd", "ica", "nmf", "seminmf", "kmeans")
DTYPES = ("float32", "float64", "bfloat16", "float16")


def rank(text: str) -> int | float | str:
    """A number, a share of the variance, or a rule by name."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def positions(text: str) -> str | list[int]:
    """A rule by name, or absolute positions such as ``1,2,5``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return text
