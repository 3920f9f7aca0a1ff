"""BlockPool: free xor referenced, counts equal table entries, no two writers, least recently used goes first."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from caudal.engine.blocks import BlockPool, block_hash, root_hash

NUM_BLOCKS = 6


class BlockPoolMachine(RuleBasedStateMachine):
    """Block tables of made-up sequences against a model that remembers what each block must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.tables: list[list[int]] = []
        self.writable: dict[int, list[int]] = {}  # block id -> the only table that may write to it
        self.content: dict[int, int] = {}  # block id -> hash of what was last written

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            return
        table = self.pool.allocate(count)
        assert len(set(table)) == count
        for block_id in table:
            assert block_id not in self.writable
            assert all(block_id not in other for other in self.tables)
            self.writable[block_id] = table
            self.content.pop(block_id, None)
        self.tables.append(table)

    @precondition(lambda self: self.writable)
    @rule(data=st.data(), hash=st.integers(0, 5))
    def write_and_publish(self, data: st.DataObject, hash: int) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.writable)))
        found = self.pool.find(hash)
        self.content[block_id] = hash
        self.pool.publish(block_id, hash)
        del self.writable[block_id]
        assert self.pool.find(hash) == (block_id if found is None else found)

    @rule(hash=st.integers(0, 5))
    def hit(self, hash: int) -> None:
        block_id = self.pool.find(hash)
        if block_id is not None:
            assert self.content[block_id] == hash, "the block holds something else"
            assert block_id not in self.writable
            self.pool.acquire([block_id])
            self.tables.append([block_id])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block_id in table:
            if self.writable.get(block_id) is table:
                del self.writable[block_id]

    @rule(hash=st.integers(0, 5))
    def unpublish(self, hash: int) -> None:
        block_id = self.pool.find(hash)
        if block_id is not None:
            self.pool.unpublish([block_id])
            assert self.pool.find(hash) is None

    @invariant()
    def free_xor_referenced(self) -> None:
        held = {block_id for table in self.tables for block_id in table}
        for block_id in range(NUM_BLOCKS):
            assert self.pool.is_free(block_id) == (block_id not in held)
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert self.pool.usage == pytest.approx(len(held) / NUM_BLOCKS)

    @invariant()
    def counts_equal_table_entries(self) -> None:
        for block_id in range(NUM_BLOCKS):
            entries = sum(table.count(block_id) for table in self.tables)
            assert self.pool.num_references(block_id) == entries


BlockPoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_block_pool = BlockPoolMachine.TestCase


def test_least_recently_freed_is_reused_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    for hash, block_id in enumerate([*first, *second]):
        pool.publish(block_id, hash)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(4) == [first[1], first[0], second[1], second[0]]


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3, 4)
    cached, empty = pool.allocate(1), pool.allocate(1)
    pool.publish(cached[0], 7)
    pool.release(cached)
    pool.release(empty)
    assert pool.allocate(1) == empty
    assert pool.find(7) == cached[0]


def test_a_hit_saves_a_free_block_from_reuse() -> None:
    pool = BlockPool(2, 4)
    table = pool.allocate(2)
    pool.publish(table[0], 1)
    pool.release(table)
    pool.acquire([table[0]])
    assert pool.allocate(1) == [table[1]]
    assert pool.find(1) == table[0]


def test_equal_blocks_are_found_once_and_both_can_be_freed() -> None:
    pool = BlockPool(2, 4)
    a, b = pool.allocate(1), pool.allocate(1)
    pool.publish(a[0], 1)
    pool.publish(b[0], 1)
    assert pool.find(1) == a[0]
    pool.release(a)
    pool.release(b)
    assert pool.num_free == 2
    assert pool.allocate(1) == b, "the copy goes first"


def test_hashes_depend_on_everything_that_keys_depend_on() -> None:
    roots = [root_hash(*args) for args in ((None, ""), (None, "a"), ("a", ""), ("", ""), ("a", "b"), ("ab", ""))]
    assert len(set(roots)) == len(roots)
    base = block_hash(roots[0], [1, 2, 3, 4])
    assert base == block_hash(roots[0], [1, 2, 3, 4])
    assert base not in {block_hash(roots[1], [1, 2, 3, 4]), block_hash(roots[0], [1, 2, 4, 3])}
    assert block_hash(base, [5]) != block_hash(roots[0], [5])


def test_a_pool_needs_blocks() -> None:
    with pytest.raises(ValueError, match="needs blocks"):
        BlockPool(0, 16)
