"""Caudal beside llama.cpp's own tools: same file, same machine, alternating in one run (A B A B).

    python bench/vs_llamacpp.py MODEL.gguf --llama-bin DIR [--rounds 5] [--threads 2] [--json]

DIR holds `llama-bench` and `llama-batched-bench`. Every number is the median over the rounds; the ratio is
the median of the ratios within a round, since a shared machine changes its speed from minute to minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import CAUDAL, execute, median, report

GENERATED = 128
BATCH_PROMPT = 16  # tokens in the cache before a batched decode; llama-batched-bench needs some


@dataclass(frozen=True, slots=True)
class Sample:
    tokens_per_second: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    name: str
    ours: Callable[[], Sample]
    theirs: Callable[[], Sample]


def caudal_bench(model: Path, threads: int, *flags: str) -> Sample:
    done = execute([*CAUDAL, "bench", model, "--json", "--threads", str(threads), "--runs", "1", *flags])
    (test,) = json.loads(done.stdout)
    return Sample(test["tokens_per_second"], done.peak_bytes)


def llama_bench(tool: Path, model: Path, threads: int, prompt: int, gen: int) -> Sample:
    done = execute([tool, "-m", model, "-t", str(threads), "-p", str(prompt), "-n", str(gen), "-r", "1", "-o", "json"])
    (test,) = json.loads(done.stdout)
    return Sample(test["avg_ts"], done.peak_bytes)


def llama_batched_bench(tool: Path, model: Path, threads: int, batch: int) -> Sample:
    context = batch * (BATCH_PROMPT + GENERATED)
    shape = ["-npp", str(BATCH_PROMPT), "-ntg", str(GENERATED), "-npl", str(batch)]
    command = [tool, "-m", model, "-t", str(threads), "-c", str(context), *shape, "--output-format", "jsonl"]
    done = execute(command)
    test = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return Sample(test["speed_tg"], done.peak_bytes)


def cases(model: Path, llama: Path, threads: int) -> list[Case]:
    bench, batched = llama / "llama-bench", llama / "llama-batched-bench"

    def decode(batch: int) -> Case:
        flags = ("--prompt", "0", "--gen", str(GENERATED), "--batch", str(batch), "--depth", str(BATCH_PROMPT))
        return Case(
            f"decode, {batch} sequences",
            lambda: caudal_bench(model, threads, *flags),
            lambda: llama_batched_bench(batched, model, threads, batch),
        )

    return [
        Case(
            "prefill 512",
            lambda: caudal_bench(model, threads, "--prompt", "512", "--gen", "0"),
            lambda: llama_bench(bench, model, threads, 512, 0),
        ),
        Case(
            "decode 128",
            lambda: caudal_bench(model, threads, "--prompt", "0", "--gen", str(GENERATED), "--batch", "1"),
            lambda: llama_bench(bench, model, threads, 0, GENERATED),
        ),
        decode(4),
        decode(16),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bin", type=Path, required=True, help="folder of llama.cpp's tools")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    results = []
    for case in cases(args.model, args.llama_bin, args.threads):
        pairs = [(case.ours(), case.theirs()) for _ in range(args.rounds)]
        results.append(
            {
                "test": case.name,
                "caudal": median(ours.tokens_per_second for ours, _ in pairs),
                "llama_cpp": median(theirs.tokens_per_second for _, theirs in pairs),
                "ratio": median(ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs),
                "caudal_peak_mib": max(ours.peak_bytes for ours, _ in pairs) / 2**20,
                "llama_cpp_peak_mib": max(theirs.peak_bytes for _, theirs in pairs) / 2**20,
                "rounds": [(ours.tokens_per_second, theirs.tokens_per_second) for ours, theirs in pairs],
            }
        )
    columns = ["test", "caudal", "llama_cpp", "ratio", "caudal_peak_mib", "llama_cpp_peak_mib"]
    report(
        {"model": args.model.name, "threads": args.threads, "results": results},
        as_json=args.json,
        columns=columns,
        rows=[[result[column] for column in columns] for result in results],
    )


if __name__ == "__main__":
    main()
