"""Conversations to prompt text, by the Jinja template that a model file carries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from caudal.core import InvalidRequestError, UnsupportedModelError
from caudal.text.tokenizer import PLAIN_MARK

if TYPE_CHECKING:
    from caudal.text.sandbox import CompiledTemplate

Message = Mapping[str, Any]

# For models whose file has no template. ChatML if the vocabulary has its markers; else plain text, which every
# language model can follow.
CHATML = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLAIN = """\
{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}

{% else %}{{ message.role | capitalize }}: {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""

MAX_DEPTH = 64  # of nested values in a message or a tool
_UNTRUSTED_ROLES = ("user", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
# Variables beside the messages, where there are no tools: as most templates expect them, and as some do.
_FORMS: tuple[dict[str, object], ...] = ({"tools": None}, {"tools": []}, {"tools": None, "functions": ""})
_PROBE = "c4ud4l"  # a text that no template writes by itself
_QUESTION: dict[str, Any] = {"role": "user", "content": "hi"}
_OPEN_END = "c4ud4l-open-end "  # its space shows whether the template trims what it is given


class ChatTemplate:
    """One model's template. Any thread may use it; it is compiled at first use, since many runs never chat."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        control_tokens: Iterable[str] = (),
        tool_source: str | None = None,
        origin: Literal["model", "chatml", "plain"] = "model",
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tool_source` is used in place of `source` when tools are given; `clock` is what `strftime_now` shows.

        `control_tokens` are only the template's to write: where a user's or a tool's text has one, it stays text.
        """
        self.source = source
        self.origin = origin
        self._control_tokens = tuple(control_tokens)
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._program = _Program(source, tokens, clock)
        self._tool_program = self._program if tool_source is None else _Program(tool_source, tokens, clock)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, object], name: str | None = None, *, clock: Callable[[], datetime] = datetime.now
    ) -> ChatTemplate:
        """The template of a GGUF file: `tokenizer.chat_template`, or the one that the file calls `name`.

        A file without one gets `CHATML` or `PLAIN`, see there; `origin` says which. Raises UnsupportedModelError if
        there is no template called `name`.
        """
        from caudal.text.vocabulary import control_token_texts, special_token_texts

        prefix = "tokenizer.chat_template"
        texts = {key: value for key, value in metadata.items() if key.startswith(prefix) and isinstance(value, str)}
        bos_token, eos_token = special_token_texts(metadata)
        origin: Literal["model", "chatml", "plain"] = "model"
        source = texts.get(prefix if name in (None, "default") else f"{prefix}.{name}")
        if source is None:
            if name is not None:
                names = [key.removeprefix(prefix + ".") for key in texts if key != prefix]
                raise UnsupportedModelError(
                    f"the model has no chat template {name!r}; it has: {', '.join(['default', *names])}"
                )
            tokens = cast("Sequence[str]", metadata.get("tokenizer.ggml.tokens", ()))
            source, origin = (CHATML, "chatml") if {"<|im_start|>", "<|im_end|>"} <= set(tokens) else (PLAIN, "plain")
        tool_source = texts.get(f"{prefix}.tool_use") if name is None else None
        return cls(
            source,
            bos_token=bos_token,
            eos_token=eos_token,
            control_tokens=control_token_texts(metadata),
            tool_source=tool_source,
            origin=origin,
            clock=clock,
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: object,
    ) -> str:
        """The prompt for `messages` (OpenAI's form; contents are strings or lists of text parts).

        `tools` are OpenAI's function definitions. `continue_final_message` ends the prompt inside the last message,
        for the model to go on with it, and needs `add_generation_prompt` false. `extra` goes to the template as it
        is (`enable_thinking`, `documents`, ...). The text is meant for `Tokenizer.encode_chat`: the character
        `text.tokenizer.PLAIN_MARK` in it says that what follows is no control token but what somebody wrote.

        Raises InvalidRequestError if the template rejects the conversation, with its words, or a message has parts
        other than text; UnsupportedModelError if the template is broken or takes more time or memory than it may.
        """
        program = self._tool_program if tools else self._program
        prepared = [self._prepare(message, index, program) for index, message in enumerate(messages)]
        if not continue_final_message:
            return program.render(prepared, tools, add_generation_prompt, extra)
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt to be false", "continue_final_message"
            )
        _open_end(prepared)
        text = program.render(prepared, tools, False, extra)
        before, found, after = text.rpartition(_OPEN_END.rstrip())
        if not found:
            raise InvalidRequestError("the model's chat template does not show the final message", "messages")
        return before if after.startswith(" ") else before.rstrip()

    @property
    def supports_tools(self) -> bool:
        """Whether the template writes the tools that it is given into the prompt."""
        return self._tool_program.supports_tools

    @cached_property
    def _control_token(self) -> re.Pattern[str] | None:
        """The empty places before control tokens, also before those that overlap."""
        longest_first = sorted(filter(None, self._control_tokens), key=len, reverse=True)
        return re.compile(f"(?={'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def _prepare(self, message: Message, index: int, program: _Program) -> dict[str, Any]:
        """A copy in the form that the template expects, without the fields that are null."""
        where = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"{where} needs a role, such as 'user'", f"{where}.role")
        prepared = {key: _plain(value) for key, value in message.items() if value is not None}
        if "content" in prepared:
            texts = _texts(prepared["content"], where)
            if message["role"] in _UNTRUSTED_ROLES and self._control_token is not None:
                texts = [self._control_token.sub(PLAIN_MARK, text.replace(PLAIN_MARK, "")) for text in texts]
            prepared["content"] = (
                [{"type": "text", "text": text} for text in texts] if program.wants_parts else "\n".join(texts)
            )
        calls = prepared.get("tool_calls")
        if calls:
            if not isinstance(calls, list) or not all(map(_is_tool_call, cast("list[object]", calls))):
                raise InvalidRequestError(f"{where}.tool_calls must be a list of calls", f"{where}.tool_calls")
            as_object = program.arguments_as_objects
            prepared["tool_calls"] = [_tool_call(call, as_object) for call in cast("list[dict[str, Any]]", calls)]
            if not prepared.get("content"):
                prepared.update(program.content_beside_tool_calls)
        return prepared


class _Program:
    """One Jinja source with what it expects of its input, found out by trying."""

    def __init__(self, source: str, tokens: Mapping[str, str], clock: Callable[[], datetime]) -> None:
        self._source = source
        self._tokens = tokens
        self._clock = clock

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, object],
    ) -> str:
        from caudal.text.sandbox import TemplateFailedError, TemplateLimitError

        try:
            return self._run(messages, tools, self._form, add_generation_prompt, extra)
        except TemplateLimitError as error:
            raise InvalidRequestError(
                f"the conversation is too much for the model's chat template: {error}", "messages"
            ) from error
        except TemplateFailedError as error:
            raise InvalidRequestError(
                f"the model's chat template cannot show this conversation: {error}", "messages"
            ) from error

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template can only show contents that are lists of parts."""
        if _PROBE in self._try([{"role": "user", "content": _PROBE}]):
            return False
        return _PROBE in self._try([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])

    @cached_property
    def supports_tools(self) -> bool:
        parameters: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        function: dict[str, Any] = {"name": _PROBE, "description": "", "parameters": parameters}
        return _PROBE in self._try([_QUESTION], tools=[{"type": "function", "function": function}])

    @property
    def arguments_as_objects(self) -> bool:
        """Whether the template wants the arguments of a tool call as an object rather than as JSON text."""
        return self._tool_call_form[0]

    @property
    def content_beside_tool_calls(self) -> dict[str, Any]:
        """What the template needs for the content of a message that has none, only tool calls."""
        return self._tool_call_form[1]

    @cached_property
    def _tool_call_form(self) -> tuple[bool, dict[str, Any]]:
        contents: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})
        for content in contents:
            for arguments in ({_PROBE: "x"}, json.dumps({_PROBE: "x"})):
                call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": arguments}}
                answer = {"role": "assistant", **content, "tool_calls": [call]}
                result = {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "ok"}
                text = self._try([_QUESTION, answer, result])
                # Not Python's way to write an object, not JSON inside JSON, not the content None as a word.
                if _PROBE in text and not any(bad in text for bad in (f"'{_PROBE}'", f'\\"{_PROBE}', "None")):
                    return not isinstance(arguments, str), content
        return True, {"content": ""}  # it shows no calls

    @cached_property
    def _form(self) -> dict[str, object]:
        """Variables for a conversation without tools, in the first form with which the template works at all."""
        from caudal.text.sandbox import TemplateFailedError, TemplateLimitError

        failure = ""
        for form in _FORMS:
            for content in ("hi", [{"type": "text", "text": "hi"}]):
                try:
                    self._run([{"role": "user", "content": content}], None, form, True, {})
                except InvalidRequestError:  # in its own words, so it works
                    return form
                except TemplateLimitError as error:
                    raise UnsupportedModelError(f"the model's chat template is refused: {error}") from error
                except TemplateFailedError as error:
                    failure = failure or str(error)
                else:
                    return form
        raise UnsupportedModelError(f"the model's chat template is broken: {failure}")

    def _try(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """What the template makes of a test conversation; nothing if it does not show it."""
        try:
            return self.render(messages, tools, False, {})
        except InvalidRequestError:
            return ""

    def _run(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        form: Mapping[str, object],
        add_generation_prompt: bool,
        extra: Mapping[str, object],
    ) -> str:
        variables: dict[str, object] = {"documents": None, **self._tokens, **form}
        if tools:
            variables["tools"] = _plain(tools)
        if "functions" in form:  # Fireworks' names
            variables["functions"] = json.dumps(variables["tools"], indent=2) if tools else ""
            variables["datetime"] = self._clock().strftime("%b %d %Y %H:%M:%S GMT")
        variables.update({key: _plain(value) for key, value in extra.items()})
        variables.update(messages=messages, add_generation_prompt=add_generation_prompt)
        return self._compiled.render(variables)

    @cached_property
    def _compiled(self) -> CompiledTemplate:
        from caudal.text.sandbox import CompiledTemplate

        return CompiledTemplate(self._source, self._clock)


def _open_end(messages: list[dict[str, Any]]) -> None:
    """Marks the end of the last message's text."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _OPEN_END
    elif content:
        content[-1]["text"] += _OPEN_END
    else:
        raise InvalidRequestError("the final message has no text to continue", "messages")


def _texts(content: object, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}.content must be a string or a list of parts", f"{where}.content")
    return [_part_text(part, where) for part in cast("list[object]", content)]


def _part_text(part: object, where: str) -> str:
    fields = cast("Mapping[str, object]", part if isinstance(part, Mapping) else {})
    kind, text = fields.get("type"), fields.get("text")
    if kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{where}.content has a part of type {kind!r}; this model reads text only", f"{where}.content"
        )
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.content has a text part without text", f"{where}.content")
    return text


def _is_tool_call(call: object) -> bool:
    return isinstance(call, dict) and isinstance(cast("dict[str, object]", call).get("function", {}), dict)


def _tool_call(call: dict[str, Any], as_object: bool) -> dict[str, Any]:
    """The call with its arguments as the template wants them: an object or JSON text."""
    function: dict[str, Any] | None = call.get("function")
    if function is None or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if as_object and isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # what a model wrote may be damaged; it is shown as it is
            arguments = json.loads(arguments or "{}")
    elif not as_object and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _plain(value: object, depth: int = 0) -> Any:
    """A copy made of JSON's own types only: other objects have methods that a template must not reach."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"messages and tools may be nested {MAX_DEPTH} deep at most")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        members = cast("Mapping[object, object]", value)
        return {str(key): _plain(member, depth + 1) for key, member in members.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in cast("Sequence[object]", value)]
    raise InvalidRequestError(f"a chat template cannot be given a {type(value).__name__}")
