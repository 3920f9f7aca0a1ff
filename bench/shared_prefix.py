"""What sequences gain that share the blocks of a prefix: decode steps of them, and of the same ones with a copy each.

    python bench/shared_prefix.py MODEL [--prefix 2048] [--sequences 16] [--kv-type f16] [--steps 20] [--json]

Steps alternate in one process; numbers are milliseconds, medians over the steps; the ratio is the median of the ratios
of neighbouring steps. Logits must be the same bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np
from common import median, report
from numpy.typing import NDArray

from caudal.config import EngineConfig
from caudal.core import Batch
from caudal.executors.driver import sequence_batch
from caudal.executors.lowering import memory_need
from caudal.executors.native import NativeExecutor
from caudal.executors.sizing import BLOCK_SIZE
from caudal.formats import open_checkpoint
from caudal.models import build_program

Table = NDArray[np.int32]  # [sequences, blocks]


def decode_batch(tables: Table, position: int, token_ids: NDArray[np.int32]) -> Batch:
    """The next token of every sequence, all at the same position."""
    count = len(tables)
    return Batch(
        token_ids=token_ids,
        positions=np.full(count, position, np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        seq_lens=np.full(count, position + 1, np.int32),
        block_tables=tables,
        slot_mapping=tables[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE,
        logits_rows=np.arange(count, dtype=np.int32),
        adapter_slots=np.zeros(count, np.int32),
    )


def block_tables(sequences: int, shared: int, own: int) -> tuple[Table, Table]:
    """Of sequences with the same first blocks, and of sequences with blocks of their own only."""
    numbers = np.arange(shared + sequences * own + sequences * (shared + own), dtype=np.int32)
    tails = numbers[shared:][: sequences * own].reshape(sequences, own)
    prefix = np.broadcast_to(numbers[:shared], (sequences, shared))
    copies = numbers[shared + sequences * own :].reshape(sequences, shared + own)
    return np.concatenate([prefix, tails], axis=1), copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prefix", type=int, default=2048, help="tokens, a multiple of 32")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--kv-type", choices=["f16", "q8"], default="f16")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    checkpoint = open_checkpoint(args.model)
    shared, own = args.prefix // BLOCK_SIZE, -(-args.steps // BLOCK_SIZE)
    tables = block_tables(args.sequences, shared, own)
    need = memory_need(build_program(checkpoint)[1], checkpoint, args.kv_type)
    executor = NativeExecutor(
        checkpoint,
        EngineConfig(
            kv_type=args.kv_type,
            isa=args.isa,
            max_model_len=(shared + own) * BLOCK_SIZE,
            kv_cache_memory=need.kv_block * (int(max(t.max() for t in tables)) + 1),
        ),
    )
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, executor.vocab_size, shared * BLOCK_SIZE)
    for table in (tables[0][0], *tables[1]):
        for start in range(0, len(prompt), 512):
            executor.run(sequence_batch(prompt[start : start + 512], start, table, BLOCK_SIZE, ()))
    times: list[tuple[float, float]] = []
    for step in range(args.steps):
        token_ids = rng.integers(0, executor.vocab_size, args.sequences, np.int32)
        seconds: list[float] = []
        results: list[NDArray[np.float32]] = []
        for table in tables:
            begin = perf_counter()
            logits = executor.run(decode_batch(table, len(prompt) + step, token_ids)).full
            seconds.append(perf_counter() - begin)
            results.append(logits.copy())
        if not np.array_equal(*results):
            raise AssertionError("the logits differ")
        times.append((seconds[0], seconds[1]))
    together, apart = (1e3 * median(t[i] for t in times) for i in (0, 1))
    ratio = median(b / a for a, b in times)
    report(
        {"shared_ms": together, "copies_ms": apart, "ratio": ratio, "samples": times},
        as_json=args.json,
        columns=("sequences", "prefix", "shared, ms", "copies, ms", "ratio"),
        rows=[(args.sequences, len(prompt), together, apart, ratio)],
    )


if __name__ == "__main__":
    main()
