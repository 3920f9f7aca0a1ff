"""The page that describes the routes, and bodies made from it: whatever a client sends, it is told what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake import FakeEngine, LiveServer, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GOOD: dict[str, dict[str, Any]] = {  # a body that is answered, for routes that need more than any text
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
}
MEMBERS = [
    "text",
    "content",
    "role",
    "type",
    "name",
    "id",
    "input",
    "output",
    "call_id",
    "tool_use_id",
    "format",
    "effort",
]
KINDS = [
    "user",
    "assistant",
    "system",
    "tool",
    "text",
    "function",
    "tool_use",
    "tool_result",
    "message",
    "enabled",
    "auto",
]
ITEMS = [
    "reasoning",
    "thinking",
    "function_call",
    "function_call_output",
    "json_schema",
    "input_text",
    "refusal",
    "none",
]
WORDS = st.sampled_from(MEMBERS) | st.sampled_from(KINDS) | st.sampled_from(ITEMS)
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats(allow_nan=False) | WORDS
LEAVES |= st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=5),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running(FakeEngine(max_model_len=64)) as live:
        yield live


def objects(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for member in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from objects(member)


def test_references_lead_somewhere(server: LiveServer) -> None:
    page = server.http.get("/openapi.json").json()
    for node in objects(page):
        if isinstance(node.get("$ref"), str):
            found = page
            for name in node["$ref"].removeprefix("#/").split("/"):
                found = found[name.replace("~1", "/").replace("~0", "~")]


def test_no_body_is_a_failure_of_the_server(server: LiveServer) -> None:
    """Each documented field, with each kind of value."""
    fields = {
        path: operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
        for path, operations in server.http.get("/openapi.json").json()["paths"].items()
        for operation in operations.values()
        if path in GOOD
    }
    assert fields.keys() == GOOD.keys()
    choices = [(path, name) for path, names in fields.items() for name in sorted(names)]

    @settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(choices), VALUES, st.booleans())
    def send(choice: tuple[str, str], value: Any, stream: bool) -> None:
        path, name = choice
        body = json.dumps({**GOOD[path], "stream": stream, name: value})
        reply = server.http.post(path, content=body)
        assert reply.status_code in (200, 400, 404), (body, reply.text)
        if reply.status_code != 200:
            assert reply.json()["error"]["message"]

    send()
