"""The executors under test. Golden, op and batch tests run over all of them: a new executor is one entry here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pytest

from caudal import _native
from caudal.config import EngineConfig, KVType
from caudal.executors.base import Executor
from caudal.executors.lowering import kv_layers
from caudal.executors.native import NativeExecutor
from caudal.executors.reference import ReferenceExecutor
from caudal.formats import Checkpoint
from caudal.graph.program import Program
from caudal.models import build_program


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


def native(kv_type: KVType, isa: str) -> Open:
    """Opens the native executor with the same arguments as the reference."""

    def open_native(
        checkpoint: Checkpoint, *, max_model_len: int = 0, num_blocks: int = 0, program: Program | None = None
    ) -> Executor:
        config = EngineConfig(
            num_threads=2, pin_threads=False, isa=isa, kv_type=kv_type, max_model_len=max_model_len, kv_cache_memory=0
        )
        if num_blocks:
            layers = kv_layers(program or build_program(checkpoint)[1])
            config = replace(config, kv_cache_memory=num_blocks * _native.kv_block_bytes(kv_type, layers))
        return NativeExecutor(checkpoint, config, program=program)

    return open_native


def native_case(name: str, isa: str) -> ExecutorCase:
    return ExecutorCase(
        name,
        native("f16", isa),
        exact_cache=False,
        exact_activations=False,
    )


NATIVE = native_case("native", "auto")
NATIVE_PLAIN = native_case("native-plain", "reference")
EXECUTORS = (REFERENCE, NATIVE, NATIVE_PLAIN)

fast_executors = pytest.mark.parametrize("case", [REFERENCE, NATIVE], ids=lambda case: case.name)
each_executor = pytest.mark.parametrize("case", EXECUTORS, ids=lambda case: case.name)


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    """Squared error relative to the squared values."""
    assert got.shape == expected.shape
    return float(np.sum(np.square(got.astype(np.float64) - expected)) / np.sum(np.square(expected.astype(np.float64))))
