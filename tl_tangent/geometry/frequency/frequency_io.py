"""Statistics of token types on disk, so that pieces of a corpus are seen apart and merged."""

from __future__ import annotations

import os

import torch

from tl_tangent.geometry.frequency.equal_sample import EqualSample
from tl_tangent.geometry.frequency.token_moments import TokenMoments
from tl_tangent.geometry.subspace_io import Record, read_records, write_records

MOMENTS, SAMPLE = "TokenMoments", "EqualSample"


def save_token_moments(path: str | os.PathLike[str], moments: TokenMoments) -> None:
    """Write the statistics to one safetensors file, in one step."""
    tensors = {
        "counts": moments.counts,
        "centres": moments.centres,
        "spreads": moments.spreads,
    }
    write_records(path, [Record(tensors, {})], kind=MOMENTS)


def load_token_moments(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> TokenMoments:
    """Read what :func:`save_token_moments` wrote; it goes on bit for bit.

    Raises:
        FileNotFoundError: there is no such file.
        TangentFileError: a truncated, altered or foreign file.
    """
    tensors = read_records(path, kind=MOMENTS)[0].tensors
    n_types, d = tensors["centres"].shape
    made = TokenMoments(d, n_types, dtype=tensors["centres"].dtype, device=device)
    for name in ("counts", "centres", "spreads"):
        setattr(made, name, tensors[name].to(device))
    return made


def save_equal_sample(path: str | os.PathLike[str], sample: EqualSample) -> None:
    """Write a sample to one safetensors file, in one step."""
    write_records(path, [Record({"lowest": sample.lowest}, {"seed": sample.seed})], kind=SAMPLE)


def load_equal_sample(path: str | os.PathLike[str]) -> EqualSample:
    """Read what :func:`save_equal_sample` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        TangentFileError: a truncated, altered or foreign file.
    """
    record = read_records(path, kind=SAMPLE)[0]
    lowest = record.tensors["lowest"]
    n_types, size = lowest.shape
    made = EqualSample(n_types, size, record.fields["seed"])
    made.lowest = lowest
    return made
