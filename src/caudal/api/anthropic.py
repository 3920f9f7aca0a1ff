"""Anthropic's API: messages, streaming and not, the tokens of a message, and models.

Fields and shapes are those of Anthropic's API reference: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from caudal.api.anthropic_requests import MessagesBody, PromptBody, chat_body, refuse_unsupported
from caudal.api.errors import ApiError, ErrorBody, request_id, to_api_error, unavailable
from caudal.api.http import EventStream, compact, documented, parse_body, read_json, until_disconnect
from caudal.api.openai_requests import encode_chat
from caudal.api.service import ServedModel, Service
from caudal.core import CaudalError, FinishReason, Request, RequestOutput

VERSION_HEADER = "anthropic-version"  # every client of this dialect sends it; on shared routes it tells them apart
PING_SECONDS = 15.0  # between the events of a stream whose message has not begun: less than proxies wait
PAGE = 20  # models in one reply, where the client does not say
MAX_PAGE = 1000
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's error: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # clients know by Anthropic's words that they must shorten the conversation
    prefix = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": f"{prefix}{error}"}, "request_id": error.request_id}


ERROR_BODIES: dict[str, ErrorBody] = {"/v1/messages": error_body}
ERROR_HEADERS: dict[str, ErrorBody] = {VERSION_HEADER: error_body}


class VersionedRoute(APIRoute):
    """A route that only requests with `anthropic-version` take; others go on to OpenAI's route of the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if any(name == VERSION_HEADER.encode() for name, _ in scope["headers"]):
            return super().matches(scope)
        return Match.NONE, {}


def router(service: Service) -> APIRouter:
    """The routes of this dialect."""
    routes = APIRouter(tags=["Anthropic"])

    @routes.post("/v1/messages", openapi_extra=documented(MessagesBody))
    async def messages(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        refuse_unsupported(raw)
        body = parse_body(MessagesBody, raw)
        model = service.find(body.model)
        ids = await encode_chat(model, await chat_body(body))
        matcher = await model.compile(body.grammar())
        request = Request(f"msg_{uuid.uuid4().hex}", tuple(ids), body.sampling(), matcher=matcher)
        model.engine.validate(request)  # before a stream has sent its status
        reply = MessageReply(model, request, body.max_tokens, request_id(http_request.scope))
        if body.stream:
            return EventStream(reply.events())
        return JSONResponse(await until_disconnect(http_request, reply.whole()))

    @routes.post("/v1/messages/count_tokens", openapi_extra=documented(PromptBody))
    async def count_tokens(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        refuse_unsupported(raw)
        body = parse_body(PromptBody, raw)
        ids = await encode_chat(service.find(body.model), await chat_body(body))
        return JSONResponse({"input_tokens": len(ids)})

    async def list_models(http_request: HTTPRequest) -> Response:
        return JSONResponse(_page([_model_card(service.model)], http_request.query_params))

    async def get_model(name: str) -> Response:
        return JSONResponse(_model_card(service.find(name)))

    # OpenAI's routes of these paths are the ones on the OpenAPI page, which has one operation for each path
    for path, endpoint in (("/v1/models", list_models), ("/v1/models/{name:path}", get_model)):
        routes.add_api_route(path, endpoint, route_class_override=VersionedRoute, include_in_schema=False)
    _ = messages, count_tokens
    return routes


def _model_card(model: ServedModel) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def _page(cards: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The part of a list that `after_id`, `before_id` and `limit` ask for. Raises a 400 `ApiError`."""
    text = query.get("limit", str(PAGE))
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= MAX_PAGE):
        raise ApiError(400, f"'limit' must be a number from 1 to {MAX_PAGE}.", param="limit")
    limit = int(text)
    ids = [card["id"] for card in cards]
    start, end = 0, len(cards)
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in ids:
            raise ApiError(400, f"'{name}' must be the id of a model of this server.", param=name)
    if "after_id" in query:
        start = ids.index(query["after_id"]) + 1
    if "before_id" in query:
        end = ids.index(query["before_id"])
        page = list(cards[max(start, end - limit) : end])
        has_more = end - limit > start
    else:
        page = list(cards[start : start + limit])
        has_more = start + limit < end
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"data": page, "has_more": has_more, "first_id": first, "last_id": last}


# --------------------------------------------------------------------------------------------- replies


class MessageReply:
    """The answer to one call, as a stream of events or whole.

    The text is one block. `max_tokens` is what the client asked for: with 0 only the prompt is computed, so that the
    next call finds it in the cache, and what the engine generates, which is one token at least, is left out.
    """

    def __init__(self, model: ServedModel, request: Request, max_tokens: int, request_id: str) -> None:
        self._model = model
        self._request = request
        self._max_tokens = max_tokens
        self._request_id = request_id

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events, each item one or several whole ones.

        They begin with the first output, or after `PING_SECONDS` without one, as the prompt may be long. Raises the
        `CaudalError` of a generation that fails before; a later one becomes an event.
        """
        is_started = has_block = False
        try:
            async with aclosing(self._paced_outputs()) as outputs:
                async for output in outputs:
                    events = ""
                    if not is_started:
                        is_started = True
                        events = _event("message_start", message=self._message(output, [])) + _event("ping")
                    elif output is None:
                        events = _event("ping")
                    if output is None:
                        yield events.encode("ascii")
                        continue
                    if output.text:
                        if not has_block:
                            has_block = True
                            block = {"type": "text", "text": ""}
                            events += _event("content_block_start", index=0, content_block=block)
                        # nearly all events of nearly all streams: put together from text
                        events += (
                            'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
                            f'"delta":{{"type":"text_delta","text":{compact(output.text)}}}}}\n\n'
                        )
                    if output.finish_reason is not None:
                        if has_block:
                            events += _event("content_block_stop", index=0)
                        events += _event("message_delta", delta=self._stop(output), usage=self._usage(output))
                        events += _event("message_stop")
                    if events:
                        yield events.encode("ascii")
        except CaudalError as error:
            if not is_started:  # the status has not been sent
                raise
            api_error = to_api_error(error)
            api_error.request_id = self._request_id
            yield f"event: error\ndata: {compact(error_body(api_error))}\n\n".encode("ascii")

    async def whole(self) -> dict[str, Any]:
        """The message as one object. Raises the `CaudalError` of a generation that fails."""
        texts: list[str] = []
        message: dict[str, Any] = {}
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                texts.append(output.text)
                if output.finish_reason is not None:
                    text = "".join(texts)
                    content = [{"type": "text", "text": text}] if text else []
                    message = self._message(output, content) | self._stop(output)
        return message

    async def _paced_outputs(self) -> AsyncGenerator[RequestOutput | None]:
        """What `_outputs` gives, and None for every `PING_SECONDS` in which the first one has not come."""
        async with aclosing(self._outputs()) as outputs:
            first = asyncio.ensure_future(anext(outputs))
            try:
                while not (await asyncio.wait((first,), timeout=PING_SECONDS))[0]:
                    yield None
            finally:
                if not first.done():  # the client has gone
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)
            yield first.result()
            async for output in outputs:
                yield output

    async def _outputs(self) -> AsyncGenerator[RequestOutput]:
        """What the engine gives. Raises a 503 `ApiError` if the server stops before the end."""
        async with aclosing(self._model.run([self._request])) as outputs:
            async for _, output in outputs:
                if output.finish_reason is FinishReason.ABORT:  # for which Anthropic has no stop reason
                    raise unavailable("The server stopped before the message was complete.")
                yield replace(output, text="", num_output_tokens=0) if self._max_tokens == 0 else output

    def _message(self, output: RequestOutput | None, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(output),
        }

    def _usage(self, output: RequestOutput | None) -> dict[str, int]:
        """Tokens so far. As Anthropic counts, those that came from the cache are no input tokens."""
        num_cached, num_output = (0, 0) if output is None else (output.num_cached_tokens, output.num_output_tokens)
        return {
            "input_tokens": len(self._request.prompt_token_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_output,
        }

    def _stop(self, output: RequestOutput) -> dict[str, str | None]:
        """Why the last output ended the message."""
        reason, sequence = "end_turn", None
        if self._max_tokens == 0:
            reason = "max_tokens"
        elif output.finish_reason is FinishReason.LENGTH:
            is_full = output.num_output_tokens < self._max_tokens  # the context, before the client's limit
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(output.stop_reason, str):
            reason, sequence = "stop_sequence", output.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}


def _event(kind: str, **members: Any) -> str:
    """An event with its name, and the same as the member `type` of its data."""
    return f"event: {kind}\ndata: {compact({'type': kind, **members})}\n\n"
