"""Caudal beside llama.cpp's own tools: same file, same machine, alternating in one run (A B A B).

    python bench/vs_llamacpp.py MODEL.gguf --peer DIR [--peer NAME=DIR] [--bounds build/bench/caudal_bench_bounds]

DIR holds `llama-bench` and `llama-batched-bench`; several builds of llama.cpp are several peers. Every number is
the median over the rounds; a ratio is the median of the ratios within a round, since a shared machine changes its
speed from minute to minute, and the smallest and largest of them stand behind it.

`load` is the time of a whole process that reads the file and a prompt of two tokens, with the file in the page cache
(warm) or not (cold). With --bounds a small program measures read bandwidth and the matrix products in cache, and
the table says which share of the tighter bound each side reaches: bytes of weights and cache per second over the
bandwidth, or multiply-adds of the weights over the rates of Caudal's own kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import CAUDAL, execute, median, report

PREFILLS = (128, 512, 2048)
DEPTHS = (0, 1024, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
GENERATED = 64
BATCH_PROMPT = 16  # tokens in the cache before a batched decode; llama-batched-bench needs some
LOAD_PROMPT = 2  # tokens
GROUPS = ("prefill", "depth", "batch", "load")


@dataclass(frozen=True, slots=True)
class Sample:
    value: float  # tokens per second; seconds for `load`
    peak_bytes: int


Samples = Mapping[str, Sample]  # by the name of the test
Runner = Callable[[], Samples]  # one process, or a few


@dataclass(frozen=True, slots=True)
class Contender:
    """One program: how it runs each group of tests."""

    name: str
    groups: Mapping[str, Runner]


@dataclass(frozen=True, slots=True)
class Settings:
    model: Path
    threads: int
    kv_type: str
    isa: str


def prefill_name(tokens: int) -> str:
    return f"prefill {tokens}"


def depth_name(depth: int) -> str:
    return f"decode at {depth}"


def batch_name(sequences: int) -> str:
    return f"decode, {sequences} at once"


def comma(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)


def caudal(settings: Settings) -> Contender:
    def bench(*flags: str, runs: int = 1) -> tuple[list[dict[str, float]], int]:
        own = ["--threads", str(settings.threads), "--kv-type", settings.kv_type, "--isa", settings.isa]
        done = execute([*CAUDAL, "bench", settings.model, "--json", "--runs", str(runs), *own, *flags])
        return json.loads(done.stdout), done.peak_bytes

    def group(name: Callable[[int], str], key: str, *flags: str) -> Runner:
        def run() -> Samples:
            tests, peak = bench(*flags)
            return {name(int(test[key])): Sample(test["tokens_per_second"], peak) for test in tests}

        return run

    def load() -> Samples:
        own = ["--threads", str(settings.threads), "--isa", settings.isa, "--runs", "1"]
        tokens = ["--prompt", str(LOAD_PROMPT), "--gen", "0"]
        return load_samples(settings.model, [*CAUDAL, "bench", settings.model, "--json", *own, *tokens])

    gen = ("--gen", str(GENERATED))
    depths, batches = ("--batch", "1", "--depth", comma(DEPTHS)), ("--batch", comma(BATCHES))
    return Contender(
        "caudal",
        {
            "prefill": group(prefill_name, "n_prompt", "--prompt", comma(PREFILLS), "--gen", "0"),
            "depth": group(depth_name, "depth", "--prompt", "0", *gen, *depths),
            "batch": group(batch_name, "batch", "--prompt", "0", *gen, *batches, "--depth", str(BATCH_PROMPT)),
            "load": load,
        },
    )


def llama_cpp(settings: Settings, name: str, folder: Path) -> Contender:
    kv = {"f16": "f16", "q8": "q8_0"}[settings.kv_type]
    common = ["-m", settings.model, "-t", str(settings.threads), "-ctk", kv, "-ctv", kv, "-fa", "on"]

    def group(name: Callable[[int], str], key: str, *flags: str) -> Runner:
        def run() -> Samples:
            done = execute([folder / "llama-bench", *common, "-r", "1", "-o", "json", *flags])
            return {name(int(test[key])): Sample(test["avg_ts"], done.peak_bytes) for test in json.loads(done.stdout)}

        return run

    def batch() -> Samples:
        context = max(BATCHES) * (BATCH_PROMPT + GENERATED)
        shape = ["-npp", str(BATCH_PROMPT), "-ntg", str(GENERATED), "-npl", comma(BATCHES), "-c", str(context)]
        done = execute([folder / "llama-batched-bench", *common, *shape, "--output-format", "jsonl"])
        tests = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {batch_name(int(test["pl"])): Sample(test["speed_tg"], done.peak_bytes) for test in tests}

    def load() -> Samples:
        tool = [folder / "llama-bench", "-m", settings.model, "-t", str(settings.threads)]
        return load_samples(
            settings.model, [*tool, "-r", "1", "-p", str(LOAD_PROMPT), "-n", "0", "--no-warmup", "-o", "json"]
        )

    return Contender(
        name,
        {
            "prefill": group(prefill_name, "n_prompt", "-p", comma(PREFILLS), "-n", "0"),
            "depth": group(depth_name, "n_depth", "-p", "0", "-n", str(GENERATED), "-d", comma(DEPTHS)),
            "batch": batch,
            "load": load,
        },
    )


def load_samples(model: Path, command: Sequence[str | Path]) -> Samples:
    """The same command with the file dropped from the page cache, and again."""
    with open(model, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cold, warm = execute(command), execute(command)
    return {
        "load, cold": Sample(cold.seconds, cold.peak_bytes),
        "load, warm": Sample(warm.seconds, warm.peak_bytes),
    }


@dataclass(slots=True)
class Outcome:
    """All samples of one test: [round][contender], nothing where a program failed."""

    rounds: list[dict[str, Sample]] = field(default_factory=list[dict[str, Sample]])

    def values(self, name: str) -> list[float]:
        return [samples[name].value for samples in self.rounds if name in samples]

    def ratios(self, peer: str, *, less_is_better: bool) -> list[float]:
        """How many times as fast as the peer Caudal is, in each round."""
        pairs = [(s["caudal"].value, s[peer].value) for s in self.rounds if "caudal" in s and peer in s]
        return [theirs / ours if less_is_better else ours / theirs for ours, theirs in pairs]

    def peak(self, name: str) -> float:
        return max((samples[name].peak_bytes for samples in self.rounds if name in samples), default=0) / 2**20


def compare(contenders: Sequence[Contender], groups: Sequence[str], rounds: int) -> dict[str, Outcome]:
    """Run every group `rounds` times, the contenders in turn. A program that fails is reported and left out."""
    outcomes: dict[str, Outcome] = {}
    for group in groups:
        for turn in range(rounds):
            done: dict[str, dict[str, Sample]] = {}
            for contender in contenders:
                print(f"{group}, round {turn + 1} of {rounds}: {contender.name}", file=sys.stderr)
                try:
                    samples = contender.groups[group]()
                except (RuntimeError, OSError, ValueError, KeyError) as error:
                    print(f"  {contender.name} failed: {error}", file=sys.stderr)
                    continue
                for test, sample in samples.items():
                    done.setdefault(test, {})[contender.name] = sample
            for test, samples in done.items():
                outcomes.setdefault(test, Outcome()).rounds.append(samples)
    return outcomes


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the machine and the kernels allow, and what a token of the model needs."""

    bandwidth: float  # bytes/s
    mac_rates: Mapping[str, float]  # multiply-adds/s by tensor type
    layer_macs: Mapping[str, int]  # of one token, by tensor type
    head_macs: Mapping[str, int]
    weight_bytes: int  # that a step reads
    kv_token_bytes: float  # of keys and values of one token, all layers

    def share(self, test: str, tokens_per_second: float) -> tuple[float, str]:
        """The fraction of the tighter bound that was reached, and its name."""
        name, tokens, sequences, depth = parse(test)
        layers, head = (sum(n / self.mac_rates[t] for t, n in m.items()) for m in (self.layer_macs, self.head_macs))
        if name == "prefill":
            compute, memory = tokens * layers + head, self.weight_bytes / self.bandwidth
        else:
            context = depth + BATCH_PROMPT * (sequences > 1) + GENERATED / 2
            cache = sequences * context * self.kv_token_bytes
            compute, memory = sequences * (layers + head), (self.weight_bytes + cache) / self.bandwidth
        actual = tokens / tokens_per_second if name == "prefill" else sequences / tokens_per_second
        return (memory / actual, "bandwidth") if memory > compute else (compute / actual, "arithmetic")


def parse(test: str) -> tuple[str, int, int, int]:
    """(prefill or decode, tokens, sequences, depth) of a test by its name."""
    words = test.replace(",", "").split()
    if words[0] == "prefill":
        return "prefill", int(words[1]), 1, 0
    return ("decode", 1, 1, int(words[2])) if words[1] == "at" else ("decode", 1, int(words[1]), 0)


def measure_bounds(tool: Path, settings: Settings) -> Bounds:
    from caudal.executors.lowering import memory_need
    from caudal.executors.native import BLOCK_SIZE
    from caudal.formats import open_checkpoint
    from caudal.models import build_program

    checkpoint = open_checkpoint(settings.model)
    program = build_program(checkpoint)[1]
    names = [name for op in program.ops if op.kind == "linear" for name in op.weights]
    tensors = [checkpoint.tensors[name] for name in names if len(checkpoint.tensors[name].shape) == 2]
    types = sorted({tensor.quant_type.name.upper() for tensor in tensors})
    done = execute([tool, str(settings.threads), settings.isa, "0.5", *types])
    rates = json.loads(done.stdout)
    macs: list[dict[str, int]] = [{}, {}]
    for i, tensor in enumerate(tensors):
        kind = tensor.quant_type.name.upper()
        into = macs[1 if i == len(tensors) - 1 else 0]  # the head comes last
        into[kind] = into.get(kind, 0) + tensor.shape[0] * tensor.shape[1]
    return Bounds(
        bandwidth=rates["read_gb_s"] * 1e9,
        mac_rates={kind: rate * 1e9 for kind, rate in rates["gmac_s"].items()},
        layer_macs=macs[0],
        head_macs=macs[1],
        weight_bytes=sum(tensor.data.nbytes for tensor in tensors),
        kv_token_bytes=memory_need(program, checkpoint, settings.kv_type).kv_block / BLOCK_SIZE,
    )


def row(
    test: str, outcome: Outcome, peers: Sequence[str], share: Callable[[str, float], tuple[float, str]] | None
) -> dict[str, object]:
    """One line of the table."""
    seconds = test.startswith("load")
    cells: dict[str, object] = {"test": test}
    for name in ("caudal", *peers):
        values = outcome.values(name)
        cells[name] = median(values) if values else "failed"
        if name != "caudal":
            ratios = outcome.ratios(name, less_is_better=seconds)
            cells[f"against {name}"] = (
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
            )
    if share is not None:
        cells["bound"] = "-"
        for name in ("caudal", *peers):
            value = cells[name]
            if seconds or not isinstance(value, float):
                cells[f"{name}'s share"] = "-"
                continue
            reached, cells["bound"] = share(test, value)
            cells[f"{name}'s share"] = f"{reached:.0%}"
    for name in ("caudal", *peers):
        cells[f"{name} peak MiB"] = round(outcome.peak(name))
    return cells


def peer_of(text: str) -> tuple[str, Path]:
    name, _, folder = text.rpartition("=")
    return name or "llama.cpp", Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--peer", type=peer_of, action="append", required=True, help="[NAME=]folder of llama.cpp's tools"
    )
    parser.add_argument("--bounds", type=Path, help="the program caudal_bench_bounds; without it no shares of bounds")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="groups of tests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-type", choices=("f16", "q8"), default="f16")
    parser.add_argument("--isa", default="auto", help="Caudal's kernels")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    settings = Settings(args.model, args.threads, args.kv_type, args.isa)
    peers = dict(args.peer)
    bounds = measure_bounds(args.bounds, settings) if args.bounds else None
    contenders = [caudal(settings), *(llama_cpp(settings, name, folder) for name, folder in peers.items())]
    outcomes = compare(contenders, args.only, args.rounds)
    rows = [row(test, outcome, list(peers), bounds and bounds.share) for test, outcome in outcomes.items()]
    result = {
        "model": args.model.name,
        "threads": args.threads,
        "kv_type": args.kv_type,
        "isa": args.isa,
        "bandwidth_gb_s": bounds and bounds.bandwidth / 1e9,
        "gmac_s": bounds and {kind: rate / 1e9 for kind, rate in bounds.mac_rates.items()},
        "results": rows,
        "rounds": {
            test: [{name: sample.value for name, sample in samples.items()} for samples in outcome.rounds]
            for test, outcome in outcomes.items()
        },
    }
    if bounds is not None and not args.json:
        rates = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in bounds.mac_rates.items())
        print(f"read bandwidth {bounds.bandwidth / 1e9:.1f} GB/s; products in cache, GMAC/s: {rates}")
    columns = list(rows[0]) if rows else ["test"]
    report(result, as_json=args.json, columns=columns, rows=[[cells[column] for column in columns] for cells in rows])
    if any("failed" in cells.values() for cells in rows) or not rows:
        sys.exit(1)


if __name__ == "__main__":
    main()
