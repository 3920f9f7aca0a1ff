"""Every op: its spec, its reference against plain float64 formulas, and the executors against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from caudal.core import CaudalError, InvalidModelFileError, UnsupportedModelError
from caudal.executors.driver import run_tokens, sequence_batch
from caudal.executors.reference import evaluate
from caudal.graph.ops import ROW_WISE, SPECS, Call, Case, OpSpec, Step, example, validate
from caudal.graph.program import Op, Program
from executor_cases import ExecutorCase, each_executor
from tiny import checkpoint

NUM_ROWS = 40  # more than one cache block
CASES = [
    pytest.param(spec, case, id=f"{spec.kind}-{i}") for spec in SPECS.values() for i, case in enumerate(spec.cases)
]
each_case = pytest.mark.parametrize(("spec", "op_case"), CASES)


def step_for(case: Case) -> Step:
    batch = sequence_batch(range(NUM_ROWS), 0, [2, 0], 32, range(0, NUM_ROWS, 3))
    batch.token_ids = batch.token_ids % 7
    if "n_kv_heads" not in case.attrs:
        return Step(batch, (), (), 32)
    heads, dim, v_dim = (int(case.attrs[name]) for name in ("n_kv_heads", "head_dim", "v_head_dim"))
    return Step(batch, (np.zeros((96, heads, dim), np.float32),), (np.zeros((96, heads, v_dim), np.float32),), 32)


def call_for(spec: OpSpec, case: Case, seed: int = 0) -> Call:
    inputs, weights = example(case, NUM_ROWS, np.random.default_rng(seed))
    names = tuple(f"w{i}" for i in range(len(weights)))
    op = Op(spec.kind, tuple(range(len(inputs))), len(inputs), names, case.attrs)
    return Call(op, case.width, inputs, weights, step_for(case))


# ------------------------------------------------------------------- plain formulas in float64, row by row


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def attention_row(c: Call, row: int) -> np.ndarray:
    a = c.op.attrs
    q, k, v = (x.astype(np.float64) for x in c.inputs)
    group = a["n_heads"] // a["n_kv_heads"]
    out: list[np.ndarray] = []
    for head in range(a["n_heads"]):
        kv = head // group
        start = max(0, row - a["window"] + 1) if a["window"] else 0
        query = q[row, head * a["head_dim"] : (head + 1) * a["head_dim"]]
        scores = np.array([query @ k[j, kv * a["head_dim"] : (kv + 1) * a["head_dim"]] for j in range(start, row + 1)])
        scores = scores * a["scale"]
        if a["softcap"]:
            scores = a["softcap"] * np.tanh(scores / a["softcap"])
        if a["slopes"]:
            scores -= [a["slopes"][head] * (row - j) for j in range(start, row + 1)]
        # A sink is one more key, with a value of zeros.
        values = v[start : row + 1, kv * a["v_head_dim"] : (kv + 1) * a["v_head_dim"]]
        if c.weights:
            scores = np.append(scores, c.weights[0][head])
            values = np.vstack([values, np.zeros(a["v_head_dim"])])
        out.append(softmax(scores) @ values)
    return np.concatenate(out)


def rope_row(c: Call, row: int) -> np.ndarray:
    """Rotation of each pair as a product of complex numbers."""
    a, pairs = c.op.attrs, len(c.op.attrs["inv_freq"])
    out = c.inputs[0][row].astype(np.float64).reshape(-1, a["head_dim"])
    for head in out:
        for i in range(pairs):
            first, second = (2 * i, 2 * i + 1) if a["style"] == "norm" else (i, i + pairs)
            factor = float(c.weights[0][i]) if c.weights else 1.0
            turned = complex(head[first], head[second]) * a["mscale"]
            turned *= complex(math.cos(row * a["inv_freq"][i] / factor), math.sin(row * a["inv_freq"][i] / factor))
            head[first], head[second] = turned.real, turned.imag
    return out.reshape(-1)


def norm_row(c: Call, row: int) -> np.ndarray:
    heads = c.inputs[0][row].astype(np.float64).reshape(-1, c.op.attrs["head_dim"] or c.width)
    return np.concatenate([h / math.sqrt((h @ h) / len(h) + c.op.attrs["eps"]) * c.weights[0] for h in heads])


def layer_norm_row(c: Call, row: int) -> np.ndarray:
    x = c.inputs[0][row].astype(np.float64)
    y = (x - x.mean()) / math.sqrt(x.var() + c.op.attrs["eps"]) * c.weights[0]
    return y + c.weights[1] if len(c.weights) == 2 else y


def glu_row(c: Call, row: int) -> np.ndarray:
    act: Callable[[float], float] = {
        "silu": lambda x: x / (1 + math.exp(-x)),
        "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    }[c.op.attrs["act"]]
    return np.array([act(float(x)) for x in c.inputs[0][row]]) * c.inputs[1][row]


FORMULAS: dict[str, Callable[[Call, int], np.ndarray]] = {
    "embed": lambda c, row: c.weights[0][c.step.batch.token_ids[row]],
    "linear": lambda c, row: c.weights[0].astype(np.float64) @ c.inputs[0][row] + sum(c.weights[1:]),
    "rms_norm": norm_row,
    "layer_norm": layer_norm_row,
    "rope": rope_row,
    "attention": attention_row,
    "add": lambda c, row: c.inputs[0][row] + c.inputs[1][row],
    "mul": lambda c, row: c.inputs[0][row] * c.inputs[1][row],
    "scale": lambda c, row: c.inputs[0][row] * c.op.attrs["by"],
    "slice": lambda c, row: c.inputs[0][row, c.op.attrs["start"] :][: c.width],
    "glu": glu_row,
    "softcap": lambda c, row: np.array(
        [c.op.attrs["cap"] * math.tanh(x / c.op.attrs["cap"]) for x in c.inputs[0][row]]
    ),
    "last_tokens": lambda c, row: c.inputs[0][c.step.batch.logits_rows[row]],
}


def test_every_op_has_a_formula_here():
    assert FORMULAS.keys() == SPECS.keys()


@each_case
def test_reference_equals_formula(spec: OpSpec, op_case: Case):
    call = call_for(spec, op_case)
    got = spec.reference(call)
    assert got.dtype == np.float32
    expected = np.array([FORMULAS[spec.kind](call, row) for row in range(len(got))])
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= max(spec.tolerance, 1e-7) * np.abs(expected).max()


@each_case
def test_reference_leaves_inputs_alone(spec: OpSpec, op_case: Case):
    call = call_for(spec, op_case)
    before = [array.copy() for array in (*call.inputs, *call.weights)]
    spec.reference(call)
    for array, copy in zip((*call.inputs, *call.weights), before, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("kind", sorted(ROW_WISE))
def test_row_wise_ops_do_not_look_at_other_rows(kind: str):
    spec = SPECS[kind]
    for case in spec.cases:
        call = call_for(spec, case)
        others = call_for(spec, case, seed=1)
        mixed = tuple(
            np.where(np.arange(NUM_ROWS)[:, None] == 5, a, b) for a, b in zip(call.inputs, others.inputs, strict=True)
        )
        np.testing.assert_array_equal(spec.reference(call)[5], spec.reference(replace(call, inputs=mixed))[5])


def test_silu_of_very_negative_numbers_is_zero():
    spec = SPECS["glu"]
    call = call_for(spec, spec.cases[0])
    call.inputs[0][:] = -1000
    np.testing.assert_array_equal(spec.reference(call), 0)


# -------------------------------------------------------------------------------------- ops in executors


def program_for(spec: OpSpec, case: Case) -> tuple[Program, dict[str, np.ndarray]]:
    """The op on rows that embeddings make, then the selection of rows."""
    rng = np.random.default_rng(3)
    _, drawn = example(case, 0, rng)
    weights = {f"w{i}.weight": w for i, w in enumerate(drawn)}
    program = Program()
    for i, width in enumerate(case.inputs):
        weights[f"input{i}.weight"] = rng.standard_normal((50, width)).astype(np.float32)
        program.ops.append(Op("embed", (), i, (f"input{i}.weight",)))
    inputs = tuple(range(len(case.inputs)))
    program.ops.append(Op(spec.kind, inputs, len(inputs), tuple(f"w{i}.weight" for i in range(len(drawn))), case.attrs))
    program.widths = [*case.inputs, case.width]
    program.output = len(inputs)
    if spec.kind != "last_tokens":
        program.ops.append(Op("last_tokens", (len(inputs),), len(inputs) + 1))
        program.widths.append(case.width)
        program.output += 1
    return program, weights


@each_executor
@each_case
def test_executor_equals_reference(case: ExecutorCase, spec: OpSpec, op_case: Case):
    program, weights = program_for(spec, op_case)
    validate(program, {name: w.shape for name, w in weights.items()})
    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 7, NUM_ROWS)]
    executor = case.open(checkpoint(weights), max_model_len=64, program=program)
    got = run_tokens(executor, tokens, chunk_sizes=(9, 1, 32), all_logits=True)
    executor.close()

    batch = sequence_batch(tokens, 0, [0, 1], 32, range(NUM_ROWS))
    expected = evaluate(program, weights, replace(step_for(op_case), batch=batch))[program.output]
    tolerance = 2e-3 if spec.kind == "attention" and not case.exact_cache else spec.tolerance
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


# -------------------------------------------------------------------------------------------- validation


def valid() -> tuple[Program, dict[str, tuple[int, ...]]]:
    attention = {
        "layer": 0,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 4,
        "v_head_dim": 4,
        "scale": 0.5,
        "window": 0,
        "softcap": 0.0,
        "slopes": (0.5, 0.25, 0.125, 0.0625),
    }
    rope = {"head_dim": 4, "inv_freq": (1.0, 0.1), "style": "norm", "mscale": 1.0}
    ops = [
        Op("embed", (), 0, ("token_embd.weight",)),
        Op("rms_norm", (0,), 1, ("norm.weight",), {"eps": 1e-5, "head_dim": 0}),
        Op("linear", (1,), 2, ("k.weight", "k.bias")),
        Op("rope", (1,), 3, ("rope_freqs.weight",), rope),
        Op("attention", (3, 2, 2), 4, ("sinks.weight",), attention),
        Op("add", (0, 4), 5),
        Op("slice", (5,), 6, (), {"start": 2}),
        Op("softcap", (6,), 7, (), {"cap": 30.0}),
        Op("glu", (7, 6), 8, (), {"act": "silu"}),
        Op("scale", (8,), 9, (), {"by": 0.5}),
        Op("last_tokens", (9,), 10),
        Op("layer_norm", (10,), 11, ("ln.weight",), {"eps": 1e-5}),
    ]
    shapes = {
        "token_embd.weight": (50, 16),
        "norm.weight": (16,),
        "k.weight": (8, 16),
        "k.bias": (8,),
        "rope_freqs.weight": (2,),
        "ln.weight": (6,),
        "sinks.weight": (4,),
    }
    return Program(ops, [16, 16, 8, 16, 16, 16, 6, 6, 6, 6, 6, 6], 11), shapes


def test_valid_program():
    program, shapes = valid()
    validate(program, shapes)
    del shapes["k.bias"]
    program.ops[2] = replace(program.ops[2], weights=("k.weight",))
    validate(program, shapes)


SHAPE_FAULTS = {
    "missing": ("k.weight", None, "tensor k.weight is missing"),
    "transposed": ("k.weight", (16, 8), r"tensor k.weight has the shape \[16, 8\].*ask for \[8, 16\]"),
    "flat": ("k.weight", (128,), r"tensor k.weight has the shape \[128\]"),
    "one more dimension": ("norm.weight", (1, 16), r"tensor norm.weight .* ask for \[16\]"),
    "missing bias": ("k.bias", None, "tensor k.bias is missing"),
    "wrong bias": ("k.bias", (16,), "tensor k.bias"),
    "no rows": ("token_embd.weight", (0, 16), "token_embd.weight is empty"),
    "wrong embedding": ("token_embd.weight", (50, 8), r"ask for \[any, 16\]"),
    "wrong sinks": ("sinks.weight", (2,), "sinks.weight"),
    "wrong factors": ("rope_freqs.weight", (4,), "rope_freqs.weight"),
}


@pytest.mark.parametrize("fault", SHAPE_FAULTS)
def test_wrong_tensors_are_named(fault: str):
    name, shape, message = SHAPE_FAULTS[fault]
    program, shapes = valid()
    if shape is None:
        del shapes[name]
    else:
        shapes[name] = shape
    with pytest.raises(InvalidModelFileError, match=message):
        validate(program, shapes)


def attrs(index: int, **changes: object) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        op = program.ops[index]
        program.ops[index] = replace(op, attrs={**op.attrs, **changes})

    return change


def op(index: int, **changes: object) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        program.ops[index] = replace(program.ops[index], **changes)

    return change


def width(value: int, new: int) -> Callable[[Program], None]:
    return lambda program: program.widths.__setitem__(value, new)


PROGRAM_FAULTS: dict[str, Callable[[Program], None]] = {
    "unknown kind": op(5, kind="conv9"),
    "reads itself": op(1, inputs=(1,)),
    "reads a later value": op(1, inputs=(7,)),
    "reads no value": op(1, inputs=(99,)),
    "reads a negative value": op(1, inputs=(-1,)),
    "too few inputs": op(5, inputs=(0,)),
    "writes twice": op(5, output=4),
    "writes outside": op(5, output=12),
    "writes a negative value": op(5, output=-1),
    "selected rows meet all rows": op(11, kind="add", inputs=(10, 9), weights=(), attrs={}),
    "selects twice": op(11, kind="last_tokens", weights=(), attrs={}),
    "output of all rows": lambda program: setattr(program, "output", 9),
    "no output": lambda program: setattr(program, "output", -1),
    "attribute missing": op(9, attrs={}),
    "attribute too many": attrs(9, more=1.0),
    "attribute of another type": attrs(9, by=1),
    "bool for int": attrs(1, head_dim=True),
    "norm without eps": attrs(1, eps=math.nan),
    "norm with negative eps": attrs(1, eps=-1.0),
    "norm heads do not divide": attrs(1, head_dim=5),
    "norm heads negative": attrs(1, head_dim=-4),
    "norm weight for the row": attrs(1, head_dim=4),
    "rope beyond the head": attrs(3, inv_freq=(1.0, 1.0, 1.0)),
    "rope without frequencies": attrs(3, inv_freq=()),
    "rope frequency infinite": attrs(3, inv_freq=(1.0, math.inf)),
    "rope mscale not a number": attrs(3, mscale=math.nan),
    "rope style": attrs(3, style="other"),
    "rope head size zero": attrs(3, head_dim=0),
    "rope heads do not divide": attrs(3, head_dim=5),
    "attention groups": attrs(4, n_heads=3),
    "attention no heads": attrs(4, n_kv_heads=0),
    "attention head size": attrs(4, head_dim=8),
    "attention value size": attrs(4, v_head_dim=2),
    "attention window": attrs(4, window=-1),
    "attention cap": attrs(4, softcap=math.inf),
    "attention slopes of some heads": attrs(4, slopes=(1.0, 0.5)),
    "attention slope not a number": attrs(4, slopes=(1.0, math.nan, 0.25, 0.125)),
    "attention scale": attrs(4, scale=math.nan),
    "attention layers with a gap": attrs(4, layer=1),
    "add of other widths": op(5, inputs=(0, 2)),
    "slice too wide": attrs(6, start=11),
    "slice before the start": attrs(6, start=-1),
    "cap zero": attrs(7, cap=0.0),
    "activation": attrs(8, act="relu6"),
    "scale infinite": attrs(9, by=math.inf),
    "width zero": width(9, 0),
    "width changed": width(3, 20),
    "last_tokens of other width": width(10, 5),
    "no weight": op(2, weights=()),
    "too many weights": op(1, weights=("norm.weight", "norm.bias")),
}


@pytest.mark.parametrize("fault", PROGRAM_FAULTS)
def test_wrong_programs_are_refused(fault: str):
    program, shapes = valid()
    PROGRAM_FAULTS[fault](program)
    with pytest.raises((InvalidModelFileError, UnsupportedModelError)):
        validate(program, shapes)


def test_unknown_bias_is_named():
    program, shapes = valid()
    PROGRAM_FAULTS["too many weights"](program)
    with pytest.raises(UnsupportedModelError, match=r"norm\.bias"):
        validate(program, shapes)


def test_random_damage_never_gets_past_validation_into_numpy():
    """A program that validates runs; one that does not is refused with a typed error."""
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        program, shapes = valid()
        index = int(rng.integers(len(program.ops)))
        damaged = program.ops[index]
        match rng.integers(4):
            case 0:
                program.widths[index] = int(rng.integers(-1, 20))
            case 1:
                inputs = tuple(int(rng.integers(-1, 13)) for _ in damaged.inputs)
                program.ops[index] = replace(damaged, inputs=inputs)
            case 2:
                name = list(shapes)[rng.integers(len(shapes))]
                shapes[name] = tuple(int(n) for n in rng.integers(0, 20, rng.integers(1, 3)))
            case _:
                if damaged.attrs:
                    name = list(damaged.attrs)[rng.integers(len(damaged.attrs))]
                    value = damaged.attrs[name]
                    new = {int: int(rng.integers(-1, 9)), float: float(rng.choice([math.nan, -1.0, 0.0, 2.0]))}
                    program.ops[index] = replace(damaged, attrs={**damaged.attrs, name: new.get(type(value), value)})
        try:
            validate(program, shapes)
        except CaudalError:
            refused += 1
            continue
        weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        (attention,) = program.attention_ops
        heads = attention.integer("n_kv_heads")
        caches = [np.zeros((64, heads, attention.integer(name)), np.float32) for name in ("head_dim", "v_head_dim")]
        batch = sequence_batch([0, 0, 0], 0, [1], 32, [0, 2])
        values = evaluate(program, weights, Step(batch, [caches[0]], [caches[1]], 32))
        assert values[program.output].shape == (2, program.widths[program.output])
    assert 200 < refused < 400
