"""The CPU executor: a Program lowered to the native core, one native call per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caudal import _native
from caudal.config import EngineConfig, format_size
from caudal.core import InsufficientMemoryError, InvalidModelFileError, UnsupportedModelError
from caudal.executors.base import KVLayout, Logits
from caudal.executors.lowering import Lowering, Progress, mapping, memory_need
from caudal.executors.sizing import BLOCK_SIZE, plan_memory
from caudal.executors.system import available_memory, lockable_memory, usable_cpus
from caudal.graph.passes import early_last_tokens
from caudal.models import build_program

if TYPE_CHECKING:
    from caudal.core import Batch
    from caudal.formats import Checkpoint
    from caudal.graph.program import Program

_MAX_HEAD_DIM = 256  # kMaxHeadDim of the native core


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
        num_token_ids: int | None = None,
        reserve: int = 0,
    ) -> None:
        """Records, packs and plans the model. program: a validated one to run in place of the checkpoint's model;
        config.max_model_len must then be given. pool: threads to share with another executor, which must not run at
        the same time. num_token_ids: columns of the logits that candidates come from; default: all. reserve: bytes of
        memory that are promised to others.

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
        plan = plan_memory(config, need, context_length=context_length, available=available_memory(), reserve=reserve)
        self._remark = plan.remark
        self._max_model_len = plan.max_model_len
        self._kv_layout = KVLayout(BLOCK_SIZE, plan.num_blocks, max(1, need.kv_block), config.kv_type)
        packed_bytes = need.packed_weights if plan.pack else 0
        num_bytes = packed_bytes + plan.num_blocks * need.kv_block
        if config.mlock:
            _check_lock_limit(need.weights + plan.num_blocks * need.kv_block)
        # Of the files that steps read from: the embedding at least, and weights that are not copied.
        self._files = {id(file): file for t in checkpoint.tensors.values() if (file := mapping(t.data)) is not None}
        self._path = checkpoint.path
        self._check_files()
        self.pool = pool or _native.ThreadPool(config.num_threads or usable_cpus(), config.pin_threads)
        try:
            self._model: _native.Model | None = _native.Model(self.pool, config.isa, packed_bytes)
            lowering = Lowering(program, checkpoint, self._model, plan.pack, num_token_ids, progress)
            lowering.run(kv_type=config.kv_type, num_blocks=plan.num_blocks)
        except MemoryError as error:
            raise InsufficientMemoryError(
                f"the system did not give {format_size(num_bytes)} for weights and cache"
            ) from error
        if config.mlock:
            _lock(self._model)
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
    def remark(self) -> str:
        return self._remark

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

    def run(self, batch: Batch) -> Logits:
        """See `Executor.run`; all rows are whole if the program does not end in a matrix product. Raises ValueError for
        arrays that do not describe a possible step, and InvalidModelFileError where the file has been cut short since
        it was opened."""
        assert self._model is not None, "the executor is closed"
        self._check_files()
        fields = self._model.run(
            batch.token_ids,
            batch.positions,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.slot_mapping,
            batch.logits_rows,
            batch.num_candidates,
            batch.log_sums,
        )
        return Logits(*fields)

    def close(self) -> None:
        self._model = None
        self._files.clear()

    def _check_files(self) -> None:
        """The system kills a process that reads a mapped page which its file no longer has (SIGBUS). Asking before
        each step, which takes a microsecond, leaves that to files which shrink during one."""
        if any(file.size() < len(file) for file in self._files.values()):
            raise InvalidModelFileError(
                f"{self._path}: the file was cut short while the model runs; restore it and load the model again "
                "(to replace a file in use, rename the new one over it)"
            )


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


def _check_lock_limit(num_bytes: int) -> None:
    """Refuses before the long load what cannot be locked after it."""
    limit = lockable_memory()
    if num_bytes > limit:
        raise _lock_error(f"{format_size(num_bytes)} must be locked, but the limit is {format_size(limit)}")


def _lock(model: _native.Model) -> None:
    try:
        model.lock_memory()
    except OSError as error:
        raise _lock_error(
            f"the system refused to lock the weights and the cache: {error.strerror} "
            f"(the limit is {format_size(lockable_memory())})"
        ) from error


def _lock_error(problem: str) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        f"--mlock: {problem}. Raise the limit (ulimit -l unlimited in the shell, LimitMEMLOCK=infinity in a systemd "
        "unit, --ulimit memlock=-1 for a container), give the process the capability CAP_IPC_LOCK, take a smaller "
        "cache (--ctx, --kv-type q8), or do without --mlock"
    )
