"""The native executor: the same bits whatever is computed together, and refusal of impossible batches."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from batches import Part, build, run_chunks

from caudal import _native
from caudal.config import EngineConfig
from caudal.core import InsufficientMemoryError, SamplingParams, UnsupportedModelError
from caudal.engine.native_sampling import NativeSampler
from caudal.engine.sampling import SamplerRow
from caudal.executors.base import MAX_CANDIDATES, asked_for, whole_rows
from caudal.executors.native import NativeExecutor
from caudal.executors.reference import ReferenceExecutor
from caudal.formats import open_checkpoint
from caudal.graph.program import Builder
from caudal.quants import QuantType, all_types, by_name
from conftest import shared_dir
from tiny import checkpoint as in_memory

CONFIG = EngineConfig(num_threads=2, max_model_len=1024, kv_cache_memory=256 << 20)


def tokens(n: int, vocab: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, vocab, n).tolist()


@pytest.fixture(scope="module", params=["f16", "q8"])
def smol(request: pytest.FixtureRequest, smollm2: Path):
    executor = NativeExecutor(open_checkpoint(smollm2), replace(CONFIG, kv_type=request.param))
    yield executor
    executor.close()


def small_models() -> list[str]:
    return [
        "arch/gguf/qwen3.gguf",
        "arch/gguf/qwen2.gguf",
        "quant/Q4_K_M.gguf",
        "quant/Q8_0.gguf",
        "quant/Q5_0.gguf",
        "quant/Q4_0.gguf",
        "quant/Q5_1.gguf",
        "quant/Q5_K_M.gguf",
        "quant/Q6_K.gguf",
        "quant/IQ2_XXS.gguf",
    ]


class TestSameBits:
    """Design rule 8: results do not depend on the batch, the chunks, the blocks or the threads."""

    def test_candidates_are_the_largest_of_the_whole_row(self, smol: NativeExecutor) -> None:
        """For every number of rows and threads' share of the vocabulary; sums give the same logprobs, bit by bit."""
        sampler = NativeSampler(smol.pool, smol.isa, 49152)
        for count in (1, 3, 17):
            parts = [Part(tokens(5 + i, 49152, i), 0, [i]) for i in range(count)]
            batch = build(parts, smol.kv_layout.block_size)
            whole = smol.run(batch).full.copy()
            counts = np.array([(0, 1, 40, MAX_CANDIDATES)[i % 4] for i in range(1, count + 1)], np.int32)
            fewer = replace(batch, num_candidates=counts, log_sums=counts > 0)
            expected, found = asked_for(whole, fewer, 49152), smol.run(fewer)
            assert np.array_equal(found.full, expected.full)
            assert np.array_equal(found.full_index, expected.full_index)
            assert np.array_equal(found.candidate_ids, expected.candidate_ids)
            assert np.array_equal(found.candidate_values, expected.candidate_values)
            assert np.allclose(found.log_sums, expected.log_sums, rtol=0, atol=1e-5, equal_nan=True)
            rows = [
                SamplerRow(SamplingParams(top_k=max(1, int(k)), logprobs=1), i, [1], 1, ())
                for i, k in enumerate(counts)
            ]
            chosen = sampler.sample(found, rows)
            assert chosen == sampler.sample(whole_rows(whole), rows)

    def test_chunks_and_scattered_blocks(self, smol: NativeExecutor) -> None:
        ids = tokens(600, 49152)
        order = np.random.default_rng(1).permutation(smol.kv_layout.num_blocks)[:19].tolist()
        whole = run_chunks(smol, ids, list(range(19)), 600)
        for chunk in (16, 33, 128, 256, 512):
            assert np.array_equal(run_chunks(smol, ids, order, chunk), whole), chunk

    def test_token_by_token(self, smol: NativeExecutor) -> None:
        ids = tokens(300, 49152, seed=3)
        whole = run_chunks(smol, ids, list(range(10)), 300)
        assert np.array_equal(run_chunks(smol, ids, list(range(10, 20)), 1), whole)

    def test_in_a_batch_of_32(self, smol: NativeExecutor) -> None:
        """Decode and prefill of other sequences beside it, at every place in the batch."""
        ids = tokens(70, 49152, seed=2)
        alone = run_chunks(smol, ids, [0, 1, 2], 70)
        size = smol.kv_layout.block_size
        lengths = np.random.default_rng(4).integers(1, 90, 31)
        others = [
            Part(tokens(int(n), 49152, seed=10 + i), 0, list(range(3 + 3 * i, 6 + 3 * i)))
            for i, n in enumerate(lengths)
        ]
        for place in (0, 13, 31):
            parts = [*others[:place], Part(ids, 0, [0, 1, 2]), *others[place:]]
            assert np.array_equal(smol.run(build(parts, size)).full[place], alone)
        # Everybody decodes one more token.
        alone = smol.run(build([Part([77], 70, [0, 1, 2])], size)).full[0].copy()
        steps = [Part([7 + i], int(n), p.blocks) for i, (n, p) in enumerate(zip(lengths, others, strict=True))]
        together = smol.run(build([*steps[:5], Part([77], 70, [0, 1, 2]), *steps[5:]], size)).full
        assert np.array_equal(together[5], alone)

    def test_all_logits_equal_last_logits(self, smol: NativeExecutor) -> None:
        ids = tokens(40, 49152, seed=5)
        size = smol.kv_layout.block_size
        every = smol.run(build([Part(ids, 0, [0, 1], all_logits=True)], size)).full.copy()
        for n in (1, 2, 17, 40):
            assert np.array_equal(smol.run(build([Part(ids[:n], 0, [2, 3])], size)).full[0], every[n - 1])

    @pytest.mark.parametrize("kv_type", ["f16", "q8"])
    def test_threads(self, smollm2: Path, kv_type: str) -> None:
        ids = tokens(300, 49152, seed=6)
        results = []
        for threads in (1, 2, 3):
            executor = NativeExecutor(
                open_checkpoint(smollm2), replace(CONFIG, num_threads=threads, kv_type=kv_type, pin_threads=threads < 3)
            )
            results.append([run_chunks(executor, ids, list(range(10)), chunk) for chunk in (300, 100)])
            executor.close()
        assert np.array_equal(results[0], results[1])
        assert np.array_equal(results[0], results[2])

    @pytest.mark.parametrize("name", small_models())
    def test_other_types_and_families(self, name: str) -> None:
        path = shared_dir("golden", *name.split("/"))
        executor = NativeExecutor(open_checkpoint(path), EngineConfig(num_threads=2, kv_cache_memory=64 << 20))
        ids = tokens(100, executor.vocab_size, seed=7)
        whole = run_chunks(executor, ids, list(range(4)), 100)
        for chunk in (1, 7, 64):
            assert np.array_equal(run_chunks(executor, ids, [9, 4, 7, 5], chunk), whole), chunk


def test_stale_cache_contents_do_not_matter(smol: NativeExecutor) -> None:
    """Blocks are never cleared: what an earlier owner left behind the end of a sequence has no effect."""
    ids = tokens(45, 49152, seed=8)
    blocks = [20, 21]
    fresh = run_chunks(smol, ids, blocks, 45)
    run_chunks(smol, tokens(64, 49152, seed=9), blocks, 64)
    assert np.array_equal(run_chunks(smol, ids, blocks, 45), fresh)


def test_a_layer_is_five_phases(smollm2: Path) -> None:
    executor = NativeExecutor(open_checkpoint(smollm2), CONFIG)
    # embedding, 30 layers, two selections of rows before the last output projection, head
    assert executor.num_phases == 1 + 30 * 5 + 2 + 1


def test_an_interrupt_waits_for_the_end_of_the_step(smol: NativeExecutor) -> None:
    """No thread is left behind in the middle of a step, and the cache is as if nothing had happened."""
    ids = tokens(200, 49152, seed=21)
    expected = run_chunks(smol, ids, list(range(7)), 200).copy()
    threading.Timer(0.03, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        run_chunks(smol, ids * 20, list(range(125)), 200)
    assert np.array_equal(run_chunks(smol, ids, list(range(7)), 200), expected)


def test_progress_is_reported(smollm2: Path) -> None:
    seen: list[tuple[int, int]] = []
    NativeExecutor(open_checkpoint(smollm2), CONFIG, progress=lambda done, total: seen.append((done, total))).close()
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 90e6


@pytest.fixture(scope="module")
def executor() -> NativeExecutor:
    path = shared_dir("data", "models", "stories260K-f32.gguf")
    return NativeExecutor(open_checkpoint(path), EngineConfig(num_threads=1, kv_cache_memory=4 << 20))


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("token_ids", [1, 2, 512], "vocabulary"),
            ("token_ids", [1, -2, 3], "vocabulary"),
            ("token_ids", [1, 2], "do not fit together"),
            ("positions", [0, 1, 3], "positions"),
            ("query_start", [0, 2], "query_start"),
            ("query_start", [1, 3], "query_start"),
            ("seq_lens", [2], "length"),
            ("seq_lens", [100], "block table is too short"),
            ("seq_lens", [2**31 - 1], "block table is too short"),
            ("block_tables", [[10**6]], "outside the cache"),
            ("block_tables", [[-1]], "outside the cache"),
            ("slot_mapping", [0, 1, 3], "slot_mapping"),
            ("slot_mapping", [-1, 0, 1], "slot_mapping"),
            ("logits_rows", [3], "logits_rows"),
            ("logits_rows", [1, 1], "logits_rows"),
            ("logits_rows", [-1], "logits_rows"),
        ],
    )
    def test_impossible_batches(self, executor: NativeExecutor, field: str, value: list, message: str) -> None:
        good = build([Part([1, 2, 3], 0, [0])], 32)
        before = executor.run(good).full.copy()
        with pytest.raises(ValueError, match=message):
            executor.run(replace(good, **{field: np.asarray(value, np.int32)}))
        assert np.array_equal(executor.run(good).full, before)

    def test_a_batch_without_logits(self, executor: NativeExecutor) -> None:
        batch = replace(build([Part([1, 2, 3], 0, [0])], 32), logits_rows=np.zeros(0, np.int32))
        assert executor.run(batch).full.shape == (0, 512)

    def test_options(self) -> None:
        checkpoint = open_checkpoint(shared_dir("data", "models", "stories260K-f32.gguf"))
        with pytest.raises(UnsupportedModelError, match="at most"):
            NativeExecutor(checkpoint, EngineConfig(max_model_len=10**6))
        with pytest.raises(InsufficientMemoryError, match="one block of 32 tokens"):
            NativeExecutor(checkpoint, EngineConfig(kv_cache_memory=1000))
        with pytest.raises(InsufficientMemoryError, match="does not fit"):
            NativeExecutor(checkpoint, EngineConfig(kv_cache_memory=1 << 50))
        with pytest.raises(UnsupportedModelError, match="instruction set"):
            NativeExecutor(checkpoint, EngineConfig(isa="avx9000"))


@pytest.mark.parametrize("head_dim", [6, 260])
def test_heads_that_the_kernels_cannot_run(head_dim: int) -> None:
    checkpoint = in_memory({"token_embd.weight": np.zeros((8, head_dim))})
    b = Builder(checkpoint.tensors)
    x = b.embed("token_embd", head_dim)
    b.program.output = b.last_tokens(b.attention(x, x, x, head_dim=head_dim, scale=1.0)).id
    with pytest.raises(UnsupportedModelError, match=f"heads of {head_dim} numbers"):
        NativeExecutor(checkpoint, EngineConfig(num_threads=1, max_model_len=32), program=b.program)


ATTENTION_OPTIONS = {
    "plain": {},
    "window": {"window": 40},
    "softcap": {"softcap": 2.0},
    "alibi": {"slopes": (0.5, 0.25, 0.02, 0.001)},
    "sinks": {"sinks": "attn_sinks"},
    "all": {"window": 300, "softcap": 3.0, "slopes": (0.5, 0.25, 0.02, 0.001), "sinks": "attn_sinks"},
}


@pytest.mark.parametrize("isa", _native.instruction_sets())
@pytest.mark.parametrize("kv_type", ["f16", "q8"])
@pytest.mark.parametrize("options", ATTENTION_OPTIONS)
def test_attention_options_and_a_shared_prefix_against_the_reference(options: str, kv_type: str, isa: str) -> None:
    """Three sequences that share the blocks of 544 tokens: two that decode and one with a prompt's end."""
    rng = np.random.default_rng(8)
    checkpoint = in_memory(
        {
            "token_embd.weight": rng.standard_normal((64, 32)),
            "attn_k.weight": 0.4 * rng.standard_normal((16, 32)),
            "attn_v.weight": rng.standard_normal((16, 32)),
            "attn_sinks.weight": np.array([1.0, -0.5, 3.0, 0.0]),
        }
    )
    b = Builder(checkpoint.tensors)
    x = b.embed("token_embd", 32)
    k, v = b.linear(x, "attn_k", 16), b.linear(x, "attn_v", 16)
    attended = b.attention(x, k, v, head_dim=8, scale=8**-0.5, **ATTENTION_OPTIONS[options])
    b.program.output = b.last_tokens(attended).id
    prefix, ends = tokens(544, 64), [tokens(n, 64, seed=n) for n in (3, 40, 5)]
    blocks = [[*range(17), 17 + 2 * i, 18 + 2 * i] for i in range(3)]
    first = [Part(end[:-1], 544, table) for end, table in zip(ends[:2], blocks, strict=False)]
    last = [Part([end[-1]], 544 + len(end) - 1, table) for end, table in zip(ends[:2], blocks, strict=False)]
    last.append(Part(ends[2], 544, blocks[2], all_logits=True))
    config = EngineConfig(num_threads=2, max_model_len=608, kv_cache_memory=1 << 20, kv_type=kv_type, isa=isa)
    native = NativeExecutor(checkpoint, config, program=b.program)
    reference = ReferenceExecutor(checkpoint, program=b.program, max_model_len=608, num_blocks=24)
    results: list[np.ndarray] = []
    for executor in (native, reference):
        executor.run(build([Part(prefix, 0, blocks[0])], 32))
        executor.run(build(first, 32))
        results.append(executor.run(build(last, 32)).full.copy())
    together, expected = results
    tolerance = 2e-3 if kv_type == "f16" else 2e-2
    assert np.abs(together - expected).max() < tolerance * np.abs(expected).max()
    alone = [native.run(build([part], 32)).full.copy() for part in last]
    assert np.array_equal(np.concatenate(alone), together)


def test_packing_does_not_destroy_tensors_that_are_no_mapped_file() -> None:
    """Only the pages of a file come back after they were dropped."""
    checkpoint = open_checkpoint(shared_dir("golden", "quant", "Q8_0.gguf"))
    copies = {name: replace(t, data=t.data.copy()) for name, t in checkpoint.tensors.items()}
    config = EngineConfig(num_threads=1, kv_cache_memory=4 << 20)
    executor = NativeExecutor(replace(checkpoint, tensors=copies), config)
    for name, t in checkpoint.tensors.items():
        assert np.array_equal(copies[name].data, t.data), name
    ids = tokens(20, executor.vocab_size)
    mapped = NativeExecutor(checkpoint, config)
    assert np.array_equal(run_chunks(executor, ids, [0], 20), run_chunks(mapped, ids, [0], 20))


@pytest.mark.parametrize("isa", _native.instruction_sets())
@pytest.mark.parametrize("t", [t for t in all_types() if t.block_size > 1], ids=lambda t: t.name)
def test_every_quantized_type_decodes_to_the_golden_numbers(t: QuantType, isa: str) -> None:
    with np.load(shared_dir("golden", "quant", "blocks.npz")) as golden:
        raw, values = golden[f"{t.name.upper()}_raw"].reshape(-1), golden[f"{t.name.upper()}_values"].reshape(-1)
    got = np.empty((1, values.size), np.float32)
    _native.decode_rows(t.ggml_id, 1, values.size, raw, isa, got)
    assert got.reshape(-1).view(np.uint32).tolist() == values.view(np.uint32).tolist()


@pytest.mark.parametrize("t", [t for t in all_types() if _native.has_type(t.ggml_id)], ids=lambda t: t.name)
def test_any_bytes_decode_as_in_python(t: QuantType) -> None:
    """Also scales that no sound file has: negative, denormal, infinite, NaN, and every exponent of MXFP4."""
    cols, rows = max(t.block_size, 256), 256
    raw = np.random.default_rng(t.ggml_id).integers(0, 256, t.num_bytes(cols) * rows, dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = t.dequantize(raw).reshape(rows, cols)
    nan = np.isnan(want)
    for isa in _native.instruction_sets():
        got = np.empty((rows, cols), np.float32)
        _native.decode_rows(t.ggml_id, rows, cols, raw, isa, got)
        assert np.array_equal(np.isnan(got), nan), isa
        assert np.array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan]), isa


def test_types_without_kernels_are_refused_by_name() -> None:
    checkpoint = open_checkpoint(shared_dir("data", "models", "stories260K-f32.gguf"))
    f64 = by_name("f64")
    assert f64 is not None
    tensors = dict(checkpoint.tensors)
    name = "blk.0.attn_q.weight"
    tensors[name] = replace(tensors[name], quant_type=f64, data=np.zeros(64 * 64 * 8, np.uint8))
    with pytest.raises(UnsupportedModelError, match=f"{name} has type f64"):
        NativeExecutor(replace(checkpoint, tensors=tensors), EngineConfig(num_threads=1))


def test_close_is_idempotent() -> None:
    executor = NativeExecutor(
        open_checkpoint(shared_dir("data", "models", "stories260K-f32.gguf")), EngineConfig(num_threads=1)
    )
    executor.close()
    executor.close()


def test_two_models_do_not_influence_each_other() -> None:
    path = shared_dir("data", "models", "stories260K-f32.gguf")
    config = EngineConfig(num_threads=1, kv_cache_memory=4 << 20)
    a, b = (NativeExecutor(open_checkpoint(path), config) for _ in range(2))
    ids = tokens(20, 512)
    alone = run_chunks(a, ids, [0], 20)
    run_chunks(b, tokens(20, 512, seed=1), [0], 20)
    assert np.array_equal(a.run(build([Part([5], 20, [0])], 32)).full, a.run(build([Part([5], 20, [0])], 32)).full)
    assert np.array_equal(run_chunks(b, ids, [3], 20), alone)
