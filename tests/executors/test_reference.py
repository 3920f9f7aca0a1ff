"""The reference executor and the driver; the batch tests run on every executor."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from caudal.core import InsufficientMemoryError, InvalidRequestError, RequestTooLongError, UnsupportedModelError
from caudal.executors.base import Executor
from caudal.executors.driver import run_tokens, sequence_batch
from caudal.executors.reference import ReferenceExecutor
from executor_cases import ExecutorCase, each_executor
from tiny import merge, model

RNG = np.random.default_rng(0)
SEQUENCES = [[int(t) for t in RNG.integers(0, 64, n)] for n in (1, 33, 70, 5)]
TABLES = [[7], [2, 9], [11, 0, 4], [5]]  # blocks out of order, some unused ones between


def assert_same(case: ExecutorCase, got: np.ndarray, expected: np.ndarray) -> None:
    if case.bit_identical:
        np.testing.assert_array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=0, atol=3e-5)


def last_row(executor: Executor, tokens: list[int]) -> np.ndarray:
    return run_tokens(executor, tokens)[0]


@each_executor
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_sequences_in_one_batch_do_not_touch_each_other(case: ExecutorCase, arch: str):
    with closing(case.open(model(arch), max_model_len=256, num_blocks=12)) as executor:
        alone = np.array([last_row(executor, tokens) for tokens in SEQUENCES])
        batch = merge(
            [
                sequence_batch(tokens, 0, table, 32, [len(tokens) - 1])
                for tokens, table in zip(SEQUENCES, TABLES, strict=True)
            ]
        )
        assert_same(case, executor.run(batch).full, alone)


@each_executor
def test_chunks_and_decodes_of_several_sequences_mix(case: ExecutorCase):
    """Each step takes a piece of every unfinished sequence; all logits equal those of each sequence alone."""
    with closing(case.open(model(), max_model_len=256, num_blocks=12)) as executor:
        alone = [run_tokens(executor, tokens, all_logits=True) for tokens in SEQUENCES]
        done = [0] * len(SEQUENCES)
        sizes = iter([1, 20, 7, 3, 1, 13, 40, 1, 1, 31, 2, 5, 1, 50] * 10)
        while any(d < len(s) for d, s in zip(done, SEQUENCES, strict=True)):
            pieces, expected = [], []
            for i, tokens in enumerate(SEQUENCES):
                if (end := min(len(tokens), done[i] + next(sizes))) > done[i]:
                    piece = tokens[done[i] : end]
                    pieces.append(sequence_batch(piece, done[i], TABLES[i], 32, range(len(piece))))
                    expected.append(alone[i][done[i] : end])
                    done[i] = end
            assert_same(case, executor.run(merge(pieces)).full, np.concatenate(expected))


@each_executor
def test_blocks_may_be_shared_and_reused(case: ExecutorCase):
    """A second sequence that continues a cached prefix; then the blocks of an old one under a new one."""
    with closing(case.open(model(), max_model_len=256, num_blocks=12)) as executor:
        tokens = SEQUENCES[2]
        other = [*tokens[:32], 1, 2, 3]
        expected = last_row(executor, other)
        run_tokens(executor, tokens)  # leaves its first 32 tokens in block 0
        assert_same(case, executor.run(sequence_batch(other[32:], 32, [0, 8], 32, [2])).full[0], expected)
        run_tokens(executor, SEQUENCES[1])  # overwrites the blocks 0 and 1
        assert_same(case, last_row(executor, other), expected)


@each_executor
def test_a_step_without_logits(case: ExecutorCase):
    with closing(case.open(model(), max_model_len=256)) as executor:
        assert executor.run(sequence_batch([1, 2, 3], 0, [0], 32, [])).full.shape == (0, 64)
        expected = last_row(executor, [1, 2, 3, 4])
        executor.run(sequence_batch([1, 2, 3], 0, [0], 32, []))
        assert_same(case, executor.run(sequence_batch([4], 3, [0], 32, [0])).full[0], expected)


@each_executor
def test_window_limits_what_is_seen(case: ExecutorCase):
    """With two layers and a window of 5, a token sees 8 positions back and no further."""
    with closing(case.open(model(attention__sliding_window=5), max_model_len=256)) as executor:
        tokens = SEQUENCES[2]
        expected = last_row(executor, tokens)
        for back, same in ((9, True), (8, False)):
            changed = list(tokens)
            changed[-1 - back] = (changed[-1 - back] + 1) % 64
            assert np.array_equal(last_row(executor, changed), expected) == same


@each_executor
def test_sizes(case: ExecutorCase):
    with closing(case.open(model(), max_model_len=100)) as executor:
        assert executor.vocab_size == 64
        assert executor.max_model_len == 100
        assert executor.kv_layout.block_size == 32
        assert executor.kv_layout.num_blocks >= 4


def test_reference_layout_and_limits():
    executor = ReferenceExecutor(model())
    assert executor.max_model_len == 256
    assert executor.kv_layout.num_blocks == 8
    assert executor.kv_layout.block_bytes == 2 * 32 * 2 * (8 + 8) * 4  # layers, tokens, heads, keys and values, float32
    assert ReferenceExecutor(model(), max_model_len=33).kv_layout.num_blocks == 2
    with pytest.raises(UnsupportedModelError, match="at most 256 tokens"):
        ReferenceExecutor(model(), max_model_len=257)
    assert ReferenceExecutor(model(), num_blocks=3).kv_layout.num_blocks == 3


def test_close_twice():
    executor = ReferenceExecutor(model())
    executor.close()
    executor.close()


@pytest.mark.parametrize("token", [-1, 64])
def test_token_outside_the_vocabulary(token: int):
    with pytest.raises(InvalidRequestError, match="from 0 to 63"):
        run_tokens(ReferenceExecutor(model()), [1, token])


def test_a_cache_that_cannot_fit():
    with pytest.raises(InsufficientMemoryError, match="GiB"):
        ReferenceExecutor(model(), num_blocks=1 << 45)


# ---------------------------------------------------------------------------------------------- driver


def test_driver_returns_one_row_or_all():
    executor = ReferenceExecutor(model())
    everything = run_tokens(executor, SEQUENCES[1], all_logits=True)
    assert everything.shape == (33, 64)
    for chunks in ((), (33,), (100,), (1,), (20, 4), (5, 5, 5)):
        np.testing.assert_allclose(
            run_tokens(executor, SEQUENCES[1], chunk_sizes=chunks, all_logits=True), everything, atol=3e-5
        )
        last = run_tokens(executor, SEQUENCES[1], chunk_sizes=chunks)
        np.testing.assert_allclose(last, everything[-1:], atol=3e-5)


def test_driver_chunks():
    class Recorder(ReferenceExecutor):
        def __init__(self) -> None:
            super().__init__(model())
            self.seen: list[tuple[int, int, int]] = []

        def run(self, batch):
            self.seen.append((int(batch.positions[0]), batch.num_tokens, len(batch.logits_rows)))
            return super().run(batch)

    executor = Recorder()
    run_tokens(executor, SEQUENCES[1], chunk_sizes=(20, 5))
    assert executor.seen == [(0, 20, 0), (20, 5, 0), (25, 5, 0), (30, 3, 1)]


@pytest.mark.parametrize("length", [0, 257])
def test_driver_refuses_lengths_that_do_not_fit(length: int):
    with pytest.raises(RequestTooLongError, match="1 to 256"):
        run_tokens(ReferenceExecutor(model()), [1] * length)


def test_driver_refuses_empty_chunks():
    with pytest.raises(ValueError, match="positive"):
        run_tokens(ReferenceExecutor(model()), [1, 2], chunk_sizes=(0,))
