"""Requests and replies of the OpenAI routes, through OpenAI's own client and as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake import BOS, EOS, TEXT, FakeEngine, LiveServer, running

from caudal.core import CaudalError, FinishReason

HELLO: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running() as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def client_of(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def post(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return server.http.post(path, json=body)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, which must be well formed and end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-2])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


# ----------------------------------------------------------------------------------------------- models


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object, card.owned_by) == ("fake", "model", "caudal")
    assert client.models.retrieve("fake") == card
    assert card.model_dump()["max_model_len"] == 4096


@pytest.mark.parametrize("name", ["other", "a/b", "fake "])
def test_other_model_is_not_found(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model=name, prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name)


# ------------------------------------------------------------------------------------------ completions


def test_completion(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="abc")
    assert reply.id.startswith("cmpl-")
    assert (reply.object, reply.model) == ("text_completion", "fake")
    assert reply.system_fingerprint is not None
    assert reply.choices[0].text == TEXT.encode()[:16].decode("utf-8", "replace")  # 16: OpenAI's default
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].logprobs is None
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (4, 16, 20)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        ([97, 98], [[97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["ab", [1, 2]], [[BOS, 97, 98], [1, 2]]),
        ("", [[BOS]]),
    ],
)
def test_prompt_forms(server: LiveServer, prompt: object, expected: list[list[int]]) -> None:
    server.engine.received.clear()
    reply = post(server, "/v1/completions", prompt=prompt, max_tokens=1).json()
    assert [list(request.prompt_token_ids) for request in server.engine.received] == expected
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(expected)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize(
    "prompt", [[], [[]], {}, 3, [True], [1, "a"], [[1, "a"]], [[1.5]], [None], ["a", 1], [[1], []], [[True]], [[-1]]]
)
def test_bad_prompts(server: LiveServer, prompt: object) -> None:
    reply = post(server, "/v1/completions", prompt=prompt)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"


def test_several_prompts_and_choices(server: LiveServer) -> None:
    body: dict[str, Any] = {"prompt": ["a", "bb", "ccc"], "n": 2, "max_tokens": 4}
    whole = post(server, "/v1/completions", **body).json()
    texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert texts == {i: f"{i % 2}Hel" for i in range(6)}
    assert whole["usage"]["prompt_tokens"] == 2 + 3 + 4
    assert whole["usage"]["completion_tokens"] == 24
    streamed = dict.fromkeys(range(6), "")
    for event in events(post(server, "/v1/completions", **body, stream=True)):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_completion_stream(server: LiveServer, client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="fake", prompt="x", max_tokens=20, stream=True))
    whole = client.completions.create(model="fake", prompt="x", max_tokens=20)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="x", max_tokens=9, logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["H", "e", "l", "l", "o", ",", " ", "w", "bytes:\\xc3"]
    assert logprobs.token_logprobs == [-1.0] * 9
    assert logprobs.text_offset == list(range(9))
    assert logprobs.top_logprobs is not None
    # the chosen token comes on top of the one best
    assert logprobs.top_logprobs[0] == {"I": -0.5, "H": -1.0}


def test_completion_logprobs_zero(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="fake", prompt="x", max_tokens=1, logprobs=0).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{"H": -1.0}]


def test_completion_logprobs_streamed_equal_whole(server: LiveServer) -> None:
    body: dict[str, Any] = {"prompt": "é", "max_tokens": 24, "logprobs": 2, "echo": True}
    whole = post(server, "/v1/completions", **body).json()["choices"][0]["logprobs"]
    streamed: dict[str, list[Any]] = {key: [] for key in whole}
    for event in events(post(server, "/v1/completions", **body, stream=True)):
        for key, values in (event["choices"][0]["logprobs"] or {}).items():
            streamed[key] += values
    assert streamed == whole
    assert whole["token_logprobs"][0] is None
    assert whole["top_logprobs"][0] is None
    assert len(whole["tokens"]) == 3 + 24
    # each byte points at its character
    text = post(server, "/v1/completions", **body).json()["choices"][0]["text"]
    assert text == "é" + TEXT.encode()[:24].decode()
    assert whole["text_offset"][0] == 0  # BOS, which is no text
    assert whole["text_offset"][1:] == [i for i, character in enumerate(text) for _ in character.encode()]


def test_echo(client: openai.OpenAI, server: LiveServer) -> None:
    reply = client.completions.create(model="fake", prompt="say: ", max_tokens=5, echo=True)
    assert reply.choices[0].text == "say: Hello"
    reply = client.completions.create(model="fake", prompt=[104, 105], max_tokens=5, echo=True)
    assert reply.choices[0].text == "hiHello"
    streamed = events(post(server, "/v1/completions", prompt="say: ", max_tokens=2, echo=True, stream=True, n=2))
    texts = ["", ""]
    for event in streamed:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["say: 0H", "say: 1H"]


def test_echo_with_logprobs_for_each_choice(server: LiveServer) -> None:
    body: dict[str, Any] = {"prompt": ["ab", "c"], "max_tokens": 1, "echo": True, "logprobs": 0, "n": 2}
    reply = post(server, "/v1/completions", **body).json()
    tokens = [choice["logprobs"]["tokens"][1:] for choice in reply["choices"]]
    assert tokens == [["a", "b", "0"], ["a", "b", "1"], ["c", "0"], ["c", "1"]]
    assert post(server, "/v1/completions", **body, stream=True).status_code == 400


def test_echo_scores_a_prompt_alone(server: LiveServer) -> None:
    """`max_tokens` 0 with `echo` and `logprobs` is how evaluation programs score text."""
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = post(server, "/v1/completions", **body).json()
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["<|begin|>", "a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert reply["usage"]["completion_tokens"] == 0
    streamed = events(post(server, "/v1/completions", **body, stream=True))
    assert "".join(event["choices"][0]["text"] for event in streamed) == "abc"
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"
    assert post(server, "/v1/completions", prompt="abc", max_tokens=0).status_code == 400


# ------------------------------------------------------------------------------------------------- chat


def test_chat(client: openai.OpenAI, server: LiveServer) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5)
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].finish_reason == "length"
    assert bytes(server.engine.received[-1].prompt_token_ids[1:]).decode() == "user: hi\nassistant:"


def test_chat_fills_the_context_by_default(client: openai.OpenAI, server: LiveServer) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO)
    assert server.engine.received[-1].params.max_tokens is None
    assert reply.usage is not None
    assert reply.usage.total_tokens == 4096
    assert reply.choices[0].finish_reason == "length"


def test_max_completion_tokens_wins(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9, max_completion_tokens=4)
    assert reply.choices[0].message.content == "Hell"


def test_chat_stream_order(server: LiveServer) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 3, "stream": True}
    received = events(post(server, "/v1/chat/completions", **body, stream_options={"include_usage": True}))
    assert [event["choices"] for event in received] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "H"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "e"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "l"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        [],
    ]
    envelope = {key: received[0][key] for key in ("id", "object", "created", "model", "system_fingerprint")}
    assert envelope["object"] == "chat.completion.chunk"
    assert all(envelope.items() <= event.items() for event in received)
    assert [event["usage"] for event in received[:-1]] == [None] * 5
    assert received[-1]["usage"]["completion_tokens"] == 3
    without = events(post(server, "/v1/chat/completions", **body))
    assert len(without) == 5
    assert all("usage" not in event for event in without)


def test_continuous_usage(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 3, "stream": True, "stream_options": options}
    received = events(post(server, "/v1/chat/completions", **body))
    assert [event["usage"]["completion_tokens"] for event in received] == [1, 1, 2, 3, 3, 3]


@pytest.mark.parametrize("extra", [{}, {"logprobs": True}, {"return_token_ids": True}, {"n": 3}, {"stop": ["你好"]}])
def test_chat_stream_equals_whole(server: LiveServer, extra: dict[str, Any]) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 40, **extra}
    whole = post(server, "/v1/chat/completions", **body).json()
    merged: list[dict[str, Any]] = [{} for _ in whole["choices"]]
    for event in events(post(server, "/v1/chat/completions", **body, stream=True)):
        (choice,) = event["choices"]
        entry = merged[choice["index"]]
        entry["text"] = entry.get("text", "") + choice["delta"].get("content", "")
        entry.setdefault("ids", []).extend(choice.get("token_ids", []))
        entry.setdefault("logprobs", []).extend((choice["logprobs"] or {}).get("content", []))
        entry["reason"] = choice["finish_reason"]
        if "prompt_token_ids" in event:
            entry["prompt"] = event["prompt_token_ids"]
    assert merged == [
        {
            "text": choice["message"]["content"],
            "ids": choice.get("token_ids", []),
            "logprobs": (choice["logprobs"] or {}).get("content", []),
            "reason": choice["finish_reason"],
            **({"prompt": whole["prompt_token_ids"]} if "prompt_token_ids" in whole else {}),
        }
        for choice in whole["choices"]
    ]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9, logprobs=True, top_logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first, last = logprobs.content[0], logprobs.content[-1]
    assert (first.token, first.bytes, first.logprob) == ("H", [72], -1.0)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("I", -0.5), ("H", -1.0)]
    assert (last.token, last.bytes) == ("�", [0xC3])


def test_chat_logprobs_without_top(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1, logprobs=True)
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert reply.choices[0].logprobs.content[0].top_logprobs == []


def test_tokens_as_ids(server: LiveServer) -> None:
    body: dict[str, Any] = {"max_tokens": 1, "return_tokens_as_token_ids": True}
    chat = post(server, "/v1/chat/completions", messages=HELLO, logprobs=True, **body).json()
    assert chat["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:72"
    text = post(server, "/v1/completions", prompt="x", logprobs=1, **body).json()
    assert text["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]


def test_prompt_logprobs(server: LiveServer) -> None:
    entry = {
        "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        "99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
    }
    text = post(server, "/v1/completions", prompt=[97, 98], max_tokens=1, prompt_logprobs=1).json()
    assert text["choices"][0]["prompt_logprobs"] == [None, entry]
    chat = post(server, "/v1/chat/completions", messages=HELLO, max_tokens=1, prompt_logprobs=0).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_return_token_ids(server: LiveServer) -> None:
    text = post(server, "/v1/completions", prompt=[[1], [2, 3]], max_tokens=2, return_token_ids=True).json()
    assert [choice["prompt_token_ids"] for choice in text["choices"]] == [[1], [2, 3]]
    assert [choice["token_ids"] for choice in text["choices"]] == [[72, 101], [72, 101]]
    streamed = events(post(server, "/v1/completions", prompt=[1], max_tokens=2, return_token_ids=True, stream=True))
    choices = [event["choices"][0] for event in streamed]
    assert choices[0]["prompt_token_ids"] == [1]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [72, 101]


@pytest.mark.parametrize("stop", ["wör", ["xyz", "wör"]])
def test_stop_strings(client: openai.OpenAI, stop: str | list[str]) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO, stop=stop)
    assert reply.choices[0].message.content == "Hello, "
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].model_dump()["stop_reason"] == "wör"
    chunks = list(client.chat.completions.create(model="fake", messages=HELLO, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, "
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_messages_reach_the_template(server: LiveServer) -> None:
    """What contents and tool calls look like in the prompt is the template's business."""
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    assert post(server, "/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200
    prompt = bytes(server.engine.received[-1].prompt_token_ids[1:]).decode()
    assert prompt == ("system: be brief\nuser: [{'type': 'text', 'text': 'one'}]\nassistant: None\ntool: 3\nassistant:")


def test_template_options(server: LiveServer) -> None:
    def prompt(**extra: Any) -> str:
        reply = post(server, "/v1/chat/completions", messages=HELLO, max_tokens=1, **extra)
        assert reply.status_code == 200, reply.text
        return bytes(server.engine.received[-1].prompt_token_ids[1:]).decode()

    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompt(add_generation_prompt=False) == "user: hi\n"
    assert prompt(continue_final_message=True) == "user: hi"
    assert prompt(chat_template_kwargs={"x": 1}) == 'user: hi\nkwargs: {"x": 1}\nassistant:'
    assert prompt(reasoning_effort="low") == 'user: hi\nkwargs: {"reasoning_effort": "low"}\nassistant:'
    assert prompt(tools=tools) == f"user: hi\ntools: {json.dumps(tools)}\nassistant:"
    assert prompt(tools=tools, tool_choice="none") == "user: hi\nassistant:"


def test_echo_of_a_continued_message(server: LiveServer) -> None:
    body: dict[str, Any] = {
        "messages": [*HELLO, {"role": "assistant", "content": "Well: "}],
        "continue_final_message": True,
        "echo": True,
        "max_tokens": 5,
    }
    reply = post(server, "/v1/chat/completions", **body).json()
    assert reply["choices"][0]["message"]["content"] == "Well: Hello"
    streamed = events(post(server, "/v1/chat/completions", **body, stream=True))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == "Well: Hello"


def test_every_parameter_reaches_the_engine(server: LiveServer) -> None:
    body: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "typical_p": 0.8,
        "top_n_sigma": 1.5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": -(2**63),
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "logit_bias": {"5": -100, "6": 1.5},
        "allowed_token_ids": [72, 101],
        "ignore_eos": True,
        "max_tokens": 3,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
        "priority": -2,
        "cache_salt": "s",
        "speculate": False,
    }
    assert post(server, "/v1/completions", prompt="x", **body, logprobs=4).status_code == 200
    request = server.engine.received[-1]
    assert (request.priority, request.cache_salt) == (-2, "s")
    params = request.params
    assert params.logprobs == 4
    assert params.logit_bias == ((5, -100.0), (6, 1.5))
    for name in body.keys() - {"priority", "cache_salt", "logit_bias"}:
        expected = tuple(body[name]) if isinstance(body[name], list) else body[name]
        assert getattr(params, name) == expected, name


def test_null_means_absent_and_unknown_is_ignored(server: LiveServer) -> None:
    body: dict[str, Any] = {"prompt": "x", "logprobs": None, "temperature": None, "stop": None, "user": "u", "zzz": 1}
    assert post(server, "/v1/completions", **body, stream_options=None).status_code == 200
    assert server.engine.received[-1].params.temperature == 1.0


# ---------------------------------------------------------------------------------- errors of the engine


def failing(request: Any, index: int) -> Iterator[int]:
    yield from b"abc"
    raise CaudalError("the step failed: numbers")


def test_failure_midway() -> None:
    with running(FakeEngine(script=failing)) as server, client_of(server) as client:
        reply = post(server, "/v1/chat/completions", messages=HELLO)
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "the step failed: numbers"
        received = events(post(server, "/v1/chat/completions", messages=HELLO, stream=True))
        assert received[-1] == {
            "error": {"message": "the step failed: numbers", "type": "server_error", "param": None, "code": None}
        }
        texts: list[str] = []
        with pytest.raises(openai.APIError, match="the step failed"):
            texts.extend(
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(model="fake", messages=HELLO, stream=True)
            )
        assert server.http.get("/health").status_code == 200


def test_failure_of_one_choice_ends_the_call() -> None:
    def script(request: Any, index: int) -> Iterator[int]:
        return failing(request, index) if request.prompt_token_ids == (66,) else iter([65] * 1000)

    with running(FakeEngine(script=script, delay=0.001)) as server:
        reply = post(server, "/v1/completions", prompt=[[65], [66], [67]], max_tokens=1000)
        assert reply.status_code == 500
        assert len(server.engine.aborted) == 2
        assert not server.engine.running


def test_failure_at_once_has_a_status_also_for_streams() -> None:
    with running(FakeEngine(max_unfinished=0)) as server, client_of(server) as client:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="fake", messages=HELLO, stream=stream)
            assert caught.value.response.headers["retry-after"] == "1"
            assert caught.value.code == "queue_full"


def test_end_token_and_abort_reasons(server: LiveServer) -> None:
    def script(request: Any, index: int) -> Iterator[int]:
        return iter([65, EOS, 66])

    with running(FakeEngine(script=script)) as live:
        reply = post(live, "/v1/completions", prompt="x").json()
        assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("A", "stop")
        assert reply["choices"][0]["stop_reason"] is None
        assert reply["usage"]["completion_tokens"] == 2
        reply = post(live, "/v1/completions", prompt="x", ignore_eos=True, max_tokens=3).json()
        assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("AB", "length")
    assert FinishReason.STOP.value == "stop"
