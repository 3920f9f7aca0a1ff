"""Passes keep what a program computes."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from caudal.executors.driver import sequence_batch
from caudal.executors.reference import evaluate
from caudal.graph.ops import Step, validate
from caudal.graph.passes import early_last_tokens, remove_dead_ops, uses
from caudal.graph.program import Builder, Program
from caudal.models import build_program
from tiny import model

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 64, 11)]


def compute(program: Program, weights: dict[str, np.ndarray], rows: list[int]) -> np.ndarray:
    shapes = [(op.integer("n_kv_heads"), op.integer("head_dim")) for op in program.attention_ops]
    keys, values = ([np.zeros((32, *shape), np.float32) for shape in shapes] for _ in range(2))
    step = Step(sequence_batch(TOKENS, 0, [0], 32, rows), keys, values, 32)
    return evaluate(program, weights, step)[program.output]


def arrays(checkpoint) -> dict[str, np.ndarray]:
    return {name: tensor.to_float32() for name, tensor in checkpoint.tensors.items()}


def test_uses():
    program = build_program(model())[1]
    readers = uses(program)
    assert len(readers) == len(program.widths)
    for value, indices in enumerate(readers):
        assert indices == [i for i, op in enumerate(program.ops) if value in op.inputs]
    assert readers[program.output] == []


def test_uses_counts_an_op_once():
    b = Builder({"e.weight"})
    x = b.embed("e", 4)
    b.program.output = (x + x).id
    assert uses(b.program) == [[1], []]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rows", [[10], [0, 4, 10], list(range(11)), []], ids=len)
def test_early_last_tokens_computes_the_same(arch: str, rows: list[int]):
    checkpoint = model(arch)
    program = build_program(checkpoint)[1]
    early = early_last_tokens(program)
    validate(early, {name: tensor.shape for name, tensor in checkpoint.tensors.items()})
    weights = arrays(checkpoint)
    expected = compute(program, weights, rows)
    assert expected.shape == (len(rows), 64)
    np.testing.assert_allclose(compute(early, weights, rows), expected, rtol=0, atol=2e-5)


def test_early_last_tokens_selects_right_after_the_last_attention():
    program = build_program(model())[1]
    early = early_last_tokens(program)
    kinds = [op.kind for op in early.ops]
    last_attention = len(kinds) - 1 - kinds[::-1].index("attention")
    attention = early.ops[last_attention]
    # The attention's output and the residual stream that passes it by, and nothing else.
    selects = [op for op in early.ops if op.kind == "last_tokens"]
    assert early.ops[last_attention + 1 : last_attention + 3] == selects
    assert attention.output in {op.inputs[0] for op in selects}
    assert early.ops[last_attention + 3].weights == ("blk.1.attn_output.weight",)
    without = [op.kind for op in program.ops if op.kind != "last_tokens"]
    assert [kind for kind in kinds if kind != "last_tokens"] == without


def test_early_last_tokens_of_its_own_result_changes_nothing():
    early = early_last_tokens(build_program(model())[1])
    assert early_last_tokens(early) == early


def test_early_last_tokens_keeps_a_selection_that_cannot_move():
    b = Builder({"e.weight"})
    b.program.output = b.last_tokens(b.embed("e", 4)).id
    assert early_last_tokens(b.program) == b.program


def test_early_last_tokens_does_not_move_what_others_read():
    """A value that attention reads too keeps all its rows and is selected once."""
    b = Builder({"e.weight", "w.weight", "u.weight"})
    x = b.embed("e", 4)
    y = b.linear(x, "w", 4)
    u = b.linear(y, "u", 4)
    z = b.attention(y, y, y, head_dim=4, scale=0.5)
    b.program.output = b.last_tokens(u + z).id
    early = early_last_tokens(b.program)
    validate(early, {"e.weight": (9, 4), "w.weight": (4, 4), "u.weight": (4, 4)})
    kinds = [op.kind for op in early.ops]
    # `u` stands before the attention, but only selected rows of it are wanted.
    assert kinds == ["embed", "linear", "last_tokens", "linear", "attention", "last_tokens", "add"]


def test_remove_dead_ops_drops_unread_values_and_closes_gaps():
    checkpoint = model()
    program = build_program(checkpoint)[1]
    weights = arrays(checkpoint)
    expected = compute(program, weights, [10])
    padded = copy.deepcopy(program)
    padded.widths.append(24)
    padded.ops.insert(3, replace(program.ops[1], output=len(padded.widths) - 1))
    result = remove_dead_ops(padded)
    assert result == remove_dead_ops(program)
    assert [op.output for op in result.ops] == list(range(len(result.ops)))
    np.testing.assert_array_equal(compute(result, weights, [10]), expected)


def test_remove_dead_ops_renumbers_attention_layers():
    b = Builder({"e.weight"})
    x = b.embed("e", 4)
    b.attention(x, x, x, head_dim=4, scale=0.5)
    y = b.attention(x, x, x, head_dim=4, scale=0.25)
    b.program.output = b.last_tokens(y).id
    result = remove_dead_ops(b.program)
    validate(result, {"e.weight": (9, 4)})
    assert [op.number("scale") for op in result.attention_ops] == [0.25]
    assert result.widths == [4, 4, 4]


def test_passes_leave_their_argument_alone():
    program = build_program(model())[1]
    before = copy.deepcopy(program)
    early_last_tokens(program)
    remove_dead_ops(program)
    assert program == before
