"""Sequences whose grammar says which tokens may come next: masks follow the output, also within drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_fakes import EOS, Collected, FakeExecutor, expected, make_engine, request, run_all
from numpy.typing import NDArray

from caudal.core import CaudalError, FinishReason, InvalidRequestError, Request, TokenMatcher
from caudal.engine.engine import Engine


class Residues:
    """Token i of the output must leave the remainder i % 3 when divided by 3; after `length` of them it is over."""

    def __init__(self, length: int, count: int = 0, fail_at: int = -1, refuse_at: int = -1) -> None:
        self.length = length
        self.count = count
        self.fail_at = fail_at
        self.refuse_at = refuse_at

    def copy(self) -> TokenMatcher:
        return Residues(self.length, self.count, self.fail_at, self.refuse_at)

    def fill(self, mask: NDArray[np.uint32]) -> None:
        if self.count == self.fail_at:
            raise CaudalError("the mask is too complex")
        bits = np.zeros(len(mask) * 32, np.uint8)
        bits[self.count % 3 : EOS : 3] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token_id: int) -> bool:
        assert token_id % 3 == self.count % 3, "the mask was not the one for this place"
        if self.count == self.refuse_at:
            raise CaudalError("the grammar does not go on")
        self.count += 1
        return self.count == self.length


def constrained(name: str, matcher: Residues, **params: object) -> Request:
    return replace(request(name, list(b"prompt of " + name.encode()), **params), matcher=matcher)


def run(engine: Engine, *requests: Request) -> Collected:
    for r in requests:
        engine.add(r)
    return run_all(engine)


def residues(token_ids: list[int]) -> list[int]:
    return [token_id % 3 for token_id in token_ids]


@pytest.mark.parametrize("settings", [{}, {"speculation": "off"}, {"max_num_batched_tokens": 4}, {"num_blocks": 20}])
def test_outputs_follow_their_grammars_beside_others(settings: dict[str, int | str]) -> None:
    config = dict(settings)
    engine, executor = make_engine(FakeExecutor(num_blocks=int(config.pop("num_blocks", 64))), **config)
    free = request("free", list(b"nothing said"), max_tokens=20)
    some = [constrained(f"r{i}", Residues(9 + i), max_tokens=30, temperature=0.0, n=1 + i % 2) for i in range(5)]
    collected = run(engine, free, *some)
    assert not executor.violations
    assert collected.tokens["free", 0] == expected(free)
    for i, r in enumerate(some):
        for index in range(r.params.n):
            tokens = collected.tokens[r.request_id, index]
            assert residues(tokens) == [k % 3 for k in range(9 + i)]
            assert collected.reason(r.request_id, index) is FinishReason.STOP


def test_the_request_keeps_its_matcher_for_all_sequences() -> None:
    matcher = Residues(5)
    engine, _ = make_engine()
    collected = run(engine, constrained("a", matcher, n=3, seed=1, temperature=1.0))
    assert matcher.count == 0
    assert len({tuple(collected.tokens["a", i]) for i in range(3)}) == 3


@pytest.mark.parametrize(("fault", "message"), [("fail_at", "too complex"), ("refuse_at", "does not go on")])
def test_a_grammar_that_fails_ends_only_its_request(fault: str, message: str) -> None:
    engine, _ = make_engine()
    good = constrained("good", Residues(8))
    bad = constrained("bad", Residues(8, **{fault: 3}))
    collected = run(engine, good, bad)
    assert residues(collected.tokens["good", 0]) == [k % 3 for k in range(8)]
    assert collected.reason("bad", 0) is FinishReason.ERROR
    assert message in str(collected.last["bad", 0].error)
    assert not engine.has_work


def test_min_tokens_contradict_a_grammar() -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="grammar"):
        engine.add(constrained("a", Residues(5), min_tokens=2))


def test_max_tokens_end_an_output_early() -> None:
    engine, _ = make_engine()
    collected = run(engine, constrained("a", Residues(9), max_tokens=4))
    assert residues(collected.tokens["a", 0]) == [0, 1, 2, 0]
    assert collected.reason("a", 0) is FinishReason.LENGTH
