"""Conversations of typed blocks, as Anthropic's messages and OpenAI's responses are, as messages for a template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from caudal.api.errors import invalid, unsupported

# Members of one list of blocks, items or messages; Anthropic's limit of messages. More of them would hold up others.
MAX_BLOCKS = 100_000
MAX_TOOLS = 10_000


class Block(NamedTuple):
    """An object of a body that has a type, and where it stands, as in `messages.0.content.1`."""

    fields: dict[str, Any]
    where: str

    @property
    def type(self) -> object:
        return self.fields.get("type")

    def string(self, name: str) -> str:
        """A member that must be there and be text. Raises a 400 `ApiError` if it is not."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise invalid(f"{self.where}.{name}", "must be text")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A member that must be there and be an object. Raises a 400 `ApiError` if it is not."""
        value = self.fields.get(name)
        if not isinstance(value, dict):
            raise invalid(f"{self.where}.{name}", "must be an object")
        return cast("dict[str, Any]", value)

    def text(self, *types: str) -> str:
        """The text of a block of one of these types. Raises a 400 `ApiError` for all others, as images are."""
        if self.type in types:
            return self.string("text")
        if not isinstance(self.type, str):
            raise invalid(f"{self.where}.type", "must be text")
        raise unsupported(f"{self.where}.type", f"'{self.where}': content of the type '{self.type[:40]}'")


def read_blocks(content: object, where: str) -> list[Block]:
    """Content as blocks; a text is a block of the type `text`. Raises a 400 `ApiError` for what is neither."""
    if isinstance(content, str):
        return [Block({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise invalid(where, "must be text or a list of content blocks")
    items = cast("list[object]", content)
    if len(items) > MAX_BLOCKS:
        raise invalid(where, f"must have at most {MAX_BLOCKS} members")
    blocks: list[Block] = []
    for i, fields in enumerate(items):
        if not isinstance(fields, dict):
            raise invalid(f"{where}.{i}", "must be a content block, which is an object")
        blocks.append(Block(cast("dict[str, Any]", fields), f"{where}.{i}"))
    return blocks


def joined(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """Content for a template: a text as it is, several as parts, which the template's own way joins."""
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool in the form of chat completions, which is that of templates.

    It has a description and properties, be they empty: many templates fail without.
    """
    schema: dict[str, Any] = {"type": "object", "properties": {}, **(parameters or {})}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


@dataclass
class AssistantTurn:
    """What an assistant thought, said and called in one turn."""

    thoughts: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def call(self, call_id: str, name: str, arguments: dict[str, Any] | str) -> None:
        """Adds the call of a tool; arguments as an object or as JSON text."""
        function = {"name": name, "arguments": arguments}
        self.calls.append({"id": call_id, "type": "function", "function": function})

    def message(self) -> dict[str, Any]:
        """The turn as a message for a template."""
        message: dict[str, Any] = {"role": "assistant"}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.texts or not self.calls:
            message["content"] = joined(self.texts)
        return message
