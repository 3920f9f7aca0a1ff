"""Small checkpoints in memory: random weights of any shape, with the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from caudal.core import Batch
from caudal.formats import Checkpoint, HostTensor
from caudal.quants import by_name


def checkpoint(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, object] | None = None) -> Checkpoint:
    """Float32 tensors as an opened model."""
    f32 = by_name("f32")
    assert f32 is not None
    tensors = {
        name: HostTensor(name, array.shape, f32, np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8))
        for name, array in arrays.items()
    }
    return Checkpoint(Path("tiny.gguf"), "gguf", metadata or {}, tensors)


def metadata(arch: str = "llama", **changes: object) -> dict[str, object]:
    """Of `model`; changes are given with `__` for dots and `None` to leave a key out."""
    keys: dict[str, object] = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 24,
        "feed_forward_length": 40,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    named = {f"{arch}.{name}": value for name, value in keys.items() if value is not None}
    return {"general.architecture": arch, **named}


def arrays(arch: str = "llama", *, n_layers: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights that fit `metadata(arch)`, with values that give logits of ordinary size."""
    d_model, d_ff, q, kv, vocab = 24, 40, 32, 16, 64
    shapes = {"token_embd.weight": (vocab, d_model), "output_norm.weight": (d_model,)}
    for i in range(n_layers):
        layer = {
            "attn_norm.weight": (d_model,),
            "attn_q.weight": (q, d_model),
            "attn_k.weight": (kv, d_model),
            "attn_v.weight": (kv, d_model),
            "attn_output.weight": (d_model, q),
            "ffn_norm.weight": (d_model,),
            "ffn_gate.weight": (d_ff, d_model),
            "ffn_up.weight": (d_ff, d_model),
            "ffn_down.weight": (d_model, d_ff),
        }
        if arch == "qwen2":
            layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if arch == "qwen3":
            layer |= {"attn_q_norm.weight": (8,), "attn_k_norm.weight": (8,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(seed)
    result: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        result[name] = (rng.standard_normal(shape) * scale + (len(shape) == 1)).astype(np.float32)
    result["token_embd.weight"] *= 4
    return result


def model(arch: str = "llama", *, seed: int = 0, **changes: object) -> Checkpoint:
    """A whole tiny model. `changes` as in `metadata`."""
    return checkpoint(arrays(arch, seed=seed), metadata(arch, **changes))


def merge(batches: list[Batch]) -> Batch:
    """One batch of several, in their order. All use the same cache."""
    counts = [b.num_tokens for b in batches]
    starts = np.cumsum([0, *counts])
    width = max(b.block_tables.shape[1] for b in batches)
    tables = [np.pad(b.block_tables, ((0, 0), (0, width - b.block_tables.shape[1]))) for b in batches]
    return Batch(
        token_ids=np.concatenate([b.token_ids for b in batches]),
        positions=np.concatenate([b.positions for b in batches]),
        query_start=np.concatenate(
            [[0], *(b.query_start[1:] + s for b, s in zip(batches, starts, strict=False))]
        ).astype(np.int32),
        seq_lens=np.concatenate([b.seq_lens for b in batches]),
        block_tables=np.concatenate(tables),
        slot_mapping=np.concatenate([b.slot_mapping for b in batches]),
        logits_rows=np.concatenate([b.logits_rows + s for b, s in zip(batches, starts, strict=False)]).astype(np.int32),
        adapter_slots=np.concatenate([b.adapter_slots for b in batches]),
    )
