"""Scheduler: properties that hold after any sequence of arrivals, steps and ends; who goes first."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from caudal.core import FinishReason, Request, SamplingParams, Sequence, SequenceStatus
from caudal.engine.blocks import BlockPool
from caudal.engine.scheduler import MAX_PROMPT_LOGITS_ROWS, Scheduler, wants_prompt_logits

BLOCK_SIZE = 2


def sequence(tokens: list[int], *, priority: int = 0, index: int = 0, **params: object) -> Sequence:
    request = Request("r", tuple(tokens), SamplingParams(**params), priority=priority)
    return Sequence(request, index, list(tokens), len(tokens))


def scheduler(num_blocks: int = 32, block_size: int = BLOCK_SIZE, **limits: int) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": num_blocks * block_size}
    return Scheduler(pool, **(defaults | limits))


def finish_step(
    s: Scheduler, plan: dict[Sequence, int], drafts: dict[Sequence, int] | None = None, num_accepted: int = 0
) -> None:
    """What the engine does after a step: tokens are recorded, a new one appended where all are computed, and more for
    the first `num_accepted` tokens of each draft."""
    drafts = drafts or {}
    s.update({seq: count - drafts.get(seq, 0) for seq, count in plan.items()})
    for seq in plan:
        for _ in range(min(num_accepted, drafts.get(seq, 0))):
            seq.token_ids.append(seq.order % 3)
            s.update({seq: 1})
        if seq in drafts:
            s.drop_drafts(seq)
        if seq.num_computed_tokens == seq.num_tokens:
            seq.token_ids.append(seq.order % 3)
            limit = min(seq.num_prompt_tokens + (seq.request.params.max_tokens or 10**9), s.max_model_len)
            if seq.num_tokens >= limit:
                s.finish(seq, FinishReason.LENGTH)


class SchedulerMachine(RuleBasedStateMachine):
    """Few token values and small blocks, so that prefixes are shared all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Sequence] = []
        self.plan: dict[Sequence, int] = {}

    @initialize(
        num_blocks=st.integers(4, 20),
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 12),
        caching=st.booleans(),
    )
    def start(self, num_blocks: int, max_num_seqs: int, extra_budget: int, caching: bool) -> None:
        self.scheduler = Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=num_blocks * BLOCK_SIZE,
            prefix_caching=caching,
        )

    @rule(
        length=st.integers(1, 30),
        seed=st.integers(0, 3),
        tail=st.lists(st.integers(0, 1), max_size=3),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        priority=st.integers(0, 2),
        prompt_logprobs=st.booleans(),
    )
    def add(
        self,
        length: int,
        seed: int,
        tail: list[int],
        max_tokens: int | None,
        priority: int,
        prompt_logprobs: bool,
    ) -> None:
        tokens = ([seed % 2] * length + tail)[: self.scheduler.max_model_len - 1]
        seq = sequence(
            tokens,
            max_tokens=max_tokens,
            priority=priority,
            prompt_logprobs=1 if prompt_logprobs and seed == 3 else None,
        )
        self.scheduler.add(seq)
        self.alive.append(seq)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        seq = data.draw(st.sampled_from(self.alive))
        self.scheduler.finish(seq, reason)
        self.forget_finished()
        assert seq.block_table == []

    @rule(fails=st.integers(0, 9), draft=st.integers(0, 6), num_accepted=st.integers(0, 6))
    def step(self, fails: int, draft: int = 0, num_accepted: int = 0) -> None:
        best = min(self.alive, key=lambda s: (s.request.priority, s.order), default=None)
        was_running = best is not None and best.status is SequenceStatus.RUNNING
        plan = self.scheduler.schedule()
        assert bool(plan) == bool(self.alive), "no progress"
        if was_running:
            assert best is not None
            assert best.status is SequenceStatus.RUNNING, "the first in line lost its blocks"
            assert best in plan or len(plan) == self.scheduler.max_num_batched_tokens
        self.check_plan(plan, {})
        drafts = self.draft(plan, draft)
        self.check_plan(plan, drafts)
        if fails == 0:
            for seq in plan:
                self.scheduler.finish(seq, FinishReason.ERROR)
        else:
            finish_step(self.scheduler, plan, drafts, num_accepted)
        self.forget_finished()

    def draft(self, plan: dict[Sequence, int], count: int) -> dict[Sequence, int]:
        """Drafts for all that compute their last token, from what is left over."""
        before = dict(plan)
        num_preemptions = self.scheduler.num_preemptions
        wanted = {seq: count for seq in plan if seq.num_computed_tokens + plan[seq] == seq.num_tokens}
        drafts = self.scheduler.add_drafts(plan, wanted)
        assert self.scheduler.num_preemptions == num_preemptions
        assert all(0 < drafts[seq] <= count for seq in drafts)
        assert plan == {seq: n + drafts.get(seq, 0) for seq, n in before.items()}
        return drafts

    def check_plan(self, plan: dict[Sequence, int], drafts: dict[Sequence, int]) -> None:
        pool = self.scheduler.pool
        assert sum(plan.values()) <= self.scheduler.max_num_batched_tokens
        written: set[int] = set()
        rows = 0
        for seq, count in plan.items():
            assert seq.status is SequenceStatus.RUNNING
            end = seq.num_computed_tokens + count
            assert count > 0
            assert end == seq.num_tokens + drafts[seq] if seq in drafts else end <= seq.num_tokens
            assert end < self.scheduler.max_model_len
            assert len(seq.block_table) == len(set(seq.block_table))
            assert len(seq.block_table) * BLOCK_SIZE >= end
            for index in range(seq.num_computed_tokens // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
                block_id = seq.block_table[index]
                assert pool.num_references(block_id) == 1, "a writer shares its block"
                assert block_id not in written
                written.add(block_id)
            if wants_prompt_logits(seq):
                assert seq.num_cached_tokens == 0
                rows += count
        assert rows <= MAX_PROMPT_LOGITS_ROWS

    def forget_finished(self) -> None:
        self.alive = [seq for seq in self.alive if seq.status is not SequenceStatus.FINISHED]

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        entries = Counter(block_id for seq in self.alive for block_id in seq.block_table)
        pool = self.scheduler.pool
        for block_id in range(pool.num_blocks):
            assert pool.num_references(block_id) == entries[block_id]
        assert pool.num_free == pool.num_blocks - len(entries)

    @invariant()
    def only_tokens_of_sequences_are_published(self) -> None:
        pool = self.scheduler.pool
        for seq in self.alive:
            for index, block_id in enumerate(seq.block_table):
                hash = pool._blocks[block_id].hash
                assert hash is None or seq.block_hashes[index] == hash
                assert hash is None or (index + 1) * BLOCK_SIZE <= seq.num_computed_tokens

    @invariant()
    def queues_are_consistent(self) -> None:
        s = self.scheduler
        running = [seq for seq in self.alive if seq.status is SequenceStatus.RUNNING]
        assert s.num_running == len(running) <= s.max_num_seqs
        assert s.num_waiting == len(self.alive) - len(running)
        for seq in self.alive:
            if seq.status is not SequenceStatus.RUNNING:
                assert seq.block_table == []
                assert seq.num_computed_tokens == 0
        assert set(s._computing.values()) <= set(running)

    def teardown(self) -> None:
        """Whatever happened, everybody ends."""
        for _ in range(3000):
            if not self.alive:
                break
            self.step(fails=1)
            self.blocks_are_accounted_for()
        assert not self.alive
        if hasattr(self, "scheduler"):
            assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
            assert not self.scheduler._computing


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_scheduler = SchedulerMachine.TestCase


def test_decodes_come_first_and_prompts_fill_the_rest() -> None:
    s = scheduler(num_blocks=64, max_num_batched_tokens=8)
    decoding = [sequence([i], max_tokens=20) for i in range(3)]
    for seq in decoding:
        s.add(seq)
    finish_step(s, s.schedule())
    long = sequence(list(range(30)))
    s.add(long)
    assert s.schedule() == {**dict.fromkeys(decoding, 1), long: 5}


def test_the_first_in_line_gets_half_and_the_shortest_the_rest() -> None:
    s = scheduler(num_blocks=64, max_num_batched_tokens=10)
    long, middle, short = (sequence([i] * n, max_tokens=1) for i, n in enumerate((40, 20, 3)))
    for seq in (long, middle, short):
        s.add(seq)
    assert s.schedule() == {long: 5, short: 3, middle: 2}


def test_admission_reserves_the_whole_prompt_and_room_to_grow() -> None:
    s = scheduler(num_blocks=10, max_num_seqs=4)
    first = sequence([0] * 6, max_tokens=10)
    s.add(first)
    finish_step(s, s.schedule())
    assert len(first.block_table) == 3
    fits, does_not = sequence([1] * 10, max_tokens=1), sequence([2] * 11, max_tokens=1)
    s.add(does_not)
    s.add(fits)
    s.schedule()
    assert does_not.status is SequenceStatus.WAITING, "6 blocks, 6 are free, but one is for `first` to grow"
    assert fits.status is SequenceStatus.WAITING, "not past the one before it"
    s.finish(does_not, FinishReason.ABORT)
    s.schedule()
    assert fits.status is SequenceStatus.RUNNING


def test_a_sequence_that_waits_for_a_prefix_hurries_the_one_that_computes_it() -> None:
    s = scheduler(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=8)
    s.add(sequence([9] * 300, max_tokens=1))
    shared = list(range(40))
    s.add(holder := sequence([*shared, *range(100, 200)], max_tokens=1))
    while holder.status is not SequenceStatus.RUNNING:
        finish_step(s, s.schedule())
    s.add(urgent := sequence([*shared, 1], max_tokens=1, priority=-1))
    before = holder.num_computed_tokens
    plan = s.schedule()
    assert urgent.status is SequenceStatus.WAITING
    assert plan[holder] == 8, "all of the budget: its result is the most urgent"
    while urgent.status is SequenceStatus.WAITING:
        finish_step(s, plan)
        plan = s.schedule()
    assert urgent.num_cached_tokens == 40
    assert before < holder.num_computed_tokens < 140, "it did not wait for the holder's own part"


def test_ends_in_every_state() -> None:
    s = scheduler(num_blocks=8, max_num_seqs=1)
    running, waiting = sequence([0] * 4), sequence([1] * 4)
    s.add(running)
    s.add(waiting)
    s.schedule()
    s.finish(waiting, FinishReason.ABORT)
    s.finish(running, FinishReason.ABORT)
    s.finish(running, FinishReason.ABORT)
    assert (s.num_running, s.num_waiting, s.pool.num_free) == (0, 0, 8)
    assert s.schedule() == {}


def test_limits_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        scheduler(max_num_seqs=9, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="32 blocks cannot hold"):
        scheduler(max_model_len=65)


def test_a_long_queue_costs_nothing() -> None:
    """4,096 waiting sequences with a common prefix: a step looks at no more of them than could run."""
    s = scheduler(num_blocks=4096, block_size=16, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096)
    common = list(range(1000))
    for i in range(4096):
        s.add(sequence([*common, i], max_tokens=1000))
    times: list[float] = []
    for _ in range(60):
        start = time.thread_time()
        plan = s.schedule()
        times.append(time.thread_time() - start)
        finish_step(s, plan)
    assert s.num_running > 50
    assert sorted(times)[30] < 2e-3
