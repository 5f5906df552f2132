"""Fitters on disk, so that pieces of a stream can be seen on different machines and merged."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tl_tangent.errors import TangentFileError, TangentValueError
from tl_tangent.geometry.fitting import SubspaceFitter
from tl_tangent.geometry.moments import Moments
from tl_tangent.geometry.subspace_io import Record, read_records, write_records

KIND = "SubspaceFitters"


def save_fitters(path: str | os.PathLike[str], fitters: Mapping[str, SubspaceFitter]) -> None:
    """Write the fitters of some sites to one safetensors file, in one step.

    All that they saw is kept, rows that wait in a buffer and the state of the sample's generator
    too: what :func:`load_fitters` returns goes on bit for bit. The fitters stay as they are.

    Raises:
        TangentValueError: a group of rows is named by something that JSON has not.
    """
    write_records(path, [_record(site, one) for site, one in fitters.items()], kind=KIND)


def load_fitters(path: str | os.PathLike[str]) -> dict[str, SubspaceFitter]:
    """Read what :func:`save_fitters` wrote, onto the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        TangentFileError: a truncated, altered or foreign file.
    """
    return {record.fields["site"]: _fitter(record) for record in read_records(path, kind=KIND)}


def merge_fitters(paths: Sequence[str | os.PathLike[str]]) -> dict[str, SubspaceFitter]:
    """Read several files and merge the fitters of each site, in the order of the files.

    Raises:
        TangentFileError: as :func:`load_fitters`, or the files are about different sites.
        TangentValueError: no files, or fitters that are not configured alike.
    """
    if not paths:
        raise TangentValueError("there are no files of fitters to merge")
    merged = load_fitters(paths[0])
    for path in paths[1:]:
        found = load_fitters(path)
        if list(found) != list(merged):
            raise TangentFileError(
                f"{path} is about {', '.join(found)}, but {paths[0]} about {', '.join(merged)}"
            )
        for site, fitter in merged.items():
            fitter.merge(found[site])
    return merged


def _record(site: str, fitter: SubspaceFitter) -> Record:
    parts = {name: part.to_record() for name, part in fitter.parts.items()}
    for part in parts.values():
        _check_groups(site, part)
    moments = fitter.parts.get("moments")
    precision = str(moments.precision) if isinstance(moments, Moments) else None
    fields = {name: dict(part.fields) for name, part in parts.items()}
    return Record(
        {f"{name}.{key}": t for name, part in parts.items() for key, t in part.tensors.items()},
        {"site": site, "config": fitter.config, "precision": precision, **fields},
    )


def _check_groups(site: str, part: Record) -> None:
    keys = [one[0] if isinstance(one, list) else one for one in part.fields["groups"]]
    wrong = [key for key in keys if not isinstance(key, str | int | float | None)]
    if wrong:
        raise TangentValueError(
            f"a group of rows at {site} is named {wrong[0]!r}, which a file would give back as "
            "something else: name groups by strings or numbers"
        )


def _fitter(record: Record) -> SubspaceFitter:
    made = SubspaceFitter(**_arguments(record.fields["config"]))
    if record.fields["precision"] is not None:
        precision = getattr(torch, record.fields["precision"].removeprefix("torch."))
        made.begin(torch.device("cpu"), precision)
    for name, part in made.parts.items():
        prefix = f"{name}."
        own = {
            key.removeprefix(prefix): tensor
            for key, tensor in record.tensors.items()
            if key.startswith(prefix)
        }
        part.restore(Record(own, record.fields[name]))
    return made


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that make a fitter of this configuration."""
    sketch, sample = config["sketch_width"], config["sample_rows"]
    exact = {"max_exact_width": config["d"]}
    sketched = {"max_exact_width": config["d"] - 1, "sketch_width": sketch}
    return {
        **{name: config[name] for name in ("d", "heads", "centering", "seed")},
        **(exact if sketch is None else sketched),
        **({} if sample is None else {"sample_rows": sample, "keep_sample": True}),
    }
