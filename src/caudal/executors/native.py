"""The CPU executor: a Program lowered to the native core, one native call per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caudal import _native
from caudal.config import EngineConfig, format_size
from caudal.core import InsufficientMemoryError, UnsupportedModelError
from caudal.executors.base import KVLayout
from caudal.executors.lowering import Lowering, Progress, memory_need
from caudal.executors.memory import available_memory
from caudal.graph.passes import early_last_tokens
from caudal.models import build_program

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from caudal.core import Batch
    from caudal.formats import Checkpoint
    from caudal.graph.program import Program

BLOCK_SIZE = 32  # tokens; kKvBlock of the native core
_DEFAULT_SEQUENCES = 4  # of full length that the cache holds unless told otherwise; pages are used as they fill
_RESERVE = 256 << 20  # bytes left to the rest of the process and the system
_MAX_HEAD_DIM = 256  # kMaxHeadDim of the native core
_MAX_BLOCKS = (2**31 - 1) // BLOCK_SIZE  # their slots are numbered by int32


class NativeExecutor:
    """Implements `executors.base.Executor`. Results do not depend on the batch or the number of threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        program: Program | None = None,
        pool: _native.ThreadPool | None = None,
        reserve: int = 0,
    ) -> None:
        """Records, packs and plans the model. program: a validated one to run in place of the checkpoint's model;
        config.max_model_len must then be given. pool: threads to share with another executor, which must not run at
        the same time. reserve: bytes of memory that are promised to others.

        Raises UnsupportedModelError (a part of the model or an option that is not supported), InvalidModelFileError
        and InsufficientMemoryError.
        """
        context_length = config.max_model_len
        if program is None:
            model_config, program = build_program(checkpoint)
            context_length = model_config.context_length
        program = early_last_tokens(program)
        _check_types(program, checkpoint)
        _check_heads(program)
        if config.max_model_len > context_length:
            raise UnsupportedModelError(
                f"the model was made for at most {context_length} tokens of context, "
                f"but {config.max_model_len} are asked for (--ctx)"
            )
        if config.isa not in _native.instruction_sets():
            raise UnsupportedModelError(
                f"the instruction set {config.isa!r} is unknown or not available on this CPU; "
                f"available: {', '.join(_native.instruction_sets())}"
            )
        need = memory_need(program, checkpoint, config.kv_type)
        # Blocks of a program without attention take no memory; the arithmetic below wants some.
        block_bytes = max(1, need.kv_block)
        self._max_model_len, num_blocks = _size_cache(
            config, context_length, block_bytes=block_bytes, weight_bytes=need.weights, reserve=reserve
        )
        self._kv_layout = KVLayout(BLOCK_SIZE, num_blocks, block_bytes, config.kv_type)
        self.pool = pool or _native.ThreadPool(config.num_threads or _native.usable_cpus(), config.pin_threads)
        try:
            self._model: _native.Model | None = _native.Model(self.pool, config.isa, need.packed_weights)
            Lowering(program, checkpoint, self._model, progress).run(kv_type=config.kv_type, num_blocks=num_blocks)
        except MemoryError as error:
            num_bytes = need.packed_weights + num_blocks * block_bytes
            raise InsufficientMemoryError(
                f"the system did not give {format_size(num_bytes)} for weights and cache"
            ) from error
        self._vocab_size = self._model.vocab_size

    @property
    def kv_layout(self) -> KVLayout:
        return self._kv_layout

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""
        assert self._model is not None, "the executor is closed"
        return self._model.isa

    @property
    def num_phases(self) -> int:
        """Barriers of a step."""
        assert self._model is not None, "the executor is closed"
        return self._model.num_phases

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """See `Executor.run`. Raises ValueError for arrays that do not describe a possible step."""
        assert self._model is not None, "the executor is closed"
        return self._model.run(
            batch.token_ids,
            batch.positions,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.slot_mapping,
            batch.logits_rows,
        )

    def close(self) -> None:
        self._model = None


def _check_types(program: Program, checkpoint: Checkpoint) -> None:
    for op in program.ops:
        for name in op.weights:
            quant_type = checkpoint.tensors[name].quant_type
            if not _native.has_type(quant_type.ggml_id):
                raise UnsupportedModelError(f"tensor {name} has type {quant_type.name}, which the CPU cannot run yet")


def _check_heads(program: Program) -> None:
    for op in program.attention_ops:
        for dim in (op.integer("head_dim"), op.integer("v_head_dim")):
            if dim % 4 or dim > _MAX_HEAD_DIM:
                raise UnsupportedModelError(
                    f"attention heads of {dim} numbers: the CPU runs multiples of 4 up to {_MAX_HEAD_DIM}"
                )


def _size_cache(
    config: EngineConfig, context_length: int, *, block_bytes: int, weight_bytes: int, reserve: int
) -> tuple[int, int]:
    """(context length, number of cache blocks) that the configuration asks for or memory allows.

    weight_bytes: of packed weights and of those that are read in place. reserve: bytes promised to others.
    """
    reserve += _RESERVE
    free = available_memory() - weight_bytes - reserve
    if free < block_bytes:
        raise InsufficientMemoryError(
            f"the weights need {format_size(weight_bytes)} and one block of cache {format_size(block_bytes)}, "
            f"but only {format_size(max(0, available_memory() - reserve))} of memory are free"
        )
    wanted = config.max_model_len or context_length
    blocks_per_sequence = -(-wanted // BLOCK_SIZE)
    if config.kv_cache_memory:
        num_blocks = config.kv_cache_memory // block_bytes
        if num_blocks == 0:
            raise InsufficientMemoryError(
                f"one block of {BLOCK_SIZE} tokens takes {format_size(block_bytes)} of cache, "
                f"more than --kv-cache-memory {format_size(config.kv_cache_memory)}"
            )
        if config.kv_cache_memory > free:
            raise InsufficientMemoryError(
                f"--kv-cache-memory {format_size(config.kv_cache_memory)} and weights of {format_size(weight_bytes)} "
                f"do not fit in the {format_size(available_memory())} that are free"
            )
    else:
        num_blocks = min(_DEFAULT_SEQUENCES * blocks_per_sequence, free // block_bytes)
        if config.max_model_len and num_blocks < blocks_per_sequence:
            raise InsufficientMemoryError(
                f"a context of {wanted} tokens takes {format_size(blocks_per_sequence * block_bytes)} of cache, "
                f"but only {format_size(free)} are free; ask for less (--ctx) or use --kv-type q8"
            )
    num_blocks = min(num_blocks, _MAX_BLOCKS)
    if not config.max_model_len:
        wanted = min(wanted, num_blocks * BLOCK_SIZE)
    return wanted, num_blocks
