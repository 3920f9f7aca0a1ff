"""Speculation changes how many steps a sequence takes and nothing else."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from engine_fakes import (
    EOS,
    Collected,
    FakeExecutor,
    byte_tokenizer,
    expected,
    history,
    make_engine,
    request,
    run_all,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation_fakes import Prophet, make_speculating
from test_engine import check, check_empty, prompt

from caudal.core import FinishReason, Request, RequestOutput
from caudal.engine.engine import Engine
from caudal.engine.sampling import SamplerRow
from caudal.engine.speculation import (
    MAX_MATCH,
    MAX_STEP_ROWS,
    Chances,
    Lookup,
    LookupIndex,
    Speculation,
    Speculator,
    StepCosts,
)

# ----------------------------------------------------------------------------------------- same output


def joined(collected: Collected) -> dict[tuple[str, int], tuple[object, ...]]:
    """All that clients can see of each sequence."""
    found: dict[tuple[str, int], list[RequestOutput]] = {}
    for output in collected.outputs:
        found.setdefault((output.request_id, output.index), []).append(output)
    return {
        key: (
            [t for o in outputs for t in o.token_ids],
            "".join(o.text for o in outputs),
            [entry for o in outputs for entry in o.logprobs],
            [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None],
            outputs[-1].finish_reason,
            outputs[-1].stop_reason,
            None if outputs[-1].error is None else str(outputs[-1].error),
        )
        for key, outputs in found.items()
    }


def both(requests: list[Request], **config: object) -> tuple[Engine, dict[tuple[str, int], tuple[object, ...]]]:
    """Run requests with and without speculation, compare, and give what came out."""
    results: list[dict[tuple[str, int], tuple[object, ...]]] = []
    plain, _ = make_engine(speculation="off", **config)
    engine, executor, _ = make_speculating(prophet=Prophet(honesty=0.8), **config)
    for e in (plain, engine):
        for r in requests:
            e.add(r)
        results.append(joined(run_all(e)))
        check_empty(e)
    assert results[0] == results[1]
    assert executor.violations == []
    assert engine.stats.num_accepted_tokens > 0
    assert engine.stats.num_steps < plain.stats.num_steps
    return engine, results[1]


PARAMS: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.8, "seed": 5, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "temperature": 0.9, "seed": 1},
    "negative frequency": {"frequency_penalty": -1.0},
    "logprobs": {"logprobs": 4, "prompt_logprobs": 2},
    "bias": {"logit_bias": ((65, 3.0), (66, -100.0))},
    "allowed": {"allowed_token_ids": tuple(range(60, 90))},
    "bad": {"bad_token_ids": tuple(range(0, 256, 2))},
    "min_tokens": {"min_tokens": 9, "logit_bias": ((EOS, 6.0),), "ignore_eos": False},
    "ends": {"logit_bias": ((EOS, 5.0),), "ignore_eos": False, "temperature": 1.0, "seed": 3},
    "n": {"n": 3, "temperature": 1.0, "seed": 2},
    "no text": {"detokenize": False},
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_the_output_is_the_same(params: dict[str, object]) -> None:
    common = {"max_tokens": 40, "ignore_eos": True} | params
    requests = [request(f"r{i}", prompt(10 + 7 * i, i), **common) for i in range(3)]
    engine, _ = both(requests)
    assert engine.stats.generation_tokens == sum(len(expected(r, index=i)) for r in requests for i in range(r.params.n))


def test_penalties_see_the_tokens_accepted_before_in_the_same_step() -> None:
    """With a strong penalty no token comes twice until all have come; one wrong history would show."""
    r = request("a", [1, 2], max_tokens=80, ignore_eos=True, repetition_penalty=100.0)
    engine, _, _ = make_speculating(prophet=Prophet(honesty=1.0, full=True))
    engine.add(r)
    collected = run_all(engine)
    check(collected, r)
    tokens = [1, 2, *collected.tokens["a", 0]]
    assert len(set(tokens)) == len(tokens)
    assert engine.stats.num_steps == 1 + -(-79 // 7), "every draft of 6 was right"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("place", range(8, 16))
def test_a_stop_string_ends_within_and_across_drafts(place: int, include: bool) -> None:
    text = prompt(6, 5)
    whole_request = request("x", text, max_tokens=30, ignore_eos=True)
    whole = byte_tokenizer().decode(expected(whole_request), skip_special=True, keep_leading_space=True)
    stop = whole[place : place + 4]
    both([request("a", text, max_tokens=30, ignore_eos=True, stop=(stop,), include_stop_str_in_output=include)])


@pytest.mark.parametrize("max_tokens", range(1, 16))
def test_max_tokens_within_a_draft(max_tokens: int) -> None:
    engine, executor, _ = make_speculating(prophet=Prophet(honesty=1.0, full=True))
    r = request("a", prompt(5), max_tokens=max_tokens, ignore_eos=True)
    engine.add(r)
    collected = run_all(engine)
    check(collected, r)
    assert executor.num_computed == 5 + max_tokens - 1, "nothing is computed past the end"
    check_empty(engine)


@pytest.mark.parametrize("length", range(33, 47))
def test_the_context_ends_within_a_draft(length: int) -> None:
    executor = FakeExecutor(num_blocks=12, block_size=4, max_model_len=48)
    engine, _, _ = make_speculating(executor, Prophet(honesty=1.0, full=True))
    r = request("a", prompt(length), ignore_eos=True)
    engine.add(r)
    collected = run_all(engine)
    check(collected, r, max_model_len=48)
    assert collected.reason("a") is FinishReason.LENGTH
    assert executor.num_computed == 47
    check_empty(engine)


def test_a_stop_token_within_a_draft() -> None:
    text = prompt(5, 3)
    tokens = expected(request("x", text, max_tokens=20, ignore_eos=True))
    for at in range(3, 14):
        stop = tokens[at]
        _, found = both([request("a", text, max_tokens=20, stop_token_ids=(stop,), ignore_eos=True)])
        assert found["a", 0][0] == tokens[: tokens.index(stop) + 1]


def test_logits_that_are_no_numbers_behind_a_right_draft() -> None:
    """The tokens before them come out; the blocks are not offered to others."""
    r = request("a", prompt(12, 2), max_tokens=20, ignore_eos=True)
    other = request("b", prompt(9, 3), max_tokens=20, ignore_eos=True)
    for place in range(1, 8):
        engine, executor, _ = make_speculating(prophet=Prophet(honesty=1.0, full=True))
        executor.bad_histories.add(history(list(r.prompt_token_ids) + expected(r)[:place]))
        engine.add(r)
        engine.add(other)
        collected = run_all(engine)
        check(collected, other)
        assert collected.tokens["a", 0] == expected(r)[:place]
        assert collected.reason("a") is FinishReason.ERROR
        check_empty(engine)
        executor.bad_histories.clear()
        engine.add(request("again", list(r.prompt_token_ids), max_tokens=1))
        assert run_all(engine).last["again", 0].num_cached_tokens == 0


def test_a_request_may_refuse() -> None:
    engine, executor, _ = make_speculating(prophet=Prophet(honesty=1.0, full=True))
    r = request("a", prompt(5), max_tokens=12, ignore_eos=True, speculate=False)
    engine.add(r)
    check(run_all(engine), r)
    assert engine.stats.num_draft_tokens == 0
    assert executor.batches == [[5], *[[1]] * 11]


def test_speculation_can_be_off() -> None:
    engine, _ = make_engine(speculation="off")
    r = request("a", [1, 2] * 20, max_tokens=20, logit_bias=((1, 100.0),))
    engine.add(r)
    check(run_all(engine), r)
    assert engine.stats.num_drafts == 0


# --------------------------------------------------------- preemption, prefix hits, chunks, aborts, blocks

MATRIX = list(product([False, True], [0, 24], [9, 64], [False, True], [1, 3]))


@pytest.mark.parametrize(("scarce", "shared", "budget", "aborts", "n"), MATRIX)
def test_preemption_prefix_hits_chunks_and_aborts(scarce: bool, shared: int, budget: int, aborts: bool, n: int) -> None:
    rng = random.Random(f"{scarce}{shared}{budget}{aborts}{n}")
    common = prompt(shared, 99)
    requests = [
        request(
            f"r{i}",
            common + prompt(rng.randrange(1, 40), i),
            max_tokens=rng.randrange(1, 40),
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
            n=n,
            ignore_eos=i % 3 == 0,
            priority=rng.choice([0, 0, 1]),
            speculate=i % 5 > 0,
            repetition_penalty=rng.choice([1.0, 1.2]),
        )
        for i in range(20)
    ]
    needed = sum(n * (len(r.prompt_token_ids) + (r.params.max_tokens or 0)) for r in requests)
    longest = max(len(r.prompt_token_ids) + (r.params.max_tokens or 0) for r in requests)
    num_blocks = longest // 4 + 3 if scarce else needed // 4 + 200
    executor = FakeExecutor(num_blocks, 4, max_model_len=num_blocks * 4)
    engine, _, _ = make_speculating(executor, Prophet(honesty=0.8), max_num_seqs=8, max_num_batched_tokens=budget)
    collected, aborted = Collected(), set[str]()
    arrivals = list(requests)
    while arrivals or engine.has_work:
        for _ in range(rng.randrange(3)):
            if arrivals:
                engine.add(arrivals.pop(0))
        if aborts and rng.random() < 0.1:
            victim = f"r{rng.randrange(20)}"
            outputs = engine.abort(victim)
            aborted |= {victim} if outputs else set()
            collected.add(outputs)
        collected.add(engine.step())
    check(collected, *(r for r in requests if r.request_id not in aborted), max_model_len=num_blocks * 4)
    assert executor.violations == []
    assert max(sum(step) for step in executor.batches) <= budget
    assert engine.stats.num_accepted_tokens > 0, "the case does not test what it should"
    if scarce and not aborts:
        assert engine.stats.num_preemptions > 0
    check_empty(engine)


def test_drafts_preempt_nobody() -> None:
    """If all drafts are wrong, steps, preemptions and their victims are those of an engine without speculation."""
    results: list[tuple[list[list[int]], int]] = []
    for speculates in (False, True):
        executor = FakeExecutor(num_blocks=14, block_size=4, max_model_len=48)
        wrong = Prophet(honesty=-1.0, full=True, max_tokens=5)
        engine = make_speculating(executor, wrong)[0] if speculates else make_engine(executor, speculation="off")[0]
        requests = [request(f"r{i}", prompt(8, i), max_tokens=38, ignore_eos=True) for i in range(3)]
        for r in requests:
            engine.add(r)
        order: list[list[int]] = []
        while engine.has_work:
            order.append([int(o.request_id[1:]) for o in engine.step()])
        results.append((order, engine.stats.num_preemptions))
        assert engine.stats.num_draft_tokens > 0 or not speculates
    assert results[0][1] > 0
    assert results[1] == results[0]


def test_a_draft_without_a_free_block_ends_where_the_blocks_end() -> None:
    executor = FakeExecutor(num_blocks=5, block_size=4, max_model_len=20)
    engine, _, _ = make_speculating(executor, Prophet(honesty=1.0, full=True, max_tokens=10))
    r = request("a", prompt(9), max_tokens=8, ignore_eos=True)
    collected = Collected()
    engine.add(r)
    collected.add(engine.step())
    engine._scheduler.pool.allocate(1)  # as if somebody held it
    collected.add(engine.step())
    assert executor.batches == [[9], [7]], "16 of 20 tokens fit"
    check(run_all(engine, collected), r, max_model_len=20)


def test_blocks_of_rejected_tokens_go_back_and_offer_nothing() -> None:
    executor = FakeExecutor(num_blocks=40, block_size=4, max_model_len=160)
    engine, _, _ = make_speculating(executor, Prophet(honesty=-1.0, full=True, max_tokens=10))
    r = request("a", prompt(9), max_tokens=12, ignore_eos=True)
    engine.add(r)
    engine.step()
    for step in range(1, 10):
        engine.step()
        pool = engine._scheduler.pool
        (seq,) = engine._generations
        assert len(seq.block_table) == pool.blocks_for(9 + step)
        assert len(pool._by_hash) == (9 + step) // 4, "only blocks full of accepted tokens"
        assert all(
            pool._blocks[b].hash == seq.block_hashes[i] for i, b in enumerate(seq.block_table[: (9 + step) // 4])
        )


def test_accepted_tokens_are_reused_by_the_next_turn() -> None:
    engine, _, _ = make_speculating(prophet=Prophet(honesty=1.0, full=True))
    first = request("a", prompt(10), max_tokens=20, ignore_eos=True)
    engine.add(first)
    answer = run_all(engine).tokens["a", 0]
    second = request("b", prompt(10) + answer + prompt(5, 2), max_tokens=2)
    engine.add(second)
    collected = run_all(engine)
    check(collected, second)
    assert collected.last["b", 0].num_cached_tokens == 28


def test_an_executor_that_fails_with_drafts(caplog: pytest.LogCaptureFixture) -> None:
    engine, executor, _ = make_speculating(prophet=Prophet(honesty=1.0, full=True), max_num_seqs=2)
    requests = [request(f"r{i}", prompt(12, i), max_tokens=30, ignore_eos=True) for i in range(4)]
    for r in requests:
        engine.add(r)
    collected = Collected()
    for _ in range(2):
        collected.add(engine.step())
    executor.fail_next = RuntimeError("out of luck")
    collected.add(engine.step())
    check(run_all(engine, collected), *requests[2:])
    check_empty(engine)
    assert "failed" in caplog.text


def test_counters() -> None:
    engine, executor, prophet = make_speculating(prophet=Prophet(honesty=1.0, full=True, max_tokens=4))
    engine.add(request("a", prompt(10), max_tokens=11, ignore_eos=True))
    run_all(engine)
    stats = engine.stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 8, 8)
    assert executor.batches == [[10], [5], [5]]
    assert [len(tokens) for tokens in prophet.observed] == [1, 5, 5]


# ----------------------------------------------------------------------------------------------- lookup


def search(ids: list[int]) -> tuple[int, int]:
    """The longest match, the slow way."""
    best = (0, 0)
    for place in range(len(ids) - 1, 0, -1):
        length = 0
        while length < min(MAX_MATCH, place) and ids[place - 1 - length] == ids[len(ids) - 1 - length]:
            length += 1
        if length >= 2 and length > best[0]:
            best = (length, place)
    return best


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=6))
def test_the_index_finds_the_longest_match_and_the_most_recent(pieces: list[list[int]]) -> None:
    ids: list[int] = []
    index = LookupIndex(ids)
    for piece in pieces:
        ids += piece
        length, place = index.find()
        best_length, best_place = search(ids)
        # It may give up after MAX_CANDIDATES places; 48 tokens of 16 pairs have no more of one pair, as a rule.
        if sum(pair == tuple(ids[-2:]) for pair in pairwise(ids)) <= 16:
            assert (length, place) == (best_length, best_place)
        assert ids[place - length : place] == ids[len(ids) - length :] if length else place == 0


def test_a_copy_past_the_end_repeats_itself() -> None:
    ids = [9, 1, 2, 3, 1, 2]
    index = LookupIndex(ids)
    assert index.find() == (2, 3)
    assert index.copy(3, 8) == [3, 1, 2, 3, 1, 2, 3, 1]


def test_a_search_costs_the_same_in_a_long_text() -> None:
    """Even where one pair of tokens is everywhere."""
    ids = [1, 2] * 50_000
    index = LookupIndex(ids)
    index.find()
    compared = 0

    class Counted(list[int]):
        def __getitem__(self, key):
            nonlocal compared
            compared += 1
            return super().__getitem__(key)

    index._token_ids = counted = Counted(ids)
    counted.append(3)
    index.find()
    counted += [1, 2]
    index.find()
    assert compared < 16 * 16 * 2 + 20


def ready(max_tokens: int = 8) -> Speculator:
    """With a first measurement."""
    speculator = Speculator(Lookup(), max_tokens)
    speculator.record(1, 0, 0.01)
    return speculator


def row(ids: list[int]) -> SamplerRow:
    return SamplerRow(request("x", ids or [0]).params, 0, ids, 1, ())


def test_lookup_proposes_what_followed() -> None:
    speculator = ready()
    text = list(range(100, 140))
    target = speculator.start(row([*text, 7, *text[:20]]))
    ((*draft,),) = speculator.draft([(target, 100)], 1)
    assert draft
    assert draft == text[20 : 20 + len(draft)]
    assert speculator.draft([(target, 3)], 1)[0] == text[20:23]


def test_nothing_is_run_before_a_plain_step_was_measured_nor_in_large_steps() -> None:
    speculator = Speculator(Lookup(), 8)
    target = speculator.start(row([1, 2, 3, 4, 5] * 8))
    assert speculator.draft([(target, 100)], 1) == [[]]
    speculator.record(1, 0, 0.01)
    assert len(speculator.draft([(target, 100)], 1)[0]) > 3
    assert speculator.draft([(target, 100)], MAX_STEP_ROWS) == [[]]
    assert len(speculator.draft([(target, 100)], MAX_STEP_ROWS - 2)[0]) <= 2


def test_guesses_that_are_wrong_stop_and_come_back_when_they_would_be_right() -> None:
    speculator = ready()
    ids = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    target = speculator.start(row(ids))
    num_run = 0
    for i in range(200):
        (draft,) = speculator.draft([(target, 100)], 1)
        num_run += bool(draft)
        speculator.record(1 + len(draft), len(draft), 0.01 * (1 + 0.3 * len(draft)))
        speculator.observe(target, [99])
        ids += [1000 + i, 1, 2, 3, 4, 5, 6, 7, 8]  # each time the guess is 1000 + i - 1
    assert num_run < 20
    for _ in range(60):
        (draft,) = speculator.draft([(target, 100)], 1)
        speculator.record(1 + len(draft), len(draft), 0.01 * (1 + 0.3 * len(draft)))
        true = target.lookup.copy(target.place, 9) if target.lookup else []
        right = true[: len(draft) + 1]
        speculator.observe(target, right)
        ids += right
    assert len(draft) >= 4


def test_drafts_stop_where_rows_cost_as_much_as_steps() -> None:
    speculator = ready()
    ids = list(range(50)) + list(range(40))
    target = speculator.start(row(ids))
    lengths: list[int] = []
    for _ in range(200):
        (draft,) = speculator.draft([(target, 100)], 1)
        lengths.append(len(draft))
        speculator.record(1 + len(draft), len(draft), 0.01 * (1 + len(draft)))
        speculator.observe(target, [-1] if len(lengths) % 2 else [target.guess[0]])
    assert sum(length > 0 for length in lengths[50:]) < 15


def test_a_plain_step_comes_now_and_then() -> None:
    speculator = ready()
    target = speculator.start(row(list(range(50)) + list(range(40))))
    lengths: list[int] = []
    for _ in range(200):
        (draft,) = speculator.draft([(target, 100)], 1)
        lengths.append(len(draft))
        speculator.record(1 + len(draft), len(draft), 0.01)
        speculator.observe(target, target.guess)
    assert 3 <= lengths.count(0) <= 6


def test_rows_go_to_the_sequences_that_are_likely_to_use_them() -> None:
    speculator = ready()
    sure, unsure = (speculator.start(row(list(range(50)) + list(range(40)))) for _ in range(2))
    for _ in range(40):
        speculator.record(2, 0, 0.01)
        speculator.record(10, 0, 0.011)
        for target in (sure, unsure):
            for level in range(8):
                target.chances.observe(level, target is sure)
    drafts = speculator.draft([(sure, 100), (unsure, 100)], 2)
    assert len(drafts[0]) == 8
    assert drafts[1] == []


def test_chances_follow_what_happens_and_new_sequences_learn_from_old_ones() -> None:
    common = Chances([0.5, 0.9])
    first = Chances(common)
    assert first[0] == pytest.approx(0.5)
    for _ in range(200):
        first.observe(0, True)
    assert first[0] > 0.95
    assert first[1] == pytest.approx(0.9)
    assert Chances(common)[0] > 0.9
    for _ in range(100):
        first.observe(0, False)
    assert first[0] < 0.1


def test_costs_are_learned_and_bad_measurements_forgotten() -> None:
    costs = StepCosts()
    costs.record(1, 0.010)
    for _ in range(50):
        costs.record(1, 0.010)
        costs.record(5, 0.014)
        costs.record(9, 0.030)
    assert costs[1] == pytest.approx(0.010, rel=0.02)
    assert costs[5] == pytest.approx(0.014, rel=0.1)
    assert costs[5] < costs[6] < costs[8] < costs[9]
    costs.record(5, 10.0)
    assert costs[5] < 0.020, "one interrupted step is not believed"
    for _ in range(30):
        costs.record(5, 0.1)
    assert costs[5] > 0.05
    for _ in range(600):
        costs.record(1, 0.010)
    assert costs[5] < 0.025, "tried again some day"


def test_the_whole_loop_with_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with few tokens repeats itself: lookup guesses right, and the output is that of the plain engine."""
    common = {"max_tokens": 60, "ignore_eos": True}
    requests = [
        request("one", [5, 6, 7], allowed_token_ids=(65,), **common),
        request("three", [5, 6, 7], allowed_token_ids=(65, 66, 67), frequency_penalty=2.0, **common),
        request("sampled", prompt(20), allowed_token_ids=(65, 66), temperature=0.5, seed=4, n=2, **common),
    ]
    plain, _ = make_engine(speculation="off")
    engine, executor = make_engine(speculation="lookup")
    # Steps of a model that costs nothing say nothing about rows.
    monkeypatch.setattr(
        StepCosts, "record", lambda self, n, s: setattr(self, "_seconds", [1 + i / 100 for i in range(16)])
    )
    results: list[dict[tuple[str, int], tuple[object, ...]]] = []
    for e in (plain, engine):
        for r in requests:
            e.add(r)
        results.append(joined(run_all(e)))
        check_empty(e)
    assert results[0] == results[1]
    assert executor.violations == []
    assert 100 < engine.stats.num_accepted_tokens <= engine.stats.num_draft_tokens
    assert engine.stats.num_steps < plain.stats.num_steps


def test_a_sequence_that_ended_leaves_nothing_behind() -> None:
    engine, _ = make_engine(speculation="lookup")
    engine.add(request("a", [5, 6, 7] * 5, max_tokens=10, ignore_eos=True))
    for _ in range(3):
        engine.step()
    (generation,) = engine._generations.values()
    speculation = generation.speculation
    assert isinstance(speculation, Speculation)
    assert speculation.lookup is not None
    engine.abort("a")
    check_empty(engine)
    assert speculation.lookup is None
