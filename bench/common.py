"""What the benchmarks share: running a program and measuring it, medians, a table."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

CAUDAL = [sys.executable, "-m", "caudal"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that ran to its end."""

    stdout: str
    seconds: float  # from start to end
    first_byte_seconds: float  # from start to its first byte of output
    peak_bytes: int  # largest resident memory; mapped model files count


def execute(command: Sequence[str | Path], *, check: bool = True) -> Finished:
    """Run a program with its errors dropped. Raises RuntimeError if it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    first_byte = time.perf_counter() - start
    rest = process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if check and process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {' '.join(str(part) for part in command)}")
    return Finished((first + rest).decode(), seconds, first_byte, usage.ru_maxrss * 1024)


def machine() -> dict[str, Any]:
    """The facts that a number is worthless without."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": cpu, "cpus": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load": os.getloadavg()[0]}


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A Markdown table, ready for docs/performance.md."""
    cells = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    for index, line in enumerate([list(columns), *cells]):
        print("| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |")
        if index == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def report(result: dict[str, Any], *, as_json: bool, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    if as_json:
        print(json.dumps(result | {"machine": machine()}, indent=2))
    else:
        print(f"{machine()}\n")
        print_table(columns, rows)


__all__ = ["CAUDAL", "Finished", "execute", "machine", "median", "print_table", "report"]
