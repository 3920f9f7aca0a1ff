"""Checkpoints to programs: optional parts follow from the tensors, and nothing in a file is overlooked."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from caudal.core import InvalidModelFileError, UnsupportedModelError
from caudal.models import build_program, supported_architectures
from tiny import arrays, checkpoint, metadata, model


def build(changed: dict[str, np.ndarray | None], arch: str = "llama"):
    weights = {**arrays(arch), **changed}
    return build_program(checkpoint({n: w for n, w in weights.items() if w is not None}, metadata(arch)))[1]


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_tensor_is_used(arch: str):
    opened = model(arch)
    _, program = build_program(opened)
    assert program.weight_names == opened.tensors.keys()
    assert len(program.attention_ops) == 2
    assert program.widths[program.output] == 64


def test_the_embedding_is_the_head_unless_there_is_one():
    assert build({}).ops[-1].weights == ("token_embd.weight",)
    own = build({"output.weight": np.ones((64, 24))})
    assert own.ops[-1].weights == ("output.weight",)


def test_biases_and_norms_follow_from_the_tensors():
    ops = {op.weights[0]: op for op in build({}, "qwen2").ops if op.weights}
    assert ops["blk.0.attn_q.weight"].weights == ("blk.0.attn_q.weight", "blk.0.attn_q.bias")
    assert ops["blk.0.attn_output.weight"].weights == ("blk.0.attn_output.weight",)
    norms = [op for op in build({}, "qwen3").ops if op.kind == "rms_norm" and op.integer("head_dim")]
    assert [op.weights[0] for op in norms[:2]] == ["blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"]


def test_rope_factors_of_llama_3():
    ropes = [op for op in build({"rope_freqs.weight": np.ones(4)}).ops if op.kind == "rope"]
    assert {op.weights for op in ropes} == {("rope_freqs.weight",)}


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_window(arch: str):
    windows = {op.integer("window") for op in build_program(model(arch, attention__sliding_window=9))[1].attention_ops}
    assert windows == ({9} if arch in ("llama", "mistral") else {0})


@pytest.mark.parametrize("name", ["blk.0.attn_rot_embd.weight", "blk.1.attn_rot_embd"])
def test_leftover_buffers_are_ignored(name: str):
    assert name not in build({name: np.ones(4)}).weight_names


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ffn_gate_exps.weight",
        "blk.0.attn_sinks.weight",
        "blk.0.attn_q.scale",
        "blk.2.attn_q.weight",
        "output.bias",
        "rope_factors_long.weight",
        "mystery",
    ],
)
def test_unused_tensors_are_refused_by_name(name: str):
    with pytest.raises(UnsupportedModelError, match=re.escape(name)):
        build({name: np.ones((8, 24))})


def test_a_bias_that_a_norm_cannot_have():
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_norm\.bias"):
        build({"blk.0.attn_norm.bias": np.ones(24)})


@pytest.mark.parametrize("name", sorted(arrays("qwen3")))
def test_missing_tensors_are_named(name: str):
    qk_norm = name.endswith(("attn_q_norm.weight", "attn_k_norm.weight"))
    error = (UnsupportedModelError, InvalidModelFileError) if qk_norm else InvalidModelFileError
    with pytest.raises(error, match=r"attn_[qk]_norm\.weight" if qk_norm else re.escape(name)):
        build({name: None}, "qwen3")


@pytest.mark.parametrize("name", sorted(arrays("qwen2")))
def test_wrong_shapes_are_named(name: str):
    array = arrays("qwen2")[name]
    with pytest.raises(InvalidModelFileError, match=re.escape(name) if name != "token_embd.weight" else "token_embd"):
        build({name: np.ones((*array.shape[:-1], array.shape[-1] + 1))}, "qwen2")


def test_embedding_that_is_no_matrix():
    with pytest.raises(InvalidModelFileError, match="no matrix token_embd"):
        build({"token_embd.weight": np.ones(24)})


@pytest.mark.parametrize(
    ("name", "nearest"), [("qwen3moe", "'qwen3'"), ("llama4", "'llama'"), ("mistral3", "'mistral'"), ("rwkv7", None)]
)
def test_other_architectures_are_refused_by_name(name: str, nearest: str | None):
    opened = replace(model(), metadata={"general.architecture": name})
    with pytest.raises(UnsupportedModelError, match=name) as info:
        build_program(opened)
    assert (nearest is not None and f"nearest supported one is {nearest}" in str(info.value)) or (
        nearest is None and "nearest" not in str(info.value)
    )
    assert all(known in str(info.value) for known in supported_architectures())


@pytest.mark.parametrize("value", [None, 3, ["llama"]])
def test_no_architecture(value: object):
    with pytest.raises(InvalidModelFileError, match="do not name an architecture"):
        build_program(replace(model(), metadata={"general.architecture": value}))


def test_supported_architectures():
    assert {"llama", "mistral", "qwen2", "qwen3"} <= {*supported_architectures()}
