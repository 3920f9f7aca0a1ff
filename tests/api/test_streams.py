"""Many streams at once, clients that go away or do not read, and the pieces in which events arrive."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from fake import TEXT, FakeEngine, running

from caudal.api.http import EventStream
from caudal.core import Request


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits for something that another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def expected(num_tokens: int) -> str:
    data = TEXT.encode() * (num_tokens // len(TEXT.encode()) + 1)
    return data[:num_tokens].decode("utf-8", "replace")


def test_64_streams_of_which_a_third_is_cancelled() -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        num_tokens = 20 + number * 3
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=100_000 if number % 3 == 0 else num_tokens,
            stream=True,
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if number % 3 == 0 and len(text) > 10:
                await stream.close()
                return text
        assert text == expected(num_tokens)
        return text

    async def all_of_them(url: str) -> None:
        limits = httpx.Limits(max_connections=64)
        async with (
            httpx.AsyncClient(limits=limits, timeout=60, verify=False) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, http_client=http) as client,
        ):
            await asyncio.gather(*(one(client, number) for number in range(64)))

    with running(FakeEngine(delay=0.002, max_model_len=10**6)) as server:
        asyncio.run(all_of_them(server.url))
        until(lambda: not server.engine.running)
        assert len(server.engine.received) == 64
        assert len(server.engine.aborted) == 22
        metrics = server.http.get("/metrics").text
        assert 'vllm:request_success_total{finished_reason="length",model_name="fake"} 42.0' in metrics
        assert 'vllm:request_success_total{finished_reason="abort",model_name="fake"} 22.0' in metrics


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": ["x", "y", "z"], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before_first_token", [False, True])
def test_client_gone_aborts_at_once(path: str, body: dict[str, Any], stream: bool, before_first_token: bool) -> None:
    engine = FakeEngine(delay=60.0 if before_first_token else 0.001, max_model_len=10**9)
    with running(engine) as server:
        content = json.dumps({**body, "stream": stream, "max_tokens": 10**8}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            sock.sendall(head.encode() + content)
            until(lambda: bool(engine.running))
            if stream and not before_first_token:
                assert sock.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: not engine.running)
        assert len(engine.aborted) == len(engine.received)
        assert server.http.get("/health").status_code == 200


def test_client_gone_in_the_middle_of_its_request() -> None:
    with running() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
            time.sleep(0.05)
        assert server.http.get("/health").status_code == 200


def test_client_that_does_not_read_holds_up_nobody() -> None:
    with running(FakeEngine(max_model_len=10**9)) as server:
        content = json.dumps({"prompt": "x", "max_tokens": 10**8, "stream": True}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            sock.sendall(head.encode() + content)
            until(lambda: bool(server.engine.running))
            time.sleep(0.3)
            for _ in range(5):
                reply = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 50})
                assert reply.json()["choices"][0]["text"] == expected(50)
            assert len(server.engine.running) == 1  # still waiting for its reader
        until(lambda: not server.engine.running)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_events_survive_any_split(size: int) -> None:
    """Whatever the pieces are in which a network delivers the bytes, the client puts the same text together."""
    with running() as server:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "stream": True}
        raw = server.http.post("/v1/chat/completions", json=body).content

    def respond(request: httpx.Request) -> httpx.Response:
        pieces = (raw[i : i + size] for i in range(0, len(raw), size))
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=pieces)

    with (
        httpx.Client(transport=httpx.MockTransport(respond)) as http,
        openai.OpenAI(base_url="http://test/v1", api_key="x", http_client=http) as client,
    ):
        chunks = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=60, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected(60)


def test_text_that_looks_like_the_end_of_a_line() -> None:
    r"""Some clients split lines also at U+2028, U+0085 and \x1c, so events have these in escaped form."""
    text = "a\u2028b\u2029c\x85d\x0be\x1cf\r\ng\n\ndata: x\n\n"

    def script(request: Request, index: int) -> Iterator[int]:
        return iter(text.encode())

    with running(FakeEngine(script=script)) as server:
        body = {"prompt": "x", "max_tokens": 100, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as reply:
            events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == text


def test_each_event_comes_with_its_token() -> None:
    """Nothing is kept back: the next token is made only after the client has read the event of the one before."""
    gate = asyncio.Event()

    def script(request: Request, index: int) -> Iterator[int]:
        for token in b"abc":
            gate.clear()
            yield token

    with running(FakeEngine(script=script, gate=gate)) as server:
        server.loop.call_soon_threadsafe(gate.set)
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        texts: list[str] = []
        with server.http.stream("POST", "/v1/completions", json=body, timeout=10) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    server.loop.call_soon_threadsafe(gate.set)
        assert texts == ["a", "b", "c"]


def test_event_stream_closes_its_generator_when_the_server_cancels() -> None:
    closed = asyncio.Event()

    async def main() -> None:
        async def events() -> Any:
            try:
                while True:
                    yield b"data: x\n\n"
                    await asyncio.sleep(0.001)
            finally:
                closed.set()

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            pass

        task = asyncio.create_task(EventStream(events())({"type": "http"}, receive, send))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed.is_set()

    asyncio.run(main())


def test_a_large_prompt() -> None:
    with running(FakeEngine(max_model_len=10**8)) as server:
        prompt = "x" * 5_000_000
        reply = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        assert reply.json()["usage"]["prompt_tokens"] == 5_000_001
