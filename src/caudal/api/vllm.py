"""vLLM's own routes: health, version, tokens and metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from caudal import __version__
from caudal.api.errors import ApiError
from caudal.api.http import Body, parse_body, read_json
from caudal.api.llamacpp_requests import ContentBody, tokenize_content
from caudal.api.openai_requests import ChatBody, TokenId, render_chat, tokenize, tokenize_chat
from caudal.api.service import Service

# More tokens than this are written in another thread, so that running streams go on.
INLINE_TOKENS = 8192


class TokenizeBody(Body):
    """`POST /tokenize`: a `prompt`, or the `messages` of a chat with the fields of its template."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True  # of a chat: false
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId] = Field()


def router(service: Service) -> APIRouter:
    """The routes of this dialect."""
    routes = APIRouter(tags=["vLLM"])

    @routes.get("/health")
    @routes.get("/v1/health")
    @routes.get("/ping")
    async def health() -> Response:
        service.model.engine.stats()  # raises when the engine is dead
        return JSONResponse({"status": "ok"})  # llama.cpp's body; vLLM's clients look at the status only

    @routes.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @routes.get("/metrics")
    async def metrics() -> Response:
        model = service.model
        return Response(model.metrics.render(model.engine.stats()), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @routes.post("/tokenize")
    async def tokenize_text(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        if "content" in raw and not raw.keys() & {"prompt", "messages"}:  # llama.cpp's route of the same path
            content = parse_body(ContentBody, raw)
            return JSONResponse(await tokenize_content(service.find(content.model), content))
        body = parse_body(TokenizeBody, raw)
        model = service.find(body.model)
        if (body.prompt is None) == ("messages" not in raw):
            raise ApiError(400, "Send either 'prompt' or 'messages'.", param="prompt")
        if body.prompt is None:
            chat = parse_body(ChatBody, raw)
            ids = await tokenize_chat(model, await render_chat(model, chat), add_special=chat.add_special_tokens)
        else:
            (ids,) = await tokenize(model, [body.prompt], add_special=body.add_special_tokens)

        def respond() -> Response:
            texts = [model.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
            reply = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": texts}
            return JSONResponse(reply)

        return respond() if len(ids) <= INLINE_TOKENS else await asyncio.to_thread(respond)

    @routes.post("/detokenize")
    async def detokenize(http_request: HTTPRequest) -> Response:
        body = parse_body(DetokenizeBody, await read_json(http_request))
        model = service.find(body.model)

        def respond() -> Response:
            text = model.tokenizer.decode(body.tokens)
            return JSONResponse({"prompt": text, "content": text})  # vLLM's member and llama.cpp's

        return respond() if len(body.tokens) <= INLINE_TOKENS else await asyncio.to_thread(respond)

    _ = health, version, metrics, tokenize_text, detokenize
    return routes
