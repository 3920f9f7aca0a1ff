"""What the dialects share: the served model, and the way from a request to its outputs.

A dialect translates: its own JSON to `Request`s, and `RequestOutput`s to its own JSON. Everything between,
that is checking, running, merging, measuring and aborting, is here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from caudal.api.errors import unavailable
from caudal.api.metrics import Metrics, RequestTracker
from caudal.core import Grammar, InvalidRequestError, ModelNotFoundError, Request, RequestOutput, TokenMatcher

if TYPE_CHECKING:
    from caudal.engine.worker import EngineStats


class OutputStream(Protocol):
    """The outputs of one request; closing it aborts the request. `engine.worker.RequestStream` is one."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    async def aclose(self) -> None: ...


class Engine(Protocol):
    """What the API needs of the engine; `engine.worker.AsyncEngine` has it."""

    def validate(self, request: Request) -> None: ...
    def generate(self, request: Request) -> OutputStream: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class Tokenizer(Protocol):
    """What the API needs of `text.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_token_characters(self) -> int | None: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def fim_ids(self) -> Mapping[str, int]: ...
    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...
    def encode_chat(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    def token_text(self, token_id: int) -> str: ...


class GrammarCompiler(Protocol):
    """What the API needs of `text.grammar.GrammarCompiler`."""

    def compile(self, grammar: Grammar) -> TokenMatcher: ...


class ChatTemplate(Protocol):
    """What the API needs of `text.chat.ChatTemplate`."""

    @property
    def source(self) -> str: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """What clients are told about a model; empty where it is not known."""

    architecture: str = ""  # GGUF's name, as llama
    quantization: str = ""  # the type of most of its weights, as Q4_K
    max_num_seqs: int = 1  # sequences that may run at the same time


@dataclass(slots=True)
class ServedModel:
    """One model that is ready to answer."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int  # tokens
    grammars: GrammarCompiler | None = None
    details: ModelDetails = field(default_factory=ModelDetails)
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.name, self.max_model_len)

    async def compile(self, grammar: Grammar | None) -> TokenMatcher | None:
        """The grammar of a request, compiled in another thread. Raises `InvalidRequestError`."""
        if grammar is None:
            return None
        if self.grammars is None:
            raise InvalidRequestError("This model cannot follow grammars.", grammar.param)
        return await asyncio.to_thread(self.grammars.compile, grammar)

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Runs requests at the same time: pairs of position in `requests` and output, as they come.

        Ends when all sequences have. When the caller closes the generator, unfinished requests are aborted at once.
        Raises the `CaudalError` of the first sequence that fails; the others are aborted.
        """
        trackers = [RequestTracker(self.metrics, request) for request in requests]
        try:
            outputs = self._only(requests[0]) if len(requests) == 1 else self._merge(requests)
            async with aclosing(outputs):
                async for position, output in outputs:
                    trackers[position].observe(output)
                    if output.error is not None:
                        raise output.error
                    yield position, output
        finally:
            for tracker in trackers:
                tracker.close()

    async def _only(self, request: Request) -> AsyncGenerator[tuple[int, RequestOutput]]:
        async with aclosing(self.engine.generate(request)) as stream:
            async for output in stream:
                yield 0, output

    async def _merge(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, RequestOutput]]:
        queue: asyncio.Queue[tuple[int, RequestOutput | None]] = asyncio.Queue()

        async def pump(position: int) -> None:
            try:
                async with aclosing(self.engine.generate(requests[position])) as stream:
                    async for output in stream:
                        queue.put_nowait((position, output))
            finally:
                queue.put_nowait((position, None))

        tasks = [asyncio.create_task(pump(position)) for position in range(len(requests))]
        try:
            running = len(tasks)
            while running:
                position, output = await queue.get()
                if output is None:
                    await tasks[position]  # raises what it raised
                    running -= 1
                else:
                    yield position, output
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Service:
    """The models of one server, and whether it takes requests."""

    def __init__(self, model: ServedModel | None = None) -> None:
        self._model = model
        self._stopping = False

    def set_model(self, model: ServedModel) -> None:
        """From now on requests are served."""
        self._model = model

    def stop(self) -> None:
        """From now on new requests get 503; running ones go on."""
        self._stopping = True

    def abort(self) -> None:
        """Ends running requests without waiting for it; call it in an event loop."""
        if self._model is not None:
            asyncio.get_running_loop().run_in_executor(None, self._model.engine.close)

    @property
    def model(self) -> ServedModel:
        """The served model. Raises a 503 `ApiError` while the server is loading or stopping."""
        if self._stopping:
            raise unavailable("The server is stopping.")
        if self._model is None:
            raise unavailable("The model is loading. Try again in a moment.", retry_after=1)
        return self._model

    def find(self, name: str | None) -> ServedModel:
        """The model that a request names; None: the served one. Raises `ModelNotFoundError`."""
        model = self.model
        if name is not None and name != model.name:
            raise ModelNotFoundError(f"The model `{name[:200]}` does not exist. This server has `{model.name}`.")
        return model
