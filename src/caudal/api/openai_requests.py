"""Request bodies of OpenAI's routes, with vLLM's additional fields, and what they mean for the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeGuard, cast

from pydantic import BeforeValidator, Field

from caudal.api.errors import ApiError, unsupported
from caudal.api.http import Body
from caudal.api.service import ServedModel
from caudal.core import Grammar, RequestTooLongError, SamplingParams

MAX_CHOICES = 1024  # prompts times n, in one call
# Texts above this are tokenized in another thread, so that running streams go on; conversations are rendered there
# with more messages than this, or with tools or variables of any number.
INLINE_CHARACTERS = 8192
INLINE_MESSAGES = 64
# Text to tokenize in one call, for which time and memory of the tokenizer grow; more where the context has room for it.
MAX_CHARACTERS = 4 * 1024**2


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[list[str], BeforeValidator(_listed)]

# Fields that change what is generated and that are not served. Ignoring them would give wrong answers silently.
_REFUSED = (
    "bad_words",
    "chat_template",
    "documents",
    "function_call",
    "functions",
    "logits_processors",
    "prompt_embeds",
    "suffix",
    "truncate_prompt_tokens",
    "use_beam_search",
)
# What a template gets from its caller; a client must not replace it.
_TEMPLATE_ARGUMENTS = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "messages", "self", "tokenize", "tools"}
)
# `developer` is OpenAI's newer word for `system`; templates know only that one.
_ROLES = ("system", "developer", "user", "assistant", "tool")


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class NamedSchema(Body):
    """OpenAI's wrapping of a JSON schema. Every schema is followed strictly, whatever `strict` says."""

    name: str = ""
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(Body):
    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`, and its older `guided_*` fields: at most one of them."""

    json_schema: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None  # Lark


class GenerationBody(Body):
    """The fields that both routes have. Ranges are checked by the engine, once for all dialects."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Int64 | None = None
    stop: Stop = Field(default=[])
    stop_token_ids: list[TokenId] = Field(default=[])
    include_stop_str_in_output: bool = False
    logit_bias: dict[str, float] = Field(default={})
    allowed_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    max_tokens: Int64 | None = None
    min_tokens: Int64 = 0
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: Int64 = 0
    cache_salt: str = Field("", max_length=128)
    speculate: bool = True
    timings_per_token: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    def check(self) -> None:
        """What no single field shows. Raises a 400 `ApiError`."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        if self.stream and self.prompt_logprobs:
            raise ApiError(400, "'prompt_logprobs' is not available with 'stream'.", param="prompt_logprobs")

    def grammar(self) -> Grammar | None:
        """What the output must look like; None: anything. Raises a 400 `ApiError`."""
        found = [grammar for grammar in (self._response_grammar(), *self._structured_grammars()) if grammar is not None]
        if len(found) > 1:
            message = f"'{found[0].param}' and '{found[1].param}' both say what the output must look like; send one."
            raise ApiError(400, message, param=found[1].param)
        return found[0] if found else None

    def _response_grammar(self) -> Grammar | None:
        asked = self.response_format
        match None if asked is None else asked.type:
            case None | "text":
                return None
            case "json_object":
                return schema_grammar({"type": "object"}, "response_format")
            case "json_schema":
                named = None if asked is None else asked.json_schema
                if named is None or named.json_schema is None:
                    param = "response_format.json_schema.schema"
                    raise ApiError(400, f"Missing required parameter: '{param}'.", param=param)
                return schema_grammar(named.json_schema, "response_format")
            case other:
                raise unsupported("response_format", f"The response format '{other}'")

    def _structured_grammars(self) -> Iterator[Grammar]:
        older = StructuredOutputs.model_construct(
            json_schema=self.guided_json,
            json_object=False,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        for asked, name in ((self.structured_outputs, "structured_outputs.{}"), (older, "guided_{}")):
            if asked is None:
                continue
            if asked.json_schema is not None:
                yield schema_grammar(asked.json_schema, name.format("json"))
            if asked.json_object:
                yield schema_grammar({"type": "object"}, name.format("json_object"))
            if asked.regex is not None:
                yield Grammar("regex", asked.regex, name.format("regex"))
            if asked.choice is not None:
                yield Grammar("choice", json.dumps(asked.choice), name.format("choice"))
            if asked.grammar is not None:
                yield _lark(asked.grammar, name.format("grammar"))

    def sampling(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """The engine's parameters. The engine checks their ranges."""
        bias: list[tuple[int, float]] = []
        for key, value in self.logit_bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ApiError(400, f"'logit_bias' has the key {key[:20]!r}, not a token id.", param="logit_bias")
            bias.append((int(key), value))
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            top_n_sigma=self.top_n_sigma,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logit_bias=tuple(bias),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            speculate=self.speculate,
        )


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Any  # text, token ids, or a list of these; `prompts` checks it
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        GenerationBody.check(self)
        if self.best_of not in (None, self.n):
            raise unsupported("best_of", "'best_of' other than 'n'")
        if self.stream and self.echo and self.logprobs is not None and self.n > 1:
            # the engine scores a prompt once, with the first choice; the others may come before
            raise ApiError(400, "'echo' with 'logprobs' and 'stream' needs 'n' to be 1.", param="n")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "'max_tokens' must be at least 1 without 'echo'.", param="max_tokens")

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, in their order. Raises a 400 `ApiError`."""
        value: Any = [self.prompt] if isinstance(self.prompt, str) or _is_token_ids(self.prompt) else self.prompt
        if not isinstance(value, list):
            raise ApiError(400, "'prompt' must be text, token ids, or a list of these.", param="prompt")
        items = cast(list[Any], value)
        if not items:
            raise ApiError(400, "'prompt' must not be empty.", param="prompt")
        if len(items) * self.n > MAX_CHOICES:
            raise ApiError(400, f"Prompts times 'n' must be at most {MAX_CHOICES}.", param="prompt")
        for item in items:
            if not (isinstance(item, str) or _is_token_ids(item)):
                raise ApiError(400, "'prompt' must be text, token ids, or a list of these.", param="prompt")
        return items


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = Field(None, min_length=1)
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    echo: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default={})

    def check(self) -> None:
        GenerationBody.check(self)
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", "A 'tool_choice' other than 'auto' and 'none'")
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                400,
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
                param="continue_final_message",
            )

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def schema_grammar(schema: dict[str, Any] | bool | str, param: str) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema), param)


def _lark(text: str, param: str) -> Grammar:
    if "::=" in text:
        raise ApiError(400, "Grammars must be in Lark's notation; GBNF ('::=') is not supported.", param=param)
    return Grammar("lark", text, param)


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises a 400 `ApiError` when a body asks for something that Caudal would have to ignore."""
    for name in _REFUSED:
        if body.get(name):
            raise unsupported(name, f"'{name}'")


def _is_token_ids(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list) and set(map(type, cast(list[Any], value))) == {int}  # bool is another type
    )


# --------------------------------------------------------------------------------------------- prompts


def _most_characters(model: ServedModel) -> int | None:
    """Characters of the longest text that could fit into the context; None: any number."""
    most = model.tokenizer.max_token_characters
    return None if most is None else most * model.max_model_len


def check_length(model: ServedModel, text: str) -> None:
    """Raises `RequestTooLongError` for a text that cannot fit into the context: tokenizing it would take long."""
    most = _most_characters(model)
    if most is not None and len(text) > most:
        raise RequestTooLongError(
            f"the prompt has {len(text)} characters, which cannot fit into the context of {model.max_model_len} "
            "tokens; shorten the prompt",
            "prompt",
        )


async def tokenize(
    model: ServedModel, texts: Sequence[str], *, add_special: bool, parse_special: bool = True
) -> list[list[int]]:
    """Token ids of each text. Long ones are worked on in another thread. Raises a 400 `ApiError` for too much text."""
    size = _checked_size(model, texts, "prompt")

    def encode() -> list[list[int]]:
        return [model.tokenizer.encode(text, add_special=add_special, parse_special=parse_special) for text in texts]

    return encode() if size <= INLINE_CHARACTERS else await asyncio.to_thread(encode)


async def tokenize_chat(model: ServedModel, text: str, *, add_special: bool) -> list[int]:
    """Token ids of a rendered template, which writes its special tokens itself. Raises as `tokenize` does."""
    size = _checked_size(model, [text], "messages")

    def encode() -> list[int]:
        return model.tokenizer.encode(text) if add_special else model.tokenizer.encode_chat(text)

    return encode() if size <= INLINE_CHARACTERS else await asyncio.to_thread(encode)


def _checked_size(model: ServedModel, texts: Sequence[str], param: str) -> int:
    """Characters of all texts. Raises a 400 `ApiError` if one call may not have so many."""
    size = sum(map(len, texts))
    most = max(MAX_CHARACTERS, _most_characters(model) or 0)
    if size > most:
        raise ApiError(
            400, f"The text has {size} characters; one call may have {most}. Shorten or split it.", param=param
        )
    return size


async def render_chat(model: ServedModel, body: ChatBody) -> str:
    """The prompt text of a conversation. Raises `InvalidRequestError` for what the template refuses."""
    template = model.chat_template
    if template is None:
        raise ApiError(400, "The model has no chat template. Use /v1/completions.", param="messages")
    reserved = _TEMPLATE_ARGUMENTS & body.chat_template_kwargs.keys()
    if reserved:
        raise ApiError(400, f"'chat_template_kwargs' must not set '{min(reserved)}'.", param="chat_template_kwargs")
    kwargs = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    generate = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    tools = None if body.tool_choice == "none" else body.tools

    def render() -> str:
        return template.render(
            normalize_messages(body.messages),
            tools=tools,
            add_generation_prompt=generate,
            continue_final_message=body.continue_final_message,
            **kwargs,
        )

    is_small = (
        len(body.messages) <= INLINE_MESSAGES
        and not (tools or kwargs)
        and sum(map(_num_characters, body.messages)) <= INLINE_CHARACTERS
    )
    return render() if is_small else await asyncio.to_thread(render)


async def encode_chat(model: ServedModel, body: ChatBody) -> list[int]:
    """The prompt of a conversation as token ids.

    Raises as `render_chat` and `tokenize_chat` do, and `RequestTooLongError` for what cannot fit into the context.
    """
    text = await render_chat(model, body)
    check_length(model, text)
    return await tokenize_chat(model, text, add_special=body.add_special_tokens)


def normalize_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the roles that templates know. Raises a 400 `ApiError` for what is no message.

    The template checks the rest, as it depends on its form which contents and tool calls it takes.
    """
    result: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise ApiError(
                400, f"'messages[{i}].role' must be one of {', '.join(_ROLES)}.", param=f"messages[{i}].role"
            )
        if message.get("content") is None and role != "assistant":
            param = f"messages[{i}].content"
            raise ApiError(400, f"Missing required parameter: '{param}'.", param=param)
        result.append({**message, "role": "system" if role == "developer" else role})
    return result


def _num_characters(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else len(str(content))
