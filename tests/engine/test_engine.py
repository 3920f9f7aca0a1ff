"""The whole loop with a model that notices mistakes: every sequence gets the tokens it would get alone."""

from __future__ import annotations

import random
import time
from itertools import product
from typing import Any

import numpy as np
import pytest
from engine_fakes import (
    EOS,
    NUM_TOKEN_IDS,
    Collected,
    FakeExecutor,
    byte_tokenizer,
    expected,
    history,
    logits_after,
    make_engine,
    request,
    run_all,
)

from caudal.config import EngineConfig
from caudal.core import (
    FinishReason,
    InvalidRequestError,
    InvalidSettingError,
    QueueFullError,
    Request,
    RequestTooLongError,
    SamplingParams,
)
from caudal.engine.engine import Engine
from caudal.engine.sampling import ReferenceSampler, SampledToken
from caudal.executors.base import asked_for


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def check(collected: Collected, *requests: Request, max_model_len: int = 256) -> None:
    for r in requests:
        for index in range(r.params.n):
            want = expected(r, max_model_len=max_model_len, index=index)
            assert collected.tokens[r.request_id, index] == want, r.request_id
            stopped = want[-1] in r.params.stop_token_ids or (want[-1] == EOS and not r.params.ignore_eos)
            assert collected.reason(r.request_id, index) is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def check_empty(engine: Engine) -> None:
    """Everything has been given back."""
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert not engine.has_work
    assert len(engine._free_table_rows) == len(engine._tables)
    assert not engine._tables.any()
    assert not engine._requests
    assert not engine._scheduler._computing


# ------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 100])
@pytest.mark.parametrize("budget", [8, 32, 256])
def test_alone(length: int, budget: int) -> None:
    engine, executor = make_engine(max_num_batched_tokens=budget)
    r = request("a", prompt(length), max_tokens=20)
    engine.add(r)
    check(run_all(engine), r)
    assert executor.violations == []
    check_empty(engine)


MATRIX = list(product([False, True], [0, 24], [8, 13, 64], [False, True], [1, 3]))


@pytest.mark.parametrize(("scarce", "shared", "budget", "aborts", "n"), MATRIX)
def test_preemption_prefix_hits_chunks_and_aborts(scarce: bool, shared: int, budget: int, aborts: bool, n: int) -> None:
    """With `scarce`, the cache holds little more than the longest sequence: a tenth of what all of them need."""
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
        )
        for i in range(30)
    ]
    needed = sum(n * (len(r.prompt_token_ids) + r.params.max_tokens) for r in requests)
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests)
    num_blocks = longest // 4 + 3 if scarce else needed // 4 + 200
    assert not scarce or num_blocks * 4 < needed / 10
    engine, executor = make_engine(
        FakeExecutor(num_blocks, 4, max_model_len=num_blocks * 4), max_num_seqs=8, max_num_batched_tokens=budget
    )
    collected, aborted = Collected(), set[str]()
    arrivals = list(requests)
    while arrivals or engine.has_work:
        for _ in range(rng.randrange(3)):
            if arrivals:
                engine.add(arrivals.pop(0))
        if aborts and rng.random() < 0.1:
            victim = f"r{rng.randrange(30)}"
            outputs = engine.abort(victim)
            aborted |= {victim} if outputs else set()
            collected.add(outputs)
            assert engine.abort(victim) == []
        collected.add(engine.step())
    survivors = [r for r in requests if r.request_id not in aborted]
    check(collected, *survivors, max_model_len=num_blocks * 4)
    for name in aborted:
        assert any(collected.reason(name, i) is FinishReason.ABORT for i in range(n))
    assert executor.violations == []
    assert max(sum(step) for step in executor.batches) <= budget
    if scarce and not aborts:
        assert engine.stats.num_preemptions > 0, "the case does not test what it should"
    if shared and n == 3:
        assert engine.stats.prefix_cache_hits > 0
    check_empty(engine)


def test_sampled_tokens_do_not_depend_on_the_batch() -> None:
    requests = [
        request(f"r{i}", prompt(10 + i, i), temperature=1.0, top_p=0.9, seed=i, max_tokens=30) for i in range(8)
    ]
    engine, _ = make_engine()
    for r in requests:
        engine.add(r)
    check(run_all(engine), *requests)


def test_without_a_seed_each_request_has_its_own() -> None:
    engine, _ = make_engine()
    for name in ("a", "b"):
        engine.add(request(name, [1, 2, 3], temperature=1.0, max_tokens=30, ignore_eos=True))
    collected = run_all(engine)
    assert collected.tokens["a", 0] != collected.tokens["b", 0]


def test_sequences_of_one_request_differ_and_share_its_prompt() -> None:
    engine, executor = make_engine()
    r = request("a", prompt(50), temperature=1.0, seed=7, n=4, max_tokens=10, ignore_eos=True)
    engine.add(r)
    collected = run_all(engine)
    check(collected, r)
    assert len({tuple(tokens) for tokens in collected.tokens.values()}) == 4
    assert executor.num_computed == 50 + 3 * 2 + 4 * 9, "48 of 50 prompt tokens are in full blocks"


# --------------------------------------------------------------------------------------- prefix cache


def test_a_shared_prompt_that_arrives_at_once_is_computed_once() -> None:
    system = prompt(1000, 1)
    executor = FakeExecutor(num_blocks=400, block_size=16, max_model_len=2048)
    engine, _ = make_engine(executor, max_num_seqs=64, max_num_batched_tokens=512)
    requests = [request(f"r{i}", system + prompt(20, 100 + i), max_tokens=4, ignore_eos=True) for i in range(32)]
    for r in requests:
        engine.add(r)
    collected = run_all(engine)
    check(collected, *requests, max_model_len=2048)
    full = 1000 // 16 * 16
    assert executor.num_computed == 1020 + 31 * (1020 - full) + 32 * 3
    assert engine.stats.prefix_cache_hits == 31 * full
    assert engine.stats.prefix_cache_queries == 32 * 1020
    assert sorted(o.num_cached_tokens for o in collected.last.values()) == [0] + [full] * 31


def test_those_who_wait_for_a_shared_prompt_go_on_when_its_sequence_is_aborted() -> None:
    engine, executor = make_engine(FakeExecutor(num_blocks=100, block_size=4, max_model_len=256))
    requests = [request(f"r{i}", [*prompt(100, 1), i], max_tokens=3) for i in range(4)]
    for r in requests:
        engine.add(r)
    engine.step()
    assert engine.stats.num_running == 1
    engine.abort("r0")
    collected = run_all(engine)
    check(collected, *requests[1:])
    assert executor.num_computed < 2 * 101 + 2 * 8, "what r0 had computed was used"
    check_empty(engine)


def test_a_full_hit_computes_the_last_token() -> None:
    engine, executor = make_engine()
    first, second = (request(name, prompt(16), max_tokens=1) for name in "ab")
    engine.add(first)
    run_all(engine)
    engine.add(second)
    collected = run_all(engine)
    check(collected, second)
    assert collected.last["b", 0].num_cached_tokens == 12
    assert executor.batches == [[16], [4]]


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    engine, _ = make_engine()
    first = request("a", prompt(10), max_tokens=20, ignore_eos=True)
    engine.add(first)
    answer = run_all(engine).tokens["a", 0]
    second = request("b", prompt(10) + answer + prompt(5, 2), max_tokens=2)
    engine.add(second)
    collected = run_all(engine)
    check(collected, second)
    assert collected.last["b", 0].num_cached_tokens == 28, "29 tokens were computed: 7 blocks of 4"


@pytest.mark.parametrize("change", ["salt", "off"])
def test_nothing_is_shared_across_salts_or_without_prefix_caching(change: str) -> None:
    engine, executor = make_engine(prefix_caching=change != "off")
    for name in "ab":
        engine.add(request(name, prompt(40), max_tokens=1, cache_salt=name if change == "salt" else ""))
    run_all(engine)
    assert engine.stats.prefix_cache_hits == 0
    assert executor.num_computed == 80


# ------------------------------------------------------------------------------------------ fairness


def steps_to_first_token(engine: Engine, requests: list[Request]) -> dict[str, int]:
    for r in requests:
        engine.add(r)
    found: dict[str, int] = {}
    step = 0
    while engine.has_work:
        step += 1
        for output in engine.step():
            found.setdefault(output.request_id, step)
    return found


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    executor = FakeExecutor(num_blocks=400, max_model_len=1400)
    engine, _ = make_engine(executor, max_num_batched_tokens=64)
    long = request("long", prompt(1280, 1), max_tokens=2)
    shorts = [request(f"s{i}", prompt(10, 2 + i), max_tokens=2) for i in range(3)]
    steps = steps_to_first_token(engine, [long, *shorts])
    assert all(steps[r.request_id] == 1 for r in shorts)
    assert steps["long"] <= 22, "20 steps alone"


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    executor = FakeExecutor(num_blocks=600, max_model_len=1400)
    engine, _ = make_engine(executor, max_num_batched_tokens=64)
    engine.add(request("long", prompt(640, 1), max_tokens=1))
    for step in range(1, 40):
        for i in range(4):
            engine.add(request(f"s{step}.{i}", prompt(30, 100 * step + i), max_tokens=1))
        if any(output.request_id == "long" for output in engine.step()):
            break
    assert step <= 20, "half of each step is its own"


def test_equal_prompts_finish_in_the_order_of_arrival() -> None:
    engine, _ = make_engine(FakeExecutor(num_blocks=400), max_num_batched_tokens=32)
    steps = steps_to_first_token(engine, [request(f"r{i}", prompt(64, i), max_tokens=1) for i in range(6)])
    assert list(steps.values()) == sorted(steps.values())
    assert list(steps) == [f"r{i}" for i in range(6)]
    assert steps["r0"] == 2


def test_a_large_request_is_not_overtaken_for_blocks() -> None:
    executor = FakeExecutor(num_blocks=30, block_size=4, max_model_len=120)
    engine, _ = make_engine(executor, max_num_seqs=8)
    engine.add(request("running", prompt(60, 1), max_tokens=20, ignore_eos=True))
    engine.step()
    engine.step()
    engine.add(request("large", prompt(80, 2), max_tokens=1))
    order: list[str] = []
    for i in range(200):
        if i < 30:
            engine.add(request(f"s{i}", prompt(4, 10 + i), max_tokens=8, ignore_eos=True))
        order += [o.request_id for o in engine.step() if o.finish_reason]
    assert order.index("large") == 1


def test_priority_goes_first_and_preempts() -> None:
    engine, executor = make_engine(max_num_seqs=2)
    low = [request(f"low{i}", prompt(8, i), max_tokens=30, ignore_eos=True, priority=5) for i in range(3)]
    for r in low:
        engine.add(r)
    collected = Collected()
    for _ in range(3):
        collected.add(engine.step())
    high = request("high", prompt(8, 9), max_tokens=5, ignore_eos=True, priority=-1)
    engine.add(high)
    collected.add(outputs := engine.step())
    assert "high" in {output.request_id for output in outputs}
    assert engine.stats.num_preemptions == 1
    run_all(engine, collected)
    check(collected, high, *low)
    finished = [o.request_id for o in collected.outputs if o.finish_reason]
    assert finished == ["high", "low0", "low1", "low2"]
    assert executor.violations == []


def test_equal_priority_does_not_preempt_for_a_place() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for name in "ab":
        engine.add(request(name, prompt(4), max_tokens=10, ignore_eos=True))
    run_all(engine)
    assert engine.stats.num_preemptions == 0


def test_the_last_to_arrive_is_preempted_and_the_first_never() -> None:
    executor = FakeExecutor(num_blocks=12, block_size=4, max_model_len=48)
    engine, _ = make_engine(executor)
    requests = [request(f"r{i}", prompt(8, i), max_tokens=38, ignore_eos=True) for i in range(3)]
    for r in requests:
        engine.add(r)
    collected = run_all(engine)
    check(collected, *requests, max_model_len=48)
    finished = [o.request_id for o in collected.outputs if o.finish_reason]
    assert finished == ["r0", "r1", "r2"]
    assert engine.stats.num_preemptions > 0
    check_empty(engine)


# --------------------------------------------------------------------------------------------- limits


def test_a_prompt_as_long_as_the_context_is_refused_with_the_numbers() -> None:
    engine, _ = make_engine(FakeExecutor(num_blocks=64, block_size=4, max_model_len=100))
    with pytest.raises(RequestTooLongError, match=r"100 tokens.*context length is 100"):
        engine.add(request("a", prompt(100)))
    engine.add(request("b", prompt(99)))
    collected = run_all(engine)
    assert len(collected.tokens["b", 0]) == 1


def test_a_prompt_larger_than_the_cache_is_refused_with_the_numbers() -> None:
    engine, _ = make_engine(FakeExecutor(num_blocks=5, block_size=4, max_model_len=100))
    assert engine.max_model_len == 20
    with pytest.raises(RequestTooLongError, match=r"30 tokens.*100 tokens.*holds 20"):
        engine.add(request("a", prompt(30)))
    r = request("b", prompt(19))
    engine.add(r)
    check(run_all(engine), r, max_model_len=20)


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_generation_ends_with_the_context(max_tokens: int | None) -> None:
    engine, _ = make_engine(FakeExecutor(num_blocks=12, block_size=4, max_model_len=48))
    r = request("a", prompt(10), max_tokens=max_tokens, ignore_eos=True)
    engine.add(r)
    collected = run_all(engine)
    check(collected, r, max_model_len=48)
    assert len(collected.tokens["a", 0]) == 38
    assert collected.reason("a") is FinishReason.LENGTH


@pytest.mark.parametrize(
    "tokens",
    [[], [-1], [NUM_TOKEN_IDS], [2**70], [1.5], ["a"]],
    ids=["empty", "negative", "large", "huge", "float", "str"],
)
def test_a_prompt_that_is_no_prompt_is_refused(tokens: list[object]) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError) as caught:
        engine.add(Request("a", tuple(tokens), SamplingParams()))  # type: ignore[arg-type]
    assert caught.value.param == "prompt"
    assert not engine.has_work


def test_an_id_in_use_an_unknown_adapter_and_bad_parameters_are_refused() -> None:
    engine, _ = make_engine()
    engine.add(request("a", [1]))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add(request("a", [1]))
    with pytest.raises(InvalidRequestError, match="adapter"):
        engine.add(Request("b", (1,), SamplingParams(), adapter="x"))
    with pytest.raises(InvalidRequestError, match="top_p"):
        engine.add(request("b", [1], top_p=0.0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_threads", -1),
        ("max_model_len", -5),
        ("max_model_len", 1),
        ("kv_cache_memory", -1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_waiting", -1),
        ("num_threads", 1025),
        ("num_threads", 10**400),
        ("num_threads", True),
        ("max_model_len", 2**31),
        ("max_model_len", "10"),
        ("kv_cache_memory", 1e9),
        ("max_num_seqs", 10**9),
        ("max_num_seqs", None),
        ("max_num_batched_tokens", 10**10),
        ("kv_type", "q4"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidSettingError, match=f"{name} must be "):
        make_engine(**{name: value})


def test_a_small_step_limits_the_sequences_in_it() -> None:
    engine, executor = make_engine(max_num_seqs=8, max_num_batched_tokens=3)
    requests = [request(f"r{i}", prompt(5, i), max_tokens=5) for i in range(6)]
    for r in requests:
        engine.add(r)
    check(run_all(engine), *requests)
    assert max(map(sum, executor.batches)) == 3


def test_a_full_queue_refuses_and_takes_again() -> None:
    engine, _ = make_engine(max_num_seqs=2, max_waiting=2)
    for i in range(2):
        engine.add(request(f"r{i}", [1], n=2, max_tokens=1))
    with pytest.raises(QueueFullError, match="4 sequences"):
        engine.add(request("x", [1]))
    run_all(engine)
    engine.add(request("x", [1]))


# ------------------------------------------------------------------------------------- ends and texts


def test_end_tokens_stop_and_ignore_eos_goes_on() -> None:
    text = prompt(5, 3)
    tokens = expected(request("x", text, max_tokens=20, ignore_eos=True))
    stop = tokens[7]
    first = tokens.index(stop)
    engine, _ = make_engine()
    engine.add(request("stop", text, max_tokens=20, stop_token_ids=(stop,), ignore_eos=True))
    engine.add(request("bias", text, max_tokens=20, logit_bias=((EOS, 100.0),)))
    engine.add(request("ignore", text, max_tokens=5, logit_bias=((EOS, 100.0),), ignore_eos=True))
    collected = run_all(engine)
    assert collected.tokens["stop", 0] == tokens[: first + 1]
    assert (collected.reason("stop"), collected.last["stop", 0].stop_reason) == (FinishReason.STOP, stop)
    assert collected.tokens["bias", 0] == [EOS]
    assert (collected.reason("bias"), collected.last["bias", 0].stop_reason) == (FinishReason.STOP, None)
    assert collected.texts["bias", 0] == ""
    assert collected.tokens["ignore", 0] == [EOS] * 5
    assert collected.reason("ignore") is FinishReason.LENGTH


def test_min_tokens_keeps_end_tokens_away() -> None:
    engine, _ = make_engine()
    r = request("a", [1, 2], max_tokens=20, min_tokens=6, logit_bias=((EOS, 100.0),))
    engine.add(r)
    collected = run_all(engine)
    assert len(collected.tokens["a", 0]) == 7
    assert collected.tokens["a", 0][-1] == EOS


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(include: bool) -> None:
    text = prompt(6, 5)
    r = request("x", text, max_tokens=30, ignore_eos=True)
    whole = byte_tokenizer().decode(expected(r), skip_special=True, keep_leading_space=True)
    stop = whole[8:10]
    engine, _ = make_engine()
    engine.add(request("a", text, max_tokens=30, ignore_eos=True, stop=(stop,), include_stop_str_in_output=include))
    collected = run_all(engine)
    at = whole.index(stop)
    assert collected.texts["a", 0] == whole[: at + (2 if include else 0)]
    assert (collected.reason("a"), collected.last["a", 0].stop_reason) == (FinishReason.STOP, stop)
    assert collected.tokens["a", 0] == expected(r)[: len(collected.tokens["a", 0])]


def test_text_is_the_decoded_tokens_and_optional() -> None:
    engine, _ = make_engine()
    engine.add(request("a", prompt(6, 5), max_tokens=40, ignore_eos=True))
    engine.add(request("b", prompt(6, 5), max_tokens=40, ignore_eos=True, detokenize=False))
    collected = run_all(engine)
    tokens = collected.tokens["a", 0]
    assert tokens == collected.tokens["b", 0]
    assert collected.texts["a", 0] == byte_tokenizer().decode(tokens, skip_special=True, keep_leading_space=True)
    assert collected.texts["b", 0] == ""


def test_an_aborted_sequence_gives_the_text_held_back() -> None:
    engine, _ = make_engine()
    engine.add(request("a", prompt(6, 5), max_tokens=40, ignore_eos=True, stop=("x" * 1000,)))
    collected = Collected()
    for _ in range(5):
        collected.add(engine.step())
    collected.add(engine.abort("a"))
    assert collected.reason("a") is FinishReason.ABORT
    tokens = collected.tokens["a", 0]
    assert collected.texts["a", 0] == byte_tokenizer().decode(tokens, skip_special=True, keep_leading_space=True)


# -------------------------------------------------------------------------------------------- logprobs


def test_logprobs_are_those_of_the_raw_logits() -> None:
    engine, _ = make_engine()
    r = request("a", prompt(9), max_tokens=4, ignore_eos=True, logprobs=3, temperature=0.7, top_k=2, seed=1)
    engine.add(r)
    collected = run_all(engine)
    entries = [entry for output in collected.outputs for entry in output.logprobs]
    tokens = collected.tokens["a", 0]
    assert [entry.chosen.token_id for entry in entries] == tokens
    for i, entry in enumerate(entries):
        x = logits_after(history(list(r.prompt_token_ids) + tokens[:i]))[:NUM_TOKEN_IDS].astype(np.float64)
        log_p = x - np.log(np.exp(x).sum())
        order = np.argsort(-log_p, kind="stable")
        assert [t.token_id for t in entry.top] == order[:3].tolist()
        assert [t.rank for t in entry.top] == [1, 2, 3]
        assert [t.logprob for t in entry.top] == pytest.approx(log_p[order[:3]].tolist(), abs=1e-6)
        assert entry.chosen.rank == order.tolist().index(entry.chosen.token_id) + 1
        assert entry.chosen.logprob == pytest.approx(log_p[entry.chosen.token_id], abs=1e-6)


@pytest.mark.parametrize("scarce", [False, True])
def test_prompt_logprobs(scarce: bool) -> None:
    """They ignore the prefix cache, keep the rows of logits few, and survive preemption."""
    executor = FakeExecutor(num_blocks=60 if scarce else 400, block_size=4, max_model_len=240)
    engine, _ = make_engine(executor, max_num_batched_tokens=256)
    text = prompt(150, 4)
    engine.add(request("warm", text, max_tokens=1))
    run_all(engine)
    requests = [
        request("a", text, max_tokens=3, prompt_logprobs=2),
        request("b", prompt(70, 6), max_tokens=60, ignore_eos=True),
        request("c", prompt(90, 5), max_tokens=3, prompt_logprobs=0, n=2, temperature=1.0, seed=1),
    ]
    for r in requests:
        engine.add(r)
    executor.max_rows = 0
    collected = run_all(engine)
    check(collected, *requests, max_model_len=240)
    assert executor.max_rows <= 64 + 8
    given = {(o.request_id, o.index): o.prompt_logprobs for o in collected.outputs if o.prompt_logprobs is not None}
    assert set(given) == {("a", 0), ("c", 0)}
    for r in (requests[0], requests[2]):
        entries = given[r.request_id, 0]
        assert len(entries) == len(r.prompt_token_ids)
        assert entries[0] is None
        for i in range(1, len(entries)):
            entry = entries[i]
            assert entry is not None
            x = logits_after(history(list(r.prompt_token_ids[:i])))[:NUM_TOKEN_IDS].astype(np.float64)
            token_id = r.prompt_token_ids[i]
            assert entry.chosen.token_id == token_id
            assert entry.chosen.logprob == pytest.approx(x[token_id] - np.log(np.exp(x).sum()), abs=1e-6)
            assert len(entry.top) == r.params.prompt_logprobs
    check_empty(engine)


# -------------------------------------------------------------------------------------------- failures


def test_logits_that_are_no_numbers_end_only_their_request() -> None:
    engine, executor = make_engine()
    requests = [request(f"r{i}", prompt(12, i), max_tokens=8, ignore_eos=True) for i in range(4)]
    bad = requests[2]
    executor.bad_histories.add(history(list(bad.prompt_token_ids) + expected(bad)[:3]))
    for r in requests:
        engine.add(r)
    collected = run_all(engine)
    check(collected, *(r for r in requests if r is not bad))
    assert collected.reason("r2") is FinishReason.ERROR
    assert collected.last["r2", 0].error is not None
    assert "not finite" in str(collected.last["r2", 0].error)
    assert collected.tokens["r2", 0] == expected(bad)[:3]
    check_empty(engine)
    executor.bad_histories.clear()
    engine.add(request("again", list(bad.prompt_token_ids), max_tokens=1))
    assert run_all(engine).last["again", 0].num_cached_tokens == 0, "its blocks are not offered to others"


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (EOS,)},
        {"allowed_token_ids": (EOS, 7), "stop_token_ids": (7,)},
        {"allowed_token_ids": (7, 8), "stop_token_ids": (7,), "bad_token_ids": (8,), "ignore_eos": True},
    ],
)
def test_a_request_that_excludes_every_token_is_refused(params: dict[str, Any]) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="excludes every token") as raised:
        engine.validate(request("bad", [1, 2, 3], min_tokens=2, **params))
    assert raised.value.param == "min_tokens"
    engine.validate(request("good", [1, 2, 3], min_tokens=2, **{**params, "allowed_token_ids": (5, EOS)}))
    engine.validate(request("good", [1, 2, 3], min_tokens=0, **params))


def test_an_executor_that_fails_ends_its_batch_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    engine, executor = make_engine(max_num_seqs=2)
    requests = [request(f"r{i}", prompt(12, i), max_tokens=8, ignore_eos=True) for i in range(4)]
    for r in requests:
        engine.add(r)
    collected = Collected()
    for _ in range(3):
        collected.add(engine.step())
    executor.fail_next = RuntimeError("out of luck")
    collected.add(failed := engine.step())
    assert [(o.request_id, o.finish_reason) for o in failed] == [("r0", FinishReason.ERROR), ("r1", FinishReason.ERROR)]
    assert all("out of luck" in str(o.error) for o in failed)
    check(run_all(engine, collected), *requests[2:])
    check_empty(engine)
    assert "failed" in caplog.text


class BrokenSampler(ReferenceSampler):
    """Raises for one request's rows."""

    def sample(self, logits, rows):
        if any(row.params.seed == 13 for row in rows):
            raise RuntimeError("bad row")
        return super().sample(logits, rows)


def test_a_sampler_that_fails_ends_only_the_guilty(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64)
    engine = Engine(FakeExecutor(), byte_tokenizer(), config, BrokenSampler(NUM_TOKEN_IDS))
    requests = [request(f"r{i}", prompt(12, i), max_tokens=8, seed=10 + i) for i in range(5)]
    for r in requests:
        engine.add(r)
    collected = run_all(engine)
    check(collected, *(r for r in requests if r.params.seed != 13))
    assert collected.reason("r3") is FinishReason.ERROR
    assert "bad row" in str(collected.last["r3", 0].error)
    assert "r3" in caplog.text
    check_empty(engine)


# ------------------------------------------------------------------------------------- times and speed


def test_times_and_counters() -> None:
    engine, _ = make_engine()
    engine.add(request("a", prompt(10), max_tokens=4, ignore_eos=True))
    time.sleep(0.01)
    last = run_all(engine).last["a", 0]
    assert last.timings is not None
    assert 0.01 <= last.timings.queued <= last.timings.first_token <= last.timings.total
    assert (last.num_prompt_tokens, last.num_output_tokens) == (10, 4)
    stats = engine.stats
    assert (stats.prompt_tokens, stats.generation_tokens) == (10, 4)
    assert (stats.num_steps, stats.num_computed_tokens) == (4, 13)


class FlatExecutor(FakeExecutor):
    """Costs nothing: the same logits for every row."""

    def run(self, batch):
        return asked_for(self.flat[: len(batch.logits_rows)], batch, NUM_TOKEN_IDS)

    flat = np.zeros((64, 272), np.float32)


class FlatSampler(ReferenceSampler):
    def sample(self, logits, rows):
        return [SampledToken(65)] * len(rows)


def test_a_step_costs_the_same_in_a_long_context() -> None:
    """The loop itself: no model, no sampler. Steps of two engines in turns, so that both have the same neighbours."""

    def decoding(length: int) -> Engine:
        executor = FlatExecutor(num_blocks=64 * 130, block_size=16, max_model_len=2048)
        config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2048)
        engine = Engine(executor, byte_tokenizer(), config, FlatSampler(NUM_TOKEN_IDS))
        for i in range(64):
            engine.add(request(f"r{i}", prompt(length, i), max_tokens=200, ignore_eos=True))
        while engine.stats.generation_tokens < 64 * 20:
            engine.step()
        return engine

    engines = decoding(30), decoding(1800)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(100):
        for engine, seconds in zip(engines, times, strict=True):
            start = time.thread_time()
            engine.step()
            seconds.append(time.thread_time() - start)
    assert all(engine.stats.num_running == 64 for engine in engines)
    assert np.median(times[1]) < 2 * np.median(times[0])
