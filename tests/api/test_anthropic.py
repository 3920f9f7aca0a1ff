"""Anthropic's routes, through Anthropic's own client and as bytes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fake import EOS, TEXT, FakeEngine, LiveServer, running

from caudal.api.anthropic_requests import PromptBody, chat_body
from caudal.config import ServerConfig
from caudal.core import CaudalError, Request

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
PROMPT = "user: hi\nassistant:"
VERSION = {"anthropic-version": "2023-06-01"}
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Vigo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/latest"}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running(config=ServerConfig(max_request_bytes=8_000_000)) as live:
        yield live
        assert live.http.get("/health").status_code == 200


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as made:
        yield made


def client_of(server: LiveServer, **settings: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, **{"api_key": "unused", "max_retries": 0, **settings})


def post(server: LiveServer, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    return server.http.post(path, json={"max_tokens": 5, "messages": HELLO} | body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must be well formed; each has its type twice."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
    result: list[dict[str, Any]] = []
    for part in parts:
        name, data = part.split("\n")
        result.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {result[-1]['type']}"
    return result


def error_of(reply: httpx.Response, status: int, kind: str) -> str:
    """The message of an error, which has Anthropic's shape and no other members."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == reply.headers["request-id"]
    assert body["error"]["message"]
    return body["error"]["message"]


# --------------------------------------------------------------------------------------------- messages


def test_message(client: anthropic.Anthropic, server: LiveServer) -> None:
    message = client.messages.create(model="fake", max_tokens=16, messages=HELLO)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    (block,) = message.content
    assert block.type == "text"
    assert block.text == TEXT.encode()[:16].decode("utf-8", "replace")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    # the fake finds half of each prompt in its cache
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(PROMPT) + 1
    assert (usage.cache_read_input_tokens, usage.output_tokens) == ((len(PROMPT) + 1) // 2, 16)
    assert message._request_id
    assert bytes(server.engine.received[-1].prompt_token_ids[1:]).decode() == PROMPT


def test_stream_equals_whole(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="fake", max_tokens=30, messages=HELLO)
    with client.messages.stream(model="fake", max_tokens=30, messages=HELLO) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert len(pieces) > 20
    assert "".join(pieces) == streamed.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    ignored = {"id", "content"}
    assert streamed.model_dump(exclude=ignored) == whole.model_dump(exclude=ignored)


def test_events(server: LiveServer) -> None:
    stream = events(post(server, stream=True))
    assert [event["type"] for event in stream] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 5,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message = stream[0]["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 1)
    assert {event["index"] for event in stream if event["type"].startswith("content_block")} == {0}
    assert stream[2]["content_block"] == {"type": "text", "text": ""}
    assert [event["delta"] for event in stream[3:8]] == [{"type": "text_delta", "text": c} for c in "Hello"]
    assert stream[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert stream[-2]["usage"]["output_tokens"] == 5


def test_a_long_prompt_gets_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies close connections on which nothing comes; the last usage tells what the first could not know."""
    monkeypatch.setattr("caudal.api.anthropic.PING_SECONDS", 0.05)
    gate = asyncio.Event()
    with running(FakeEngine(gate=gate)) as server, client_of(server) as client:
        body = {"max_tokens": 5, "messages": HELLO, "stream": True}
        with server.http.stream("POST", "/v1/messages", json=body) as reply:
            lines = reply.iter_lines()
            seen: list[str] = []
            while seen.count("event: ping") < 3:
                seen.append(next(lines))
            assert seen[0] == "event: message_start"
            assert "event: content_block_start" not in seen
            server.loop.call_soon_threadsafe(gate.set)
            assert "event: message_stop" in list(lines)
        with client.messages.stream(model="fake", max_tokens=5, messages=HELLO) as stream:
            assert stream.get_final_message().usage.cache_read_input_tokens == (len(PROMPT) + 1) // 2
        server.loop.call_soon_threadsafe(gate.clear)
        with server.http.stream("POST", "/v1/messages", json=body) as reply:  # and is gone before the first token
            next(reply.iter_lines())
        end = time.monotonic() + 5
        while server.engine.running:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert len(server.engine.aborted) == 1


def test_text_that_looks_like_the_end_of_an_event() -> None:
    text = "a\u2028b\x85c\r\n\ndata: x\n\n"
    with running(FakeEngine(script=lambda request, index: iter(text.encode()))) as server:
        stream = events(post(server, max_tokens=100, stream=True))
        deltas = [event["delta"]["text"] for event in stream if event["type"] == "content_block_delta"]
        assert "".join(deltas) == text


@pytest.mark.parametrize(
    ("stop", "reason", "found", "text"),
    [
        ([], "end_turn", None, "Hello, wörld!"),
        (["xyz", "lo"], "stop_sequence", "lo", "Hel"),
        (["wör", "o, w"], "stop_sequence", "o, w", "Hell"),
        (["H"], "stop_sequence", "H", ""),
    ],
)
def test_stop_reasons(stop: list[str], reason: str, found: str | None, text: str) -> None:
    with (
        running(FakeEngine(script=lambda request, index: iter("Hello, wörld!".encode()))) as server,
        client_of(server) as client,
    ):
        whole = client.messages.create(model="fake", max_tokens=50, messages=HELLO, stop_sequences=stop)
        with client.messages.stream(model="fake", max_tokens=50, messages=HELLO, stop_sequences=stop) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            assert (message.stop_reason, message.stop_sequence) == (reason, found)
            assert "".join(block.text for block in message.content if block.type == "text") == text
            assert len(message.content) == bool(text)  # no empty block


def test_a_full_context_is_told_from_max_tokens() -> None:
    """As Anthropic's newer models do: `max_tokens` may be more than the context has room for."""
    with running(FakeEngine(max_model_len=len(PROMPT) + 1 + 10)) as server, client_of(server) as client:
        message = client.messages.create(model="fake", max_tokens=2000, messages=HELLO)
        assert (message.stop_reason, message.usage.output_tokens) == ("model_context_window_exceeded", 10)
        message = client.messages.create(model="fake", max_tokens=10, messages=HELLO)
        assert message.stop_reason == "max_tokens"


def test_max_tokens_zero_computes_the_prompt_only(server: LiveServer) -> None:
    whole = post(server, max_tokens=0).json()
    assert (whole["content"], whole["stop_reason"], whole["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    stream = events(post(server, max_tokens=0, stream=True))
    assert [event["type"] for event in stream] == ["message_start", "ping", "message_delta", "message_stop"]
    assert stream[-2]["usage"]["output_tokens"] == 0
    assert server.engine.received[-1].params.max_tokens == 1


def test_sampling_parameters(server: LiveServer, client: anthropic.Anthropic) -> None:
    extra = {"temperature": 0.5, "top_p": 0.75, "top_k": 7}
    client.messages.create(
        model="fake", max_tokens=3, messages=HELLO, stop_sequences=["\n\nHuman:", "x"], extra_body=extra
    )
    params = server.engine.received[-1].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (3, 0.5, 0.75, 7)
    assert params.stop == ("\n\nHuman:", "x")
    post(server, temperature=1, top_p=None, top_k=None)
    params = server.engine.received[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (1.0, 1.0, 0, ())


def test_an_output_format_reaches_the_engine(server: LiveServer) -> None:
    reply = post(server, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert reply.status_code == 200, reply.text
    assert server.engine.received[-1].matcher is not None
    post(server)
    assert server.engine.received[-1].matcher is None


def test_fields_that_change_nothing_are_ignored(server: LiveServer) -> None:
    reply = post(
        server,
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        unheard_of=1,
    )
    assert reply.status_code == 200


# --------------------------------------------------------------------------------------------- prompts


def converted(**body: Any) -> dict[str, Any]:
    chat = asyncio.run(chat_body(PromptBody.model_validate({"messages": HELLO} | body)))
    return chat.model_dump(exclude_unset=True)


def converted_messages(*messages: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return converted(messages=list(messages), **body)["messages"]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_system_prompt() -> None:
    user = {"role": "user", "content": "hi"}
    assert converted_messages(*HELLO, system="be brief") == [{"role": "system", "content": "be brief"}, user]
    assert converted_messages(*HELLO, system=[text("a")]) == [{"role": "system", "content": "a"}, user]
    both = [text("a"), text("b")]
    assert converted_messages(*HELLO, system=both) == [{"role": "system", "content": both}, user]
    for nothing in (None, "", [], [text("")]):
        assert converted_messages(*HELLO, system=nothing) == [user]
    late = {"role": "system", "content": "now in French"}
    assert converted_messages(*HELLO, late) == [user, late]


def test_the_counter_of_calls_does_not_spoil_the_prefix_cache() -> None:
    prompts = [
        converted_messages(*HELLO, system=[text(f"x-anthropic-billing-header: cch={i};"), text("You are an agent.")])
        for i in range(2)
    ]
    assert prompts[0] == prompts[1]
    assert prompts[0][0] == {"role": "system", "content": "You are an agent."}


def test_turns_of_the_same_role_are_one() -> None:
    messages = converted_messages(
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text("b")]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    )
    assert messages == [
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": [text("c"), text("d")]},
    ]


def test_tools_and_their_results() -> None:
    thought = {"type": "thinking", "thinking": "I need the weather.", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    second = {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}}
    body = converted(
        messages=[
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": [thought, hidden, text("Let me see."), CALL, second]},
            {
                "role": "user",
                "content": [
                    {**RESULT, "content": [text("rain"), text("wind")]},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": "no clock"},
                    text("And now?"),
                ],
            },
        ],
        tools=[TOOL, {"type": "custom", "name": "time", "description": None, "input_schema": {}}],
        tool_choice={"type": "auto"},
    )
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Vigo"}}}
    other = {"id": "toolu_2", "type": "function", "function": {"name": "time", "arguments": {}}}
    assert body["messages"] == [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "reasoning_content": "I need the weather.",
            "tool_calls": [call, other],
            "content": "Let me see.",
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "rain\nwind"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "time", "content": "Error: no clock"},
        {"role": "user", "content": "And now?"},
    ]
    function = {"name": "weather", "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    empty = {"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert body["tools"] == [{"type": "function", "function": function}, {"type": "function", "function": empty}]


def test_tools_reach_the_template(server: LiveServer) -> None:
    def prompt(**body: Any) -> str:
        assert post(server, **body).status_code == 200
        return bytes(server.engine.received[-1].prompt_token_ids[1:]).decode()

    assert '"name": "weather"' in prompt(tools=[TOOL])
    assert "weather" not in prompt(tools=[TOOL], tool_choice={"type": "none"})
    assert '{"enable_thinking": true}' in prompt(thinking={"type": "enabled", "budget_tokens": 1024})
    assert '{"enable_thinking": false}' in prompt(thinking={"type": "disabled"})
    assert prompt(thinking={"type": "adaptive"}) == PROMPT
    assert '{"reasoning_effort": "low"}' in prompt(output_config={"effort": "low"})
    assert prompt(messages=[*HELLO, {"role": "assistant", "content": "Well,"}]) == "user: hi\nassistant: Well,"


def test_many_blocks_hold_up_nobody(server: LiveServer) -> None:
    """Conversations of many pieces are put together in another thread."""
    blocks = [text("x")] * 100_000
    start = time.monotonic()
    message = error_of(post(server, messages=[{"role": "user", "content": blocks}]), 400, "invalid_request_error")
    assert time.monotonic() - start < 5
    assert message.startswith("prompt is too long")
    for many in (
        {"messages": HELLO * 100_001},
        {"messages": [{"role": "user", "content": [text("")] * 100_001}]},
        {"tools": [{}] * 10_001},
    ):
        assert "at most" in error_of(post(server, **many), 400, "invalid_request_error")


# ------------------------------------------------------------------------------------- tokens and models


def test_count_tokens(client: anthropic.Anthropic, server: LiveServer) -> None:
    server.engine.received.clear()
    system, tools = [text("be brief")], [TOOL]
    counted = client.messages.count_tokens(model="fake", messages=HELLO, system=system, tools=tools)  # type: ignore[arg-type]
    assert server.engine.received == []
    message = client.messages.create(model="fake", max_tokens=1, messages=HELLO, system=system, tools=tools)  # type: ignore[arg-type]
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_models(client: anthropic.Anthropic, server: LiveServer) -> None:
    page = client.models.list()
    (card,) = page.data
    assert (card.id, card.type, card.display_name, card.max_input_tokens) == ("fake", "model", "fake", 4096)
    assert abs(card.created_at.timestamp() - time.time()) < 600
    assert (page.has_more, page.first_id, page.last_id) == (False, "fake", "fake")
    assert client.models.retrieve("fake") == card
    assert [card.id for card in client.models.list(limit=1)] == ["fake"]
    assert client.models.list(after_id="fake").data == client.models.list(before_id="fake").data == []
    for name in ("other", "a/b"):
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve(name)
        assert caught.value.type == "not_found_error"
    for query in ("limit=0", "limit=x", "limit=1001", "limit=٣", "limit=" + "9" * 5000, "after_id=x", "before_id="):
        error_of(server.http.get(f"/v1/models?{query}", headers=VERSION), 400, "invalid_request_error")
    error_of(server.http.delete("/v1/models", headers=VERSION), 405, "invalid_request_error")


def test_models_stay_openais_for_others(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        assert client.models.list().data[0].object == "model"
    assert server.http.get("/v1/models/nope").json()["error"]["code"] == "model_not_found"


# ----------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{}]}, "messages.0.role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages.0.content"),
        ({"messages": [*HELLO, {"role": "user", "content": [text("x"), 5]}]}, "messages.1.content.1"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "'tool_use'"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "'tool_result'"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [CALL]},
                    {"role": "user", "content": [RESULT | {"content": [IMAGE]}]},
                ]
            },
            "messages.1.content.0.content.0",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}]}, "results must follow"),
        ({"messages": [{"role": "assistant", "content": [CALL | {"input": "x"}]}]}, "messages.0.content.0.input"),
        ({"messages": [{"role": "assistant", "content": [CALL | {"id": None}]}]}, "messages.0.content.0.id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages.0.content.0.thinking"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "refuses"),
        ({"system": 5}, "system"),
        ({"system": [IMAGE]}, "'system.0'"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop"),
        ({"stop_sequences": ["x"] * 20_000}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools.0.name"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [TOOL | {"strict": True}]}, "tools.0.strict"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "'any'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}, "'tool'"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "parallel"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {
                "messages": [*HELLO, {"role": "assistant", "content": "{"}],
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_config.format",
        ),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
        ({"mcp_servers": [{"type": "url", "url": "http://10.0.0.1"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
    ids=lambda value: json.dumps(value)[:70] if isinstance(value, dict) else None,
)
def test_bad_requests(server: LiveServer, body: dict[str, Any], said: str) -> None:
    """Refused before a stream starts, with a status; nothing reaches the engine."""
    server.engine.received.clear()
    for stream in (False, True):
        message = error_of(post(server, **({"stream": stream} | body)), 400, "invalid_request_error")
        assert said in message
        assert len(message) < 500
    prompt_only = {"max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream"}
    if not prompt_only & body.keys():
        reply = post(server, "/v1/messages/count_tokens", **body)
        assert said in error_of(reply, 400, "invalid_request_error")
    assert server.engine.received == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"max_tokens": NaN}', b'{"x": "\xff"}', b'{"x": "\\ud800"}', b"[" * 50_000],
    ids=lambda content: repr(content[:20]),
)
def test_invalid_json(server: LiveServer, content: bytes) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        error_of(server.http.post(path, content=content), 400, "invalid_request_error")


def test_deep_tools_and_messages(server: LiveServer) -> None:
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    calls = [{"role": "assistant", "content": [CALL | {"input": deep}]}, {"role": "user", "content": [RESULT]}]
    for body in ({"tools": [TOOL | {"input_schema": deep}]}, {"messages": calls}):
        assert post(server, **body).status_code in (200, 400)  # the fake template has no limit


def test_statuses_and_types(server: LiveServer, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=HELLO)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*4096") as too_long:
        client.messages.create(model="fake", max_tokens=1, messages=[{"role": "user", "content": "x" * 5000}])
    assert too_long.value.type == "invalid_request_error"
    error_of(server.http.get("/v1/messages"), 405, "invalid_request_error")
    error_of(server.http.post("/v1/messages/batches", json={}), 404, "not_found_error")
    error_of(server.http.get("/v1/files", headers=VERSION), 404, "not_found_error")
    error_of(post(server, x="y" * 9_000_000), 413, "request_too_large")
    error_of(server.http.post("/v1/messages", headers={"host": "evil.example"}), 403, "permission_error")
    reply = post(server, **{"messages": [{"role": "user", "content": "refuse"}]})
    assert reply.json()["request_id"] == reply.headers["x-request-id"]


def test_keys() -> None:
    with running(config=ServerConfig(api_key="sesame")) as server:
        for right in ({"api_key": "sesame"}, {"api_key": None, "auth_token": "sesame"}):
            with client_of(server, **right) as client:
                assert client.messages.create(model="fake", max_tokens=1, messages=HELLO).content
                assert client.models.list().data
        with client_of(server, api_key="wrong") as client:
            for call in (client.models.list, lambda: client.messages.count_tokens(model="fake", messages=HELLO)):
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    call()
                assert caught.value.type == "authentication_error"
        error_of(post(server), 401, "authentication_error")


def test_too_many_requests() -> None:
    with running(FakeEngine(max_unfinished=0)) as server:
        for stream in (False, True):
            reply = post(server, stream=stream)
            error_of(reply, 429, "rate_limit_error")
            assert reply.headers["retry-after"] == "1"


def test_loading(server: LiveServer) -> None:
    with running() as other:
        other.service.stop()
        for stream in (False, True):
            error_of(post(other, stream=stream), 503, "overloaded_error")
        error_of(other.http.get("/v1/models", headers=VERSION), 503, "overloaded_error")


def test_failure_before_and_in_a_stream() -> None:
    def script(request: Request, index: int) -> Iterator[int]:
        yield from b"ab" if len(request.prompt_token_ids) > 25 else b""
        raise CaudalError("out of luck")

    with running(FakeEngine(script=script)) as server, client_of(server) as client:
        for stream in (False, True):
            assert error_of(post(server, stream=stream), 500, "api_error") == "out of luck"
        later: list[Any] = [{"role": "user", "content": "a longer prompt"}]
        error_of(post(server, messages=later), 500, "api_error")
        reply = post(server, messages=later, stream=True)
        *before, last = events(reply)
        assert [event["type"] for event in before][-2:] == ["content_block_delta", "content_block_delta"]
        assert last["error"] == {"type": "api_error", "message": "out of luck"}
        assert last["request_id"] == reply.headers["request-id"]
        with (
            pytest.raises(anthropic.APIStatusError, match="out of luck"),
            client.messages.stream(model="fake", max_tokens=5, messages=later) as stream,
        ):
            stream.until_done()


def test_bugs_become_errors_without_details() -> None:
    def script(request: Request, index: int) -> Iterator[int]:
        raise RuntimeError("secret of somebody else")

    with running(FakeEngine(script=script)) as server:
        assert "secret" not in error_of(post(server), 500, "api_error")


def test_a_server_that_stops_says_so() -> None:
    """Anthropic has no stop reason for a message that the server gave up: half of one must not look complete."""
    engine = FakeEngine(max_model_len=10**6)

    def script(request: Request, index: int) -> Iterator[int]:
        yield from b"abc"
        engine.closed = True
        yield from b"defgh"

    engine.script = script
    with running(engine) as server:
        stream = events(post(server, max_tokens=1000, stream=True))
        assert stream[-1]["error"]["type"] == "overloaded_error"
        assert "message_stop" not in [event["type"] for event in stream]
        error_of(post(server, max_tokens=1000), 503, "overloaded_error")


def test_streams_of_many_clients() -> None:
    async def one(client: anthropic.AsyncAnthropic, number: int) -> None:
        wanted = 5 + number
        async with client.messages.stream(model="fake", max_tokens=wanted, messages=HELLO) as stream:
            if number % 3 == 0:
                return  # goes away
            message = await stream.get_final_message()
        expected = (TEXT.encode() * 4)[:wanted].decode("utf-8", "replace")
        assert message.content[0].text == expected  # type: ignore[union-attr]
        assert message.usage.output_tokens == wanted

    async def all_of_them(url: str) -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
            await asyncio.gather(*(one(client, number) for number in range(32)))

    with running(FakeEngine(delay=0.002)) as server:
        asyncio.run(all_of_them(server.url))
        end = time.monotonic() + 5
        while server.engine.running:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_end_token_alone() -> None:
    with running(FakeEngine(script=lambda request, index: iter([EOS]))) as server, client_of(server) as client:
        message = client.messages.create(model="fake", max_tokens=9, messages=HELLO)
        assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "end_turn", 1)
