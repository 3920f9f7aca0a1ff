"""OpenAI's API: models, completions and chat completions, streaming and not.

Fields and shapes are those of OpenAI's API reference, and of vLLM where OpenAI has none (see docs/api.md).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from caudal import __version__
from caudal.api.errors import to_api_error
from caudal.api.http import EventStream, compact, documented, parse_body, read_json, until_disconnect
from caudal.api.openai_requests import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    check_length,
    encode_chat,
    refuse_unsupported,
    tokenize,
)
from caudal.api.service import ServedModel, Service, Tokenizer
from caudal.api.timings import timings
from caudal.core import (
    CaudalError,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    TokenMatcher,
)

FINGERPRINT = f"caudal-{__version__}"
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens on /v1/completions
MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot write
DONE = b"data: [DONE]\n\n"


def router(service: Service) -> APIRouter:
    """The routes of this dialect."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(service.model)]})

    @routes.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return JSONResponse(_model_card(service.find(name)))

    @routes.post("/v1/completions", openapi_extra=documented(CompletionBody))
    async def completions(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        refuse_unsupported(raw)
        body = parse_body(CompletionBody, raw)
        body.check()
        reply = await completion_reply(service.find(body.model), body)
        return await respond(http_request, reply)

    @routes.post("/v1/chat/completions", openapi_extra=documented(ChatBody))
    async def chat_completions(http_request: HTTPRequest) -> Response:
        raw = await read_json(http_request)
        refuse_unsupported(raw)
        body = parse_body(ChatBody, raw)
        body.check()
        reply = await chat_reply(service.find(body.model), body)
        return await respond(http_request, reply)

    _ = list_models, get_model, completions, chat_completions
    return routes


def _model_card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "caudal",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


# ---------------------------------------------------------------------------------- from call to reply


async def completion_reply(model: ServedModel, body: CompletionBody) -> CompletionReply:
    """The reply to a checked body. Raises what is wrong with its prompts."""
    prompts = body.prompts()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        check_length(model, text)
    encoded = iter(await tokenize(model, texts, add_special=body.add_special_tokens))
    prompt_ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    call_id = f"cmpl-{uuid.uuid4().hex}"
    requests: list[Request] = []
    matcher = await model.compile(body.grammar())
    for i, ids in enumerate(prompt_ids):
        max_tokens = body.max_tokens
        if max_tokens is None:  # the default is no wish: less, where the context has no room for it
            max_tokens = max(1, min(COMPLETION_TOKENS, model.max_model_len - len(ids)))
        params = body.sampling(
            max_tokens=max(1, max_tokens) if body.echo else max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        requests.append(_request(f"{call_id}-{i}" if len(prompt_ids) > 1 else call_id, ids, body, params, matcher))
    reply = CompletionReply(model, call_id, body, requests)
    if body.echo:
        reply.prompt_texts = [
            prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip_special=body.skip_special_tokens)
            for prompt in prompts
        ]
        reply.discard = body.max_tokens == 0
    return reply


async def chat_reply(model: ServedModel, body: ChatBody) -> ChatReply:
    """The reply to a checked body. Raises what is wrong with its messages."""
    ids = await encode_chat(model, body)
    call_id = f"chatcmpl-{uuid.uuid4().hex}"
    params = body.sampling(max_tokens=body.token_limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    matcher = await model.compile(body.grammar())
    reply = ChatReply(model, call_id, body, [_request(call_id, ids, body, params, matcher)])
    if body.echo and body.continue_final_message:
        content = body.messages[-1].get("content")
        reply.prefix = content if isinstance(content, str) else ""
    return reply


def _request(
    request_id: str, ids: Sequence[int], body: GenerationBody, params: SamplingParams, matcher: TokenMatcher | None
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(ids),
        params=params,
        priority=body.priority,
        cache_salt=body.cache_salt,
        matcher=matcher,
    )


async def respond(http_request: HTTPRequest, reply: Reply) -> Response:
    """Starts the call. All that can be wrong with it is found here, before a stream has sent its status."""
    for request in reply.requests:
        reply.model.engine.validate(request)
    if reply.body.stream:
        return EventStream(reply.events())
    return JSONResponse(await until_disconnect(http_request, reply.whole()))


# -------------------------------------------------------------------------------------------- logprobs


class LogprobWriter:
    """Log probabilities in the shapes of both routes."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._skip_special = skip_special
        self._offset = 0  # characters that have begun in all tokens so far, for `text_offset`

    def chat(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`choices[].logprobs` of chat completions."""
        content = [
            {**self._chat_entry(token.chosen), "top_logprobs": [self._chat_entry(entry) for entry in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _chat_entry(self, entry: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(entry.token_id)
        text = f"token_id:{entry.token_id}" if self._as_ids else raw.decode("utf-8", "replace")
        return {"token": text, "logprob": max(entry.logprob, MIN_LOGPROB), "bytes": list(raw)}

    def completion(self, ids: Sequence[int], tokens: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """`choices[].logprobs` of completions. None stands for the first token of a prompt, which has none."""
        result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, token in zip(ids, tokens, strict=True):
            result["tokens"].append(self._text(token_id))
            result["text_offset"].append(self._advance(token_id))
            result["token_logprobs"].append(None if token is None else max(token.chosen.logprob, MIN_LOGPROB))
            # the chosen token is always there, also when it is not among the best
            top = None if token is None else {self._text(e.token_id): max(e.logprob, MIN_LOGPROB) for e in token.top}
            if top is not None and token is not None:
                top.setdefault(self._text(token_id), max(token.chosen.logprob, MIN_LOGPROB))
            result["top_logprobs"].append(top)
        return result

    def _advance(self, token_id: int) -> int:
        """The place in the text of the first character of which the token has a byte; goes on to the next token."""
        offset = self._offset
        if self._skip_special and self._tokenizer.is_special(token_id):
            return offset
        raw = self._tokenizer.token_bytes(token_id)
        self._offset += sum(byte & 0xC0 != 0x80 for byte in raw)  # a character begins with any other byte
        return offset - 1 if raw and raw[0] & 0xC0 == 0x80 and offset else offset

    def prompt(self, tokens: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token but the first the entries by token id."""
        return [
            None
            if token is None
            else {
                str(entry.token_id): {
                    "logprob": max(entry.logprob, MIN_LOGPROB),
                    "rank": entry.rank,
                    "decoded_token": self._tokenizer.token_bytes(entry.token_id).decode("utf-8", "replace"),
                }
                for entry in (token.chosen, *token.top)
            }
            for token in tokens
        ]

    def _text(self, token_id: int) -> str:
        """A token as text; OpenAI writes one that is no whole text as `bytes:\\xe2\\x80`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


# --------------------------------------------------------------------------------------------- replies


@dataclass(slots=True)
class Choice:
    """All that one sequence has produced."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, output: RequestOutput) -> None:
        self.texts.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            self.stop_reason = output.stop_reason


class Reply:
    """The answer to one call, as a stream of events or whole. Choice = position of the prompt * n + sequence."""

    object: str
    chunk_object: str
    discard = False  # generated tokens, as none were asked for
    # Members beside `choices` in the last event of each choice, and in a whole reply those of the first choice.
    last_extra: Callable[[RequestOutput], dict[str, Any]] | None = None

    def __init__(self, model: ServedModel, call_id: str, body: GenerationBody, requests: Sequence[Request]) -> None:
        self.model = model
        self.body = body
        self.requests = requests
        options = body.stream_options
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._call_id = call_id
        self._created = int(time.time())
        self._generated = [0] * (len(requests) * body.n)  # tokens by choice
        self._cached = [0] * len(requests)
        self._writers = [
            LogprobWriter(
                model.tokenizer, as_ids=body.return_tokens_as_token_ids, skip_special=body.skip_special_tokens
            )
            for _ in self._generated
        ]
        self._has_logprobs = requests[0].params.logprobs is not None
        if body.timings_per_token:
            self.last_extra = lambda output: {"timings": timings(output)}
        # Plain deltas, that is nearly all events of nearly all streams, are put together from text.
        self._is_plain = not (body.return_token_ids or self._continuous_usage or self._has_logprobs)
        self._event_start = f'data: {compact(self._envelope(self.chunk_object))[:-1]},"choices":['
        self._plain_end = '],"usage":null}\n\n' if self._include_usage else "]}\n\n"

    # The two shapes

    def _start(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of events that come before the first output of a choice."""
        raise NotImplementedError

    def _plain(self, index: int, text: str) -> str:
        """The JSON text of a choice that has nothing but text."""
        raise NotImplementedError

    def _delta(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of the events for one output."""
        raise NotImplementedError

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """The member of `choices` for a finished sequence."""
        raise NotImplementedError

    def _start_extra(self) -> dict[str, Any]:
        """Members beside `choices` in the events of `_start`."""
        return {}

    def _extra(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Members beside `choices` in a whole reply."""
        return {}

    # What they share

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events, each item one or several whole ones.

        Raises the `CaudalError` of a sequence that fails before anything has come; later ones become events.
        """
        started = [False] * len(self._generated)
        try:
            async with aclosing(self.model.run(self.requests)) as outputs:
                async for position, given in outputs:
                    output = without_tokens(given) if self.discard else given
                    index = self._count(position, output)
                    if started[index] and self._is_plain and output.finish_reason is None:
                        text = output.text
                        if text:
                            yield f"{self._event_start}{self._plain(index, text)}{self._plain_end}".encode("ascii")
                        continue
                    events = b""
                    if not started[index]:
                        started[index] = True
                        extra = self._start_extra()
                        events = b"".join(self._event(choice, extra) for choice in self._start(index, output))
                    deltas = self._delta(index, output)
                    events += b"".join(map(self._event, deltas[:-1]))
                    events += b"".join(self._event(last, self._last_extra(output)) for last in deltas[-1:])
                    if events:
                        yield events
        except CaudalError as error:
            if not any(started):  # the status has not been sent
                raise
            yield f"data: {compact(to_api_error(error).body())}\n\n".encode("ascii")
        else:
            if self._include_usage:
                last: dict[str, Any] = {**self._envelope(self.chunk_object), "choices": [], "usage": self._usage()}
                yield f"data: {compact(last)}\n\n".encode("ascii")
        yield DONE

    async def whole(self) -> dict[str, Any]:
        """The reply to a call without streaming. Raises the `CaudalError` of the first sequence that fails."""
        choices = [Choice() for _ in self._generated]
        extra: dict[str, Any] = {}
        async with aclosing(self.model.run(self.requests)) as outputs:
            async for position, given in outputs:
                output = without_tokens(given) if self.discard else given
                index = self._count(position, output)
                choices[index].add(output)
                if index == 0:
                    extra = self._last_extra(output)
        return {
            **self._envelope(self.object),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self._usage(),
            **self._extra(choices),
            **extra,
        }

    def _last_extra(self, output: RequestOutput) -> dict[str, Any]:
        return {} if self.last_extra is None or output.finish_reason is None else self.last_extra(output)

    def _count(self, position: int, output: RequestOutput) -> int:
        index = position * self.body.n + output.index
        self._generated[index] = output.num_output_tokens
        self._cached[position] = output.num_cached_tokens
        return index

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._call_id,
            "object": kind,
            "created": self._created,
            "model": self.model.name,
            "system_fingerprint": FINGERPRINT,
        }

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        completion = sum(self._generated)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def _event(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        """The event with one choice, and with `extra` members beside `choices`."""
        members = {} if extra is None else dict(extra)
        if self._continuous_usage:
            members["usage"] = self._usage()
        elif self._include_usage:
            members["usage"] = None
        tail = f",{compact(members)[1:]}" if members else "}"
        return f"{self._event_start}{compact(choice)}]{tail}\n\n".encode("ascii")


def without_tokens(output: RequestOutput) -> RequestOutput:
    """For `max_tokens` 0, which asks for the prompt only: the engine generates at least one token."""
    reason = None if output.finish_reason is None else FinishReason.LENGTH
    return replace(
        output, text="", token_ids=(), logprobs=(), num_output_tokens=0, finish_reason=reason, stop_reason=None
    )


class CompletionReply(Reply):
    object = chunk_object = "text_completion"
    prompt_texts: Sequence[str] | None = None  # to be echoed, by position
    _prompt_logprobs: Sequence[TokenLogprobs | None] | None = None  # of the latest prompt

    def _start(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        prompt_ids = self.requests[index // self.body.n].prompt_token_ids
        extra: dict[str, Any] = {}
        if self.body.return_token_ids:
            extra["prompt_token_ids"] = prompt_ids
        if self.prompt_texts is None and not extra:
            return []
        return [self._member(index, *self._echo(index, output.prompt_logprobs), None, None) | extra]

    def _echo(self, index: int, prompt_logprobs: Sequence[TokenLogprobs | None] | None) -> tuple[str, Any]:
        """What comes before the generated text: the prompt and its log probabilities, if they are to be echoed."""
        if self.prompt_texts is None:
            return "", None
        position = index // self.body.n
        logprobs = None
        if prompt_logprobs is not None and self.requests[position].params.logprobs is not None:
            ids = self.requests[position].prompt_token_ids
            logprobs = self._writers[index].completion(ids, prompt_logprobs)
        return self.prompt_texts[position], logprobs

    def _plain(self, index: int, text: str) -> str:
        return f'{{"index":{index},"text":{json.dumps(text)},"logprobs":null,"finish_reason":null}}'

    def _delta(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        logprobs = None
        if output.logprobs:
            logprobs = self._writers[index].completion(output.token_ids, output.logprobs)
        reason = output.finish_reason
        if not (output.text or output.token_ids or reason):
            return []
        member = self._member(
            index, output.text, logprobs, None if reason is None else reason.value, output.stop_reason
        )
        if self.body.return_token_ids:
            member["token_ids"] = output.token_ids
        return [member]

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        n = self.body.n
        if index % n == 0:
            self._prompt_logprobs = choice.prompt_logprobs  # they come with the first choice of a prompt only
        text, logprobs = self._echo(index, self._prompt_logprobs)
        if choice.logprobs:
            generated = self._writers[index].completion(choice.token_ids, choice.logprobs)
            logprobs = generated if logprobs is None else {key: logprobs[key] + generated[key] for key in generated}
        text += "".join(choice.texts)
        member = self._member(index, text, logprobs, choice.finish_reason, choice.stop_reason)
        if self.body.return_token_ids:
            member["token_ids"] = choice.token_ids
            member["prompt_token_ids"] = self.requests[index // n].prompt_token_ids
        if self.body.prompt_logprobs is not None and self._prompt_logprobs is not None:
            member["prompt_logprobs"] = self._writers[index].prompt(self._prompt_logprobs)
        return member

    def _member(
        self, index: int, text: str, logprobs: Any, finish_reason: str | None, stop_reason: str | int | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


class ChatReply(Reply):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = ""  # text that the reply begins with: the message that it continues, if that is to be echoed

    def _start(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        return [self._member(index, {"role": "assistant", "content": self.prefix}, None, None)]

    def _plain(self, index: int, text: str) -> str:
        return f'{{"index":{index},"delta":{{"content":{json.dumps(text)}}},"logprobs":null,"finish_reason":null}}'

    def _delta(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        members: list[dict[str, Any]] = []
        reported = self.body.return_token_ids and output.token_ids
        if output.text or output.logprobs or reported:
            logprobs = self._writers[index].chat(output.logprobs) if output.logprobs else None
            member = self._member(index, {"content": output.text}, logprobs, None)
            if reported:
                member["token_ids"] = output.token_ids
            members.append(member)
        if output.finish_reason is not None:
            member = self._member(index, {}, None, output.finish_reason)
            members.append({**member, "stop_reason": output.stop_reason})
        return members

    def _start_extra(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.requests[0].prompt_token_ids} if self.body.return_token_ids else {}

    def _extra(self, choices: Sequence[Choice]) -> dict[str, Any]:
        extra = self._start_extra()
        prompt_logprobs = choices[0].prompt_logprobs
        if prompt_logprobs is not None:
            extra["prompt_logprobs"] = self._writers[0].prompt(prompt_logprobs)
        return extra

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        member: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": self.prefix + "".join(choice.texts), "refusal": None},
            "logprobs": self._writers[index].chat(choice.logprobs) if self._has_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            member["token_ids"] = choice.token_ids
        return member

    @staticmethod
    def _member(
        index: int, delta: dict[str, str], logprobs: dict[str, Any] | None, finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        reason = None if finish_reason is None else finish_reason.value
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
