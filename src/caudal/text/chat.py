"""Conversations to prompt text, by the Jinja template that a model file carries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from caudal.core import InvalidRequestError, UnsupportedModelError

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
_TEXT_PARTS = ("text", "input_text", "output_text")
_PROBE = "c4ud4l"  # a text that no template writes by itself
_OPEN_END = "c4ud4l-open-end "  # its space shows whether the template trims what it is given


class ChatTemplate:
    """One model's template. Any thread may use it; it is compiled at first use, since many runs never chat."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        tool_source: str | None = None,
        origin: Literal["model", "chatml", "plain"] = "model",
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tool_source` is used in place of `source` when tools are given; `clock` is what `strftime_now` shows."""
        self.source = source
        self.origin = origin
        self._tool_source = tool_source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._clock = clock

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, object], name: str | None = None, *, clock: Callable[[], datetime] = datetime.now
    ) -> ChatTemplate:
        """The template of a GGUF file: `tokenizer.chat_template`, or the one that the file calls `name`.

        A file without one gets `CHATML` or `PLAIN`, see there; `origin` says which. Raises UnsupportedModelError if
        there is no template called `name`.
        """
        from caudal.text.vocabulary import special_token_texts

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
        is (`enable_thinking`, `documents`, ...).

        Raises InvalidRequestError if the template rejects the conversation, with its words, or a message has parts
        other than text; UnsupportedModelError if the template is broken or takes more time or memory than it may.
        """
        source = self._tool_source if tools and self._tool_source is not None else self.source
        prepared = [self._prepare(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message needs add_generation_prompt to be false", "continue_final_message"
                )
            return self._render_open(source, prepared, tools, extra)
        return self._run(source, prepared, tools, add_generation_prompt, extra)

    @property
    def supports_tools(self) -> bool:
        """Whether the template writes the tools that it is given into the prompt."""
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
        return _PROBE in self._probe([{"role": "user", "content": "hi"}], tools=[tool])

    def _render_open(
        self,
        source: str,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        extra: Mapping[str, object],
    ) -> str:
        final = messages[-1] if messages else {}
        content = final.get("content")
        if self._wants_parts and isinstance(content, list) and content:
            parts = cast("list[dict[str, Any]]", content)
            final["content"] = [*parts[:-1], {**parts[-1], "text": parts[-1]["text"] + _OPEN_END}]
        elif isinstance(content, str):
            final["content"] = content + _OPEN_END
        else:
            raise InvalidRequestError("the final message has no text to continue", "messages")
        text = self._run(source, messages, tools, False, extra)
        mark = _OPEN_END.rstrip()
        before, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidRequestError("the model's chat template does not show the final message", "messages")
        return before if text[len(before) :].startswith(_OPEN_END) else before.rstrip()

    def _prepare(self, message: Message, index: int) -> dict[str, Any]:
        """A copy in the form that the template expects, without the fields that are null."""
        where = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"{where} needs a role, such as 'user'", f"{where}.role")
        prepared = {key: _plain(value) for key, value in message.items() if value is not None}
        if "content" in prepared:
            prepared["content"] = self._content(prepared["content"], where)
        if prepared.get("tool_calls"):
            as_object, content = self._tool_call_form
            if "content" not in prepared and content != "missing":
                prepared["content"] = content
            prepared["tool_calls"] = [_tool_call(call, as_object) for call in prepared["tool_calls"]]
        return prepared

    def _content(self, content: object, where: str) -> object:
        if isinstance(content, list):
            texts = [_part_text(part, where) for part in cast("list[object]", content)]
        elif isinstance(content, str):
            if not self._wants_parts:
                return content
            texts = [content]
        else:
            raise InvalidRequestError(f"{where}.content must be a string or a list of parts", f"{where}.content")
        return [{"type": "text", "text": text} for text in texts] if self._wants_parts else "\n".join(texts)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template can only show contents that are lists of parts."""
        if _PROBE in self._probe([{"role": "user", "content": _PROBE}]):
            return False
        return _PROBE in self._probe([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])

    @cached_property
    def _tool_call_form(self) -> tuple[bool, str | None]:
        """(arguments as an object rather than JSON text, content beside tool calls) that the template shows right."""
        question = {"role": "user", "content": "hi"}
        for content in ("missing", None, ""):
            for arguments in ({_PROBE: "x"}, json.dumps({_PROBE: "x"})):
                call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": arguments}}
                answer: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
                if content == "missing":
                    del answer["content"]
                text = self._probe([question, answer])
                if _PROBE in text and f"'{_PROBE}'" not in text and f'\\"{_PROBE}' not in text and "None" not in text:
                    return not isinstance(arguments, str), content
        return True, "missing"

    def _probe(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """What the template makes of a test conversation; nothing if it rejects it."""
        source = self._tool_source if self._tool_source is not None else self.source
        try:
            return self._run(source, messages, tools, False, {})
        except InvalidRequestError:
            return ""

    def _run(
        self,
        source: str,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, object],
    ) -> str:
        variables = {
            **self._tokens,
            "documents": None,
            **{key: _plain(value) for key, value in extra.items()},
            "messages": messages,
            "tools": _plain(tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._compiled[source].render(variables)

    @cached_property
    def _compiled(self) -> dict[str, CompiledTemplate]:
        from caudal.text.sandbox import CompiledTemplate

        sources = {self.source} if self._tool_source is None else {self.source, self._tool_source}
        return {source: CompiledTemplate(source, self._clock) for source in sources}


def _part_text(part: object, where: str) -> str:
    fields = cast("Mapping[str, object]", part) if isinstance(part, Mapping) else {}
    kind, text = fields.get("type"), fields.get("text")
    if kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{where}.content has a part of type {kind!r}; this model reads text only", f"{where}.content"
        )
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.content has a text part without text", f"{where}.content")
    return text


def _tool_call(call: object, as_object: bool) -> object:
    """The call with its arguments as the template wants them: an object or JSON text."""
    if not isinstance(call, dict):
        return call
    fields = cast("dict[str, Any]", call)
    function = fields.get("function")
    if not isinstance(function, dict):
        return fields
    arguments = cast("dict[str, Any]", function).get("arguments")
    if as_object and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except ValueError:  # a model's own attempt at JSON may be damaged; it is shown as it was
            parsed = arguments
        arguments = parsed
    elif not as_object and arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**fields, "function": {**function, "arguments": arguments}}


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
