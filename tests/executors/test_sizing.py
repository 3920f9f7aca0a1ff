"""How memory is divided between weights and cache."""

from __future__ import annotations

from typing import Any

import pytest

from caudal.config import EngineConfig
from caudal.core import InsufficientMemoryError
from caudal.executors.lowering import MemoryNeed
from caudal.executors.sizing import BLOCK_SIZE, MemoryPlan, plan_memory

GIB = 1 << 30
RESERVE = 256 << 20  # left to the rest of the process
BLOCK = 4 << 20  # 128 KiB a token
NEED = MemoryNeed(packed_weights=4 * GIB, mapped_weights=GIB // 2, kv_block=BLOCK)
CONTEXT = 8192


def plan(free: float, *, reserve: int = 0, need: MemoryNeed = NEED, **settings: Any) -> MemoryPlan:
    """free: bytes for weights and cache."""
    available = int(free) + RESERVE
    return plan_memory(
        EngineConfig(**settings), need, context_length=CONTEXT, available=available + reserve, reserve=reserve
    )


def test_packed_where_it_fits():
    roomy = plan(16 * GIB)
    assert roomy == MemoryPlan(pack=True, max_model_len=CONTEXT, num_blocks=4 * CONTEXT // BLOCK_SIZE)
    assert plan(16 * GIB, reserve=3 * GIB) == roomy


def test_less_memory_means_less_cache_then_a_shorter_context():
    less = plan(6 * GIB)
    assert (less.pack, less.max_model_len, less.num_blocks) == (True, CONTEXT, 3 * GIB // 2 // BLOCK)
    short = plan(5 * GIB)
    assert (short.pack, short.max_model_len, short.num_blocks) == (True, 4096, GIB // 2 // BLOCK)
    assert short.remark == ""


@pytest.mark.parametrize(
    ("settings", "smallest"),  # bytes of cache that packed weights must leave room for
    [
        ({}, 1024 // BLOCK_SIZE * BLOCK),
        ({"max_model_len": 4096}, 4096 // BLOCK_SIZE * BLOCK),
        ({"max_model_len": 64}, 2 * BLOCK),
        ({"kv_cache_memory": 1 << 30}, 1 << 30),
    ],
)
def test_the_mode_follows_from_what_fits(settings: dict[str, Any], smallest: int):
    limit = NEED.weights + smallest
    assert plan(limit, **settings).pack
    in_place = plan(limit - 1, **settings)
    assert not in_place.pack
    assert "4.5 GiB packed do not fit" in in_place.remark
    assert "--weights packed" in in_place.remark
    # The promised bytes of others count.
    assert not plan(limit - 1, reserve=GIB, **settings).pack


def test_weights_in_the_file_leave_their_pages_most_of_the_memory():
    small = plan(2 * GIB)
    assert (small.pack, small.num_blocks) == (False, 2 * GIB // 4 // BLOCK)
    assert small.max_model_len == small.num_blocks * BLOCK_SIZE
    asked = plan(2 * GIB, max_model_len=CONTEXT)
    assert (asked.pack, asked.max_model_len, asked.num_blocks) == (False, CONTEXT, CONTEXT // BLOCK_SIZE)
    # Asked for, where there is plenty: the same cache as beside packed weights.
    chosen = plan(16 * GIB, weights="mmap")
    assert (chosen.pack, chosen.num_blocks) == (False, plan(16 * GIB).num_blocks)
    assert chosen.remark == "weights are used where they lie in the file (mmap mode)"


def test_packed_on_demand_is_refused_where_it_does_not_fit():
    assert plan(NEED.weights + BLOCK, weights="packed").max_model_len == BLOCK_SIZE
    with pytest.raises(InsufficientMemoryError, match=r"the weights need 4.5 GiB .*--weights mmap.*--kv-type q8"):
        plan(NEED.weights, weights="packed")
    with pytest.raises(InsufficientMemoryError, match=r"a context of 8192 tokens .*--weights mmap.*--ctx"):
        plan(NEED.weights + BLOCK, weights="packed", max_model_len=CONTEXT)


def test_a_cache_that_fits_nowhere_is_refused_with_the_ways_out():
    with pytest.raises(InsufficientMemoryError, match=r"^a cache of 1.0 GiB for a context .*--ctx.*--kv-type q8") as e:
        plan(GIB - 1, max_model_len=CONTEXT)
    assert "--weights mmap" not in str(e.value)
    with pytest.raises(InsufficientMemoryError, match=r"^a cache of 2.0 GiB \(--kv-cache-memory\)"):
        plan(GIB, kv_cache_memory=2 * GIB)
    with pytest.raises(InsufficientMemoryError, match=r"^one block of cache of 4.0 MiB"):
        plan(0)
    with pytest.raises(InsufficientMemoryError, match="one block of 32 tokens"):
        plan(16 * GIB, kv_cache_memory=BLOCK - 1)


def test_locked_weights_must_fit_in_either_mode():
    for weights in ("auto", "packed", "mmap"):
        with pytest.raises(InsufficientMemoryError, match=r"the weights need 4.5 GiB .*do without --mlock"):
            plan(NEED.weights, weights=weights, mlock=True)
    assert plan(16 * GIB, mlock=True).pack
    assert not plan(16 * GIB, weights="mmap", mlock=True).pack


def test_a_program_without_attention_needs_no_cache():
    assert plan(NEED.weights + GIB, need=MemoryNeed(4 * GIB, GIB // 2, 0)).pack
