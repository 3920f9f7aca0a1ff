"""The closed op vocabulary: one spec for each kind with its attributes, shapes, numpy reference and test cases.

`validate` checks a whole program against the specs and the checkpoint's tensors. An executor may rely on
everything that it checks, so a broken model file is refused before any fast path sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from caudal.core import InvalidModelFileError, UnsupportedModelError
from caudal.graph.program import Attr, Op, Program

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from caudal.core import Batch

    Array = NDArray[np.float32]

Shape = tuple[int | None, ...]  # None: any size

ROPE_STYLES = ("norm", "neox")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
ROW_WISE = frozenset(("linear", "rms_norm", "layer_norm", "add", "mul", "scale", "slice", "glu", "softcap"))
"""Kinds that compute each row from the same row of their inputs and from nothing else."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an op may see beside its inputs and weights: the batch, and the cache that attention reads and writes."""

    batch: Batch
    keys: Sequence[Array]  # by cache layer: [slots, kv heads, head_dim]
    values: Sequence[Array]  # by cache layer: [slots, kv heads, v_head_dim]
    block_size: int


@dataclass(frozen=True, slots=True)
class Call:
    """One op with all that its reference needs."""

    op: Op
    width: int  # of the output
    inputs: tuple[Array, ...]  # each [rows, width]
    weights: tuple[Array, ...]
    step: Step


@dataclass(frozen=True, slots=True)
class Case:
    """A small instance of an op for tests: `example` draws its inputs and weights."""

    inputs: tuple[int, ...]  # widths
    width: int
    weights: tuple[tuple[int, ...], ...] = ()  # shapes
    attrs: Mapping[str, Attr] = field(default_factory=dict[str, Attr])


@dataclass(frozen=True, slots=True)
class OpSpec:
    """Everything that is known about one kind of op.

    `tolerance`: largest |error| of an executor that computes in float32, relative to the largest |expected|.
    """

    kind: str
    reference: Callable[[Call], Array]
    cases: tuple[Case, ...]
    num_inputs: int = 1
    attrs: Mapping[str, type] = field(default_factory=dict[str, type])
    weight_shapes: Callable[[Op, tuple[int, ...], int], tuple[Shape, ...]] = lambda op, inputs, width: ()
    num_optional: int = 0  # of these shapes, so many at the end may be missing
    problem: Callable[[Op, tuple[int, ...], int], str] = lambda op, inputs, width: ""  # empty: none
    tolerance: float = 1e-5


# ------------------------------------------------------------------------------------------ references


def _embed(c: Call) -> Array:
    return c.weights[0][c.step.batch.token_ids]


def _linear(c: Call) -> Array:
    y = c.inputs[0] @ c.weights[0].T
    return y + c.weights[1] if len(c.weights) > 1 else y


def _rms_norm(c: Call) -> Array:
    x = c.inputs[0]
    head_dim = c.op.integer("head_dim") or c.width
    heads = x.reshape(len(x), c.width // head_dim, head_dim)  # no -1: there may be no rows
    root: Array = np.sqrt(np.square(heads).mean(axis=-1, keepdims=True) + np.float32(c.op.number("eps")))
    return (heads / root * c.weights[0]).reshape(x.shape)


def _layer_norm(c: Call) -> Array:
    x = c.inputs[0]
    mean: Array = x.mean(axis=-1, keepdims=True)
    centered = x - mean
    deviation: Array = np.sqrt(np.square(centered).mean(axis=-1, keepdims=True) + np.float32(c.op.number("eps")))
    y = centered / deviation * c.weights[0]
    return y + c.weights[1] if len(c.weights) > 1 else y


def _rope(c: Call) -> Array:
    x = c.inputs[0].reshape(len(c.inputs[0]), -1, c.op.integer("head_dim"))  # [tokens, heads, head_dim]
    frequencies = np.array(c.op.numbers("inv_freq"))
    if c.weights:
        frequencies = frequencies / c.weights[0]
    # The angle grows with the position: in float32 it would lose a digit at long contexts.
    angles = c.step.batch.positions[:, None].astype(np.float64) * frequencies
    mscale = c.op.number("mscale")
    cos = (np.cos(angles) * mscale).astype(np.float32)[:, None]
    sin = (np.sin(angles) * mscale).astype(np.float32)[:, None]
    pairs = len(frequencies)
    adjacent = c.op.text("style") == "norm"
    first = slice(0, 2 * pairs, 2) if adjacent else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if adjacent else slice(pairs, 2 * pairs)
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y.reshape(c.inputs[0].shape)


def _attention(c: Call) -> Array:
    op, batch = c.op, c.step.batch
    keys, values = c.step.keys[op.integer("layer")], c.step.values[op.integer("layer")]
    n_kv_heads, head_dim = keys.shape[1:]
    q = c.inputs[0].reshape(len(c.inputs[0]), n_kv_heads, -1, head_dim)  # [tokens, kv heads, group, head_dim]
    keys[batch.slot_mapping] = c.inputs[1].reshape(-1, *keys.shape[1:])
    values[batch.slot_mapping] = c.inputs[2].reshape(-1, *values.shape[1:])
    softcap, window = op.number("softcap"), op.integer("window")
    heads = (*q.shape[1:3], 1, 1)
    slopes = np.array(op.numbers("slopes"), np.float32).reshape(heads) if op.numbers("slopes") else None
    sinks = c.weights[0].reshape(heads) if c.weights else None
    out = np.empty((*q.shape[:3], values.shape[2]), np.float32)
    for s in range(batch.num_sequences):
        rows = slice(batch.query_start[s], batch.query_start[s + 1])
        context = np.arange(int(batch.seq_lens[s]))
        slots = batch.block_tables[s, context // c.step.block_size] * c.step.block_size + context % c.step.block_size
        k, v = keys[slots], values[slots]  # [context, kv heads, dim]
        scores = q[rows].transpose(1, 2, 0, 3) @ k.transpose(1, 2, 0)[:, None]  # [kv heads, group, tokens, context]
        scores *= np.float32(op.number("scale"))
        if softcap:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        distance = batch.positions[rows, None] - context
        if slopes is not None:
            scores -= slopes * distance.astype(np.float32)
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        scores[:, :, hidden] = -np.inf
        largest = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            largest = np.maximum(largest, sinks)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True, dtype=np.float32)
        weights /= total if sinks is None else total + np.exp(sinks - largest)
        out[rows] = (weights @ v.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3)
    return out.reshape(len(out), c.width)


def _add(c: Call) -> Array:
    return c.inputs[0] + c.inputs[1]


def _mul(c: Call) -> Array:
    return c.inputs[0] * c.inputs[1]


def _scale(c: Call) -> Array:
    return c.inputs[0] * np.float32(c.op.number("by"))


def _slice(c: Call) -> Array:
    start = c.op.integer("start")
    return c.inputs[0][:, start : start + c.width]


def _silu(x: Array) -> Array:
    exp: Array = np.exp(-x)
    return x / (1 + exp)


def _gelu_tanh(x: Array) -> Array:
    """The approximation of Hendrycks and Gimpel (2016)."""
    tanh: Array = np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x))
    return np.float32(0.5) * x * (1 + tanh)


def _gelu(x: Array) -> Array:
    erf: Array = np.vectorize(math.erf, otypes=[np.float32])(x / np.float32(math.sqrt(2)))
    return np.float32(0.5) * x * (1 + erf)


_ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh, "gelu": _gelu}


def _glu(c: Call) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x is inf, and x / inf the right 0
        return _ACTIVATIONS[c.op.text("act")](c.inputs[0]) * c.inputs[1]


def _softcap(c: Call) -> Array:
    cap = np.float32(c.op.number("cap"))
    return cap * np.tanh(c.inputs[0] / cap)


def _last_tokens(c: Call) -> Array:
    return c.inputs[0][c.step.batch.logits_rows]


# ---------------------------------------------------------------------------------------------- checks


def _same_width(op: Op, inputs: tuple[int, ...], width: int) -> str:
    return "" if {*inputs} == {width} else f"widths {inputs} and {width} must be equal"


def _norm_problem(op: Op, inputs: tuple[int, ...], width: int) -> str:
    if not op.number("eps") >= 0 or not math.isfinite(op.number("eps")):
        return f"eps must be a small positive number, not {op.number('eps')}"
    head_dim = op.attrs.get("head_dim", 0)
    assert isinstance(head_dim, int)
    if head_dim < 0 or (head_dim and width % head_dim):
        return f"{width} numbers do not divide into heads of {head_dim}"
    return _same_width(op, inputs, width)


def _rope_problem(op: Op, inputs: tuple[int, ...], width: int) -> str:
    head_dim, inv_freq = op.integer("head_dim"), op.numbers("inv_freq")
    if head_dim <= 0 or width % head_dim:
        return f"{width} numbers do not divide into heads of {head_dim}"
    if not 0 < 2 * len(inv_freq) <= head_dim:
        return f"{2 * len(inv_freq)} rotated numbers do not fit in a head of {head_dim}"
    if not all(map(math.isfinite, inv_freq)) or not math.isfinite(op.number("mscale")):
        return "frequencies and mscale must be finite"
    if op.text("style") not in ROPE_STYLES:
        return f"style {op.text('style')!r} is not one of {ROPE_STYLES}"
    return _same_width(op, inputs, width)


def _attention_problem(op: Op, inputs: tuple[int, ...], width: int) -> str:
    n_heads, n_kv_heads = op.integer("n_heads"), op.integer("n_kv_heads")
    head_dim, v_head_dim = op.integer("head_dim"), op.integer("v_head_dim")
    if min(n_heads, n_kv_heads, head_dim, v_head_dim) <= 0:
        return "heads and their sizes must be positive"
    if n_heads % n_kv_heads:
        return f"{n_heads} query heads do not divide into groups for {n_kv_heads} key heads"
    if (*inputs, width) != (n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * v_head_dim, n_heads * v_head_dim):
        return f"widths {inputs} -> {width} do not fit {n_heads} query and {n_kv_heads} key heads of {head_dim}"
    if not math.isfinite(op.number("scale")):
        return f"scale is {op.number('scale')}"
    if op.integer("window") < 0 or not 0 <= op.number("softcap") < math.inf:
        return "window and softcap must be 0 (none) or positive"
    if len(op.numbers("slopes")) not in (0, n_heads) or not all(map(math.isfinite, op.numbers("slopes"))):
        return f"slopes must be {n_heads} finite numbers, one a head, or none"
    return ""


def _scale_problem(op: Op, inputs: tuple[int, ...], width: int) -> str:
    return _same_width(op, inputs, width) if math.isfinite(op.number("by")) else f"the factor is {op.number('by')}"


def _slice_problem(op: Op, inputs: tuple[int, ...], width: int) -> str:
    start = op.integer("start")
    return "" if 0 <= start <= inputs[0] - width else f"columns {start} to {start + width} of {inputs[0]}"


def _glu_problem(op: Op, inputs: tuple[int, ...], width: int) -> str:
    if op.text("act") not in ACTIVATIONS:
        return f"activation {op.text('act')!r} is not one of {ACTIVATIONS}"
    return _same_width(op, inputs, width)


def _softcap_problem(op: Op, inputs: tuple[int, ...], width: int) -> str:
    return _same_width(op, inputs, width) if 0 < op.number("cap") < math.inf else f"the cap is {op.number('cap')}"


# ----------------------------------------------------------------------------------------------- specs


def _rope_case(
    heads: int, head_dim: int, pairs: int, style: str, *, mscale: float = 1.0, factors: bool = False
) -> Case:
    attrs = {
        "head_dim": head_dim,
        "inv_freq": tuple(100.0 ** -(i / pairs) for i in range(pairs)),
        "style": style,
        "mscale": mscale,
    }
    return Case((heads * head_dim,), heads * head_dim, ((pairs,),) if factors else (), attrs)


def _attention_case(
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    v_dim: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    alibi: bool = False,
    sinks: bool = False,
) -> Case:
    v_dim = v_dim or dim
    attrs = {
        "layer": 0,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": dim,
        "v_head_dim": v_dim,
        "scale": dim**-0.5,
        "window": window,
        "softcap": softcap,
        "slopes": tuple(2.0 ** (-8 * (i + 1) / heads) for i in range(heads)) if alibi else (),
    }
    widths = (heads * dim, kv_heads * dim, kv_heads * v_dim)
    return Case(widths, heads * v_dim, ((heads,),) if sinks else (), attrs)


_SPECS = (
    OpSpec(
        "embed",
        _embed,
        (Case((), 64, ((50, 64),)), Case((), 20, ((7, 20),))),
        num_inputs=0,
        weight_shapes=lambda op, inputs, width: ((None, width),),
        tolerance=0.0,
    ),
    OpSpec(
        "linear",
        _linear,
        (Case((64,), 48, ((48, 64),)), Case((20,), 7, ((7, 20), (7,))), Case((256,), 33, ((33, 256), (33,)))),
        weight_shapes=lambda op, inputs, width: ((width, inputs[0]), (width,)),
        num_optional=1,
    ),
    OpSpec(
        "rms_norm",
        _rms_norm,
        (
            Case((64,), 64, ((64,),), {"eps": 1e-5, "head_dim": 0}),
            Case((72,), 72, ((24,),), {"eps": 1e-6, "head_dim": 24}),
        ),
        attrs={"eps": float, "head_dim": int},
        weight_shapes=lambda op, inputs, width: ((op.integer("head_dim") or width,),),
        problem=_norm_problem,
    ),
    OpSpec(
        "layer_norm",
        _layer_norm,
        (Case((64,), 64, ((64,), (64,)), {"eps": 1e-5}), Case((20,), 20, ((20,),), {"eps": 1e-6})),
        attrs={"eps": float},
        weight_shapes=lambda op, inputs, width: ((width,), (width,)),
        num_optional=1,
        problem=_norm_problem,
    ),
    OpSpec(
        "rope",
        _rope,
        (
            _rope_case(4, 16, 8, "norm"),
            _rope_case(4, 16, 8, "neox"),
            _rope_case(2, 12, 4, "norm", factors=True),
            _rope_case(3, 20, 5, "neox", mscale=1.2, factors=True),
        ),
        attrs={"head_dim": int, "inv_freq": tuple, "style": str, "mscale": float},
        weight_shapes=lambda op, inputs, width: ((len(op.numbers("inv_freq")),),),
        num_optional=1,
        problem=_rope_problem,
    ),
    OpSpec(
        "attention",
        _attention,
        (
            _attention_case(4, 4, 16),
            _attention_case(6, 2, 32),
            _attention_case(4, 1, 24, v_dim=16),
            _attention_case(4, 2, 16, window=5),
            _attention_case(4, 2, 16, softcap=2.0),
            _attention_case(6, 2, 16, alibi=True),
            _attention_case(6, 2, 16, sinks=True),
            _attention_case(4, 2, 16, window=7, softcap=2.0, alibi=True, sinks=True),
        ),
        num_inputs=3,
        attrs={
            "layer": int,
            "n_heads": int,
            "n_kv_heads": int,
            "head_dim": int,
            "v_head_dim": int,
            "scale": float,
            "window": int,
            "softcap": float,
            "slopes": tuple,
        },
        weight_shapes=lambda op, inputs, width: ((op.integer("n_heads"),),),
        num_optional=1,
        problem=_attention_problem,
    ),
    OpSpec("add", _add, (Case((20, 20), 20),), num_inputs=2, problem=_same_width),
    OpSpec("mul", _mul, (Case((20, 20), 20),), num_inputs=2, problem=_same_width),
    OpSpec("scale", _scale, (Case((20,), 20, (), {"by": -1.5}),), attrs={"by": float}, problem=_scale_problem),
    OpSpec(
        "slice",
        _slice,
        (Case((20,), 5, (), {"start": 0}), Case((64,), 16, (), {"start": 48})),
        attrs={"start": int},
        problem=_slice_problem,
        tolerance=0.0,
    ),
    OpSpec(
        "glu",
        _glu,
        tuple(Case((20, 20), 20, (), {"act": act}) for act in ACTIVATIONS),
        num_inputs=2,
        attrs={"act": str},
        problem=_glu_problem,
    ),
    OpSpec("softcap", _softcap, (Case((20,), 20, (), {"cap": 1.5}),), attrs={"cap": float}, problem=_softcap_problem),
    OpSpec("last_tokens", _last_tokens, (Case((20,), 20),), problem=_same_width, tolerance=0.0),
)

SPECS: Mapping[str, OpSpec] = {spec.kind: spec for spec in _SPECS}


def example(case: Case, num_rows: int, rng: np.random.Generator) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Random inputs [num_rows, width] and weights of a case. Weights are near 1, as rope divides by some."""
    inputs = tuple(rng.standard_normal((num_rows, width), np.float32) for width in case.inputs)
    weights = tuple(1 + np.float32(0.3) * rng.uniform(-1, 1, shape).astype(np.float32) for shape in case.weights)
    return inputs, weights


# ------------------------------------------------------------------------------------------ validation


def validate(program: Program, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check every op of a program against its spec, the values it reads and the shapes of the checkpoint's tensors.

    After this holds: each value is written once and before it is read; rows match (a value has one row a
    token, or one a wanted logit after `last_tokens`); attention layers count from 0 without gaps; every
    weight exists with the shape that the op needs; attributes are complete and in range; the output has one
    row for each wanted logit.

    Raises InvalidModelFileError or UnsupportedModelError, naming the tensor or op with what was expected and
    found.
    """
    selected: dict[int, bool] = {}  # by value id: has the rows of `logits_rows` only
    for op in program.ops:
        spec = SPECS.get(op.kind)
        if spec is None:
            raise UnsupportedModelError(f"the model needs the operation {op.kind!r}, which Caudal does not have")
        _check_values(program, op, spec, selected)
        inputs, width = tuple(program.widths[i] for i in op.inputs), program.widths[op.output]
        if width <= 0:
            raise InvalidModelFileError(f"{_label(op)}: a value of {width} numbers a row is impossible")
        _check_attrs(op, spec)
        if problem := spec.problem(op, inputs, width):
            raise InvalidModelFileError(f"{_label(op)}: {problem}")
        _check_weights(op, spec, spec.weight_shapes(op, inputs, width), shapes)
        selected[op.output] = op.kind == "last_tokens" or any(selected[i] for i in op.inputs)
    if not selected.get(program.output, False):
        raise InvalidModelFileError("the program does not end in rows selected by last_tokens")
    layers = [op.integer("layer") for op in program.attention_ops]
    if layers != list(range(len(layers))):
        raise InvalidModelFileError(f"the attention layers are {layers}; they must count from 0 without gaps")


def _label(op: Op) -> str:
    return f"operation {op.kind} of {op.weights[0]}" if op.weights else f"operation {op.kind} (value {op.output})"


def _check_values(program: Program, op: Op, spec: OpSpec, selected: Mapping[int, bool]) -> None:
    if len(op.inputs) != spec.num_inputs:
        raise InvalidModelFileError(f"{_label(op)} has {len(op.inputs)} inputs; it takes {spec.num_inputs}")
    for value in op.inputs:
        if value not in selected:
            raise InvalidModelFileError(f"{_label(op)} reads value {value} before it is written")
    if not 0 <= op.output < len(program.widths) or op.output in selected:
        raise InvalidModelFileError(f"{_label(op)} writes value {op.output}, which is unknown or written before")
    rows = {selected[value] for value in op.inputs}
    if len(rows) > 1 or (rows == {True} and op.kind not in ROW_WISE):
        raise InvalidModelFileError(f"{_label(op)} needs all its inputs before last_tokens")


def _check_attrs(op: Op, spec: OpSpec) -> None:
    if op.attrs.keys() != spec.attrs.keys():
        raise InvalidModelFileError(f"{_label(op)} has attributes {sorted(op.attrs)}; it takes {sorted(spec.attrs)}")
    for name, kind in spec.attrs.items():
        if type(op.attrs[name]) is not kind:
            raise InvalidModelFileError(
                f"{_label(op)}: {name} is {op.attrs[name]!r}; it must be of type {kind.__name__}"
            )


def _check_weights(op: Op, spec: OpSpec, expected: tuple[Shape, ...], shapes: Mapping[str, Sequence[int]]) -> None:
    if len(op.weights) > len(expected):
        extra = op.weights[len(expected)]
        raise UnsupportedModelError(f"tensor {extra} is not supported: {op.kind} takes only {len(expected)} tensors")
    if len(op.weights) < len(expected) - spec.num_optional:
        raise InvalidModelFileError(f"{_label(op)} has too few weights")
    for name, want in zip(op.weights, expected, strict=False):
        if name not in shapes:
            raise InvalidModelFileError(f"tensor {name} is missing; the model file is incomplete or of another kind")
        found = tuple(shapes[name])
        if len(found) != len(want) or any(w is not None and w != f for w, f in zip(want, found, strict=True)):
            text = ", ".join("any" if size is None else str(size) for size in want)
            raise InvalidModelFileError(
                f"tensor {name} has the shape {list(found)}, but the metadata of the model ask for [{text}]"
            )
        if 0 in found:
            raise InvalidModelFileError(f"tensor {name} is empty: its shape is {list(found)}")
