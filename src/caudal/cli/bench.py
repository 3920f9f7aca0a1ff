"""`caudal bench`: how fast a model reads prompts and writes answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from caudal.cli.support.options import IntList, engine_options, json_option, model_argument, take
from caudal.cli.support.output import print_json, print_table, progress
from caudal.config import EngineConfig

if TYPE_CHECKING:
    from caudal.core import Batch
    from caudal.engine.sampling import Sampler
    from caudal.executors.base import Executor


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: reading `n_prompt` tokens, or `n_gen` steps of `batch` sequences, after `depth` tokens."""

    kind: str  # prefill or decode
    n_prompt: int
    n_gen: int
    batch: int
    depth: int

    @property
    def max_tokens(self) -> int:
        """Tokens of one sequence in the cache at the end."""
        return self.depth + self.n_prompt + self.n_gen

    @property
    def timed_tokens(self) -> int:
        return self.batch * (self.n_prompt + self.n_gen)


@click.command(short_help="Measure the speed of prefill and decode.")
@model_argument
@click.option("--prompt", type=IntList(0), default="512", show_default=True, help="Prompt lengths; 0: none.")
@click.option("--gen", type=IntList(0), default="128", show_default=True, help="Tokens to generate; 0: none.")
@click.option("--batch", type=IntList(1), default="1,4,16", show_default=True, help="Sequences decoded together.")
@click.option("--depth", type=IntList(0), default="0", show_default=True, help="Tokens in the cache before.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Times that each is run.")
@engine_options("num_threads", "weights", "kv_type", "max_num_batched_tokens", "pin_threads", "isa")
@json_option
def command(
    model: str,
    prompt: tuple[int, ...],
    gen: tuple[int, ...],
    batch: tuple[int, ...],
    depth: tuple[int, ...],
    runs: int,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure tokens per second of the executor and the sampler, without HTTP or scheduling.

    prefill: one prompt, with the logits of its last token. decode: one token for each sequence in a step, chosen
    by the sampler. All after one run that does not count; the numbers are medians.

    \b
    Examples:
      caudal bench smollm2:135m
      caudal bench smollm2:135m --json --threads 2 --prompt 512 --gen 128 --batch 1,4,16
      caudal bench smollm2:135m --prompt 0 --gen 64 --batch 1 --depth 0,1024
    """
    from statistics import median

    tests = [Case("prefill", n, 0, 1, d) for d in depth for n in prompt if n]
    tests += [Case("decode", 0, n, b, d) for d in depth for n in gen if n for b in batch]
    if not tests:
        raise click.UsageError("nothing to measure: --prompt and --gen are both 0")
    config = take(EngineConfig, settings)
    executor, sampler = _open(model, tests, config)
    results: list[dict[str, Any]] = []
    try:
        with progress("runs") as show_progress:
            for test in tests:
                rates: list[float] = []
                for _ in range(runs + 1):
                    rates.append(test.timed_tokens / run_test(executor, sampler, test, config.max_num_batched_tokens))
                    show_progress(len(results) * (runs + 1) + len(rates), len(tests) * (runs + 1))
                results.append(
                    {
                        "test": test.kind,
                        "n_prompt": test.n_prompt,
                        "n_gen": test.n_gen,
                        "batch": test.batch,
                        "depth": test.depth,
                        "tokens_per_second": median(rates[1:]),
                        "runs": runs,
                        "samples": rates[1:],
                    }
                )
    finally:
        executor.close()
    if as_json:
        print_json(results)
        return
    print_table(
        ("test", "tokens", "batch", "depth", "tokens/s", "lowest", "highest"),
        [
            (
                r["test"],
                str(r["n_prompt"] or r["n_gen"]),
                str(r["batch"]),
                str(r["depth"]),
                f"{r['tokens_per_second']:.1f}",
                f"{min(r['samples']):.1f}",
                f"{max(r['samples']):.1f}",
            )
            for r in results
        ],
    )


class Lanes:
    """Sequences of equal length that go through the model side by side."""

    def __init__(self, test: Case, block_size: int, vocab_size: int) -> None:
        """Random tokens: those of the context and the prompt, and for decode the first one to continue from."""
        import random

        import numpy as np

        from caudal.core import SamplingParams
        from caudal.engine.sampling import SamplerRow

        generator = random.Random(0)
        num_tokens = test.depth + (test.n_prompt or 1)
        params = SamplingParams(temperature=0.0)
        self.rows = [
            SamplerRow(params, 0, [generator.randrange(vocab_size) for _ in range(num_tokens)], num_tokens, ())
            for _ in range(test.batch)
        ]
        num_blocks = -(-test.max_tokens // block_size)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._tables = np.arange(test.batch * num_blocks, dtype=np.int32).reshape(test.batch, num_blocks)
        self._num_computed = 0

    def batch(self, end: int, *, logits: bool) -> Batch:
        """The step that computes every sequence up to `end` tokens, with the logits of the last one of each."""
        import numpy as np

        from caudal.core import Batch
        from caudal.engine.sampling import num_candidates

        start, self._num_computed = self._num_computed, end
        count, width = len(self.rows), end - start
        positions = np.arange(start, end, dtype=np.int32)
        slots = self._tables[:, positions // self._block_size] * self._block_size + positions % self._block_size
        query_start = np.arange(count + 1, dtype=np.int32) * width
        logits_rows = query_start[1:] - 1 if logits else query_start[:0]
        return Batch(
            token_ids=np.array([row.token_ids[start:end] for row in self.rows], np.int32).ravel(),
            positions=np.tile(positions, count),
            query_start=query_start,
            seq_lens=np.full(count, end, np.int32),
            block_tables=self._tables,
            slot_mapping=slots.ravel(),
            logits_rows=logits_rows,
            adapter_slots=np.zeros(count, np.int32),
            num_candidates=np.full(len(logits_rows), num_candidates(self.rows[0].params, self._vocab_size), np.int32),
        )


def run_test(executor: Executor, sampler: Sampler, test: Case, step_tokens: int) -> float:
    """Run a test once, from an empty cache, and return the seconds of its timed part."""
    lanes = Lanes(test, executor.kv_layout.block_size, executor.vocab_size)
    width = max(1, step_tokens // test.batch)
    for end in range(width, test.depth + width, width):
        executor.run(lanes.batch(min(end, test.depth), logits=False))
    start = perf_counter()
    if test.kind == "prefill":
        total = test.depth + test.n_prompt
        for end in range(test.depth + width, total + width, width):
            logits = executor.run(lanes.batch(min(end, total), logits=end >= total))
            if end >= total:
                sampler.sample(logits, lanes.rows)
    else:
        for end in range(test.depth + 1, test.depth + 1 + test.n_gen):
            logits = executor.run(lanes.batch(end, logits=True))
            for row, sampled in zip(lanes.rows, sampler.sample(logits, lanes.rows), strict=True):
                row.token_ids.append(sampled.token_id)
    return perf_counter() - start


def _open(model: str, tests: Sequence[Case], config: EngineConfig) -> tuple[Executor, Sampler]:
    """An executor whose cache holds the largest test, and its sampler."""
    from caudal.cli.support.models import open_model
    from caudal.engine.engine import validate_config
    from caudal.executors.lowering import memory_need
    from caudal.executors.sizing import BLOCK_SIZE
    from caudal.loader import open_executor
    from caudal.models import build_program

    validate_config(config)
    checkpoint = open_model(model)
    num_blocks = max(test.batch * -(-test.max_tokens // BLOCK_SIZE) for test in tests)
    need = memory_need(build_program(checkpoint)[1], checkpoint, config.kv_type)
    sized = replace(
        config,
        max_model_len=max(test.max_tokens for test in tests),
        kv_cache_memory=num_blocks * need.kv_block,
        max_num_seqs=max(test.batch for test in tests),
    )
    return open_executor(checkpoint, sized)
