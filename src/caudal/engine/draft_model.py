"""DraftModel: proposes what a smaller model of the same vocabulary would say.

Its tokens are sampled with the parameters and the random numbers of the sequence itself, so that both models agree
as often as their distributions overlap, and always if these are equal. It has a cache of its own, which follows
the sequences whatever becomes of them: what its history does not share with a sequence any more is computed anew.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from caudal.core import Batch
from caudal.engine.blocks import BlockPool
from caudal.engine.sampling import SamplerRow, num_candidates
from caudal.engine.speculation import MAX_STEP_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from caudal.engine.sampling import Sampler
    from caudal.engine.speculation import Speculation
    from caudal.executors.base import Executor


@dataclass(slots=True, eq=False)
class _Mirror:
    """A sequence as the draft model knows it."""

    row: SamplerRow  # with a token list of its own: the sequence's, then the draft's
    num_candidates: int  # that its parameters need
    num_confirmed: int = 0  # tokens that are the sequence's for sure
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list[int])

    def follow(self, token_ids: list[int]) -> None:
        """Bring the history up to date; `token_ids` are those of the sequence. The last one is to be computed again,
        for its logits."""
        own, same = self.row.token_ids, self.num_confirmed
        while same < min(len(own), len(token_ids)) and own[same] == token_ids[same]:
            same += 1
        own[same:] = token_ids[same:]
        self.num_confirmed = len(own)
        self.num_computed = min(self.num_computed, same, len(own) - 1)


class DraftModel:
    """Implements `engine.speculation.Proposer`. The engine's one thread uses it between steps."""

    chances = (0.7, 0.7, 0.7, 0.7)  # by the place in the draft
    free = False

    def __init__(self, executor: Executor, sampler: Sampler, num_token_ids: int, max_step_tokens: int) -> None:
        """`num_token_ids`: that the sampler chooses from. `max_step_tokens`: that its steps may compute; a long prompt
        takes several calls before there are drafts."""
        layout = executor.kv_layout
        self._executor = executor
        self._sampler = sampler
        self._num_token_ids = num_token_ids
        self._max_step_tokens = max_step_tokens
        self._pool = BlockPool(layout.num_blocks, layout.block_size)
        self._max_len = min(executor.max_model_len, layout.num_blocks * layout.block_size)
        self._mirrors: OrderedDict[Speculation, _Mirror] = OrderedDict()  # the least recently used first
        self._seconds_per_token: float | None = None

    @property
    def seconds_per_token(self) -> float:
        return self._seconds_per_token or 0.0

    def levels(self, target: Speculation, limit: int) -> list[int]:
        count = min(limit, self._max_len - len(target.row.token_ids))
        return [min(place, len(self.chances) - 1) for place in range(count)]

    def propose(self, wanted: Sequence[tuple[Speculation, int]]) -> list[list[int]]:
        """One step of the draft model for each token of the longest draft. A sequence that needs more blocks than the
        others leave, or more steps to catch up, gets an empty draft."""
        mirrors = [self._mirror(target) for target, _ in wanted]
        drafting = {
            mirror: count
            for mirror, (_, count) in zip(mirrors, wanted, strict=True)
            if self._reserve(mirror, mirror.num_confirmed + count - 1, keep=mirrors)
        }
        started, num_rounds, num_rows = perf_counter(), 0, 0
        while drafting:
            num_rows += self._run(drafting)
            num_rounds += 1
            drafting = {
                mirror: count
                for mirror, count in drafting.items()
                if mirror.num_computed == mirror.num_confirmed + num_rounds - 1
                and num_rounds < count
                # (others are not up to date yet, or got no token)
                and len(mirror.row.token_ids) == mirror.num_confirmed + num_rounds
            }
        if num_rounds and num_rows <= MAX_STEP_ROWS * num_rounds:  # no long prompt among them
            seconds = (perf_counter() - started) / num_rounds
            old = self._seconds_per_token
            self._seconds_per_token = seconds if old is None else old + 0.2 * (min(seconds, 2 * old) - old)
        return [mirror.row.token_ids[mirror.num_confirmed :] for mirror in mirrors]

    def forget(self, target: Speculation) -> None:
        mirror = self._mirrors.pop(target, None)
        if mirror is not None:
            self._pool.release(mirror.block_table)

    def _mirror(self, target: Speculation) -> _Mirror:
        mirror = self._mirrors.get(target)
        if mirror is None:
            # Penalties would need a history that can be shortened; without them drafts are right a little less often.
            params = replace(
                target.row.params,
                logprobs=None,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
            )
            mirror = self._mirrors[target] = _Mirror(
                replace(target.row, params=params, token_ids=[], state=None),
                num_candidates(params, self._num_token_ids),
            )
        self._mirrors.move_to_end(target)
        mirror.follow(target.row.token_ids)
        return mirror

    def _reserve(self, mirror: _Mirror, num_tokens: int, *, keep: list[_Mirror]) -> bool:
        """Make sure of blocks for that many tokens, at the cost of sequences that get no draft now."""
        missing = self._pool.blocks_for(num_tokens) - len(mirror.block_table)
        if missing <= 0:
            return True
        for other in list(self._mirrors.values()):
            if self._pool.num_free >= missing:
                break
            if other not in keep:
                self._pool.release(other.block_table)
                other.block_table.clear()
                other.num_computed = 0
        if self._pool.num_free < missing:
            return False
        mirror.block_table += self._pool.allocate(missing)
        return True

    def _run(self, drafting: dict[_Mirror, int]) -> int:
        """One step: what these have not computed, and a token more for those that are up to date then. The number of
        tokens computed."""
        budget = self._max_step_tokens
        counts: dict[_Mirror, int] = {}
        for mirror in drafting:
            count = min(len(mirror.row.token_ids) - mirror.num_computed, budget)
            if count > 0:
                counts[mirror] = count
                budget -= count
        ready = [m for m, count in counts.items() if m.num_computed + count == len(m.row.token_ids)]
        logits = self._executor.run(self._batch(counts))
        for mirror, count in counts.items():
            mirror.num_computed += count
        if ready:
            tokens = self._sampler.sample(logits, [mirror.row for mirror in ready])
            for mirror, token in zip(ready, tokens, strict=True):
                if token.error is None:
                    mirror.row.token_ids.append(token.token_id)
        return self._max_step_tokens - budget

    def _batch(self, counts: dict[_Mirror, int]) -> Batch:
        size = self._pool.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start = [0]
        logits_rows: list[int] = []
        candidates: list[int] = []
        tables = np.zeros((len(counts), max(len(mirror.block_table) for mirror in counts)), np.int32)
        for index, (mirror, count) in enumerate(counts.items()):
            end = mirror.num_computed + count
            places = range(mirror.num_computed, end)
            token_ids += mirror.row.token_ids[mirror.num_computed : end]
            positions += places
            slots += [mirror.block_table[place // size] * size + place % size for place in places]
            query_start.append(len(token_ids))
            tables[index, : len(mirror.block_table)] = mirror.block_table
            if end == len(mirror.row.token_ids):
                logits_rows.append(len(token_ids) - 1)
                candidates.append(0 if mirror.row.excludes_end else mirror.num_candidates)
        return Batch(
            token_ids=_int32(token_ids),
            positions=_int32(positions),
            query_start=_int32(query_start),
            seq_lens=_int32([mirror.num_computed + count for mirror, count in counts.items()]),
            block_tables=tables,
            slot_mapping=_int32(slots),
            logits_rows=_int32(logits_rows),
            adapter_slots=np.zeros(len(counts), np.int32),
            num_candidates=_int32(candidates),
        )


def _int32(numbers: list[int]) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)
