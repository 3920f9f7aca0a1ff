"""Program -> phases of the native core: groups recorded ops into the work between two barriers.

The usual decoder layer becomes five phases: norm + q, k, v | norms of heads, rope, cache, attention | output
projection + residual | norm + gate, up, activation | down projection + residual. The patterns are found in the
record, so no model is named here, and an op that fits none is a phase of its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caudal import _native
from caudal.formats import Checkpoint, HostTensor
from caudal.graph.passes import uses
from caudal.graph.program import Op, Program

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def kv_layers(program: Program) -> list[tuple[int, int, int]]:
    """(kv heads, key dimension, value dimension) of each cache layer."""
    return [
        (op.integer("n_kv_heads"), op.integer("head_dim"), op.integer("v_head_dim")) for op in program.attention_ops
    ]


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of memory that a model takes."""

    packed_weights: int  # copies in the order of the kernels
    mapped_weights: int  # that every step reads in place in any case: their types have no packed layout
    kv_block: int  # of one block of the cache, over all layers

    @property
    def weights(self) -> int:
        return self.packed_weights + self.mapped_weights


def memory_need(program: Program, checkpoint: Checkpoint, kv_type: str) -> MemoryNeed:
    names = {op.weights[0] for op in program.ops if op.kind == "linear"}
    packed = {name: _packed_bytes(checkpoint.tensors[name]) for name in names}
    return MemoryNeed(
        packed_weights=sum(packed.values()),
        mapped_weights=sum(checkpoint.tensors[name].data.nbytes for name in names if packed[name] == 0),
        kv_block=_native.kv_block_bytes(kv_type, kv_layers(program)),
    )


def _packed_bytes(tensor: HostTensor) -> int:
    return _native.packed_bytes(tensor.quant_type.ggml_id, tensor.shape[0], tensor.shape[1])


def mapping(array: NDArray[np.uint8]) -> mmap.mmap | None:
    """The mapped file that the array is a view of, whose pages can be dropped and read again."""
    base: Any = array  # numpy's stubs know arrays only
    while isinstance(base, np.ndarray):
        base = base.base
    owner = base.obj if isinstance(base, memoryview) else base
    return owner if isinstance(owner, mmap.mmap) else None


@dataclass(slots=True)
class Lowering:
    """Writes one program into one native model. `run()` once."""

    program: Program
    checkpoint: Checkpoint
    model: _native.Model
    pack: bool = True  # matrices are copied in the order of the kernels, or else used where they lie
    num_token_ids: int | None = None  # columns of the logits that are tokens; None: all
    progress: Progress | None = None
    _readers: list[list[int]] = field(default_factory=list[list[int]])
    _producer: dict[int, Op] = field(default_factory=dict[int, Op])
    _done: set[int] = field(default_factory=set[int])  # outputs of ops that are emitted or part of a phase
    _values: dict[int, int] = field(default_factory=dict[int, int])  # computed values -> native ids
    _weights: dict[tuple[str, bool], int] = field(default_factory=dict[tuple[str, bool], int])
    _vectors: dict[str, int] = field(default_factory=dict[str, int])
    _bytes_done: int = 0
    _bytes_total: int = 0

    def run(self, *, kv_type: str, num_blocks: int) -> None:
        self._readers = uses(self.program)
        self._producer = {op.output: op for op in self.program.ops}
        linears = [op.weights[0] for op in self.program.ops if op.kind == "linear"]
        self._bytes_total = sum(self.checkpoint.tensors[name].data.nbytes for name in set(linears))
        for op in self.program.ops:
            if op.output not in self._done and not self._is_folded(op):
                self._emit(op)
        # (None: the program ends in a head, which keeps its output)
        self.model.finish(self._values.get(self.program.output), kv_type, num_blocks, kv_layers(self.program))

    # ---------------------------------------------------------------------------------------- patterns

    def _reader_ops(self, value: int) -> list[Op]:
        return [self.program.ops[i] for i in self._readers[value]]

    def _only_reader(self, value: int) -> Op | None:
        readers = self._reader_ops(value)
        return readers[0] if len(readers) == 1 and value != self.program.output else None

    def _is_folded(self, op: Op) -> bool:
        """Whether the phases that read this op's output compute it themselves."""
        if op.output == self.program.output:
            return False
        if op.kind in ("rms_norm", "layer_norm") and not op.attrs.get("head_dim"):
            readers = self._reader_ops(op.output)
            return bool(readers) and all(reader.kind == "linear" for reader in readers)
        if op.kind == "rope":
            reader = self._only_reader(op.output)
            return reader is not None and self._is_head_input(op, reader)
        if op.kind == "rms_norm":
            reader = self._only_reader(op.output)
            if reader is None or reader.kind != "rope" or not self._is_folded(reader):
                return False
            return op.integer("head_dim") == reader.integer("head_dim")
        return False

    def _is_head_input(self, rope: Op, reader: Op) -> bool:
        """Whether attention can rotate this input itself: q or k, both in the same style."""
        if reader.kind != "attention" or rope.output not in reader.inputs[:2] or rope.output == reader.inputs[2]:
            return False
        pair = [self._producer[value] for value in reader.inputs[:2]]
        return (
            all(op.kind == "rope" and self._only_reader(op.output) is not None for op in pair)
            and pair[0].text("style") == pair[1].text("style")
            and all(op.integer("head_dim") == reader.integer("head_dim") for op in pair)
        )

    def _gated_partner(self, op: Op) -> tuple[Op, Op] | None:
        """(glu, up) if this linear is the gate of a pair that nothing else reads."""
        glu = self._only_reader(op.output)
        if glu is None or glu.kind != "glu" or glu.inputs[0] != op.output or glu.inputs[1] == op.output:
            return None
        up = self._producer[glu.inputs[1]]
        if up.kind != "linear" or up.inputs != op.inputs or self._only_reader(up.output) is not glu:
            return None
        return glu, up

    def _is_up(self, op: Op) -> bool:
        glu = self._only_reader(op.output)
        if glu is None or glu.kind != "glu" or glu.inputs[1] != op.output:
            return False
        gate = self._producer[glu.inputs[0]]
        return gate.kind == "linear" and self._gated_partner(gate) is not None

    def _residual(self, op: Op, existing: set[int]) -> tuple[Op, int] | None:
        """(add, other input) if this linear's output is only added to a value computed in an earlier phase."""
        add = self._only_reader(op.output)
        if add is None or add.kind != "add" or add.inputs[0] == add.inputs[1]:
            return None
        other = add.inputs[1] if add.inputs[0] == op.output else add.inputs[0]
        return (add, other) if other in existing else None

    def _head_tail(self, op: Op) -> list[Op] | None:
        """The ops after this linear, if it makes the logits and only a scale and a softcap follow, in this order."""
        if not self._is_logits_row(op.output) or len(self._reader_ops(op.inputs[0])) > 1:
            return None
        tail: list[Op] = []
        last = op
        for kind in ("scale", "softcap"):
            reader = self._only_reader(last.output)
            if reader is not None and reader.kind == kind:
                tail.append(reader)
                last = reader
        return tail if last.output == self.program.output else None

    # ---------------------------------------------------------------------------------------- parts

    def _value(self, value: int) -> int:
        return self._values[value]

    def _new_value(self, op: Op, *, output: int | None = None) -> int:
        """Announces the value that a phase computes; `output`: of the last op of the phase, if not `op`'s."""
        output = op.output if output is None else output
        native = self.model.add_value(self.program.widths[output], self._is_logits_row(output))
        self._values[output] = native
        self._done.update((op.output, output))
        return native

    def _is_logits_row(self, value: int) -> bool:
        op = self._producer[value]
        if op.kind == "last_tokens":
            return True
        return bool(op.inputs) and self._is_logits_row(op.inputs[0]) if op.kind != "attention" else False

    def _matrix(self, name: str) -> int:
        """A weight of a product."""
        return self._weight(name, pack=self.pack)

    def _weight(self, name: str, *, pack: bool) -> int:
        if (name, pack) not in self._weights:
            tensor = self.checkpoint.tensors[name]
            rows, cols = tensor.shape
            self._weights[name, pack] = self.model.add_weight(
                tensor.quant_type.ggml_id,
                rows,
                cols,
                tensor.data,
                pack,
                release_source=mapping(tensor.data) is not None,
            )
            if pack:
                self._bytes_done += tensor.data.nbytes
                if self.progress is not None:
                    self.progress(self._bytes_done, self._bytes_total)
        return self._weights[name, pack]

    def _vector(self, name: str) -> int:
        if name not in self._vectors:
            self._vectors[name] = self.model.add_vector(self.checkpoint.tensors[name].to_float32().ravel())
        return self._vectors[name]

    def _bias(self, op: Op) -> int:
        return self._vector(op.weights[1]) if len(op.weights) > 1 else -1

    def _norm(self, op: Op) -> _native.Norm:
        return _native.Norm(
            "rms" if op.kind == "rms_norm" else "layer",
            weight=self._vector(op.weights[0]),
            bias=self._bias(op),
            eps=op.number("eps"),
            head_dim=op.integer("head_dim") if op.kind == "rms_norm" else 0,
        )

    def _rope_table(self, op: Op) -> int:
        inv_freq = np.asarray(op.numbers("inv_freq"), np.float32)
        if op.weights:
            inv_freq = inv_freq / self.checkpoint.tensors[op.weights[0]].to_float32().ravel()[: len(inv_freq)]
        return self.model.add_rope_table(np.ascontiguousarray(inv_freq, np.float32), op.number("mscale"))

    # ---------------------------------------------------------------------------------------- phases

    def _emit(self, op: Op) -> None:
        match op.kind:
            case "embed":
                self.model.embed(self._weight(op.weights[0], pack=False), self._new_value(op))
            case "linear":
                if (tail := self._head_tail(op)) is not None:
                    self._emit_head(op, tail)
                else:
                    self._emit_linears(op)
            case "attention":
                self._emit_attention(op)
            case "last_tokens":
                x = self._value(op.inputs[0])
                self.model.select_rows(x, self._new_value(op))
            case _:
                self._emit_row_op(op)

    def _normed_input(self, op: Op) -> tuple[int, _native.Norm | None]:
        """The native input of a linear, and the norm that is folded into it."""
        producer = self._producer[op.inputs[0]]
        if self._is_folded(producer):
            return self._value(producer.inputs[0]), self._norm(producer)
        return self._value(op.inputs[0]), None

    def _emit_head(self, op: Op, tail: list[Op]) -> None:
        """The last phase, which need not store all logits."""
        width = self.program.widths[op.output]
        x, norm = self._normed_input(op)
        self.model.head(
            x,
            self._matrix(op.weights[0]),
            self._bias(op),
            norm,
            scale=next((o.number("by") for o in tail if o.kind == "scale"), 1.0),
            softcap=next((o.number("cap") for o in tail if o.kind == "softcap"), 0.0),
            num_ids=min(self.num_token_ids or width, width),
        )
        self._done.update(o.output for o in (op, *tail))

    def _emit_linears(self, first: Op) -> None:
        """One phase for all linears of the same input."""
        source = first.inputs[0]
        x, norm = self._normed_input(first)
        existing = set(self._values)
        linears: list[_native.Linear] = []
        for op in self._reader_ops(source):
            if op.kind != "linear" or op.output in self._done or self._is_up(op):
                continue
            weight, bias = self._matrix(op.weights[0]), self._bias(op)
            if pair := self._gated_partner(op):
                glu, up = pair
                up_weight, up_bias = self._matrix(up.weights[0]), self._bias(up)
                self._done.add(up.output)
                out = self._new_value(op, output=glu.output)
                linears.append(
                    _native.Linear(weight, out, bias=bias, up_weight=up_weight, up_bias=up_bias, act=glu.text("act"))
                )
            elif residual := self._residual(op, existing):
                add, other = residual
                out = self._new_value(op, output=add.output)
                linears.append(_native.Linear(weight, out, bias=bias, residual=self._value(other)))
            else:
                linears.append(_native.Linear(weight, self._new_value(op), bias=bias))
        self.model.linear(x, linears, norm)

    def _emit_attention(self, op: Op) -> None:
        inputs: list[int] = []
        norms: list[_native.Norm | None] = []
        tables: list[int] = []
        style = "norm"
        for source in op.inputs[:2]:
            value, table, norm = source, -1, None
            producer = self._producer[value]
            if self._is_folded(producer):
                table, style, value = self._rope_table(producer), producer.text("style"), producer.inputs[0]
                producer = self._producer[value]
                if self._is_folded(producer):
                    norm, value = self._norm(producer), producer.inputs[0]
            inputs.append(self._value(value))
            norms.append(norm)
            tables.append(table)
        self.model.attention(
            q=inputs[0],
            k=inputs[1],
            v=self._value(op.inputs[2]),
            out=self._new_value(op),
            layer=op.integer("layer"),
            n_heads=op.integer("n_heads"),
            n_kv_heads=op.integer("n_kv_heads"),
            head_dim=op.integer("head_dim"),
            v_head_dim=op.integer("v_head_dim"),
            scale=op.number("scale"),
            window=op.integer("window"),
            softcap=op.number("softcap"),
            q_rope=tables[0],
            k_rope=tables[1],
            rope_style=style,
            q_norm=norms[0],
            k_norm=norms[1],
            sinks=self._vector(op.weights[0]) if op.weights else -1,
            slopes=self.model.add_vector(np.array(op.numbers("slopes"), np.float32)) if op.numbers("slopes") else -1,
        )

    def _emit_row_op(self, op: Op) -> None:
        inputs = [self._value(value) for value in op.inputs]
        out = self._new_value(op)
        match op.kind:
            case "add":
                self.model.add(inputs[0], inputs[1], out)
            case "mul":
                self.model.mul(inputs[0], inputs[1], out)
            case "scale":
                self.model.scale(inputs[0], out, op.number("by"))
            case "softcap":
                self.model.softcap(inputs[0], out, op.number("cap"))
            case "glu":
                self.model.glu(inputs[0], inputs[1], out, op.text("act"))
            case "slice":
                self.model.slice(inputs[0], out, op.integer("start"))
            case "rms_norm" | "layer_norm":
                self.model.norm(inputs[0], out, self._norm(op))
            case "rope":
                self.model.rope(inputs[0], out, self._rope_table(op), op.text("style"), op.integer("head_dim"))
            case _:
                raise AssertionError(f"the op {op.kind} has no native phase")
