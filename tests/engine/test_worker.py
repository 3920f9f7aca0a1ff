"""The engine thread: streams, cancellation, slow readers, closing, death."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from engine_fakes import Collected, FakeExecutor, expected, make_engine, request

from caudal.core import (
    EngineDeadError,
    FinishReason,
    InvalidRequestError,
    QueueFullError,
    Request,
    RequestOutput,
    TokenLogprobs,
)
from caudal.engine import worker
from caudal.engine.worker import AsyncEngine, merge_outputs


def start(executor: FakeExecutor | None = None, **config: object) -> tuple[AsyncEngine, FakeExecutor]:
    engine, executor = make_engine(executor, **config)
    return AsyncEngine(engine), executor


@pytest.fixture
def served() -> Iterator[tuple[AsyncEngine, FakeExecutor]]:
    engine, executor = start(FakeExecutor(num_blocks=400, max_model_len=1024), max_num_seqs=64)
    yield engine, executor
    engine.close()
    assert executor.violations == []


async def read(engine: AsyncEngine, r: Request) -> Collected:
    collected = Collected()
    async for output in engine.generate(r):
        collected.add([output])
    return collected


async def until_empty(engine: AsyncEngine) -> None:
    async with asyncio.timeout(30):
        while (stats := engine.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.002)
    assert engine.stats().kv_cache_usage == 0.0


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def test_many_streams_each_get_their_own(served) -> None:
    engine, _ = served
    requests = [request(f"r{i}", prompt(5 + i, i), max_tokens=20, n=1 + i % 2, seed=i) for i in range(40)]

    async def main() -> list[Collected]:
        return await asyncio.gather(*(read(engine, r) for r in requests))

    for r, collected in zip(requests, asyncio.run(main()), strict=True):
        for index in range(r.params.n):
            assert collected.tokens[r.request_id, index] == expected(r, max_model_len=1024, index=index)


def test_a_storm_of_cancellations_hurts_nobody_else(served) -> None:
    engine, executor = served
    executor.delay = 0.0005
    rng = random.Random(1)
    requests = [request(f"r{i}", prompt(rng.randrange(1, 80), i), max_tokens=60, seed=i) for i in range(64)]

    async def quit_early(r: Request, how: str, after: int) -> None:
        if how == "cancel":
            task = asyncio.create_task(read(engine, r))
            await asyncio.sleep(after / 1000)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        stream = engine.generate(r)
        count = 0
        async for _ in stream:
            count += 1
            if count == after:
                break
        if how == "close":
            await stream.aclose()
        elif how == "abort":
            engine.abort(r.request_id)
        del stream

    async def main() -> list[Collected]:
        quitters = [
            asyncio.create_task(quit_early(r, ("cancel", "close", "drop", "abort")[i % 4], 1 + i % 7))
            for i, r in enumerate(requests[1::3])
        ]
        stayers = [r for i, r in enumerate(requests) if i % 3 != 1]
        collected = await asyncio.gather(*(read(engine, r) for r in stayers))
        await asyncio.gather(*quitters)
        gc.collect()
        await until_empty(engine)
        return collected

    stayers = [r for i, r in enumerate(requests) if i % 3 != 1]
    for r, collected in zip(stayers, asyncio.run(main()), strict=True):
        assert collected.tokens[r.request_id, 0] == expected(r, max_model_len=1024)


def test_an_abort_from_outside_ends_the_stream(served) -> None:
    engine, executor = served
    executor.delay = 0.002

    async def main() -> Collected:
        collected = Collected()
        async for output in engine.generate(request("a", [1, 2], max_tokens=500, ignore_eos=True)):
            collected.add([output])
            engine.abort("a")
            engine.abort("unknown")
        await until_empty(engine)
        return collected

    assert asyncio.run(main()).reason("a") is FinishReason.ABORT


def test_dropping_a_stream_aborts(served) -> None:
    engine, executor = served
    executor.delay = 0.01

    async def main() -> None:
        stream = engine.generate(request("a", [1], max_tokens=900, ignore_eos=True))
        await anext(stream)
        del stream
        await until_empty(engine)

    asyncio.run(main())
    assert engine.stats().generation_tokens < 100


def test_closing_an_old_stream_spares_a_new_request_with_its_id(served) -> None:
    engine, _ = served

    async def main() -> Collected:
        old = engine.generate(request("a", [1], max_tokens=1, ignore_eos=True))
        while engine.stats().generation_tokens == 0:
            await asyncio.sleep(0.001)
        r = request("a", [2, 3], max_tokens=30, ignore_eos=True)
        new = asyncio.create_task(read(engine, r))
        await asyncio.sleep(0)
        await old.aclose()
        return await new

    assert len(asyncio.run(main()).tokens["a", 0]) == 30


def test_a_slow_reader_gets_merged_outputs_and_holds_nobody_up(served) -> None:
    engine, _ = served
    slow = request("slow", [1, 2, 3], max_tokens=300, ignore_eos=True, logprobs=1, n=2, temperature=1.0, seed=3)
    fast = request("fast", [4], max_tokens=300, ignore_eos=True)

    async def main() -> tuple[Collected, Collected]:
        stream = engine.generate(slow)
        collected = Collected()
        collected.add([await anext(stream)])
        other = await read(engine, fast)
        while engine.stats().num_running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert all(len(outputs) < worker._MAX_PENDING for outputs in stream._mailbox.pending.values())
        async for output in stream:
            collected.add([output])
        return collected, other

    collected, other = asyncio.run(main())
    assert other.tokens["fast", 0] == expected(fast, max_model_len=1024)
    assert len(collected.outputs) <= 6
    for index in range(2):
        assert collected.tokens["slow", index] == expected(slow, max_model_len=1024, index=index)
        assert sum(len(o.logprobs) for o in collected.outputs if o.index == index) == 300


def test_merging_keeps_everything() -> None:
    logprobs = (TokenLogprobs(None, ()),)  # type: ignore[arg-type]
    parts = [
        RequestOutput("a", 0, "x", (1,), logprobs, num_output_tokens=1, prompt_logprobs=(None,)),
        RequestOutput("a", 0, "", (2, 3), logprobs * 2, num_output_tokens=3),
        RequestOutput("a", 0, "yz", (4,), logprobs, FinishReason.STOP, "stop", num_output_tokens=4),
    ]
    merged = merge_outputs(parts)
    assert (merged.text, merged.token_ids, len(merged.logprobs)) == ("xyz", (1, 2, 3, 4), 4)
    assert (merged.finish_reason, merged.stop_reason, merged.num_output_tokens) == (FinishReason.STOP, "stop", 4)
    assert merged.prompt_logprobs == (None,)


def test_a_step_wakes_an_event_loop_once(served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor = served
    executor.delay = 0.002
    wakes = 0

    async def main() -> None:
        nonlocal wakes
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe

        def counted(*args, **kwargs):
            nonlocal wakes
            wakes += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        requests = [request(f"r{i}", [i], max_tokens=20, ignore_eos=True) for i in range(30)]
        await asyncio.gather(*(read(engine, r) for r in requests))

    asyncio.run(main())
    assert 20 <= wakes <= engine.stats().num_steps


def test_callbacks_serve_callers_without_an_event_loop(served) -> None:
    engine, _ = served
    queue: SimpleQueue[RequestOutput] = SimpleQueue()
    r = request("a", [1, 2], max_tokens=5, ignore_eos=True)
    engine.submit(r, queue.put)
    collected = Collected()
    while ("a", 0) not in collected.last:
        collected.add([queue.get(timeout=30)])
    assert collected.tokens["a", 0] == expected(r, max_model_len=1024)


def test_a_callback_that_fails_loses_its_request_only(served, caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = served

    def fail(output: RequestOutput) -> None:
        raise RuntimeError("my own fault")

    engine.submit(request("bad", [1], max_tokens=500, ignore_eos=True), fail)
    r = request("good", [2], max_tokens=20, ignore_eos=True)
    collected = asyncio.run(read(engine, r))
    assert collected.tokens["good", 0] == expected(r, max_model_len=1024)
    asyncio.run(until_empty(engine))
    assert "my own fault" in caplog.text


def test_a_closed_event_loop_loses_its_requests_only(served) -> None:
    engine, executor = served
    executor.delay = 0.001
    kept = []

    async def leave() -> None:
        kept.append(engine.generate(request("left", [1], max_tokens=900, ignore_eos=True)))

    asyncio.run(leave())
    asyncio.run(until_empty(engine))


def test_invalid_requests_are_refused_at_once(served) -> None:
    engine, _ = served

    async def main() -> None:
        with pytest.raises(InvalidRequestError, match="top_p"):
            engine.generate(request("a", [1], top_p=2.0))
        with pytest.raises(InvalidRequestError, match="empty"):
            engine.generate(request("a", []))
        assert (await read(engine, request("a", [1], max_tokens=1))).last

    asyncio.run(main())


def test_a_full_queue_is_an_error_in_the_stream() -> None:
    engine, executor = start(max_num_seqs=1, max_waiting=1)
    executor.delay = 0.01

    async def main() -> list[Collected]:
        return await asyncio.gather(*(read(engine, request(f"r{i}", [i], max_tokens=3)) for i in range(4)))

    collected = asyncio.run(main())
    refused = [c for i, c in enumerate(collected) if isinstance(c.last[f"r{i}", 0].error, QueueFullError)]
    assert len(refused) == 2
    engine.close()


def test_closing_aborts_and_refuses_the_new() -> None:
    engine, executor = start()
    executor.delay = 0.005

    async def main() -> Collected:
        reading = asyncio.create_task(read(engine, request("a", [1], max_tokens=200, ignore_eos=True)))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineDeadError, match="shutting down"):
            engine.generate(request("b", [1]))
        return await reading

    assert asyncio.run(main()).reason("a") is FinishReason.ABORT
    assert executor.closed
    engine.close()
    assert not any(thread.name == "caudal-engine" for thread in threading.enumerate())


def test_everybody_hears_of_the_death_of_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, executor = start()
    executor.delay = 0.01
    queue: SimpleQueue[RequestOutput] = SimpleQueue()

    async def main() -> None:
        streams = [engine.generate(request(f"r{i}", [i], max_tokens=100, ignore_eos=True, n=2)) for i in range(3)]
        engine.submit(request("callback", [1], max_tokens=100, ignore_eos=True), queue.put)
        await anext(streams[0])
        monkeypatch.setattr(engine._engine, "step", lambda: 1 / 0)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="ZeroDivision"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineDeadError):
            engine.generate(request("late", [1]))
        with pytest.raises(EngineDeadError):
            engine.stats()

    asyncio.run(main())
    outputs = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs.append(queue.get(timeout=30))
    assert isinstance(outputs[-1].error, EngineDeadError)
    assert "has died" in caplog.text
    engine.close()


def test_an_idle_engine_uses_no_processor_time(served) -> None:
    engine, _ = served
    asyncio.run(read(engine, request("a", [1], max_tokens=2)))
    time.sleep(0.05)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05
