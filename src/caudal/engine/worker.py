"""AsyncEngine: the thread that owns an Engine, and the queues on either side of it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from caudal.core import CaudalError, EngineDeadError, FinishReason, Request, RequestOutput
from caudal.engine.engine import Engine, EngineStats

_log = logging.getLogger(__name__)

_MAX_PENDING = 64  # outputs of one sequence that a slow reader has not taken, before they are merged

__all__ = ["AsyncEngine", "EngineStats", "RequestStream", "merge_outputs"]


def merge_outputs(outputs: list[RequestOutput]) -> RequestOutput:
    """One output that says what these consecutive ones of one sequence say."""
    if len(outputs) == 1:
        return outputs[0]
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=tuple(logprobs for output in outputs for logprobs in output.logprobs),
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
    )


class _Mailbox:
    """Outputs of one request on their way to a RequestStream. Touched only in the stream's event loop."""

    def __init__(self, num_sequences: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.pending: dict[int, list[RequestOutput]] = {}  # by sequence, in the order of arrival
        self.num_unread = num_sequences  # sequences whose last output has not been read; 0: nobody reads any more
        self.waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        if self.num_unread == 0:
            return
        pending = self.pending.setdefault(output.index, [])
        pending.append(output)
        if len(pending) >= _MAX_PENDING:
            pending[:] = [merge_outputs(pending)]
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class RequestStream:
    """The outputs of one request, as an asynchronous iterator that ends after the last output of its last sequence.

    If the reader is slower than the engine, it gets several steps in one output for each sequence. Closing the
    stream, dropping it or cancelling a wait for it aborts the request. One task at a time may read it.
    """

    def __init__(self, mailbox: _Mailbox, abort: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._abort = abort

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises EngineDeadError if the engine's thread has died. Other errors are in the outputs."""
        mailbox = self._mailbox
        while not mailbox.pending:
            if mailbox.num_unread == 0:
                raise StopAsyncIteration
            mailbox.waiter = mailbox.loop.create_future()
            try:
                await mailbox.waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
            finally:
                mailbox.waiter = None
        output = merge_outputs(mailbox.pending.pop(next(iter(mailbox.pending))))
        if isinstance(output.error, EngineDeadError):
            mailbox.num_unread = 0
            mailbox.pending.clear()
            raise output.error
        mailbox.num_unread -= output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        """Abort the request if it is not over; nothing more comes out. Idempotent."""
        mailbox = self._mailbox
        mailbox.pending.clear()
        if mailbox.num_unread > 0:
            mailbox.num_unread = 0
            self._abort()
            mailbox.wake()

    def __del__(self) -> None:
        if self._mailbox.num_unread > 0:
            self._abort()


@dataclass(slots=True, eq=False)
class _Consumer:
    """Where the outputs of one request go. Belongs to the engine thread."""

    request: Request
    sink: _Mailbox | Callable[[RequestOutput], None]
    unfinished: set[int]  # indices of sequences


@dataclass(frozen=True, slots=True)
class _Add:
    consumer: _Consumer


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    consumer: _Consumer | None = None  # only this one, if the id has been used again


@dataclass(frozen=True, slots=True)
class _Stop:
    """Abort what there is and end."""


class AsyncEngine:
    """Runs an Engine in a thread of its own. All methods may be called from any thread.

    While there is nothing to do, the thread sleeps in a queue. The outputs of a step reach each event loop in one
    call, and no reader can hold the engine up.
    """

    def __init__(self, engine: Engine) -> None:
        """Takes the engine over, nobody else may call it from now on, and starts the thread."""
        self._engine = engine
        self._inbox: SimpleQueue[_Add | _Abort | _Stop] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="caudal-engine", daemon=True)
        self._lock = threading.Lock()  # orders "is it refused?" and "put it into the inbox"
        self._refusal: str | None = None  # why no more requests are taken
        self._death: Exception | None = None
        self._stats = engine.stats
        # Below: only the engine thread.
        self._consumers: dict[str, _Consumer] = {}
        self._thread.start()
        atexit.register(self.close)  # or the interpreter would end under a running step

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._engine.max_model_len

    def stats(self) -> EngineStats:
        """As of the latest step. Raises EngineDeadError if the thread has died."""
        if self._death is not None:
            raise EngineDeadError(f"the engine has died: {self._death!r}")
        return self._stats

    def validate(self, request: Request) -> None:
        """Raises InvalidRequestError or RequestTooLongError if the request can never be served."""
        self._engine.validate(request)

    def generate(self, request: Request) -> RequestStream:
        """Start a request and give its outputs. Call it in the event loop that reads them.

        Raises InvalidRequestError or RequestTooLongError if it can never be served, and EngineDeadError if the
        engine takes no more requests. A full queue gives outputs with a QueueFullError.
        """
        mailbox = _Mailbox(request.params.n)
        consumer = self._submit(request, mailbox)
        abort = _Abort(request.request_id, consumer)
        return RequestStream(mailbox, lambda: self._inbox.put(abort))

    def submit(self, request: Request, callback: Callable[[RequestOutput], None]) -> None:
        """Start a request whose outputs go to `callback`, called in the engine's thread: it must not block.

        Raises as `generate` does.
        """
        self._submit(request, callback)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its sequences end with FinishReason.ABORT. Unknown ids are ignored."""
        self._inbox.put(_Abort(request_id))

    def close(self) -> None:
        """Abort all requests, end the thread and free the model. Blocks for at most a step. Idempotent."""
        with self._lock:
            self._refusal = self._refusal or "the engine is shutting down and takes no more requests"
            self._inbox.put(_Stop())
        if threading.current_thread() is not self._thread:  # the garbage collector calls from anywhere
            self._thread.join()
        atexit.unregister(self.close)

    def _submit(self, request: Request, sink: _Mailbox | Callable[[RequestOutput], None]) -> _Consumer:
        self._engine.validate(request)
        consumer = _Consumer(request, sink, set(range(request.params.n)))
        with self._lock:
            if self._refusal is not None:
                raise EngineDeadError(self._refusal)
            self._inbox.put(_Add(consumer))
        return consumer

    # ---------------------------------------------------------------------------------- in the engine thread

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_work:
                    self._dispatch(self._engine.step())
        except Exception as error:  # noqa: BLE001  (nobody above could tell those who wait)
            _log.exception("the engine thread has died")
            self._die(error)
        finally:
            self._engine.close()

    def _obey(self) -> bool:
        """Carry out the orders in the inbox; waits for one if there is nothing else to do. False: end the thread."""
        while True:
            try:
                order = self._inbox.get(block=not self._engine.has_work)
            except Empty:
                return True
            match order:
                case _Add(consumer):
                    self._add(consumer)
                case _Abort(request_id, consumer):
                    if consumer is None or self._consumers.get(request_id) is consumer:
                        self._dispatch(self._engine.abort(request_id))
                case _Stop():
                    for request_id in list(self._consumers):
                        self._dispatch(self._engine.abort(request_id))
                    return False

    def _add(self, consumer: _Consumer) -> None:
        try:
            self._engine.add(consumer.request)
        except CaudalError as error:
            _deliver((consumer, output) for output in _failures(consumer, error))
            return
        self._consumers[consumer.request.request_id] = consumer
        self._stats = self._engine.stats

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        """Hand the outputs of a step out; those who cannot take them lose their requests."""
        self._stats = self._engine.stats  # before, so that who has the last output sees it counted
        addressed: list[tuple[_Consumer, RequestOutput]] = []
        for output in outputs:
            consumer = self._consumers[output.request_id]
            addressed.append((consumer, output))
            if output.finish_reason is not None:
                consumer.unfinished.remove(output.index)
                if not consumer.unfinished:
                    del self._consumers[output.request_id]
        for consumer in _deliver(addressed):
            if self._consumers.pop(consumer.request.request_id, None) is not None:
                self._engine.abort(consumer.request.request_id)
                self._stats = self._engine.stats

    def _die(self, error: Exception) -> None:
        with self._lock:
            self._death = error
            self._refusal = f"the engine has died: {error!r}"
        consumers = list(self._consumers.values())
        while not self._inbox.empty():
            order = self._inbox.get()
            if isinstance(order, _Add):
                consumers.append(order.consumer)
        self._consumers.clear()
        for consumer in consumers:
            _deliver((consumer, output) for output in _failures(consumer, EngineDeadError(self._refusal)))


def _failures(consumer: _Consumer, error: CaudalError) -> list[RequestOutput]:
    """Last outputs for all sequences that are not over."""
    request = consumer.request
    return [
        RequestOutput(
            request.request_id,
            index,
            text="",
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            num_prompt_tokens=len(request.prompt_token_ids),
            error=error,
        )
        for index in sorted(consumer.unfinished)
    ]


def _deliver(addressed: Iterable[tuple[_Consumer, RequestOutput]]) -> list[_Consumer]:
    """Pass outputs on, with one call for each event loop; the consumers that could not take them."""
    failed: list[_Consumer] = []
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Consumer, RequestOutput]]] = {}
    for consumer, output in addressed:
        if isinstance(consumer.sink, _Mailbox):
            by_loop.setdefault(consumer.sink.loop, []).append((consumer, output))
            continue
        try:
            consumer.sink(output)
        except Exception:  # noqa: BLE001  (one caller's bug must not end the loop)
            _log.exception("the callback of request %s failed", consumer.request.request_id)
            failed.append(consumer)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, group)
        except RuntimeError:  # the loop is closed
            failed += [consumer for consumer, _ in group]
    return failed


def _put_all(group: list[tuple[_Consumer, RequestOutput]]) -> None:
    for consumer, output in group:
        if isinstance(consumer.sink, _Mailbox):
            consumer.sink.put(output)
