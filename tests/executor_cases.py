"""The executors under test. Golden, op and batch tests run over all of them: a new executor is one entry here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest

from caudal.executors.base import Executor
from caudal.executors.reference import ReferenceExecutor
from caudal.formats import Checkpoint
from caudal.graph.program import Program


class Open(Protocol):
    def __call__(
        self, checkpoint: Checkpoint, *, max_model_len: int = 0, num_blocks: int = 0, program: Program | None = None
    ) -> Executor: ...


@dataclass(frozen=True)
class ExecutorCase:
    """How to open an executor, and in what it is less exact than float32 throughout."""

    name: str
    open: Open
    exact_cache: bool = True  # keys and values are float32
    exact_activations: bool = True  # inputs of quantized weights are not rounded
    bit_identical: bool = True  # results do not depend on batch, chunks and threads


# numpy's matrix products round differently for different numbers of rows.
REFERENCE = ExecutorCase("reference", ReferenceExecutor, bit_identical=False)
EXECUTORS = (REFERENCE,)

each_executor = pytest.mark.parametrize("case", EXECUTORS, ids=lambda case: case.name)


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    """Squared error relative to the squared values."""
    assert got.shape == expected.shape
    return float(np.sum(np.square(got.astype(np.float64) - expected)) / np.sum(np.square(expected.astype(np.float64))))
