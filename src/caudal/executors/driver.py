"""Runs one sequence through an executor without an engine: for `caudal logits`, perplexity and tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from caudal.core import Batch, RequestTooLongError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from caudal.executors.base import Executor


def sequence_batch(
    token_ids: Sequence[int], start: int, block_table: Sequence[int], block_size: int, logits_rows: Sequence[int]
) -> Batch:
    """A batch of one sequence: its tokens from position `start` on, with the earlier ones in the cache.

    block_table: the blocks of the whole sequence. logits_rows: ascending indices into `token_ids`.
    """
    positions = np.arange(start, start + len(token_ids), dtype=np.int32)
    table = np.asarray(block_table, np.int32)
    return Batch(
        token_ids=np.asarray(token_ids, np.int32),
        positions=positions,
        query_start=np.array([0, len(token_ids)], np.int32),
        seq_lens=np.array([start + len(token_ids)], np.int32),
        block_tables=table[None],
        slot_mapping=table[positions // block_size] * block_size + positions % block_size,
        logits_rows=np.asarray(logits_rows, np.int32),
        adapter_slots=np.zeros(1, np.int32),
    )


def run_tokens(
    executor: Executor,
    token_ids: Sequence[int],
    *,
    chunk_sizes: Sequence[int] = (),
    all_logits: bool = False,
) -> NDArray[np.float32]:
    """Logits of the last token [1, vocab], or of all [tokens, vocab], of one sequence computed from its start.

    Uses the first blocks of the cache and leaves its keys and values there. chunk_sizes: how many tokens each
    step takes; the last one repeats; empty: all in one step. Raises RequestTooLongError.
    """
    layout = executor.kv_layout
    limit = min(executor.max_model_len, layout.num_blocks * layout.block_size)
    if not 0 < len(token_ids) <= limit:
        raise RequestTooLongError(f"a sequence of {len(token_ids)} tokens; it must have 1 to {limit}", "prompt")
    table = range(-(-len(token_ids) // layout.block_size))
    results: list[NDArray[np.float32]] = []
    for start, end in _chunks(len(token_ids), chunk_sizes):
        rows = (
            range(end - start) if all_logits else range(end - start - 1, end - start) if end == len(token_ids) else ()
        )
        batch = sequence_batch(token_ids[start:end], start, table, layout.block_size, rows)
        results.append(executor.run(batch).full.copy())
    return np.concatenate(results)


def _chunks(length: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    if any(size <= 0 for size in sizes):
        raise ValueError(f"chunk sizes must be positive, not {sizes}")
    start = 0
    for i in range(length):
        if start == length:
            return
        end = min(length, start + (sizes[min(i, len(sizes) - 1)] if sizes else length))
        yield start, end
        start = end
