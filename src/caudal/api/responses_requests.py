"""Request bodies of OpenAI's responses routes, and the conversation that they mean for the model's template.

Fields and shapes are those of OpenAI's API reference: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, cast

from pydantic import Field

from caudal.api.content import MAX_TOOLS, AssistantTurn, Block, function_tool, joined, read_blocks
from caudal.api.errors import ApiError, invalid, unsupported
from caudal.api.http import Body
from caudal.api.openai_requests import INLINE_MESSAGES, ChatBody, GenerationBody, schema_grammar
from caudal.core import Grammar

# What needs replies of earlier calls, which this server does not keep.
_NEEDS_STORE = ("background", "conversation", "previous_response_id", "prompt", "store")
# Fields that change what is generated and that are not served. Ignoring them would give wrong answers silently.
_REFUSED = ("context_management", "moderation", "prompt_logprobs", "return_token_ids")
_TEXT_TYPES = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"  # the member of `include` that asks for them


class Reasoning(Body):
    effort: str | None = None


class TextFormat(Body):
    type: str
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(GenerationBody):
    """`POST /v1/responses`. `messages` checks what is `Any` here."""

    n: int = Field(1, ge=1, le=1)
    input: Any  # text, or a list of items
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**63)
    tools: list[dict[str, Any]] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[str] = Field(default=[])
    top_logprobs: int | None = Field(None, ge=0, le=20)
    metadata: dict[str, str] = Field(default={}, max_length=16)
    chat_template_kwargs: dict[str, Any] = Field(default={})

    def check(self) -> None:
        """What no single field shows. Raises a 400 `ApiError`."""
        GenerationBody.check(self)
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", "A 'tool_choice' other than 'auto' and 'none'")
        if self.tools and not self.parallel_tool_calls:
            raise unsupported("parallel_tool_calls", "'parallel_tool_calls' false with 'tools'")

    def grammar(self) -> Grammar | None:
        """What the output must look like; None: anything. Raises a 400 `ApiError`."""
        grammar, other = self._text_grammar(), GenerationBody.grammar(self)
        if grammar is not None and other is not None:
            message = f"'text.format' and '{other.param}' both say what the output must look like; send one."
            raise ApiError(400, message, param=other.param)
        return grammar or other

    def _text_grammar(self) -> Grammar | None:
        asked = None if self.text is None else self.text.format
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return schema_grammar({"type": "object"}, "text.format")
        if asked.type != "json_schema":
            raise unsupported("text.format", f"The text format '{asked.type[:40]}'")
        if asked.json_schema is None:
            raise ApiError(400, "Missing required parameter: 'text.format.schema'.", param="text.format.schema")
        return schema_grammar(asked.json_schema, "text.format")

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many log probabilities are asked for beside that of the chosen token; None: none at all."""
        return 0 if self.top_logprobs is None and _LOGPROBS in self.include else self.top_logprobs


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises a 400 `ApiError` when a body asks for something that Caudal would have to ignore."""
    for name in _NEEDS_STORE:
        if body.get(name):
            raise ApiError(
                400,
                f"'{name}' is not supported: this server keeps no responses. Send the whole conversation as 'input'.",
                param=name,
                code="unsupported_parameter",
            )
    for name in _REFUSED:
        if body.get(name):
            raise unsupported(name, f"'{name}'")


async def chat_body(body: ResponsesBody) -> ChatBody:
    """The conversation in the form that templates know. Raises a 400 `ApiError` for what they cannot show.

    What an assistant thought, said and called without another's item in between is one message.
    """
    items: object = body.input
    size = len(body.tools) + (len(cast("list[object]", items)) if isinstance(items, list) else 1)
    return _chat_body(body) if size <= INLINE_MESSAGES else await asyncio.to_thread(_chat_body, body)


def _chat_body(body: ResponsesBody) -> ChatBody:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _messages(read_blocks(body.input, "input"))
    if not messages:
        raise invalid("input", "must have at least one item")
    kwargs = dict(body.chat_template_kwargs)
    if body.text is not None and body.text.verbosity is not None:
        kwargs.setdefault("verbosity", body.text.verbosity)
    return ChatBody.model_validate(
        {
            "messages": messages,
            "tools": [_tool(Block(tool, f"tools.{i}")) for i, tool in enumerate(body.tools)] or None,
            "tool_choice": body.tool_choice,
            "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
            "chat_template_kwargs": kwargs,
        }
    )


def _messages(items: Iterable[Block]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    turn: AssistantTurn | None = None
    names: dict[str, str] = {}  # of tools, by the id of the call
    unanswered: dict[str, str] = {}  # the items of calls, by their id
    for item in items:
        kind = item.fields.get("type", "message")
        if kind == "function_call_output" or (kind == "message" and item.fields.get("role") != "assistant"):
            if turn is not None:
                messages.append(turn.message())
            turn = None
            messages.append(_message(item) if kind == "message" else _output(item, names, unanswered))
            continue
        turn = turn or AssistantTurn()
        match kind:
            case "message":
                turn.texts += _content_texts(item, "content", "refusal")
            case "reasoning":
                # `encrypted_content` is left out: only who wrote it can read it
                turn.thoughts += _thoughts(item)
            case "function_call":
                call_id, name = item.string("call_id"), item.string("name")
                names[call_id], unanswered[call_id] = name, item.where
                turn.call(call_id, name, item.string("arguments"))
            case "item_reference":
                raise unsupported(f"{item.where}.type", "An 'item_reference', as this server keeps no responses,")
            case _:
                raise unsupported(f"{item.where}.type", f"'{item.where}': an item of the type '{str(kind)[:40]}'")
    if turn is not None:
        messages.append(turn.message())
    for call_id, where in unanswered.items():
        raise invalid(where, f"the function call '{call_id[:80]}' has no 'function_call_output' after it")
    return messages


def _message(item: Block) -> dict[str, Any]:
    role = item.fields.get("role")
    if role not in ("user", "system", "developer"):
        raise invalid(f"{item.where}.role", "must be 'user', 'assistant', 'system' or 'developer'")
    return {"role": role, "content": joined(_content_texts(item, "content"))}


def _output(item: Block, names: Mapping[str, str], unanswered: dict[str, str]) -> dict[str, Any]:
    """The message with the result of a tool; takes its call out of `unanswered`."""
    call_id = item.string("call_id")
    if call_id not in names:
        raise invalid(f"{item.where}.call_id", "no earlier item is a 'function_call' with this id")
    unanswered.pop(call_id, None)
    content = "\n".join(_content_texts(item, "output"))
    return {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": content}


def _content_texts(item: Block, name: str, *others: str) -> list[str]:
    """The texts of a member; `others` are types of parts that have their text in a member of the same name."""
    parts = read_blocks(item.fields.get(name), f"{item.where}.{name}")
    return [part.string(str(part.type)) if part.type in others else part.text(*_TEXT_TYPES) for part in parts]


def _thoughts(item: Block) -> list[str]:
    """The thoughts themselves if they are there, else their summary."""
    for name in ("content", "summary"):
        if item.fields.get(name):
            parts = read_blocks(item.fields[name], f"{item.where}.{name}")
            return [part.text("reasoning_text", "summary_text") for part in parts]
    return []


def _tool(tool: Block) -> dict[str, Any]:
    """A tool in the form of chat completions, which is that of templates."""
    if tool.type != "function":
        raise unsupported(f"{tool.where}.type", f"'{tool.where}': a tool of the type '{str(tool.type)[:40]}'")
    description = None if tool.fields.get("description") is None else tool.string("description")
    parameters = None if tool.fields.get("parameters") is None else tool.mapping("parameters")
    return function_tool(tool.string("name"), description, parameters)
