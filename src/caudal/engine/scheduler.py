"""Scheduler: which sequences compute how many tokens in the next step, and which blocks they hold.

There are no prefill and decode phases: the computed tokens of every sequence chase its tokens. Standard
library only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from caudal.core import FinishReason, Sequence, SequenceStatus
from caudal.engine.blocks import BlockPool, block_hash, root_hash

# Prompt logprobs need a row of logits for each prompt token; this many in one step bound their memory.
MAX_PROMPT_LOGITS_ROWS = 64


def wants_prompt_logits(seq: Sequence) -> bool:
    """Whether the prompt positions of this sequence still have to give logits."""
    return seq.index == 0 and seq.request.params.prompt_logprobs is not None and seq.num_output_tokens == 0


class _Queue:
    """Sequences in the order of service: by priority, then by arrival."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Sequence]] = []

    @staticmethod
    def _entry(seq: Sequence) -> tuple[int, int, Sequence]:
        return seq.request.priority, seq.order, seq

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, _, seq in self._entries)

    @property
    def first(self) -> Sequence:
        return self._entries[0][2]

    @property
    def last(self) -> Sequence:
        return self._entries[-1][2]

    def add(self, seq: Sequence) -> None:
        insort(self._entries, self._entry(seq))

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._entries, self._entry(seq))
        assert self._entries[index][2] is seq
        del self._entries[index]


@dataclass(frozen=True, slots=True)
class _Probe:
    """What the prefix cache offers a waiting sequence right now."""

    hits: tuple[int, ...]  # ids of the blocks found
    num_blocks_needed: int  # that count as free until the sequence is admitted
    holder: Sequence | None  # who is computing the next block of the prefix at this moment


@dataclass(slots=True)
class _Candidate:
    """A sequence with more than one token to compute. `priority` and `order` are those of the best-placed
    sequence that waits for its result, `remaining` the fewest tokens among these."""

    seq: Sequence
    priority: int
    order: int
    remaining: int

    def hurry(self, seq: Sequence, remaining: int) -> None:
        self.priority, self.order = min((self.priority, self.order), (seq.request.priority, seq.order))
        self.remaining = min(self.remaining, remaining)


class Scheduler:
    """Shares a token budget and a pool of blocks between sequences, step by step.

    - Decodes come first. The rest of the budget goes to prompts: half of it to the first in line, so that a
      long prompt always advances, and half to those with the fewest tokens left, so that a short prompt does
      not wait for a long one.
    - Admission is in the order of arrival within a priority. A sequence is admitted when there are blocks for
      all its tokens and one to spare for each running sequence that may still grow; it gets them at once.
    - A sequence whose next prefix block is being computed by another one waits for it instead of computing
      it again. Only running sequences are waited for, and those wait for nobody, so there is no deadlock.
    - When a running sequence needs a block and none is free, the last in line loses all its blocks and is
      recomputed later (mostly from its own cached blocks). The first in line never does.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
    ) -> None:
        """`max_model_len`: tokens of the longest sequence, at most what the whole pool holds."""
        if max_num_seqs < 1 or max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs}), "
                "which must be at least 1"
            )
        if pool.blocks_for(max_model_len) > pool.num_blocks:
            raise ValueError(f"{pool.num_blocks} blocks cannot hold max_model_len={max_model_len} tokens")
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.prefix_caching = prefix_caching
        self.preempted: list[Sequence] = []  # by the latest schedule()
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache, at first admissions
        self.prefix_hits = 0  # tokens found there
        self._waiting = _Queue()
        self._running = _Queue()
        self._next_order = 0
        self._computing: dict[int, Sequence] = {}  # hash of a block -> the running sequence that computes it

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence, with at least one and fewer than `max_model_len` tokens."""
        assert 0 < seq.num_tokens < self.max_model_len
        seq.order = self._next_order
        self._next_order += 1
        self._waiting.add(seq)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state and free its blocks. On ERROR their content is not offered to others."""
        if seq.status is SequenceStatus.RUNNING:
            if reason is FinishReason.ERROR:
                self.pool.unpublish(seq.block_table)
            self._running.remove(seq)
            self._give_up_blocks(seq)
        elif seq.status is not SequenceStatus.FINISHED:
            self._waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    def schedule(self) -> dict[Sequence, int]:
        """Choose the next step: for each sequence in it, how many of its tokens to compute. Their blocks are in
        its block table. Empty only if nothing waits and nothing runs."""
        self.preempted = []
        plan: dict[Sequence, int] = {}
        prompts: list[Sequence] = []
        for seq in list(self._running):
            if seq.status is not SequenceStatus.RUNNING:
                continue  # lost its blocks to one before it
            if seq.num_tokens - seq.num_computed_tokens > 1:
                prompts.append(seq)
            elif self._grow(seq):
                plan[seq] = 1
        self._make_way(plan)
        candidates = [
            _Candidate(seq, seq.request.priority, seq.order, seq.num_tokens - seq.num_computed_tokens)
            for seq in prompts
            if seq.status is SequenceStatus.RUNNING
        ]
        if len(plan) < self.max_num_batched_tokens:
            self._add_waiting(candidates)
        if candidates:
            self._share(self.max_num_batched_tokens - len(plan), candidates, plan)
        return plan

    def add_drafts(self, plan: dict[Sequence, int], wanted: dict[Sequence, int]) -> dict[Sequence, int]:
        """Let sequences of the plan that compute their last token compute draft tokens behind it, as far as the budget,
        free blocks and their final lengths allow: how many of those wanted, which the plan then includes. Nobody is
        preempted for it, and `drop_drafts` gives back what it took."""
        budget = self.max_num_batched_tokens - sum(plan.values())
        granted: dict[Sequence, int] = {}
        for seq, count in wanted.items():
            assert seq.num_computed_tokens + plan[seq] == seq.num_tokens
            allowed = min(count, budget, self._final_length(seq) - seq.num_tokens)
            missing = self.pool.blocks_for(seq.num_tokens + allowed) - len(seq.block_table)
            if missing > 0:
                seq.block_table += self.pool.allocate(min(missing, self.pool.num_free))
            allowed = min(allowed, len(seq.block_table) * self.pool.block_size - seq.num_tokens)
            if allowed > 0:
                granted[seq] = allowed
                plan[seq] += allowed
                budget -= allowed
        return granted

    def drop_drafts(self, seq: Sequence) -> None:
        """Give back the blocks that only rejected draft tokens needed. Call it after `update` for the accepted ones."""
        num_blocks = self.pool.blocks_for(seq.num_computed_tokens)
        self.pool.release(seq.block_table[num_blocks:])
        del seq.block_table[num_blocks:]

    def update(self, plan: dict[Sequence, int]) -> None:
        """Record that tokens have been computed: full blocks can be shared from now on. Only tokens that the sequences
        have count: of drafts those that were accepted. Not for sequences that finished meanwhile."""
        size = self.pool.block_size
        for seq, num_tokens in plan.items():
            first, seq.num_computed_tokens = seq.num_computed_tokens // size, seq.num_computed_tokens + num_tokens
            if not self.prefix_caching:
                continue
            for index in range(first, seq.num_computed_tokens // size):
                hash = self._hash(seq, index)
                self.pool.publish(seq.block_table[index], hash)
                if self._computing.get(hash) is seq:
                    del self._computing[hash]

    # ------------------------------------------------------------------------------------- running

    def _grow(self, seq: Sequence) -> bool:
        """Make sure of a block for the next token, at the cost of the last in line. False: that was itself."""
        if len(seq.block_table) * self.pool.block_size > seq.num_computed_tokens:
            return True
        while self.pool.num_free == 0:
            victim = self._running.last
            self._preempt(victim)
            if victim is seq:
                return False
        seq.block_table += self.pool.allocate(1)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._give_up_blocks(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        seq.status = SequenceStatus.PREEMPTED
        self._waiting.add(seq)
        self.preempted.append(seq)
        self.num_preemptions += 1

    def _give_up_blocks(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        for hash in seq.block_hashes[seq.num_computed_tokens // self.pool.block_size :]:
            if self._computing.get(hash) is seq:
                del self._computing[hash]
        seq.block_table.clear()

    def _num_growing(self) -> int:
        """Running sequences that may still need another block."""
        size = self.pool.block_size
        return sum(len(seq.block_table) * size < self._final_length(seq) for seq in self._running)

    def _final_length(self, seq: Sequence) -> int:
        """Most tokens of this sequence that the cache will hold; the last one sampled is never computed."""
        max_tokens = seq.request.params.max_tokens
        if max_tokens is None:
            return self.max_model_len - 1
        return min(seq.num_prompt_tokens + max_tokens, self.max_model_len) - 1

    # ------------------------------------------------------------------------------------- waiting

    def _make_way(self, plan: dict[Sequence, int]) -> None:
        """Preempt running sequences of a lower priority that keep the first waiting one from a place or blocks."""
        if not self._waiting or not self._running:
            return
        first = self._waiting.first
        if self._running.last.request.priority <= first.request.priority:
            return
        needed = self._probe(first).num_blocks_needed + self._num_growing()
        lower = [seq for seq in self._running if seq.request.priority > first.request.priority]
        if needed > self.pool.num_free + sum(len(seq.block_table) for seq in lower):
            return  # would not help
        for victim in reversed(lower):
            if len(self._running) < self.max_num_seqs and needed <= self.pool.num_free:
                break
            self._preempt(victim)
            plan.pop(victim, None)

    def _add_waiting(self, candidates: list[_Candidate]) -> None:
        """Append the waiting sequences that could all be admitted now, in order. One that does not fit stops those
        behind it, or it might starve. One that waits for another's prefix hurries that one instead."""
        slots = self.max_num_seqs - len(self._running)
        if slots == 0 or not self._waiting:
            return
        by_seq = {candidate.seq: candidate for candidate in candidates}
        free = self.pool.num_free - self._num_growing()
        for seq in self._waiting:
            if slots == 0:
                break
            probe = self._probe(seq)
            if probe.num_blocks_needed > free:
                break
            slots -= 1
            free -= probe.num_blocks_needed
            remaining = seq.num_tokens - len(probe.hits) * self.pool.block_size
            if probe.holder is None:
                candidates.append(_Candidate(seq, seq.request.priority, seq.order, remaining))
            elif probe.holder in by_seq:
                by_seq[probe.holder].hurry(seq, remaining)

    def _share(self, budget: int, candidates: list[_Candidate], plan: dict[Sequence, int]) -> None:
        """Fill the rest of the plan from these sequences, admitting those that wait."""
        rows = MAX_PROMPT_LOGITS_ROWS
        open_doors = True  # no admission has failed yet in this step

        def grant(seq: Sequence, limit: int) -> None:
            nonlocal budget, rows, open_doors
            if limit <= 0 or (wants_prompt_logits(seq) and rows == 0):
                return
            if seq.status is not SequenceStatus.RUNNING:
                if not open_doors:
                    return
                probe = self._probe(seq)
                if probe.holder is not None:
                    return  # one that was admitted a moment ago
                if probe.num_blocks_needed + self._num_growing() > self.pool.num_free:
                    open_doors = False
                    return
                self._admit(seq, probe)
            done = plan.get(seq, 0)
            num_tokens = min(seq.num_tokens - seq.num_computed_tokens - done, limit)
            if wants_prompt_logits(seq):
                num_tokens = min(num_tokens, rows)
                rows -= num_tokens
            if num_tokens > 0:
                plan[seq] = done + num_tokens
                budget -= num_tokens

        first = min(candidates, key=lambda c: (c.priority, c.order))
        before = budget
        grant(first.seq, (budget + 1) // 2)
        first.remaining -= before - budget
        for candidate in sorted(candidates, key=lambda c: (c.priority, c.remaining, c.order)):
            grant(candidate.seq, budget)

    def _probe(self, seq: Sequence) -> _Probe:
        """Look the beginning of a waiting sequence up. Its last token is always computed anew, for its logits."""
        hits: list[int] = []
        num_shared = 0  # hit blocks that others hold, and blocks that another is computing
        holder: Sequence | None = None
        if self.prefix_caching and not wants_prompt_logits(seq):
            for index in range((seq.num_tokens - 1) // self.pool.block_size):
                hash = self._hash(seq, index)
                block_id = self.pool.find(hash) if holder is None else None
                if block_id is not None:
                    hits.append(block_id)
                    num_shared += not self.pool.is_free(block_id)
                elif (computing := self._computing.get(hash)) is not None:
                    holder = holder or computing
                    num_shared += 1
                else:
                    break
        return _Probe(tuple(hits), self.pool.blocks_for(seq.num_tokens) - num_shared, holder)

    def _admit(self, seq: Sequence, probe: _Probe) -> None:
        self._waiting.remove(seq)
        self._running.add(seq)
        self.pool.acquire(probe.hits)
        num_blocks = self.pool.blocks_for(seq.num_tokens)
        seq.block_table = [*probe.hits, *self.pool.allocate(num_blocks - len(probe.hits))]
        seq.num_computed_tokens = len(probe.hits) * self.pool.block_size
        if seq.status is SequenceStatus.WAITING:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.prefix_queries += seq.num_tokens
            self.prefix_hits += seq.num_cached_tokens
        seq.status = SequenceStatus.RUNNING
        if self.prefix_caching and not wants_prompt_logits(seq):
            for index in range(len(probe.hits), seq.num_tokens // self.pool.block_size):
                self._computing.setdefault(self._hash(seq, index), seq)

    def _hash(self, seq: Sequence, index: int) -> int:
        """Hash of a full block of the sequence, computed once."""
        hashes, size = seq.block_hashes, self.pool.block_size
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else root_hash(seq.request.adapter, seq.request.cache_salt)
            start = len(hashes) * size
            hashes.append(block_hash(parent, seq.token_ids[start : start + size]))
        return hashes[index]
