"""OpenAI's responses, streaming and not, without a store: each call brings its whole conversation.

Fields and shapes are those of OpenAI's API reference: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from caudal.api.errors import to_api_error, unavailable
from caudal.api.http import EventStream, compact, documented, parse_body, read_json, until_disconnect
from caudal.api.openai import LogprobWriter
from caudal.api.openai_requests import encode_chat
from caudal.api.openai_requests import refuse_unsupported as refuse_unsupported_generation
from caudal.api.responses_requests import ResponsesBody, chat_body, refuse_unsupported
from caudal.api.service import ServedModel, Service
from caudal.core import CaudalError, FinishReason, Request, RequestOutput, TokenLogprobs


def router(service: Service) -> APIRouter:
    """The routes of this dialect."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/responses", openapi_extra=documented(ResponsesBody))
    async def responses(http_request: HTTPRequest) -> Response:
        body = _checked(await read_json(http_request))
        model = service.find(body.model)
        ids = await encode_chat(model, await chat_body(body))
        request = Request(
            request_id=f"resp_{uuid.uuid4().hex}",
            prompt_token_ids=tuple(ids),
            params=body.sampling(max_tokens=body.token_limit, logprobs=body.num_logprobs),
            priority=body.priority,
            cache_salt=body.cache_salt,
            matcher=await model.compile(body.grammar()),
        )
        model.engine.validate(request)  # before a stream has sent its status
        reply = ResponseReply(model, body, request)
        if body.stream:
            return EventStream(reply.events())
        return JSONResponse(await until_disconnect(http_request, reply.whole()))

    @routes.post("/v1/responses/input_tokens", openapi_extra=documented(ResponsesBody))
    async def input_tokens(http_request: HTTPRequest) -> Response:
        body = _checked(await read_json(http_request))
        ids = await encode_chat(service.find(body.model), await chat_body(body))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(ids)})

    _ = responses, input_tokens
    return routes


def _checked(raw: dict[str, Any]) -> ResponsesBody:
    refuse_unsupported(raw)
    refuse_unsupported_generation(raw)
    body = parse_body(ResponsesBody, raw)
    body.check()
    return body


class ResponseReply:
    """The answer to one call: a message with one part, which is text."""

    def __init__(self, model: ServedModel, body: ResponsesBody, request: Request) -> None:
        self._model = model
        self._request = request
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._writer = LogprobWriter(
            model.tokenizer, as_ids=body.return_tokens_as_token_ids, skip_special=body.skip_special_tokens
        )
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._sequence_number = -1
        self._echo = {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.token_limit,
            "metadata": body.metadata,
            "model": model.name,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _echoed_format(body)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
        }
        self._created_at = int(time.time())

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events, each item one or several whole ones.

        Raises the `CaudalError` of a generation that fails before anything has come; a later one becomes an event.
        """
        is_started = False
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    events = ""
                    if not is_started:
                        is_started = True
                        events = self._start()
                    logprobs = self._add(output)
                    if output.text or logprobs:
                        # nearly all events of nearly all streams: put together from text
                        self._sequence_number += 1
                        events += (
                            'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
                            f'"sequence_number":{self._sequence_number},"item_id":"{self._item_id}","output_index":0,'
                            f'"content_index":0,"delta":{compact(output.text)},"logprobs":{compact(logprobs)}}}\n\n'
                        )
                    if output.finish_reason is not None:
                        events += self._end(output)
                    if events:
                        yield events.encode("ascii")
        except CaudalError as error:
            if not is_started:  # the status has not been sent
                raise
            api_error = to_api_error(error)
            failure = {"code": "server_error", "message": str(api_error)}
            response = self._response("failed", [self._item("incomplete", [self._part()])]) | {"error": failure}
            yield self._event("response.failed", response=response).encode("ascii")

    async def whole(self) -> dict[str, Any]:
        """The response as one object. Raises the `CaudalError` of a generation that fails."""
        response: dict[str, Any] = {}
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                self._add(output)
                if output.finish_reason is not None:
                    response = self._finished(output)
        return response

    async def _outputs(self) -> AsyncGenerator[RequestOutput]:
        """What the engine gives. Raises a 503 `ApiError` if the server stops before the end."""
        async with aclosing(self._model.run([self._request])) as outputs:
            async for _, output in outputs:
                if output.finish_reason is FinishReason.ABORT:  # for which OpenAI has no status
                    raise unavailable("The server stopped before the response was complete.")
                yield output

    def _add(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Keeps what is new; gives its log probabilities."""
        self._texts.append(output.text)
        logprobs = self._written(output.logprobs)
        self._logprobs += logprobs
        return logprobs

    def _written(self, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return self._writer.chat(tokens)["content"] if tokens else []

    def _start(self) -> str:
        response = self._response("in_progress", [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            + self._part_event("response.content_part.added", part=self._part())
        )

    def _end(self, output: RequestOutput) -> str:
        part = self._part()
        response = self._finished(output)
        return (
            self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            + self._part_event("response.content_part.done", part=part)
            + self._event("response.output_item.done", output_index=0, item=response["output"][0])
            + self._event(f"response.{response['status']}", response=response)
        )

    def _event(self, kind: str, **members: Any) -> str:
        self._sequence_number += 1
        data = {"type": kind, "sequence_number": self._sequence_number, **members}
        return f"event: {kind}\ndata: {compact(data)}\n\n"

    def _part_event(self, kind: str, **members: Any) -> str:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **members)

    def _finished(self, output: RequestOutput) -> dict[str, Any]:
        """The response after its last output."""
        is_cut = output.finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        response = self._response(status, [self._item(status, [self._part()])])
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = {
            "input_tokens": output.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": output.num_prompt_tokens + output.num_output_tokens,
        }
        return response

    def _response(self, status: str, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
            **self._echo,
        }

    def _item(self, status: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": self._logprobs, "text": "".join(self._texts)}


def _echoed_format(body: ResponsesBody) -> dict[str, Any]:
    asked = None if body.text is None else body.text.format
    return {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)
