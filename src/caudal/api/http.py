"""Reading requests and writing responses: bounded strict JSON in, JSON or server-sent events out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from caudal.api.errors import ApiError

T = TypeVar("T")
B = TypeVar("B", bound="Body")

# Bodies above this are parsed in another thread, so that running streams go on.
INLINE_BYTES = 64 * 1024
MAX_DEPTH = 256  # of a body


class Body(BaseModel):
    """Base of request bodies. Types are strict, unknown fields ignored, numbers finite; null means absent."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object without its null members. Raises a 400 `ApiError`."""
    raw = await request.body()
    value = _parse(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(_parse, raw)
    return {key: member for key, member in value.items() if member is not None}


def _parse(raw: bytes) -> dict[str, Any]:
    if not raw:
        raise ApiError(400, "The body is empty; it must be a JSON object.", code="invalid_json")
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # a lone surrogate passes the parser but is no text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise ApiError(400, f"The body is not valid UTF-8: {error}.", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "The body is not valid JSON: nested too deep.", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if _is_deep(value):
        raise ApiError(400, "The body is not valid JSON: nested too deep.", code="invalid_json")
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return cast(dict[str, Any], value)


def _is_deep(value: object) -> bool:
    """Whether it nests beyond `MAX_DEPTH`. The parser takes what is too deep to be written again, as schemas are."""
    level: list[object] = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (
                cast(dict[str, object], item).values() if isinstance(item, dict) else cast(list[object], item)
            )
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def parse_body(kind: type[B], body: dict[str, Any]) -> B:
    """`body` as a pydantic model. Raises a 400 `ApiError` that names the first wrong field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        if first["type"] == "missing":
            raise ApiError(400, f"Missing required parameter: '{param}'.", param=param) from error
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"Invalid value for '{param}': {message}.", param=param, code="invalid_value") from error


def documented(body: type[Body]) -> dict[str, Any]:
    """For `openapi_extra`: the part of the OpenAPI page that FastAPI cannot see, as bodies are read by hand."""
    schema = body.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """A schema without references, which would point to another place once it is part of the page."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    members = cast(dict[str, Any], node)
    if "$ref" in members:
        return _inlined(definitions[members["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(member, definitions) for key, member in members.items()}


def compact(value: object) -> str:
    """JSON without spaces and in ASCII: some clients split events also at U+2028 and U+0085."""
    return json.dumps(value, separators=(",", ":"))


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises `ClientGoneError` then."""
    task = asyncio.create_task(work)
    if not await _run(task, request.receive):
        raise ClientGoneError
    return task.result()


async def _run(task: asyncio.Task[Any], receive: Receive) -> bool:
    """Waits until `task` is done, and cancels it when the client goes away. Whether it came to its end."""
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator of complete events, written as they come.

    It writes to ASGI directly: one `send` for each item and no task switch. When the client goes away, also one
    that has stopped reading, the generator is closed at once. The status is sent with the first event, so an error
    before that has a status of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.create_task(self._write(send))
        if await _run(task, receive):
            task.result()

    async def _write(self, send: Send) -> None:
        started = False
        async with aclosing(self._events):
            async for event in self._events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
