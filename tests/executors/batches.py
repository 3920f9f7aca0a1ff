"""Batches of several sequences, as the engine would build them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caudal.core import Batch
from caudal.executors.base import Executor


@dataclass
class Part:
    """The new tokens of one sequence from position `start` on, with its whole block table."""

    token_ids: list[int]
    start: int
    blocks: list[int]
    all_logits: bool = False


def build(parts: list[Part], block_size: int) -> Batch:
    positions = [np.arange(p.start, p.start + len(p.token_ids), dtype=np.int32) for p in parts]
    slots = [
        np.asarray(p.blocks, np.int32)[at // block_size] * block_size + at % block_size
        for p, at in zip(parts, positions, strict=True)
    ]
    ends = np.cumsum([len(p.token_ids) for p in parts])
    rows = [
        row
        for p, end in zip(parts, ends, strict=True)
        for row in range(end - (len(p.token_ids) if p.all_logits else 1), end)
    ]
    width = max(len(p.blocks) for p in parts)
    return Batch(
        token_ids=np.concatenate([np.asarray(p.token_ids, np.int32) for p in parts]),
        positions=np.concatenate(positions),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        seq_lens=np.asarray([p.start + len(p.token_ids) for p in parts], np.int32),
        block_tables=np.asarray([p.blocks + [0] * (width - len(p.blocks)) for p in parts], np.int32),
        slot_mapping=np.concatenate(slots).astype(np.int32),
        logits_rows=np.asarray(rows, np.int32),
        adapter_slots=np.zeros(len(parts), np.int32),
    )


def run_chunks(executor: Executor, token_ids: list[int], blocks: list[int], chunk: int) -> np.ndarray:
    """Logits of the last token, computed `chunk` tokens at a time."""
    logits = None
    for start in range(0, len(token_ids), chunk):
        part = Part(token_ids[start : start + chunk], start, blocks)
        logits = executor.run(build([part], executor.kv_layout.block_size)).full.copy()
    assert logits is not None
    return logits[-1]
