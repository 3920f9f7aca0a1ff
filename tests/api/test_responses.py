"""OpenAI's responses, through OpenAI's own client and as bytes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake import TEXT, FakeEngine, LiveServer, running

from caudal.api.responses_requests import ResponsesBody, chat_body
from caudal.core import CaudalError, Request

PROMPT = "user: hi\nassistant:"
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Vigo"}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
SENTENCE = "Hello, wörld!"


def say(request: Request, index: int) -> Iterator[int]:
    return iter(SENTENCE.encode())


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running() as live:
        yield live
        assert live.http.get("/health").status_code == 200


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def client_of(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def post(server: LiveServer, path: str = "/v1/responses", **body: Any) -> httpx.Response:
    return server.http.post(path, json={"input": "hi", "max_output_tokens": 5} | body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must be well formed and numbered; each has its type twice."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
    result: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        name, data = part.split("\n")
        result.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {result[-1]['type']}"
        assert result[-1]["sequence_number"] == number
    return result


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.json().keys() == {"error"}
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
    return reply.json()["error"]


# -------------------------------------------------------------------------------------------- responses


def test_response(client: openai.OpenAI, server: LiveServer) -> None:
    response = client.responses.create(
        model="fake", input="hi", max_output_tokens=16, metadata={"a": "b"}, temperature=0.5, top_p=0.75
    )
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.metadata) == ("response", "fake", {"a": "b"})
    assert response.output_text == TEXT.encode()[:16].decode("utf-8", "replace")
    assert response.status == response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (20, 16, 36)
    assert response.usage.input_tokens_details.cached_tokens == 10
    request = server.engine.received[-1]
    assert bytes(request.prompt_token_ids[1:]).decode() == PROMPT
    assert (request.params.temperature, request.params.top_p, request.params.max_tokens) == (0.5, 0.75, 16)


def test_stream_equals_whole() -> None:
    with running(FakeEngine(script=say)) as server, client_of(server) as client:
        whole = client.responses.create(model="fake", input="hi")
        with client.responses.stream(model="fake", input="hi") as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
            streamed = stream.get_final_response()
        assert "".join(pieces) == streamed.output_text == whole.output_text == SENTENCE
        assert whole.status == streamed.status == "completed"
        assert whole.usage == streamed.usage
        assert whole.completed_at is not None


def test_events(server: LiveServer) -> None:
    stream = events(post(server, stream=True))
    assert [event["type"].removeprefix("response.") for event in stream] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 5,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert stream[0]["response"]["status"] == "in_progress"
    assert stream[0]["response"]["output"] == []
    assert (stream[2]["item"]["status"], stream[2]["item"]["content"]) == ("in_progress", [])
    assert stream[3]["part"] == {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
    assert (
        "".join(event["delta"] for event in stream[4:9]) == stream[9]["text"] == stream[10]["part"]["text"] == "Hello"
    )
    assert stream[-1]["response"]["output"] == [stream[-2]["item"]]
    assert {event["item_id"] for event in stream if "item_id" in event} == {stream[-2]["item"]["id"]}
    whole = post(server).json()
    assert stream[-1]["response"].keys() == stream[0]["response"].keys() == whole.keys()


def test_text_that_looks_like_the_end_of_an_event() -> None:
    text = "a\u2028b\x85c\r\n\ndata: x\n\n"
    with running(FakeEngine(script=lambda request, index: iter(text.encode()))) as server:
        stream = events(post(server, max_output_tokens=100, stream=True))
        assert "".join(event["delta"] for event in stream if event["type"].endswith("text.delta")) == text


def test_logprobs(client: openai.OpenAI, server: LiveServer) -> None:
    include: Any = ["message.output_text.logprobs"]
    for settings, count in (({"include": include}, 0), ({"top_logprobs": 1}, 1)):
        response = client.responses.create(model="fake", input="hi", max_output_tokens=5, **settings)
        logprobs = response.output[0].content[0].logprobs  # type: ignore[union-attr]
        assert logprobs is not None
        assert [entry.token for entry in logprobs] == list("Hello")
        assert {entry.logprob for entry in logprobs} == {-1.0}
        assert {len(entry.top_logprobs) for entry in logprobs} == {count}
        stream = events(post(server, stream=True, **settings))
        streamed = [entry for event in stream if event["type"].endswith("text.delta") for entry in event["logprobs"]]
        assert streamed == stream[-1]["response"]["output"][0]["content"][0]["logprobs"]
        assert [entry["token"] for entry in streamed] == list("Hello")
    assert post(server).json()["output"][0]["content"][0]["logprobs"] == []


def test_formats_reach_the_engine(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {}}
    asked = {"type": "json_schema", "name": "x", "schema": schema}
    for body in ({"text": {"format": asked}}, {"text": {"format": {"type": "json_object"}}}, {"guided_regex": "a"}):
        reply = post(server, **body)
        assert reply.status_code == 200, reply.text
        assert server.engine.received[-1].matcher is not None
    assert post(server, text={"format": asked}).json()["text"]["format"]["schema"] == schema
    post(server)
    assert server.engine.received[-1].matcher is None


def test_stop_and_other_fields_of_generating_routes(server: LiveServer) -> None:
    reply = post(server, stop="lo", top_k=7, seed=3, max_output_tokens=50).json()
    assert (reply["status"], reply["output"][0]["content"][0]["text"]) == ("completed", "Hel")
    assert (server.engine.received[-1].params.top_k, server.engine.received[-1].params.seed) == (7, 3)


def test_fields_that_change_nothing_are_ignored(server: LiveServer) -> None:
    reply = post(
        server,
        store=False,
        user="u",
        truncation="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="auto",
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}},
        stream=True,
        stream_options={"include_obfuscation": False},
    )
    assert events(reply)[-1]["response"]["truncation"] == "disabled"


# --------------------------------------------------------------------------------------------- prompts


def converted(**body: Any) -> dict[str, Any]:
    return asyncio.run(chat_body(ResponsesBody.model_validate(body))).model_dump(exclude_unset=True)


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_messages() -> None:
    body = converted(
        instructions="be brief",
        input=[
            {"role": "developer", "content": "in French"},
            {"role": "user", "content": [part("a"), part("b")]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{**part("c", "output_text"), "annotations": []}, {"type": "refusal", "refusal": "no"}],
            },
            {"type": "message", "role": "user", "content": "d"},
        ],
    )
    parts = [{"type": "text", "text": text} for text in "ab"]
    assert body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "in French"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "no"}]},
        {"role": "user", "content": "d"},
    ]


def test_calls_and_thoughts_are_one_turn() -> None:
    body = converted(
        input=[
            {"role": "user", "content": "Rain?"},
            {"type": "reasoning", "id": "rs_1", "summary": [part("Hm.", "summary_text")], "encrypted_content": "x"},
            {"role": "assistant", "content": "Let me see."},
            {"type": "reasoning", "summary": [], "content": [part("Which?", "reasoning_text")]},
            CALL,
            CALL | {"call_id": "call_2", "name": "time", "arguments": "{}"},
            OUTPUT,
            OUTPUT | {"call_id": "call_2", "output": [part("ten"), part("past")]},
            {"role": "assistant", "content": "It rains."},
            {"type": "reasoning", "encrypted_content": "x"},
        ],
        tools=[TOOL],
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
    )
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Vigo"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    assert body["messages"] == [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.\nWhich?",
            "tool_calls": calls,
            "content": "Let me see.",
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "name": "time", "content": "ten\npast"},
        {"role": "assistant", "content": "It rains."},
    ]
    function = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert (body["reasoning_effort"], body["chat_template_kwargs"]) == ("low", {"verbosity": "low"})


def test_a_response_can_be_sent_back(client: openai.OpenAI, server: LiveServer) -> None:
    """The way to go on without a store: the items of a reply are items of the next input."""
    first = client.responses.create(model="fake", input="hi", max_output_tokens=5)
    items: Any = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "go on"}]
    client.responses.create(model="fake", input=items, max_output_tokens=5)
    prompt = bytes(server.engine.received[-1].prompt_token_ids[1:]).decode()
    assert prompt == "user: hi\nassistant: Hello\nuser: go on\nassistant:"


def test_tools_reach_the_template(server: LiveServer) -> None:
    for choice, shown in ((None, True), ("auto", True), ("none", False)):
        assert post(server, tools=[TOOL], tool_choice=choice).status_code == 200
        prompt = bytes(server.engine.received[-1].prompt_token_ids[1:]).decode()
        assert ("weather" in prompt) == shown


def test_input_tokens(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.received.clear()
    assert client.responses.input_tokens.count(model="fake", input="hi").input_tokens == len(PROMPT) + 1
    assert server.engine.received == []


# ----------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": {}}, "input"),
        ({"input": ["hi"]}, "input.0"),
        ({"input": [{}]}, "input.0.role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [5]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "input.0.content.0.refusal"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type"),
        ({"input": [{"type": []}]}, "input.0.type"),
        ({"input": [OUTPUT]}, "input.0.call_id"),
        ({"input": [CALL]}, "input.0"),
        ({"input": [CALL, {"role": "user", "content": "x"}]}, "input.0"),
        ({"input": [CALL | {"arguments": {}}, OUTPUT]}, "input.0.arguments"),
        ({"input": [CALL, OUTPUT | {"output": None}]}, "input.1.output"),
        ({"input": [CALL, OUTPUT | {"output": [{"type": "input_image"}]}]}, "input.1.output.0.type"),
        ({"input": [{"type": "reasoning", "content": [5]}]}, "input.0.content.0"),
        ({"input": [OUTPUT] * 100_001}, "input"),
        ({"input": "refuse"}, "messages"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**30}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [TOOL | {"parameters": 5}]}, "tools.0.parameters"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"suffix": "a"}, "suffix"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"stream": "yes"}, "stream"),
    ],
    ids=lambda value: json.dumps(value)[:70] if isinstance(value, dict) else None,
)
def test_bad_requests(server: LiveServer, body: dict[str, Any], param: str) -> None:
    """Refused before a stream starts, with a status; nothing reaches the engine."""
    server.engine.received.clear()
    for stream in (False, True):
        error = error_of(post(server, **({"stream": stream} | body)))
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert len(error["message"]) < 500
    assert server.engine.received == []


def test_what_needs_a_store_says_what_to_do(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Send the whole conversation as 'input'"):
        client.responses.create(model="fake", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_statuses(server: LiveServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="other", input="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="4096") as too_long:
        client.responses.create(model="fake", input="x" * 5000)
    assert too_long.value.code == "context_length_exceeded"
    for content in (b"", b"{", b"[]", b'{"input": "\xff"}', b"[" * 50_000):
        assert error_of(server.http.post("/v1/responses", content=content))["code"] == "invalid_json"
    with running(FakeEngine(max_unfinished=0)) as full:
        for stream in (False, True):
            assert error_of(post(full, stream=stream), 429)["code"] == "queue_full"


def test_failure_before_and_in_a_stream() -> None:
    def script(request: Request, index: int) -> Iterator[int]:
        yield from b"ab" if len(request.prompt_token_ids) > 25 else b""
        raise CaudalError("out of luck")

    with running(FakeEngine(script=script)) as server, client_of(server) as client:
        for stream in (False, True):
            assert error_of(post(server, stream=stream), 500)["message"] == "out of luck"
        events = list(client.responses.create(model="fake", input="a longer prompt", stream=True))
        assert [event.type for event in events][-2:] == ["response.output_text.delta", "response.failed"]
        last: Any = events[-1]
        assert (last.response.status, last.response.error.message) == ("failed", "out of luck")
        assert last.response.output_text == "ab"


def test_a_server_that_stops_says_so() -> None:
    engine = FakeEngine(max_model_len=10**6)

    def script(request: Request, index: int) -> Iterator[int]:
        yield from b"abc"
        engine.closed = True
        yield from b"defgh"

    engine.script = script
    with running(engine) as server:
        last = events(post(server, max_output_tokens=1000, stream=True))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        error_of(post(server, max_output_tokens=1000), 503)


def test_client_gone_aborts() -> None:
    with running(FakeEngine(delay=0.002, max_model_len=10**7)) as server, client_of(server) as client:
        stream = client.responses.create(model="fake", input="x", max_output_tokens=10**6, stream=True)
        next(iter(stream))
        stream.close()
        end = time.monotonic() + 5
        while server.engine.running:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert len(server.engine.aborted) == 1
