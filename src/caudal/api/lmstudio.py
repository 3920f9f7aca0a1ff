"""LM Studio's REST API v0: models, and OpenAI's routes with statistics.

Shapes are those of its documentation: https://lmstudio.ai/docs/developer/rest/endpoints
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from caudal import __version__
from caudal.api.errors import ApiError, ErrorBody
from caudal.api.http import documented, parse_body, read_json
from caudal.api.openai import Reply, chat_reply, completion_reply, respond
from caudal.api.openai_requests import ChatBody, CompletionBody, refuse_unsupported
from caudal.api.service import ServedModel, Service
from caudal.api.timings import output_speed
from caudal.core import FinishReason, RequestOutput, Timings

ERROR_BODIES: dict[str, ErrorBody] = {"/api/v0/": ApiError.body}  # OpenAI's, unlike other routes below /api
FORMAT = "gguf"


def router(service: Service) -> APIRouter:
    """The routes of this dialect."""
    routes = APIRouter(tags=["LM Studio"])

    @routes.get("/api/v0/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(service.model)]})

    @routes.get("/api/v0/models/{name:path}")
    async def get_model(name: str) -> Response:
        return JSONResponse(_model_card(service.find(name)))

    @routes.post("/api/v0/completions", openapi_extra=documented(CompletionBody))
    async def completions(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        refuse_unsupported(raw)
        model = service.model
        body = parse_body(CompletionBody, _with_limit(raw, model))
        body.check()
        return await _respond(http_request, await completion_reply(service.find(body.model), body))

    @routes.post("/api/v0/chat/completions", openapi_extra=documented(ChatBody))
    async def chat_completions(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        refuse_unsupported(raw)
        body = parse_body(ChatBody, _with_limit(raw, service.model))
        body.check()
        return await _respond(http_request, await chat_reply(service.find(body.model), body))

    @routes.post("/api/v0/embeddings")
    async def embeddings() -> Response:
        raise ApiError(400, "The served model generates text and gives no embeddings.", code="unsupported_model")

    _ = list_models, get_model, completions, chat_completions, embeddings
    return routes


def _model_card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "type": "llm",
        "publisher": "",
        "arch": model.details.architecture,
        "compatibility_type": FORMAT,
        "quantization": model.details.quantization,
        "state": "loaded",
        "max_context_length": model.max_model_len,
        "loaded_context_length": model.max_model_len,
    }


def _with_limit(raw: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """In LM Studio -1, the default, is as many tokens as the context has room for."""
    limit = raw.get("max_tokens", -1)
    return {**raw, "max_tokens": model.max_model_len if limit == -1 else limit}


async def _respond(http_request: HTTPRequest, reply: Reply) -> Response:
    model, limit = reply.model, reply.requests[0].params.max_tokens
    described = {
        "model_info": {
            "arch": model.details.architecture,
            "quant": model.details.quantization,
            "format": FORMAT,
            "context_length": model.max_model_len,
        },
        "runtime": {"name": "caudal", "version": __version__, "supported_formats": [FORMAT]},
    }
    reply.last_extra = lambda output: {"stats": _stats(output, limit)} | described
    return await respond(http_request, reply)


def _stats(output: RequestOutput, limit: int | None) -> dict[str, Any]:
    """Times in seconds. `output` is the last one of its sequence."""
    times, speed = output.timings or Timings(), output_speed(output)
    return {
        "tokens_per_second": speed.per_second,
        "time_to_first_token": times.first_token,
        "generation_time": speed.seconds,
        "stop_reason": _stop_reason(output, limit),
    }


def _stop_reason(output: RequestOutput, limit: int | None) -> str:
    match output.finish_reason:
        case FinishReason.LENGTH:
            is_full = limit is None or output.num_output_tokens < limit
            return "contextLengthReached" if is_full else "maxPredictedTokensReached"
        case FinishReason.STOP:
            return "eosFound" if output.stop_reason is None else "stopStringFound"
        case _:
            return "userStopped"
