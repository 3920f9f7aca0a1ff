"""A scripted engine, tokenizer and template, and a live server around them: the HTTP layer without a model.

Tokens are bytes (id = byte), with three control tokens after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import httpx
import numpy as np
import uvicorn
from numpy.typing import NDArray

from caudal.api.server import bind, create_app, uvicorn_config
from caudal.api.service import ServedModel, Service
from caudal.config import ServerConfig
from caudal.core import (
    CaudalError,
    FinishReason,
    Grammar,
    InvalidRequestError,
    Logprob,
    QueueFullError,
    Request,
    RequestOutput,
    RequestTooLongError,
    Timings,
    TokenLogprobs,
    TokenMatcher,
)
from caudal.engine.engine import EngineStats
from caudal.engine.sampling import validate
from caudal.text.detokenizer import Detokenizer

VOCAB_SIZE = 259
EOS, BOS, SEP = 256, 257, 258
NAMES = {EOS: b"<|end|>", BOS: b"<|begin|>", SEP: b"<|sep|>"}
TEXT = "Hello, wörld! 你好 ¡qué tal! "


class FakeTokenizer:
    """Bytes as tokens."""

    vocab_size = VOCAB_SIZE
    max_token_characters = max(map(len, NAMES.values()))
    strips_leading_space = False
    bos_id, eos_id = BOS, EOS
    eos_ids = (EOS,)
    fim_ids: ClassVar[dict[str, int]] = {}

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """`parse_special` takes the text `<|sep|>` for that token."""
        first, *others = text.split("<|sep|>") if parse_special else [text]
        return [BOS] * add_special + list(first.encode()) + [i for part in others for i in (SEP, *part.encode())]

    def encode_chat(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        pieces = [self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i))]
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < VOCAB_SIZE:
            raise InvalidRequestError(f"token id {token_id} is outside the vocabulary")
        return NAMES.get(token_id) or bytes((token_id,))

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("latin-1")

    def is_special(self, token_id: int) -> bool:
        return token_id > 255 and bool(self.token_bytes(token_id))  # which refuses what is no token id


class FakeTemplate:
    """`role: content` lines. The content `refuse` is refused, as templates can."""

    source = "the template"

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        if any(message.get("content") == "refuse" for message in messages):
            raise InvalidRequestError("the chat template refuses: no", "messages")
        lines = [f"{message['role']}: {message.get('content')}" for message in messages]
        lines += [f"tools: {json.dumps(tools)}"] * bool(tools) + [f"kwargs: {json.dumps(kwargs)}"] * bool(kwargs)
        text = "\n".join(lines)
        return text + ("" if continue_final_message else "\nassistant:" if add_generation_prompt else "\n")


def cycle_text(request: Request, index: int) -> Iterator[int]:
    """The default script: `TEXT` again and again, with the index in front if there are several sequences."""
    if request.params.n > 1:
        yield ord("0") + index
    while True:
        yield from TEXT.encode()


@dataclass
class FakeEngine:
    """Gives each sequence the tokens of `script` until it ends or `max_tokens` is reached.

    An exception in a script becomes the error of its sequence. `delay`: seconds between tokens; `gate`, where set,
    holds all tokens back until it is set.
    """

    script: Callable[[Request, int], Iterable[int]] = cycle_text
    delay: float = 0.0
    max_model_len: int = 4096
    max_unfinished: int = 1000
    dead: CaudalError | None = None
    gate: asyncio.Event | None = None
    received: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    closed: bool = False

    def validate(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if not all(0 <= token < VOCAB_SIZE for token in request.prompt_token_ids):
            raise InvalidRequestError("the prompt contains a number that is no token id", "prompt")
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise RequestTooLongError(
                f"the prompt has {len(request.prompt_token_ids)} tokens, but the context has {self.max_model_len}",
                "prompt",
            )
        validate(request.params, VOCAB_SIZE, self.max_model_len)

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        if self.dead:
            raise self.dead
        self.received.append(request)
        return self._generate(request)

    async def _generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        if len(self.running) >= self.max_unfinished:
            error = QueueFullError("too many requests; try again later")
            for index in range(request.params.n):
                yield RequestOutput(request.request_id, index, "", (), finish_reason=FinishReason.ERROR, error=error)
            return
        self.running.add(request.request_id)
        sequences: list[Iterator[RequestOutput]] = []
        try:
            sequences = [self._sequence(request, index) for index in range(request.params.n)]
            while sequences:
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(self.delay)
                for sequence in list(sequences):
                    output = next(sequence)
                    if self.closed:
                        output = replace(output, text="", token_ids=(), finish_reason=FinishReason.ABORT)
                    if output.finish_reason is not None:
                        sequences.remove(sequence)
                    yield output
        finally:
            self.running.discard(request.request_id)
            if sequences:
                self.aborted.append(request.request_id)

    def stats(self) -> EngineStats:
        if self.dead:
            raise self.dead
        return EngineStats(
            num_running=len(self.running),
            kv_cache_usage=0.25,
            prefix_cache_queries=100,
            prefix_cache_hits=40,
            num_preemptions=3,
            num_drafts=4,
            num_draft_tokens=12,
            num_accepted_tokens=7,
        )

    def close(self) -> None:
        self.closed = True

    def _sequence(self, request: Request, index: int) -> Iterator[RequestOutput]:
        params = request.params
        detokenizer = Detokenizer(
            FakeTokenizer(),  # type: ignore[arg-type]
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
        )
        limit = self.max_model_len - len(request.prompt_token_ids)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        output = RequestOutput(
            request_id=request.request_id,
            index=index,
            text="",
            token_ids=(),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=len(request.prompt_token_ids) // 2,
        )
        script = iter(self.script(request, index))
        for count in range(1, limit + 1):
            try:
                token = next(script, EOS)
            except CaudalError as error:
                yield replace(output, finish_reason=FinishReason.ERROR, error=error)
                return
            stopped: str | int | None = None
            reason: FinishReason | None = None
            if token == EOS and not params.ignore_eos:
                text, reason = "", FinishReason.STOP
            else:
                pushed = detokenizer.push((token,))
                text, stopped = pushed.text, pushed.stopped
                if token in params.stop_token_ids:
                    stopped = token
                reason = FinishReason.STOP if stopped is not None else FinishReason.LENGTH if count == limit else None
            if reason is not None:
                text += detokenizer.flush().text
            first = count == 1 and index == 0
            yield replace(
                output,
                text=text,
                token_ids=(token,),
                logprobs=() if params.logprobs is None else (logprobs_of(token, params.logprobs),),
                prompt_logprobs=prompt_logprobs_of(request) if first else None,
                num_output_tokens=count,
                finish_reason=reason,
                stop_reason=stopped,
                timings=None if reason is None else Timings(0.1, 0.2, 0.3),
            )
            if reason is not None:
                return


def logprobs_of(token: int, count: int) -> TokenLogprobs:
    """The token is second best; the best is the one after it."""
    top = tuple(Logprob((token + 1 - i) % VOCAB_SIZE, -0.5 * (i + 1), i + 1) for i in range(count))
    return TokenLogprobs(Logprob(token, -1.0, 2), top)


def prompt_logprobs_of(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    count = request.params.prompt_logprobs
    if count is None:
        return None
    return (None, *(logprobs_of(token, count) for token in request.prompt_token_ids[1:]))


class FakeGrammars:
    """Takes every grammar; the fake engine does not look at it."""

    def compile(self, grammar: Grammar) -> TokenMatcher:
        return FreeMatcher()


class FreeMatcher:
    """Allows everything."""

    def copy(self) -> TokenMatcher:
        return self

    def fill(self, mask: NDArray[np.uint32]) -> None:
        mask[:] = 0xFFFFFFFF

    def accept(self, token_id: int) -> bool:
        return False


def fake_model(engine: FakeEngine) -> ServedModel:
    return ServedModel("fake", engine, FakeTokenizer(), FakeTemplate(), engine.max_model_len, FakeGrammars())


@dataclass
class LiveServer:
    """A server that is running in a thread."""

    url: str
    port: int
    engine: FakeEngine
    service: Service
    loop: asyncio.AbstractEventLoop
    http: httpx.Client


@contextlib.contextmanager
def running(engine: FakeEngine | None = None, config: ServerConfig | None = None) -> Iterator[LiveServer]:
    """A live server on a free port, as `serve` runs it."""
    engine = engine or FakeEngine()
    config = replace(config or ServerConfig(), port=0)
    service = Service(fake_model(engine))
    sock = bind(config)
    server_config = uvicorn_config(create_app(service, config), config)
    server = uvicorn.Server(server_config)
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def work() -> None:
        async def main() -> None:
            loops.append(asyncio.get_running_loop())
            started.set()
            await server.serve(sockets=[sock])

        with asyncio.Runner(loop_factory=server_config.get_loop_factory()) as runner:
            runner.run(main())

    thread = threading.Thread(target=work, name="server")
    thread.start()
    started.wait()
    port = sock.getsockname()[1]
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, verify=False, timeout=30) as http:  # without TLS a client is made quickly
            yield LiveServer(url, port, engine, service, loops[0], http)
    finally:
        server.should_exit = True
        thread.join()
