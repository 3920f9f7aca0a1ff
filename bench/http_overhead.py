"""What the HTTP layer costs: tokens per second and CPU time with an engine that costs next to nothing.

    python bench/http_overhead.py [--streams 32] [--tokens 500] [--route chat] [--json]

A server process answers N streams from an engine that makes one token for every stream whenever the event loop comes
round, as the steps of a real engine do. This process reads the streams as raw bytes and checks the number of events.
The CPU seconds are those of the server process alone, without its start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from typing import Any

from caudal.api.server import serve
from caudal.api.service import ServedModel
from caudal.config import ServerConfig
from caudal.core import FinishReason, Request, RequestOutput
from caudal.engine.engine import EngineStats

WORDS = (" the", " of", " river", " water", "\n", " and", " flow", "s")
ROUTES = {
    "completions": ("/v1/completions", {"prompt": [1]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
}


class StepEngine:
    """Every turn of the event loop is a step: one more token for every request that runs."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def validate(self, request: Request) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        pass

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        loop = asyncio.get_running_loop()
        limit = request.params.max_tokens or 0
        for count in range(1, limit + 1):
            turn: asyncio.Future[None] = loop.create_future()
            if not self._waiting:
                loop.call_soon(self._step)
            self._waiting.append(turn)
            await turn
            yield RequestOutput(
                request.request_id,
                0,
                WORDS[count % len(WORDS)],
                (count,),
                finish_reason=FinishReason.LENGTH if count == limit else None,
                num_prompt_tokens=1,
                num_output_tokens=count,
            )

    def _step(self) -> None:
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.cancelled():
                turn.set_result(None)


class OneToken:
    """A tokenizer and a template that do nothing."""

    vocab_size = 1000

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [1]

    def encode_chat(self, text: str) -> list[int]:
        return [1]

    def decode(self, ids: object, *, skip_special: bool = False) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def token_text(self, token_id: int) -> str:
        return ""

    def is_special(self, token_id: int) -> bool:
        return False

    def render(self, messages: object, **kwargs: object) -> str:
        return ""


def server_process(pipe: Connection) -> None:
    """Sends its port, then its CPU seconds each time it is asked."""
    nothing = OneToken()
    start = time.process_time()

    def load() -> ServedModel:
        return ServedModel("bench", StepEngine(), nothing, nothing, 10**9)

    def answer() -> None:
        pipe.recv()
        pipe.send(time.process_time() - start)

    def report(line: str) -> None:
        if not line.startswith("Listening on "):
            return
        pipe.send(int(line.rsplit(":", 1)[1]))
        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)

    serve(load, ServerConfig(port=0), report)


async def read_stream(port: int, path: str, body: dict[str, Any], num_tokens: int) -> None:
    """One request; its events are only counted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps({**body, "stream": True, "max_tokens": num_tokens}).encode()
    writer.write(b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % path.encode())
    writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
    events = 0
    tail = b""
    while data := await reader.read(65536):
        tail = tail[-5:] + data
        events += tail.count(b"data: {")
        tail = tail[-5:]
    writer.close()
    assert events >= num_tokens, f"{events} events for {num_tokens} tokens"


async def measure(port: int, route: str, num_streams: int, num_tokens: int) -> float:
    """Seconds for all streams."""
    path, body = ROUTES[route]
    start = time.perf_counter()
    await asyncio.gather(*(read_stream(port, path, body, num_tokens) for _ in range(num_streams)))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500, help="in each stream")
    parser.add_argument("--route", choices=ROUTES, default="chat")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    process = context.Process(target=server_process, args=(far_end,))
    process.start()
    try:
        port = pipe.recv()
        asyncio.run(measure(port, arguments.route, arguments.streams, 10))
        pipe.send(None)
        cpu_before = pipe.recv()
        seconds = asyncio.run(measure(port, arguments.route, arguments.streams, arguments.tokens))
        pipe.send(None)
        cpu = pipe.recv() - cpu_before
    finally:
        process.terminate()
        process.join()
    tokens = arguments.streams * arguments.tokens
    result = {
        "streams": arguments.streams,
        "tokens": tokens,
        "route": arguments.route,
        "tokens_per_second": tokens / seconds,
        "cpu_seconds_per_1000_tokens": cpu / tokens * 1000,
        "tokens_per_cpu_second": tokens / cpu,
    }
    if arguments.json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        for name, value in result.items():
            print(f"{name:30} {value:.4g}" if isinstance(value, float) else f"{name:30} {value}")


if __name__ == "__main__":
    main()
