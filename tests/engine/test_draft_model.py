"""A draft model that follows its sequences whatever becomes of them; its fake executor checks every key."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from engine_fakes import (
    NUM_TOKEN_IDS,
    Collected,
    FakeExecutor,
    byte_tokenizer,
    expected,
    history,
    request,
    run_all,
)
from test_engine import check, check_empty, prompt

from caudal.config import EngineConfig
from caudal.core import Batch, InvalidSettingError
from caudal.engine.draft_model import DraftModel
from caudal.engine.engine import Engine, validate_config
from caudal.engine.sampling import ReferenceSampler
from caudal.engine.speculation import StepCosts


class Student(FakeExecutor):
    """Knows the real model's logits, and is wrong after a share of all histories."""

    def __init__(self, num_blocks: int = 64, *, wrong: float = 0.3, max_model_len: int = 256) -> None:
        super().__init__(num_blocks, 8, max_model_len)
        self.wrong = wrong

    def all_logits(self, batch: Batch) -> np.ndarray:
        logits = super().all_logits(batch)
        for row in logits:
            if random.Random(float(row[0])).random() < self.wrong:
                row[:NUM_TOKEN_IDS] = row[:NUM_TOKEN_IDS][::-1].copy()
        return logits


@pytest.fixture(autouse=True)
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps cost the same for any number of rows, and drafts nothing: the engine speculates as much as it can."""
    monkeypatch.setattr(StepCosts, "record", lambda self, num_rows, seconds: setattr(self, "_seconds", [1.0] * 16))
    monkeypatch.setattr(DraftModel, "seconds_per_token", 0.0)


def make_drafting(
    student: Student | None = None, executor: FakeExecutor | None = None, **config: object
) -> tuple[Engine, FakeExecutor, Student]:
    student, executor = student or Student(), executor or FakeExecutor()
    settings = EngineConfig(
        **({"max_num_seqs": 8, "max_num_batched_tokens": 32, "speculation": "draft", "draft_model": "x"} | config)  # type: ignore[arg-type]
    )
    engine = Engine(executor, byte_tokenizer(), settings, ReferenceSampler(NUM_TOKEN_IDS), draft_executor=student)
    return engine, executor, student


def mirrors(engine: Engine) -> DraftModel:
    assert engine._speculator is not None
    proposer = engine._speculator._proposer
    assert isinstance(proposer, DraftModel)
    return proposer


def check_students_memory(engine: Engine) -> None:
    draft_model = mirrors(engine)
    assert not draft_model._mirrors
    assert draft_model._pool.num_free == draft_model._pool.num_blocks


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alone(wrong: float, temperature: float) -> None:
    engine, executor, student = make_drafting(Student(wrong=wrong))
    r = request("a", prompt(40), max_tokens=60, ignore_eos=True, temperature=temperature, seed=3)
    engine.add(r)
    check(run_all(engine), r)
    assert executor.violations == student.violations == []
    stats = engine.stats
    if wrong == 0.0:
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 40, "the same uniform numbers give the same tokens"
    elif wrong == 1.0:
        assert stats.num_accepted_tokens <= 2
    else:
        assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens
    check_empty(engine)
    check_students_memory(engine)


MATRIX = list(product([False, True], [False, True], [8, 32], [False, True]))


@pytest.mark.parametrize(("scarce", "short_of_memory", "budget", "aborts"), MATRIX)
def test_preemption_prefix_hits_chunks_and_aborts(
    scarce: bool, short_of_memory: bool, budget: int, aborts: bool
) -> None:
    """Also with a student whose cache holds one sequence or two, and not the longest ones."""
    rng = random.Random(f"{scarce}{short_of_memory}{budget}{aborts}")
    common = prompt(16, 99)
    requests = [
        request(
            f"r{i}",
            common + prompt(rng.randrange(1, 40), i),
            max_tokens=rng.randrange(1, 40),
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
            n=1 + i % 2,
            ignore_eos=i % 3 == 0,
            priority=rng.choice([0, 0, 1]),
            repetition_penalty=rng.choice([1.0, 1.2]),
        )
        for i in range(12)
    ]
    num_blocks = 96 // 4 + 3 if scarce else 600
    executor = FakeExecutor(num_blocks, 4, max_model_len=num_blocks * 4)
    student = Student(10 if short_of_memory else 200, max_model_len=1000)
    engine, _, _ = make_drafting(student, executor, max_num_batched_tokens=budget)
    collected, aborted = Collected(), set[str]()
    arrivals = list(requests)
    while arrivals or engine.has_work:
        if arrivals and rng.random() < 0.3:
            engine.add(arrivals.pop(0))
        if aborts and rng.random() < 0.05:
            victim = f"r{rng.randrange(12)}"
            outputs = engine.abort(victim)
            aborted |= {victim} if outputs else set()
            collected.add(outputs)
        collected.add(engine.step())
    check(collected, *(r for r in requests if r.request_id not in aborted), max_model_len=num_blocks * 4)
    assert executor.violations == student.violations == []
    assert engine.stats.num_accepted_tokens > 0, "the case does not test what it should"
    assert max(map(sum, student.batches)) <= budget
    check_empty(engine)
    check_students_memory(engine)


def test_a_step_of_the_student_computes_what_is_new() -> None:
    engine, executor, student = make_drafting(Student(wrong=0.0), num_speculative_tokens=3)
    engine.add(request("a", prompt(20), max_tokens=13, ignore_eos=True))
    run_all(engine)
    # The first decode is plain, to be measured. Then the student catches up and gives a token more each step; it
    # computes the last one of a draft with the next draft.
    assert executor.batches == [[20], [1], [4], [4], [3]]
    assert student.batches == [[22], [1], [1], [2], [1], [1], [2], [1]]


def test_a_long_prompt_takes_the_student_several_steps() -> None:
    executor = FakeExecutor(num_blocks=100, max_model_len=400)
    engine, _, student = make_drafting(Student(wrong=0.0), executor)
    r = request("a", prompt(100), max_tokens=40, ignore_eos=True)
    engine.add(r)
    check(run_all(engine), r, max_model_len=400)
    assert [sum(step) for step in student.batches[:4]] == [32, 32, 32, 9]
    assert engine.stats.num_accepted_tokens > 20


def test_a_sequence_longer_than_the_students_context_goes_on_alone() -> None:
    engine, _, student = make_drafting(Student(wrong=0.0, max_model_len=40))
    r = request("a", prompt(20), max_tokens=60, ignore_eos=True)
    engine.add(r)
    check(run_all(engine), r)
    assert engine.stats.num_accepted_tokens > 0
    assert student.violations == []


def test_a_student_that_is_wrong_is_asked_rarely() -> None:
    engine, _, _ = make_drafting(Student(wrong=1.0), FakeExecutor(100, 4, 400), num_speculative_tokens=4)
    engine.add(request("a", prompt(20), max_tokens=350, ignore_eos=True))
    monkeypatched_costs = [1.0 + 0.3 * i for i in range(16)]
    assert engine._speculator is not None
    collected = Collected()
    while engine.has_work:
        collected.add(engine.step())
        engine._speculator._costs._seconds = monkeypatched_costs
    assert engine.stats.num_draft_tokens < 60
    assert engine.stats.num_drafts > 1, "it is tried again"


def test_a_student_that_fails_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine, _, student = make_drafting()
    requests = [request(f"r{i}", prompt(10 + i, i), max_tokens=30, ignore_eos=True) for i in range(3)]
    for r in requests:
        engine.add(r)
    collected = Collected()
    for _ in range(4):
        collected.add(engine.step())
    student.fail_next = RuntimeError("out of luck")
    check(run_all(engine, collected), *requests)
    assert engine._speculator is None
    assert "switched off" in caplog.text
    check_empty(engine)


def test_logits_that_are_no_numbers_end_a_draft() -> None:
    engine, _, student = make_drafting(Student(wrong=0.0))
    r = request("a", prompt(12), max_tokens=30, ignore_eos=True)
    tokens = expected(r)
    student.bad_histories = {history([*r.prompt_token_ids, *tokens[:i]]) for i in range(6, 12)}
    engine.add(r)
    check(run_all(engine), r)
    assert engine.stats.num_accepted_tokens > 5


def test_both_executors_are_closed() -> None:
    engine, executor, student = make_drafting()
    engine.close()
    assert executor.closed
    assert student.closed


@pytest.mark.parametrize(
    "settings",
    [{"speculation": "draft"}, {"draft_model": "x"}, {"draft_model": "x", "speculation": "off"}, {"speculation": "x"}],
)
def test_settings_that_contradict_each_other(settings: dict[str, str]) -> None:
    with pytest.raises(InvalidSettingError, match="must be"):
        validate_config(EngineConfig(**settings))  # type: ignore[arg-type]
