"""How long a model takes to be ready, beside reading its file.

    python bench/loading.py MODEL.gguf [--rounds 3] [--weights packed] [--ctx 4096] [--threads 2] [--json]

Each round reads the file in a plain loop before and after a process that loads it, and counts the faster reading (a
host's cache may help the later ones): first with an empty page cache (cold), then with the file in it (warm). "ready"
counts from the start of the process to the model that could take a request: Python and its imports, metadata, tokenizer
and weights (which mmap mode reads in the first step only). "fresh memory" is what as many bytes of new memory cost one
thread without any model: on a virtual machine whose host has to find them first it can be most of the time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from common import execute, median, report

_LOAD = """
import os, sys
from pathlib import Path
from caudal.config import EngineConfig
from caudal.loader import load
path, weights, ctx, threads = sys.argv[1:]
load(Path(path), EngineConfig(weights=weights, max_model_len=int(ctx), num_threads=int(threads)))
os.write(1, b"ready")
os._exit(0)
"""
_FRESH_MEMORY = """
import mmap, sys, time
import numpy as np
start = time.perf_counter()
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
print(time.perf_counter() - start)
"""


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds, and bytes."""

    read: float
    ready: float
    fresh_memory: float
    peak_bytes: int


def drop_cached(file: Path) -> None:
    """Pages that a process has mapped or that are not yet on the disk stay."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(file: Path) -> float:
    buffer = bytearray(1 << 20)
    start = time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass
    return time.perf_counter() - start


def fresh_memory_seconds(num_bytes: int) -> float:
    """In a process of its own, so that its peak does not count as that of the next one."""
    return float(execute([sys.executable, "-c", _FRESH_MEMORY, str(num_bytes)]).stdout)


def measure(file: Path, flags: list[str], *, cold: bool) -> Round:
    def read() -> float:
        if cold:
            drop_cached(file)
        return read_seconds(file)

    before = read()
    fresh_memory = fresh_memory_seconds(file.stat().st_size)
    if cold:
        drop_cached(file)
    load = execute([sys.executable, "-c", _LOAD, file, *flags])
    return Round(min(before, read()), load.first_byte_seconds, fresh_memory, load.peak_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights", choices=("packed", "mmap"), default="packed")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    flags = [args.weights, str(args.ctx), str(args.threads)]
    rounds: dict[str, list[Round]] = {"cold": [], "warm": []}
    for _ in range(args.rounds):  # the cold one leaves the file in the cache for the warm one
        for cache, done in rounds.items():
            done.append(measure(args.model, flags, cold=cache == "cold"))
    report(
        {cache: [asdict(r) for r in done] for cache, done in rounds.items()},
        as_json=args.json,
        columns=["page cache", "read, s", "ready, s", "ratio", "fresh memory, s", "peak, GiB"],
        rows=[
            [
                cache,
                median(r.read for r in done),
                median(r.ready for r in done),
                median(r.ready / r.read for r in done),
                median(r.fresh_memory for r in done),
                max(r.peak_bytes for r in done) / 2**30,
            ]
            for cache, done in rounds.items()
        ],
    )


if __name__ == "__main__":
    main()
