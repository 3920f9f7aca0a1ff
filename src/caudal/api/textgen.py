"""Internal routes of text-generation-webui's API: tokens, probabilities of the next token, the model.

Its own documentation has them: https://github.com/oobabooga/text-generation-webui/wiki/12-%E2%80%90-OpenAI-API
Everything else of that API is OpenAI's.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from caudal.api.errors import ApiError, unsupported
from caudal.api.http import Body, documented, parse_body, read_json, until_disconnect
from caudal.api.openai_requests import ChatBody, TokenId, check_length, refuse_unsupported, render_chat, tokenize
from caudal.api.service import ServedModel, Service
from caudal.core import Request, SamplingParams
from caudal.text.tokenizer import PLAIN_MARK

MAX_LOGITS = 20  # the engine's bound of logprobs
INLINE_TOKENS = 8192  # more are written in another thread, so that running streams go on


class TextBody(Body):
    """`POST /v1/internal/encode` and `/v1/internal/token-count`."""

    text: str


class TokensBody(Body):
    """`POST /v1/internal/decode`."""

    tokens: list[TokenId]


class LogitsBody(Body):
    """`POST /v1/internal/logits`."""

    prompt: str
    use_samplers: bool = False
    top_logits: int = Field(MAX_LOGITS, ge=1, le=MAX_LOGITS)


def router(service: Service) -> APIRouter:
    """The routes of this dialect. Their errors have OpenAI's shape."""
    routes = APIRouter(tags=["text-generation-webui"])

    @routes.get("/v1/internal/health")
    async def health() -> Response:
        service.model.engine.stats()  # raises when the engine is dead
        return JSONResponse({"status": "ok"})

    @routes.get("/v1/internal/model/info")
    async def model_info() -> Response:
        return JSONResponse({"model_name": service.model.name, "lora_names": []})

    @routes.get("/v1/internal/model/list")
    async def model_list() -> Response:
        return JSONResponse({"model_names": [service.model.name]})

    @routes.get("/v1/internal/lora/list")
    async def lora_list() -> Response:
        return JSONResponse({"lora_names": []})

    @routes.post("/v1/internal/encode", openapi_extra=documented(TextBody))
    async def encode(http_request: HTTPRequest) -> Response:
        body = parse_body(TextBody, await read_json(http_request))
        (ids,) = await tokenize(service.model, [body.text], add_special=True)
        return JSONResponse({"tokens": ids, "length": len(ids)})

    @routes.post("/v1/internal/token-count", openapi_extra=documented(TextBody))
    async def token_count(http_request: HTTPRequest) -> Response:
        body = parse_body(TextBody, await read_json(http_request))
        (ids,) = await tokenize(service.model, [body.text], add_special=True)
        return JSONResponse({"length": len(ids)})

    @routes.post("/v1/internal/decode", openapi_extra=documented(TokensBody))
    async def decode(http_request: HTTPRequest) -> Response:
        body = parse_body(TokensBody, await read_json(http_request))
        model = service.model

        def text() -> str:
            return model.tokenizer.decode(body.tokens, skip_special=True)

        return JSONResponse({"text": text() if len(body.tokens) <= INLINE_TOKENS else await asyncio.to_thread(text)})

    @routes.post("/v1/internal/logits", openapi_extra=documented(LogitsBody))
    async def logits(http_request: HTTPRequest) -> Response:
        body = parse_body(LogitsBody, await read_json(http_request))
        if body.use_samplers:
            raise unsupported("use_samplers", "'use_samplers'")
        model = service.model
        check_length(model, body.prompt)
        (ids,) = await tokenize(model, [body.prompt], add_special=True)
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=body.top_logits)
        request = Request(f"logits-{uuid.uuid4().hex}", tuple(ids), params)
        model.engine.validate(request)
        return JSONResponse({"logits": await until_disconnect(http_request, _probabilities(model, request))})

    @routes.post("/v1/internal/chat-prompt", openapi_extra=documented(ChatBody))
    async def chat_prompt(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        refuse_unsupported(raw)
        body = parse_body(ChatBody, raw)
        body.check()
        text = await render_chat(service.find(body.model), body)
        return JSONResponse({"prompt": text.replace(PLAIN_MARK, "")})  # which means nothing to other programs

    @routes.post("/v1/internal/stop-generation")
    async def stop_generation() -> Response:
        raise ApiError(
            400,
            "This server answers many clients at the same time, and this call would stop them all. To stop a "
            "generation, close the connection of its own call.",
            code="unsupported_parameter",
        )

    _ = health, model_info, model_list, lora_list, encode, token_count, decode, logits, chat_prompt, stop_generation
    return routes


async def _probabilities(model: ServedModel, request: Request) -> dict[str, float]:
    """The most likely next tokens, best first. Raises the `CaudalError` of a request that fails."""
    result: dict[str, Any] = {}
    async with aclosing(model.run([request])) as outputs:
        async for _, output in outputs:
            for token in output.logprobs:
                for entry in token.top:
                    text = model.tokenizer.token_bytes(entry.token_id).decode("utf-8", "replace")
                    # parts of characters may look the same
                    result[text] = result.get(text, 0.0) + math.exp(entry.logprob)
    return result
