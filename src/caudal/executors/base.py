"""The seam between the engine and whatever computes: the Executor protocol and its description of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from caudal.core import Batch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The paged cache of keys and values, as the scheduler needs to know it."""

    block_size: int  # tokens
    num_blocks: int
    block_bytes: int  # of one block over all layers
    kv_type: str


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

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Compute one step and return the logits [R, vocab_size] of `batch.logits_rows`.

        The array is valid until the next call. Keys and values of the batch's tokens are in the cache
        afterwards. Blocks are never cleared: the caller says through seq_lens what is valid.
        """
        ...

    def close(self) -> None:
        """Free the weights and the cache. Idempotent."""
        ...
