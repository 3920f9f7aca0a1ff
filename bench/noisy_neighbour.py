"""How much of its quiet speed decoding keeps beside a busy process.

    python bench/noisy_neighbour.py MODEL.gguf [--rounds 5] [--threads 2] [--json]

The neighbour is one process that never sleeps, in a session of its own: where the kernel groups processes by
session (sched_autogroup) it has the same claim on the CPUs as all of Caudal. Quiet and busy rounds alternate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import CAUDAL, execute, median, report

GENERATED = 128


@contextmanager
def busy_neighbour() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def decode_speed(model: Path, threads: int) -> float:
    """Tokens per second of one sequence."""
    flags = ["--prompt", "0", "--gen", str(GENERATED), "--batch", "1", "--runs", "1"]
    (test,) = json.loads(execute([*CAUDAL, "bench", model, "--json", "--threads", str(threads), *flags]).stdout)
    return test["tokens_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    rounds = []
    for _ in range(args.rounds):
        quiet = decode_speed(args.model, args.threads)
        with busy_neighbour():
            busy = decode_speed(args.model, args.threads)
        rounds.append((quiet, busy))
    result = {
        "quiet": median(quiet for quiet, _ in rounds),
        "busy": median(busy for _, busy in rounds),
        "share": median(busy / quiet for quiet, busy in rounds),
    }
    report(
        result | {"rounds": rounds},
        as_json=args.json,
        columns=["quiet, tokens/s", "busy, tokens/s", "share kept"],
        rows=[[result["quiet"], result["busy"], result["share"]]],
    )


if __name__ == "__main__":
    main()
