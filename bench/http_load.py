"""What HTTP costs: tokens/s of many streams through `caudal serve`, beside the same requests to the engine alone.

    python bench/http_load.py MODEL.gguf [--streams 32] [--tokens 128] [--rounds 5] [--threads 2] [--json]

Both sides get the same prompts as token ids, in turn: a round over HTTP, a round without. The client is as thin
as it can be, since it runs on the same CPUs as the server: it counts the events and reads the usage at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from common import CAUDAL, median, report

from caudal.config import EngineConfig
from caudal.core import Request, RequestOutput, SamplingParams
from caudal.engine.worker import AsyncEngine
from caudal.loader import load

HOST = "127.0.0.1"
PROMPT_TOKENS = 32
START_TIMEOUT = 60.0  # seconds


def prompts(streams: int, round_number: int) -> list[list[int]]:
    """Random ids, new ones in each round so that no prefix is found again; both sides get the same."""
    generator = random.Random(round_number)
    return [[generator.randrange(1000, 20000) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextmanager
def server(model: Path, threads: int, streams: int) -> Iterator[int]:
    """A running server; yields its port."""
    port = free_port()
    flags = ["--port", str(port), "--threads", str(threads), "--max-num-seqs", str(streams)]
    process = subprocess.Popen([*CAUDAL, "serve", str(model), *flags], stderr=subprocess.DEVNULL)
    try:
        asyncio.run(wait_until_healthy(port))
        yield port
    finally:
        process.terminate()
        process.wait()


async def wait_until_healthy(port: int) -> None:
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        try:
            reader, writer = await asyncio.open_connection(HOST, port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.05)
            continue
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        status = await reader.readline()
        writer.close()
        if b" 200 " in status:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError("the server did not become healthy")


async def stream(port: int, prompt: list[int], tokens: int) -> int:
    """One streamed completion; the number of tokens that its usage counts."""
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    tail = b""
    while chunk := await reader.read(1 << 16):
        tail = (tail + chunk)[-4096:]
    writer.close()
    usage = next(line for line in reversed(tail.split(b"\n")) if b'"completion_tokens"' in line)
    return json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]


async def http_round(port: int, requests: list[list[int]], tokens: int) -> float:
    """Tokens per second of all streams together."""
    start = time.perf_counter()
    counts = await asyncio.gather(*(stream(port, prompt, tokens) for prompt in requests))
    return sum(counts) / (time.perf_counter() - start)


def engine_round(engine: AsyncEngine, requests: list[list[int]], tokens: int) -> float:
    """The same without HTTP."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs: SimpleQueue[RequestOutput] = SimpleQueue()
    start = time.perf_counter()
    for number, prompt in enumerate(requests):
        engine.submit(Request(f"bench-{start}-{number}", tuple(prompt), params), outputs.put)
    unfinished, count = len(requests), 0
    while unfinished:
        output = outputs.get()
        if output.error is not None:
            raise output.error
        count += len(output.token_ids)
        unfinished -= output.finish_reason is not None
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    loaded = load(args.model, EngineConfig(num_threads=args.threads, max_num_seqs=args.streams))
    rounds = []
    try:
        with server(args.model, args.threads, args.streams) as port:
            for number in range(args.rounds + 1):
                requests = prompts(args.streams, number)
                over_http = asyncio.run(http_round(port, requests, args.tokens))
                rounds.append((over_http, engine_round(loaded.engine, requests, args.tokens)))
    finally:
        loaded.engine.close()
    rounds = rounds[1:]  # the first one warms up
    result = {
        "http": median(http for http, _ in rounds),
        "engine": median(alone for _, alone in rounds),
        "ratio": median(http / alone for http, alone in rounds),
    }
    report(
        result | {"streams": args.streams, "tokens": args.tokens, "rounds": rounds},
        as_json=args.json,
        columns=["streams", "HTTP, tokens/s", "engine alone, tokens/s", "ratio"],
        rows=[[args.streams, result["http"], result["engine"], result["ratio"]]],
    )


if __name__ == "__main__":
    main()
