"""The seam between the engine and whatever computes: the Executor protocol, what it gives, and its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from caudal.core import Batch

MAX_CANDIDATES = 128  # most that a batch may ask for in one row; kMaxCandidates of the native core


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The paged cache of keys and values, as the scheduler needs to know it."""

    block_size: int  # tokens
    num_blocks: int
    block_bytes: int  # of one block over all layers
    kv_type: str


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """What a step gives for its R rows that need logits: of each the whole row, or its K largest numbers at most.

    A row of candidates without any id holds NaN, plus infinity, or nothing but minus infinity.
    """

    full: NDArray[np.float32]  # [F, V]: the whole rows, in their order
    full_index: NDArray[np.int32]  # [R]: place in `full`; -1: the row has candidates only
    candidate_ids: NDArray[np.int32]  # [R, K]: token ids ascending, then -1; of equal logits those with the lowest ids
    candidate_values: NDArray[np.float32]  # [R, K]
    log_sums: NDArray[np.float64]  # [R]: log(sum(exp(row))) over all token ids, where the batch asks for it

    def __len__(self) -> int:
        return len(self.full_index)

    def take(self, rows: Sequence[int]) -> Logits:
        """These rows only. Whole rows are not copied."""
        return Logits(
            self.full, self.full_index[rows], self.candidate_ids[rows], self.candidate_values[rows], self.log_sums[rows]
        )


def whole_rows(logits: NDArray[np.float32]) -> Logits:
    """All rows [R, V], whole."""
    count = len(logits)
    return Logits(
        full=logits,
        full_index=np.arange(count, dtype=np.int32),
        candidate_ids=np.full((count, 0), -1, np.int32),
        candidate_values=np.zeros((count, 0), np.float32),
        log_sums=np.full(count, np.nan),
    )


def asked_for(logits: NDArray[np.float32], batch: Batch, num_token_ids: int) -> Logits:
    """What a batch asks for of all its logits [R, V]; candidates have ids below `num_token_ids`. The plain
    implementation, in double precision where it sums."""
    if batch.num_candidates is None:
        return whole_rows(logits)
    counts = np.minimum(batch.num_candidates, num_token_ids)
    count, width = len(counts), int(counts.max(initial=0))
    result = Logits(
        full=logits[counts == 0],
        full_index=np.where(counts == 0, np.cumsum(counts == 0) - 1, -1).astype(np.int32),
        candidate_ids=np.full((count, width), -1, np.int32),
        candidate_values=np.zeros((count, width), np.float32),
        log_sums=np.full(count, np.nan),
    )
    for row in np.flatnonzero(counts):
        x = logits[row, :num_token_ids]
        if not np.isfinite(x.max()):
            continue
        best = np.sort(np.argsort(-x, kind="stable")[: counts[row]])
        result.candidate_ids[row, : len(best)] = best
        result.candidate_values[row, : len(best)] = x[best]
        if batch.log_sums is not None and batch.log_sums[row]:
            result.log_sums[row] = log_sum_exp(x.astype(np.float64))
    return result


def log_sum_exp(x: NDArray[np.float64]) -> float:
    peak = x.max()
    return float(peak + np.log(np.sum(np.exp(x - peak))))


class Executor(Protocol):
    """Runs steps of one model. One thread at a time may call it; it keeps the keys and values of all blocks."""

    @property
    def kv_layout(self) -> KVLayout: ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits; may exceed the tokenizer's vocabulary (padding rows)."""
        ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def remark(self) -> str:
        """For people: how memory is used, where that is not the usual way; else empty."""
        ...

    def run(self, batch: Batch) -> Logits:
        """Compute one step and return the logits of `batch.logits_rows`: whole rows of vocab_size numbers, or
        candidates where these suffice (`batch.num_candidates`); an executor may give whole rows there, too.

        The arrays are valid until the next call. Keys and values of the batch's tokens are in the cache
        afterwards. Blocks are never cleared: the caller says through seq_lens what is valid.
        """
        ...

    def close(self) -> None:
        """Free the weights and the cache. Idempotent."""
        ...
