"""A speculator that knows the future and lies about it as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine_fakes import NUM_TOKEN_IDS, FakeExecutor, history, logits_after, make_engine

from caudal.engine.engine import Engine
from caudal.engine.sampling import ReferenceSampler, SamplerRow
from caudal.engine.speculation import LOOKUP_CHANCES, Chances, Speculation, Speculator
from caudal.executors.base import whole_rows


def future(row: SamplerRow, count: int) -> list[int]:
    """The next tokens of a sequence, computed without an engine; past its end they are as good as any."""
    tokens = list(row.token_ids)
    copy = SamplerRow(row.params, row.seed, tokens, row.num_prompt_tokens, row.end_token_ids)
    sampler = ReferenceSampler(NUM_TOKEN_IDS)
    for _ in range(count):
        (token,) = sampler.sample(whole_rows(logits_after(history(tokens))[None]), [copy])
        tokens.append(max(token.token_id, 0))
    return tokens[len(row.token_ids) :]


class Prophet(Speculator):
    """Drafts of random length that are right up to a random place; `honesty` 1.0: everywhere."""

    def __init__(self, seed: int = 0, *, max_tokens: int = 6, honesty: float = 0.5, full: bool = False) -> None:
        self._rng = random.Random(seed)
        self._max_tokens = max_tokens
        self._honesty = honesty
        self._full = full  # always max_tokens
        self.observed: list[list[int]] = []

    def start(self, row: SamplerRow) -> Speculation:
        return Speculation(row, Chances(LOOKUP_CHANCES))

    def draft(self, targets: Sequence[tuple[Speculation, int]], num_rows: int) -> list[list[int]]:
        return [self._draft(target.row) for target, _ in targets]

    def _draft(self, row: SamplerRow) -> list[int]:
        count = self._max_tokens if self._full else self._rng.randrange(self._max_tokens + 1)
        draft = future(row, count)
        for i in range(count):
            if self._rng.random() > self._honesty:
                draft[i] = self._rng.randrange(NUM_TOKEN_IDS)
        return draft

    def observe(self, target: Speculation, token_ids: Sequence[int]) -> None:
        self.observed.append(list(token_ids))

    def record(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        assert num_rows > num_drafted >= 0

    def forget(self, target: Speculation) -> None:
        pass


def make_speculating(
    executor: FakeExecutor | None = None, prophet: Prophet | None = None, **config: object
) -> tuple[Engine, FakeExecutor, Prophet]:
    engine, executor = make_engine(executor, **config)
    engine._speculator = prophet = prophet or Prophet()
    return engine, executor, prophet
