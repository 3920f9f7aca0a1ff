"""A Program as text, for `caudal show --graph`."""

from __future__ import annotations

from collections.abc import Mapping

from caudal.graph.program import Attr, Op, Program


def describe(program: Program, tensors: Mapping[str, str], *, full: bool = False) -> str:
    """One line an op: the value it writes and its width, kind, inputs, weights, attributes.

    `tensors`: what to print beside a weight's name, such as `q4_1 [576, 576]`. Layers that differ in nothing
    but their numbers are folded into the first of them, unless `full`.
    """
    groups: dict[tuple[str, ...], list[int]] = {}  # what a layer looks like -> its layers
    for layer in sorted({op.layer for op in program.ops if op.layer >= 0}):
        ops = [op for op in program.ops if op.layer == layer]
        look = tuple(_line(program, op, tensors, ops[0].output) for op in ops)
        groups.setdefault(look, []).append(layer)
    first = {layers[0]: layers for layers in groups.values()}

    lines: list[str] = []
    previous = -1
    for op in program.ops:
        if not full and op.layer >= 0 and op.layer not in first:
            continue
        if op.layer != previous and op.layer >= 0:
            lines.append(f"layer {op.layer}:" if full else f"{_ranges(first[op.layer])}:")
        previous = op.layer
        lines.append(("  " if op.layer >= 0 else "") + _line(program, op, tensors))
    return "\n".join(lines)


def _line(program: Program, op: Op, tensors: Mapping[str, str], origin: int | None = None) -> str:
    """One op. With an `origin` value ids are relative to it and the layer's number is left out, for comparison."""

    def value(i: int) -> str:
        return f"%{i}" if origin is None else f"%{i - origin:+d}"

    names = op.weights
    if origin is not None:
        names = tuple(name.removeprefix(f"blk.{op.layer}.") for name in names)
    weights = [
        f"{name} {tensors.get(full_name, '')}".rstrip() for name, full_name in zip(names, op.weights, strict=True)
    ]
    attrs = [f"{name}={_attr(attr)}" for name, attr in op.attrs.items() if not (name == "layer" and origin is not None)]
    arguments = ", ".join([*(value(i) for i in op.inputs), *weights, *attrs])
    return f"{value(op.output)} [{program.widths[op.output]}] = {op.kind}({arguments})"


def _attr(attr: Attr) -> str:
    if isinstance(attr, tuple):
        return f"({', '.join(f'{x:.4g}' for x in attr[:2])}{', ...' if len(attr) > 2 else ''}; {len(attr)})"
    return f"{attr:.6g}" if isinstance(attr, float) else str(attr)


def _ranges(layers: list[int]) -> str:
    """Layer numbers as a short text: [0, 1, 2, 5] -> `layers 0-2, 5`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(parts)}"
