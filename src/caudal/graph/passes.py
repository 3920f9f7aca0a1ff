"""Passes over the record: pure functions from one Program to another, and what they need to know about it."""

from __future__ import annotations

from dataclasses import replace

from caudal.graph.ops import ROW_WISE
from caudal.graph.program import Op, Program


def uses(program: Program) -> list[list[int]]:
    """For each value id the indices of the ops that read it, ascending, once each."""
    readers: list[list[int]] = [[] for _ in program.widths]
    for index, op in enumerate(program.ops):
        for value in dict.fromkeys(op.inputs):
            readers[value].append(index)
    return readers


def remove_dead_ops(program: Program) -> Program:
    """Without the ops that the output does not need. Values and attention layers are numbered anew, without gaps."""
    needed = {program.output}
    kept: list[Op] = []
    for op in reversed(program.ops):
        if op.output in needed:
            needed.update(op.inputs)
            kept.append(op)
    kept.reverse()
    new_ids = {op.output: i for i, op in enumerate(kept)}
    layers = sorted(op.integer("layer") for op in kept if op.kind == "attention")
    result = Program(widths=[program.widths[op.output] for op in kept], output=new_ids[program.output])
    for op in kept:
        attrs = {**op.attrs, "layer": layers.index(op.integer("layer"))} if op.kind == "attention" else op.attrs
        inputs = tuple(new_ids[i] for i in op.inputs)
        result.ops.append(replace(op, inputs=inputs, output=new_ids[op.output], attrs=attrs))
    return result


def early_last_tokens(program: Program) -> Program:
    """Move the selection of the rows that need logits up to just after the last attention.

    All that follows works row by row, so the output projection and feed-forward of the last layer and the
    head need not see the other rows; no selected row changes. A prompt chunk without logits skips them all.
    The residual stream that goes past the attention is selected as well.
    """
    readers = uses(program)
    moved: set[int] = set()  # ops that will see, or see already, selected rows only
    for index, op in enumerate(program.ops):
        if op.kind == "last_tokens" or index in moved:
            moved |= {index, *readers[op.output]}
    for index in range(len(program.ops) - 1, -1, -1):
        op = program.ops[index]
        if op.kind in ROW_WISE and readers[op.output] and moved.issuperset(readers[op.output]):
            moved.add(index)
    read = {value for index in moved for value in program.ops[index].inputs}

    result = Program(widths=list(program.widths))
    unselected: list[int] = []  # values with a row a token, written by now, that moved ops read
    selected: dict[int, int] = {}  # value of the old program -> its selected rows in the new one
    for index, op in enumerate(program.ops):
        if index not in moved:
            result.ops.append(op)
            unselected += [op.output] if op.output in read else []
            continue
        for value in unselected:
            result.widths.append(program.widths[value])
            selected[value] = len(result.widths) - 1
            result.ops.append(Op("last_tokens", (value,), selected[value], layer=op.layer))
        unselected.clear()
        inputs = tuple(selected.get(value, value) for value in op.inputs)
        if op.kind == "last_tokens":
            selected[op.output] = inputs[0]
        else:
            result.ops.append(replace(op, inputs=inputs))
    result.output = selected.get(program.output, program.output)
    return remove_dead_ops(result)
