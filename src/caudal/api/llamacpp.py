"""The own routes of llama.cpp's server: completion, infill, templates, properties.

Fields and shapes are those of its documentation: https://github.com/ggml-org/llama.cpp/tree/master/tools/server
`/tokenize` and `/detokenize`, which vLLM has as well, and `/health` are in `vllm.py`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from caudal import __version__
from caudal.api.errors import ApiError, ErrorBody, to_api_error, unavailable
from caudal.api.http import EventStream, compact, documented, parse_body, read_json, until_disconnect
from caudal.api.llamacpp_requests import (
    CompletionBody,
    InfillBody,
    encode_infill,
    encode_prompts,
    parse_prompts,
    refuse_unsupported,
)
from caudal.api.openai import MIN_LOGPROB, without_tokens
from caudal.api.openai_requests import INLINE_CHARACTERS, ChatBody, render_chat
from caudal.api.openai_requests import refuse_unsupported as refuse_unsupported_chat
from caudal.api.service import ServedModel, Service, Tokenizer
from caudal.api.timings import timings
from caudal.core import CaudalError, FinishReason, Logprob, Request, RequestOutput, SamplingParams, TokenLogprobs
from caudal.text.tokenizer import PLAIN_MARK

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
_OWN_TYPES = frozenset({"not_supported_error"})  # which the status does not tell
NO_SLOT = -1  # in requests: any slot. Caudal finds prefixes without slots


class ContextSizeError(ApiError):
    """A prompt that does not fit into the context, with the numbers that llama.cpp's clients look at."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            400,
            f"the prompt has {num_prompt_tokens} tokens, but the context has {max_model_len}; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


def error_body(error: ApiError) -> dict[str, Any]:
    """llama.cpp's error: `{"error": {"code", "message", "type"}}`, where `code` is the status."""
    kind = error.type if error.type in _OWN_TYPES else _TYPES.get(error.status, "invalid_request_error")
    members: dict[str, Any] = {}
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    if isinstance(error, ContextSizeError):
        members = {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.max_model_len}
    return {"error": {"code": error.status, "message": str(error), "type": kind} | members}


ERROR_BODIES: dict[str, ErrorBody] = {
    prefix: error_body
    for prefix in (
        "/apply-template",
        "/completion",
        "/embedding",
        "/health",
        "/infill",
        "/lora-adapters",
        "/props",
        "/rerank",
        "/slots",
        "/v1/health",
        "/v1/reranking",
    )
}


def router(service: Service) -> APIRouter:
    """The routes of this dialect."""
    routes = APIRouter(tags=["llama.cpp"])

    @routes.post("/completion", openapi_extra=documented(CompletionBody))
    @routes.post("/completions", openapi_extra=documented(CompletionBody))
    async def completion(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        refuse_unsupported(raw)
        body = parse_body(CompletionBody, raw)
        model = service.find(body.model)
        prompts = parse_prompts(body)
        return await _respond(http_request, model, body, await encode_prompts(model, prompts))

    @routes.post("/infill", openapi_extra=documented(InfillBody))
    async def infill(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        refuse_unsupported(raw)
        body = parse_body(InfillBody, raw)
        model = service.find(body.model)
        return await _respond(http_request, model, body, [await encode_infill(model, body)])

    @routes.post("/apply-template", openapi_extra=documented(ChatBody))
    async def apply_template(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        refuse_unsupported_chat(raw)
        body = parse_body(ChatBody, raw)
        body.check()
        text = await render_chat(service.find(body.model), body)
        return JSONResponse({"prompt": text.replace(PLAIN_MARK, "")})  # which means nothing to other programs

    @routes.get("/props")
    async def props() -> Response:
        return JSONResponse(_props(service.model))

    @routes.post("/props")
    async def set_props() -> Response:
        raise _not_supported("This server does not change its properties while it runs.")

    @routes.get("/slots")
    async def slots() -> Response:
        raise _not_supported("This server has no slots: any request may use any part of the cache. See /metrics.")

    @routes.get("/lora-adapters")
    async def lora_adapters() -> Response:
        return JSONResponse([])

    @routes.post("/embedding")
    @routes.post("/embeddings")
    async def embedding() -> Response:
        raise _not_supported("The served model generates text and gives no embeddings.")

    @routes.post("/rerank")
    @routes.post("/reranking")
    @routes.post("/v1/reranking")
    async def rerank() -> Response:
        raise _not_supported("The served model generates text and does not rank documents.")

    _ = completion, infill, apply_template, props, set_props, slots, lora_adapters, embedding, rerank
    return routes


def _not_supported(message: str) -> ApiError:
    return ApiError(400, message, type="not_supported_error")


def _props(model: ServedModel) -> dict[str, Any]:
    def token(token_id: int | None) -> str:
        return "" if token_id is None else model.tokenizer.token_text(token_id)

    body = CompletionBody.model_validate({})
    params = body.sampling(model.tokenizer)
    return {
        "default_generation_settings": {
            "params": body.settings(params, model.max_model_len),
            "n_ctx": model.max_model_len,
        },
        "total_slots": model.details.max_num_seqs,
        "model_alias": model.name,
        "model_path": model.name,  # its place is nobody's business
        "modalities": {"vision": False, "audio": False, "video": False},
        "endpoint_slots": False,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": "" if model.chat_template is None else model.chat_template.source,
        "chat_template_caps": {},
        "bos_token": token(model.tokenizer.bos_id),
        "eos_token": token(model.tokenizer.eos_id),
        "build_info": f"caudal-{__version__}",
        "is_sleeping": False,
    }


async def _respond(
    http_request: HTTPRequest, model: ServedModel, body: CompletionBody, prompts: Sequence[Sequence[int]]
) -> Response:
    """Starts the call. All that can be wrong with it is found here, before a stream has sent its status."""
    params = body.sampling(model.tokenizer)
    call_id = f"completion-{uuid.uuid4().hex}"
    matcher = await model.compile(body.grammar())
    requests: list[Request] = []
    for i, ids in enumerate(prompts):
        if len(ids) >= model.max_model_len:
            raise ContextSizeError(len(ids), model.max_model_len)
        salt = "" if body.cache_prompt else call_id  # which nobody else has
        requests.append(Request(f"{call_id}-{i}", tuple(ids), params, cache_salt=salt, matcher=matcher))
        model.engine.validate(requests[-1])
    reply = CompletionReply(model, body, params, requests)
    if body.stream:
        return EventStream(reply.events())
    return JSONResponse(await until_disconnect(http_request, reply.whole()))


# --------------------------------------------------------------------------------------------- replies


@dataclass(slots=True)
class _Choice:
    """What one sequence has given so far."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self.texts.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.last = output


class CompletionReply:
    """The answer to one call. Index = position of the prompt * n_cmpl + sequence."""

    def __init__(
        self, model: ServedModel, body: CompletionBody, params: SamplingParams, requests: Sequence[Request]
    ) -> None:
        self._model = model
        self._body = body
        self._params = params
        self._requests = requests

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events: what has come, and for each choice a last one that has all members.

        Raises the `CaudalError` of a sequence that fails before anything has come; later ones become events.
        """
        choices = self._choices()
        is_started = False
        try:
            async with aclosing(self._outputs()) as outputs:
                async for index, output in outputs:
                    events = ""
                    choice = choices[index]
                    choice.texts.append(output.text)
                    if output.text or output.token_ids:
                        events = self._chunk(index, output)
                    if output.finish_reason is not None:
                        choice.last = output
                        members = await self._members(index, choice)
                        last = self._selected({**members, "content": "", "tokens": []})
                        last.pop("completion_probabilities", None)
                        events += f"data: {compact(last)}\n\n"
                    if events:
                        is_started = True
                        yield events.encode("ascii")
        except CaudalError as error:
            if not is_started:  # the status has not been sent
                raise
            yield f"data: {compact(error_body(to_api_error(error)))}\n\n".encode("ascii")

    async def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The one completion, or the list of several. Raises the `CaudalError` of the first that fails."""
        choices = self._choices()
        async with aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                choices[index].add(output)
        results = [self._selected(await self._members(index, choice)) for index, choice in enumerate(choices)]
        return results[0] if len(results) == 1 else results

    def _choices(self) -> list[_Choice]:
        return [_Choice() for _ in range(len(self._requests) * self._params.n)]

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Index and output. Raises a 503 `ApiError` if the server stops before the end."""
        async with aclosing(self._model.run(self._requests)) as outputs:
            async for position, given in outputs:
                output = without_tokens(given) if self._body.n_predict == 0 else given
                if output.finish_reason is FinishReason.ABORT:  # for which llama.cpp has no stop type
                    raise unavailable("The server stopped before the completion was finished.")
                yield position * self._params.n + output.index, output

    def _chunk(self, index: int, output: RequestOutput) -> str:
        # nearly all events of nearly all streams: put together from text
        probabilities = (
            f',"completion_probabilities":{compact(self._probabilities(output.logprobs))}' if output.logprobs else ""
        )
        return (
            f'data: {{"index":{index},"content":{compact(output.text)},"tokens":{compact(output.token_ids)},'
            f'"stop":false,"id_slot":{NO_SLOT},"tokens_predicted":{output.num_output_tokens},'
            f'"tokens_evaluated":{output.num_prompt_tokens}{probabilities}}}\n\n'
        )

    async def _members(self, index: int, choice: _Choice) -> dict[str, Any]:
        """All members of a completion that is over."""
        output = choice.last
        assert output is not None
        content = "".join(choice.texts)
        ids = self._requests[index // self._params.n].prompt_token_ids
        stop_type, word, is_full = self._stop(output)
        members: dict[str, Any] = {
            "index": index,
            "content": content,
            "tokens": choice.token_ids if self._body.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._model.name,
            "tokens_predicted": output.num_output_tokens,
            "tokens_evaluated": output.num_prompt_tokens,
            "generation_settings": self._body.settings(self._params, self._model.max_model_len),
            "prompt": await _text(self._model.tokenizer, ids),
            "has_new_line": "\n" in content,
            "truncated": is_full,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": output.num_cached_tokens,
            "timings": timings(output),
        }
        if choice.logprobs:
            members["completion_probabilities"] = self._probabilities(choice.logprobs)
        return members

    def _stop(self, output: RequestOutput) -> tuple[str, str, bool]:
        """`stop_type` and `stopping_word`, and whether the context was full before the client's limit."""
        if output.finish_reason is FinishReason.LENGTH:
            limit = self._body.n_predict
            return "limit", "", limit < 0 or output.num_output_tokens < limit
        if isinstance(output.stop_reason, str):
            return "word", output.stop_reason, False
        return "eos", "", False

    def _probabilities(self, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            {**self._probability(token.chosen), "top_logprobs": [self._probability(entry) for entry in token.top]}
            for token in tokens
        ]

    def _probability(self, entry: Logprob) -> dict[str, Any]:
        raw = self._model.tokenizer.token_bytes(entry.token_id)
        return {
            "id": entry.token_id,
            "token": raw.decode("utf-8", "replace"),
            "bytes": list(raw),
            "logprob": max(entry.logprob, MIN_LOGPROB),
        }

    def _selected(self, members: dict[str, Any]) -> dict[str, Any]:
        """The members that `response_fields` asks for; `a/b` is the member `b` of `a`."""
        if not self._body.response_fields:
            return members
        result: dict[str, Any] = {}
        for path in self._body.response_fields:
            value: Any = members
            *_, name = parts = path.split("/")
            for part in parts:
                found = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
                if part not in found:
                    break
                value = found[part]
            else:
                result[name] = value
        return result


async def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    if len(ids) <= INLINE_CHARACTERS:
        return tokenizer.decode(ids)
    return await asyncio.to_thread(tokenizer.decode, ids)
