"""Request bodies of Anthropic's messages routes, and the conversation that they mean for the model's template.

Fields and shapes are those of Anthropic's API reference: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

from pydantic import Field

from caudal.api.content import MAX_BLOCKS, MAX_TOOLS, AssistantTurn, Block, function_tool, joined, read_blocks
from caudal.api.errors import invalid, unsupported
from caudal.api.http import Body
from caudal.api.openai_requests import INLINE_MESSAGES, ChatBody, Int64, schema_grammar
from caudal.core import Grammar, SamplingParams

# Fields that change what is generated and that are not served. Ignoring them would give wrong answers silently.
_REFUSED = ("container", "mcp_servers", "output_format")
# A block of the system prompt in which Claude Code counts its calls. No model needs it, and since it changes with
# every call, no prefix of the prompt would be found in the cache.
_BILLING_HEADER = "x-anthropic-billing-header:"


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptBody(Body):
    """`POST /v1/messages/count_tokens`: the fields that become the prompt. `chat_body` checks what is `Any` here."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_BLOCKS)
    system: Any = None  # text or a list of text blocks
    tools: list[dict[str, Any]] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(PromptBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=0, lt=2**63)
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = 1.0
    top_k: Int64 = 0
    stop_sequences: list[str] = Field(default=[])

    def grammar(self) -> Grammar | None:
        """What the output must look like; None: anything. Raises a 400 `ApiError`."""
        asked = None if self.output_config is None else self.output_config.format
        return None if asked is None else schema_grammar(asked.json_schema, "output_config.format")

    def sampling(self) -> SamplingParams:
        """The engine's parameters. The engine checks the ranges of those that have the same name there."""
        return SamplingParams(
            max_tokens=max(1, self.max_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop_sequences),
        )


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises a 400 `ApiError` when a body asks for something that Caudal would have to ignore."""
    for name in _REFUSED:
        if body.get(name):
            raise unsupported(name, f"'{name}'")


async def chat_body(body: PromptBody) -> ChatBody:
    """The conversation in the form that templates know. Raises a 400 `ApiError` for what they cannot show.

    As in Anthropic's API, turns of the same role that follow each other are one turn, and the model goes on with the
    last turn if that is the assistant's.
    """
    size = len(body.messages) + len(body.tools)
    if size <= INLINE_MESSAGES:
        contents = [message.get("content") for message in body.messages]
        size += sum(len(cast("list[object]", content)) for content in contents if isinstance(content, list))
    return _chat_body(body) if size <= INLINE_MESSAGES else await asyncio.to_thread(_chat_body, body)


def _chat_body(body: PromptBody) -> ChatBody:
    choice = body.tool_choice
    if choice is not None and choice.type in ("any", "tool"):
        raise unsupported("tool_choice", f"The tool choice '{choice.type}', which forces a tool to be used,")
    if choice is not None and choice.disable_parallel_tool_use:
        raise unsupported("tool_choice.disable_parallel_tool_use", "'disable_parallel_tool_use'")
    messages = list(_system(body.system))
    names: dict[str, str] = {}  # of tools, by the id of the call
    for role, blocks in _turns(body.messages):
        match role:
            case "user":
                messages += _user_messages(blocks, names)
            case "assistant":
                messages.append(_assistant_message(blocks, names))
            case _:
                messages.append({"role": "system", "content": joined(_texts(blocks))})
    last = messages[-1]
    if "tool_calls" in last:
        raise invalid("messages", "the last message calls tools; a message with their results must follow")
    if last["role"] == "assistant" and body.output_config is not None and body.output_config.format is not None:
        raise invalid("output_config.format", "cannot be followed by a message that begins with what an assistant said")
    thinking = None if body.thinking is None or body.thinking.type == "adaptive" else body.thinking.type == "enabled"
    return ChatBody.model_validate(
        {
            "messages": messages,
            "tools": [_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools)] or None,
            "tool_choice": "none" if choice is not None and choice.type == "none" else None,
            "reasoning_effort": None if body.output_config is None else body.output_config.effort,
            "continue_final_message": last["role"] == "assistant",
            "chat_template_kwargs": {} if thinking is None else {"enable_thinking": thinking},
        }
    )


def _turns(messages: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Block]]]:
    """Roles and contents; messages of the same role that follow each other are one turn."""
    turns: list[tuple[str, list[Block]]] = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"messages.{i}.role", "must be 'user', 'assistant' or 'system'")
        blocks = read_blocks(message.get("content"), f"messages.{i}.content")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _system(system: object) -> Iterator[dict[str, Any]]:
    """The message that stands before the conversation, if there is one."""
    texts = [] if system is None else _texts(read_blocks(system, "system"))
    texts = [text for text in texts if not text.startswith(_BILLING_HEADER)]
    if any(texts):
        yield {"role": "system", "content": joined(texts)}


def _user_messages(blocks: Iterable[Block], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A user's turn: its texts, and a message of the role `tool` for each result of a tool, in their order."""
    texts: list[str] = []
    has_results = False
    for block in blocks:
        if block.type != "tool_result":
            texts.append(block.text("text"))
            continue
        if texts:
            yield {"role": "user", "content": joined(texts)}
            texts = []
        has_results = True
        yield _tool_message(block, names)
    if texts or not has_results:
        yield {"role": "user", "content": joined(texts)}


def _tool_message(block: Block, names: Mapping[str, str]) -> dict[str, Any]:
    call_id = block.string("tool_use_id")
    if call_id not in names:
        raise invalid(f"{block.where}.tool_use_id", "no earlier message has a tool_use block with this id")
    content = block.fields.get("content")
    text = "" if content is None else "\n".join(_texts(read_blocks(content, f"{block.where}.content")))
    if block.fields.get("is_error") is True:  # templates have no other place for it
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": text}


def _assistant_message(blocks: Iterable[Block], names: dict[str, str]) -> dict[str, Any]:
    """An assistant's turn; puts the names of the tools that it calls into `names`."""
    turn = AssistantTurn()
    for block in blocks:
        match block.type:
            case "thinking":
                turn.thoughts.append(block.string("thinking"))
            case "redacted_thinking":
                pass  # only who wrote it can read it
            case "tool_use":
                call_id, name = block.string("id"), block.string("name")
                names[call_id] = name
                turn.call(call_id, name, block.mapping("input"))
            case _:
                turn.texts.append(block.text("text"))
    return turn.message()


def _texts(blocks: Iterable[Block]) -> list[str]:
    return [block.text("text") for block in blocks]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool in OpenAI's form, which is that of templates."""
    block = Block(tool, where)
    if block.type not in (None, "custom"):
        raise unsupported(f"{where}.type", f"'{where}': a tool of the type '{str(block.type)[:40]}'")
    if tool.get("strict"):
        raise unsupported(f"{where}.strict", f"'{where}.strict'")
    name = block.string("name")
    description = None if tool.get("description") is None else block.string("description")
    return function_tool(name, description, block.mapping("input_schema"))
