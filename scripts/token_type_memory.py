"""Memory of the statistics of token types against the tokens that were read.

    python scripts/token_type_memory.py      50,000 types at width 768, up to four million tokens

Random activations of types that follow Zipf's law stream into one site's moments; what the process
holds at its peak is printed after every doubling.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from tl_tangent.geometry.frequency import TokenMoments

BATCH = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--types", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=2**22)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    frequency = 1 / torch.arange(1, options.types + 1, dtype=torch.float64)
    started, before = time.perf_counter(), peak()
    moments = TokenMoments(options.width, options.types)
    read, shown = 0, BATCH * 8
    while read < options.tokens:
        types = torch.multinomial(frequency, BATCH, replacement=True, generator=generator)
        moments.update(torch.randn(BATCH, options.width, generator=generator), types)
        read += BATCH
        if read >= shown:
            took = time.perf_counter() - started
            print(f"{read:>9} tokens: {peak() - before:6.0f} MiB more than before, {took:5.0f} s")
            shown *= 2


def peak() -> float:
    """The most that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
