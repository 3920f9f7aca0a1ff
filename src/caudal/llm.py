"""LLM: a model in your own program, with vLLM's shape."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, overload

from caudal.config import EngineConfig
from caudal.core import (
    CaudalError,
    EngineDeadError,
    InvalidRequestError,
    Request,
    RequestOutput,
    SamplingParams,
    Timings,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from caudal.engine.worker import RequestStream
    from caudal.loader import ExecutorKind, LoadedModel
    from caudal.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text or token ids
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | list[Prompt]
Message = Mapping[str, Any]  # OpenAI's form: role and content


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated sequence."""

    index: int  # 0 .. params.n - 1
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # stop, length, abort or error
    stop_reason: str | int | None = None  # the stop string or token that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token, if asked for
    timings: Timings | None = None
    error: CaudalError | None = None  # with finish_reason error

    @property
    def cumulative_logprob(self) -> float | None:
        """Logarithm of the probability of all tokens together, if logprobs were asked for."""
        return None if self.logprobs is None else sum(entry.chosen.logprob for entry in self.logprobs)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What became of one prompt. `text`, `token_ids` and `finish_reason` are the first sequence's."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]  # params.n of them
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason


class LLM:
    """A loaded model. Any thread may use it; requests of several threads run together.

        with LLM("smollm2:135m", max_model_len=2048) as llm:
            print(llm.generate("The capital of France is", SamplingParams(max_tokens=8)).text)

    A failure of one prompt is in its `Completion.error`; the others are not affected.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        executor: ExecutorKind = "native",
        progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        """`model`: a path, a name in the store, or a name that can be fetched. `settings`: fields of `EngineConfig`.
        `progress` is called with the bytes of weights done and in all.

        Raises TypeError for a setting that does not exist, and InvalidSettingError, ModelNotFoundError,
        InvalidModelFileError, UnsupportedModelError or InsufficientMemoryError.
        """
        from caudal.loader import load
        from caudal.store import Store

        store = Store.default()
        self.config = EngineConfig(**settings)
        if self.config.draft_model is not None:
            self.config = replace(self.config, draft_model=str(store.fetch(self.config.draft_model)))
        self._model: LoadedModel = load(store.fetch(str(model)), self.config, executor=executor, progress=progress)
        self._finalizer = weakref.finalize(self, self._model.engine.close)  # for those who forget to close

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    @property
    def remark(self) -> str:
        """For people: how memory is used, if not in the usual way; else empty."""
        return self._model.remark

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._model.engine.max_model_len

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None) -> GenerationResult: ...
    @overload
    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]: ...
    def generate(
        self, prompts: Prompt | Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> GenerationResult | list[GenerationResult]:
        """Continue one prompt, or many at once; `params` for all, or one for each.

        Raises InvalidRequestError or RequestTooLongError before anything runs if one can never be served, and
        EngineDeadError.
        """
        single = _is_single(prompts)
        each = cast("Sequence[Prompt]", [prompts] if single else prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(each)
        if len(params) != len(each):
            raise ValueError(f"{len(each)} prompts, but {len(params)} params")
        requests = [self._request(prompt, p) for prompt, p in zip(each, params, strict=True)]
        for request in requests:
            self._model.engine.validate(request)
        texts = [prompt if isinstance(prompt, str) else None for prompt in each]
        results = [_result(r, t, o) for r, t, o in zip(requests, texts, self._run(requests), strict=True)]
        return results[0] if single else results

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> GenerationResult: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[GenerationResult]: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Answer one conversation, or many at once; `template` as for `chat_prompt`. Raises as `generate` does."""
        if not messages or isinstance(messages[0], Mapping):
            prompt = self.chat_prompt(cast("Sequence[Message]", messages), **template)
            return self.generate(prompt, cast("SamplingParams | None", params))
        conversations = cast("Sequence[Sequence[Message]]", messages)
        return self.generate([self.chat_prompt(messages, **template) for messages in conversations], params)

    def chat_prompt(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to where the answer begins.

        `template`: `tools`, `add_generation_prompt`, `continue_final_message` and the template's own variables.
        Raises InvalidRequestError if the template rejects the conversation.
        """
        return self.tokenizer.encode_chat(self._model.chat_template.render(messages, **template))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[RequestOutput]:
        """What each step adds, as it comes; leaving the loop aborts. For a conversation pass its `chat_prompt`.

        Raises InvalidRequestError or RequestTooLongError when called, EngineDeadError later.
        """
        request = self._request(prompt, params or SamplingParams())
        self._model.engine.validate(request)
        return self._stream(request)

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestStream:
        """As `stream`, for an event loop; call it there. Cancelling or closing the stream aborts."""
        return self._model.engine.generate(self._request(prompt, params or SamplingParams()))

    def close(self) -> None:
        """Abort what runs and free the model. Idempotent; also happens when nobody refers to the object any more."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
        elif isinstance(cast("object", prompt), (bytes, bytearray)) or any(isinstance(t, bool) for t in prompt):
            raise InvalidRequestError("a prompt is text or a list of token ids, not bytes or truth values", "prompt")
        else:
            token_ids = prompt
        return Request(uuid.uuid4().hex, tuple(token_ids), params)

    def _stream(self, request: Request) -> Generator[RequestOutput]:
        outputs = SimpleQueue[RequestOutput]()
        unfinished = request.params.n
        self._model.engine.submit(request, outputs.put)
        try:
            while unfinished:
                output = outputs.get()
                unfinished -= output.finish_reason is not None
                if isinstance(output.error, EngineDeadError):
                    raise output.error
                yield output
        finally:
            if unfinished:
                self._model.engine.abort(request.request_id)

    def _run(self, requests: Sequence[Request]) -> list[list[RequestOutput]]:
        """The outputs of each request. Only so many are handed in at a time that the engine's queue never fills."""
        outputs = SimpleQueue[RequestOutput]()
        collected: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        waiting = iter(requests)
        unfinished: dict[str, int] = {}  # sequences, by request
        following = next(waiting, None)
        try:
            while following is not None or unfinished:
                while following is not None and len(unfinished) < 2 * self.config.max_num_seqs:
                    unfinished[following.request_id] = following.params.n
                    self._model.engine.submit(following, outputs.put)
                    following = next(waiting, None)
                output = outputs.get()
                if isinstance(output.error, EngineDeadError):
                    raise output.error
                collected[output.request_id].append(output)
                if output.finish_reason is not None:
                    unfinished[output.request_id] -= 1
                    if not unfinished[output.request_id]:
                        del unfinished[output.request_id]
        finally:  # an interrupt, or the engine's death
            for request_id in unfinished:
                self._model.engine.abort(request_id)
        return list(collected.values())


def _is_single(prompts: Prompt | Prompts) -> bool:
    """Text, or token ids. An empty list is no prompts, not a prompt without tokens."""
    if not isinstance(cast("object", prompts), Sequence):
        raise InvalidRequestError(f"prompts are text or lists of token ids, not {type(prompts).__name__}", "prompt")
    return isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], str | Sequence))


def _result(request: Request, prompt: str | None, outputs: Sequence[RequestOutput]) -> GenerationResult:
    first = outputs[0]
    return GenerationResult(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=tuple(
            _completion([output for output in outputs if output.index == index], request.params)
            for index in range(request.params.n)
        ),
        num_cached_tokens=max(output.num_cached_tokens for output in outputs if output.index == first.index),
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
    )


def _completion(outputs: Sequence[RequestOutput], params: SamplingParams) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    return Completion(
        index=last.index,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        finish_reason=last.finish_reason.value,
        stop_reason=last.stop_reason,
        logprobs=None if params.logprobs is None else tuple(entry for output in outputs for entry in output.logprobs),
        timings=last.timings,
        error=last.error,
    )
