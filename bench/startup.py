"""What it costs to start: importing Caudal, the first token of `caudal run`, resident memory.

    python bench/startup.py MODEL.gguf [--rounds 5] [--ctx 2048] [--json]

Limits: import under 0.1 s and without torch, transformers or scipy; first token under 1 s from process start;
resident memory at most the file's size + the KV cache + 150 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from common import CAUDAL, execute, median, report

HEAVY = ("torch", "transformers", "scipy")
EXTRA_BYTES = 150 * 10**6

_IMPORT = "import caudal, sys; print(sorted({name.partition('.')[0] for name in sys.modules}))"


def import_cost(rounds: int) -> dict[str, object]:
    """Median seconds that `import caudal` adds to an empty Python, and what it loads."""
    empty = [execute([sys.executable, "-c", "print()"]).seconds for _ in range(rounds)]
    full = [execute([sys.executable, "-c", _IMPORT]) for _ in range(rounds)]
    modules = full[0].stdout
    return {
        "seconds": median(f.seconds for f in full) - median(empty),
        "heavy_modules": [name for name in HEAVY if f"'{name}'" in modules],
    }


def run_cost(model: Path, rounds: int, ctx: int) -> dict[str, object]:
    """First token and peak memory of `caudal run`."""
    command = [*CAUDAL, "run", model, "Why is the sky blue?", "--max-tokens", "16", "--ctx", str(ctx)]
    runs = [execute(command) for _ in range(rounds)]
    shown = json.loads(execute([*CAUDAL, "show", model, "--ctx", str(ctx), "--json"]).stdout)
    allowed = model.stat().st_size + shown["memory"]["kv_cache_bytes"] + EXTRA_BYTES
    return {
        "first_token_seconds": median(run.first_byte_seconds for run in runs),
        "peak_bytes": max(run.peak_bytes for run in runs),
        "allowed_bytes": allowed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    imported = import_cost(args.rounds)
    run = run_cost(args.model, args.rounds, args.ctx)
    mib = 2**20
    report(
        {"import": imported, "run": run},
        as_json=args.json,
        columns=["what", "measured", "limit"],
        rows=[
            ["import caudal, s", imported["seconds"], 0.1],
            ["heavy modules", imported["heavy_modules"] or "none", "none"],
            ["first token of `caudal run`, s", run["first_token_seconds"], 1.0],
            ["peak resident memory, MiB", run["peak_bytes"] / mib, run["allowed_bytes"] / mib],
        ],
    )


if __name__ == "__main__":
    main()
