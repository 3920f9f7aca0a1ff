"""The slow and plain executor: numpy in float32, one function per op (`graph.ops`). It defines what is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from caudal.core import InsufficientMemoryError, InvalidRequestError, UnsupportedModelError
from caudal.executors.base import KVLayout, Logits, asked_for
from caudal.graph.ops import SPECS, Call, Step
from caudal.models import build_program

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from caudal.core import Batch
    from caudal.formats import Checkpoint
    from caudal.graph.program import Program

    Array = NDArray[np.float32]

_BLOCK_SIZE = 32


class ReferenceExecutor:
    """Holds every weight as float32, so it wants several times the memory of a quantized file."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_model_len: int = 0,
        num_blocks: int = 0,
        program: Program | None = None,
        num_token_ids: int | None = None,
    ) -> None:
        """max_model_len: 0: the model's context length. num_blocks: of the cache; 0: room for one sequence.
        program: a validated one to run in place of the checkpoint's model; max_model_len must then be given.
        num_token_ids: columns of the logits that candidates come from; default: all.

        Raises UnsupportedModelError, InvalidModelFileError (from `build_program`) and InsufficientMemoryError.
        """
        if program is None:
            config, program = build_program(checkpoint)
            if max_model_len > config.context_length:
                raise UnsupportedModelError(
                    f"the model was made for at most {config.context_length} tokens of context, not {max_model_len}"
                )
            max_model_len = max_model_len or config.context_length
        num_blocks = num_blocks or -(-max_model_len // _BLOCK_SIZE)
        self._max_model_len = max_model_len
        self._program = program
        self._num_token_ids = min(num_token_ids or self.vocab_size, self.vocab_size)
        self._weights = {name: checkpoint.tensors[name].to_float32() for name in program.weight_names}
        self._keys, self._values = _cache(program, num_blocks * _BLOCK_SIZE)
        num_bytes = sum(array.nbytes for array in (*self._keys, *self._values))
        self._kv_layout = KVLayout(_BLOCK_SIZE, num_blocks, num_bytes // num_blocks, "f32")

    @property
    def kv_layout(self) -> KVLayout:
        return self._kv_layout

    @property
    def vocab_size(self) -> int:
        return self._program.widths[self._program.output]

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def remark(self) -> str:
        return ""

    def run(self, batch: Batch) -> Logits:
        """See `Executor.run`. Raises InvalidRequestError for a token id outside the vocabulary."""
        step = Step(batch, self._keys, self._values, _BLOCK_SIZE)
        logits = evaluate(self._program, self._weights, step)[self._program.output]
        return asked_for(logits, batch, self._num_token_ids)

    def close(self) -> None:
        self._weights.clear()
        self._keys.clear()
        self._values.clear()


def evaluate(program: Program, weights: Mapping[str, Array], step: Step) -> dict[int, Array]:
    """Every value of one step, by value id. Raises InvalidRequestError for a token id outside the vocabulary."""
    token_ids = step.batch.token_ids
    values: dict[int, Array] = {}
    for op in program.ops:
        op_weights = tuple(weights[name] for name in op.weights)
        if op.kind == "embed" and not np.all((token_ids >= 0) & (token_ids < len(op_weights[0]))):
            raise InvalidRequestError(f"token ids must be from 0 to {len(op_weights[0]) - 1}", "prompt")
        inputs = tuple(values[i] for i in op.inputs)
        values[op.output] = SPECS[op.kind].reference(Call(op, program.widths[op.output], inputs, op_weights, step))
    return values


def _cache(program: Program, num_slots: int) -> tuple[list[Array], list[Array]]:
    """Zeroed keys and values of each layer; the system gives the memory when it is written."""
    shapes = [
        (op.integer("n_kv_heads"), op.integer("head_dim"), op.integer("v_head_dim")) for op in program.attention_ops
    ]
    try:
        keys = [np.zeros((num_slots, heads, dim), np.float32) for heads, dim, _ in shapes]
        values = [np.zeros((num_slots, heads, dim), np.float32) for heads, _, dim in shapes]
    except MemoryError as error:
        num_bytes = 4 * num_slots * sum(heads * (dim + v_dim) for heads, dim, v_dim in shapes)
        raise InsufficientMemoryError(
            f"keys and values of {num_slots} tokens need {num_bytes / 2**30:.1f} GiB; ask for a shorter context"
        ) from error
    return keys, values
