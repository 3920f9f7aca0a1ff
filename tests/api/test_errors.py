"""What is refused, with which status and body, and that the server goes on after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from fake import FakeEngine, FakeTemplate, LiveServer, fake_model, running

from caudal.api.openai_requests import MAX_CHARACTERS, ChatBody, render_chat
from caudal.api.protocol import MAX_HEAD_BYTES, MAX_HEADERS
from caudal.config import ServerConfig

HELLO: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running(config=ServerConfig(max_request_bytes=200_000)) as live:
        yield live
        assert live.http.get("/health").status_code == 200


def post(server: LiveServer, path: str, content: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    return server.http.post(path, content=content, headers={"content-type": "application/json", **headers})


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object, which has OpenAI's members and no others."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    return body["error"]


# ------------------------------------------------------------------------------------------------ bodies


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" ",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{'prompt': 'x'}",
        b'{"prompt": "x"} {}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "stop": "\\udfff"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 50_000,
        b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
        # which Python reads, but cannot write again
        *(
            b'{"prompt": "x", "guided_json":' + b'{"a":' * depth + b"1" + b"}" * (depth + 1)
            for depth in (300, 960, 964)
        ),
        '{"prompt": "x"}'.encode("utf-16"),
        b"\x00",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_invalid_json(server: LiveServer, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert error_of(post(server, path, content))["code"] == "invalid_json"


def test_surrogate_pairs_are_text(server: LiveServer) -> None:
    reply = post(server, "/v1/completions", b'{"prompt": "\\ud83d\\ude00", "echo": true, "max_tokens": 0}')
    assert reply.json()["choices"][0]["text"] == "😀"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "n": "2"}, "n"),
        ({"prompt": "x", "n": True}, "n"),
        ({"prompt": "x", "n": 1.5}, "n"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 1_000_000}, "n"),
        ({"prompt": ["x"] * 1024, "n": 2}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "temperature": True}, "temperature"),
        ({"prompt": "x", "temperature": 2.5}, "temperature"),
        ({"prompt": "x", "temperature": -0.1}, "temperature"),
        ({"prompt": "x", "temperature": 1e308 * 10}, None),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "min_p": 1.5}, "min_p"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "x", "repetition_penalty": 1e-308}, "repetition_penalty"),
        ({"prompt": "x", "logprobs": 10**400}, "logprobs"),
        ({"prompt": "x", "prompt_logprobs": 10**400}, "prompt_logprobs"),
        ({"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "x", "seed": 2**63}, "seed"),
        ({"prompt": "x", "seed": "1"}, "seed"),
        ({"prompt": "x", "stop": 3}, "stop"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": ["a", 1]}, "stop.1"),
        ({"prompt": "x", "stop": ["a"] * 20_000}, "stop"),
        ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"prompt": "x", "stop_token_ids": [70_000]}, "stop_token_ids"),
        ({"prompt": "x", "logit_bias": [1]}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"٣": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"70000": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": "5"}}, "logit_bias.1"),
        ({"prompt": "x", "allowed_token_ids": [70_000]}, "allowed_token_ids"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 49152}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": True}, "stream_options"),
        ({"prompt": "x", "cache_salt": "s" * 129}, "cache_salt"),
        ({"prompt": "x", "model": 5}, "model"),
        ({"prompt": [70_000]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "x", "guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "x", "response_format": "text"}, "response_format"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_completion(server: LiveServer, body: dict[str, Any], param: str | None, stream: bool) -> None:
    """Refused before a stream starts, with a status; nothing reaches the engine."""
    server.engine.received.clear()
    if stream and "stream" not in body and "stream_options" not in body:
        body = {**body, "stream": True}
    content = json.dumps(body).encode()
    error = error_of(post(server, "/v1/completions", content))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert server.engine.received == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": "5"}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": 1}, "logprobs"),
        ({"messages": HELLO, "tools": []}, "tools"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": HELLO, "guided_grammar": "root ::= 'a'"}, "guided_grammar"),
        ({"messages": HELLO, "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"messages": HELLO, "guided_choice": ["a", 1]}, "guided_choice.1"),
        ({"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": HELLO, "chat_template": "{% for x in range(10**9) %}{% endfor %}"}, "chat_template"),
        ({"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": HELLO, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_tokens"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_bad_chat(server: LiveServer, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        content = json.dumps({**body, "stream": stream}).encode()
        assert error_of(post(server, "/v1/chat/completions", content))["param"] == param


def test_prompt_too_long(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=r"5001 tokens.*4096") as caught:
                client.completions.create(model="fake", prompt="x" * 5000, stream=stream)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 5000}])
        assert caught.value.code == "context_length_exceeded"


def test_text_that_cannot_fit_is_not_tokenized(server: LiveServer) -> None:
    text = "x" * (9 * 4096 + 1)  # no token of the fake's has more than 9 characters
    for path, body in (
        ("/v1/completions", {"prompt": ["x", text]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        error = error_of(server.http.post(path, json=body))
        assert error["code"] == "context_length_exceeded"
        assert "characters" in error["message"]
    assert server.http.post("/tokenize", json={"prompt": text}).json()["count"] == len(text) + 1


def test_text_is_bounded_whatever_the_context() -> None:
    text = "x" * (MAX_CHARACTERS + 1)
    with running() as server:
        for body, param in (
            ({"prompt": text}, "prompt"),
            ({"messages": [{"role": "user", "content": text}]}, "messages"),
        ):
            error = error_of(server.http.post("/tokenize", json=body))
            assert str(MAX_CHARACTERS) in error["message"]
            assert error["param"] == param


def test_long_conversations_are_not_rendered_in_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    class Recorder(FakeTemplate):
        def render(self, messages: Any, **kwargs: Any) -> str:
            threads.append(threading.current_thread())
            return ""

    model = replace(fake_model(FakeEngine()), chat_template=Recorder())
    hello = {"role": "user", "content": ""}
    for body in (
        {"messages": [hello]},
        {"messages": [hello] * 1000},
        {"messages": [{"role": "user", "content": "x" * 10_000}]},
        {"messages": [hello], "tools": [{"type": "function"}]},
        {"messages": [hello], "chat_template_kwargs": {"x": 1}},
    ):
        asyncio.run(render_chat(model, ChatBody.model_validate(body)))
    assert [thread is threading.current_thread() for thread in threads] == [True, False, False, False, False]


# ------------------------------------------------------------------------------------------------- limits


def test_body_limit(server: LiveServer) -> None:
    fits = json.dumps({"prompt": [1], "max_tokens": 1, "x": "y" * 199_000}).encode()
    assert len(fits) < 200_000
    assert post(server, "/v1/completions", fits).status_code == 200
    large = json.dumps({"prompt": [1], "x": "y" * 200_000}).encode()
    assert error_of(post(server, "/v1/completions", large), 413)["code"] == "request_too_large"


def test_body_limit_holds_without_content_length(server: LiveServer) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 10_000
            yield b" " * 10_000

    try:
        reply = post(server, "/v1/completions", chunks())
    except httpx.TransportError:  # the server closed while this client was still writing
        pass
    else:
        error_of(reply, 413)
    assert sent < 10_000_000


def raw_exchange(server: LiveServer, *parts: bytes, half_close: bool = True) -> bytes:
    """What the server answers to bytes on a fresh connection, until it closes."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        with contextlib.suppress(OSError):  # the server may close before it has read all
            for part in parts:
                sock.sendall(part)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(65536):
                answer += piece
    return answer


def test_large_content_length_is_refused_at_once(server: LiveServer) -> None:
    for length in (b"200001", b"9" * 18, b"0" * 30 + b"200001"):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + length + b"\r\n\r\n"
        answer = raw_exchange(server, head)
        assert answer.startswith(b"HTTP/1.1 413"), answer
        assert b"connection: close" in answer.lower()


def test_bytes_that_are_not_http(server: LiveServer) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"\x80" * 1000, b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"):
        answer = raw_exchange(server, garbage)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer
    assert server.http.get("/health").status_code == 200


def test_head_limits(server: LiveServer) -> None:
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for name, head in {
        "header": [start, b"X: " + b"y" * MAX_HEAD_BYTES * 20],
        "line": [b"GET /" + b"y" * MAX_HEAD_BYTES * 20],
        "number": [start + b"X: y\r\n" * (MAX_HEADERS + 1) + b"\r\n"],
        "drops": [start, *[b"X: y\r\n" * 100] * 500],
    }.items():
        answer = raw_exchange(server, *head)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400"), name
    assert raw_exchange(server, start + b"X: y\r\n" * 100 + b"\r\n").startswith(b"HTTP/1.1 200")


def test_a_body_in_many_pieces_is_not_taken_for_a_head(server: LiveServer) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 1, "x": "y" * 190_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    pieces = [body[i : i + 1000] for i in range(0, len(body), 1000)]
    next_head = [b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\nConnection: close\r\n", b"\r\n"]
    answer = raw_exchange(server, head, *pieces, *next_head, half_close=False)
    assert answer.count(b"HTTP/1.1 200") == 2


# ----------------------------------------------------------------------------------------- routes and keys


def test_unknown_routes_and_methods(server: LiveServer) -> None:
    for path in ("/", "/v1", "/v1/nope", "/v1/completions/", "/docs", "/%00", "/../etc/passwd"):
        assert "Unknown route" in error_of(server.http.get(path), 404)["message"]
    reply = server.http.get("/v1/completions")
    error_of(reply, 405)
    assert reply.headers["allow"] == "POST"
    error_of(server.http.delete("/v1/models"), 405)


def test_bugs_become_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: Any, index: int) -> Any:
        raise RuntimeError("secret of somebody else")

    with running(FakeEngine(script=script)) as server:
        reply = server.http.post("/v1/completions", json={"prompt": "x"})
        assert error_of(reply, 500)["type"] == "server_error"
        assert "secret" not in reply.text
        assert server.http.get("/health").status_code == 200
    assert "secret of somebody else" in caplog.text


def test_api_key() -> None:
    with running(config=ServerConfig(api_key="sesame")) as server:
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nope"):
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "Bearer"},
                {"authorization": "Bearer sesame2"},
                {"authorization": "Bearer sesam"},
                {"authorization": "Basic sesame"},
                {"authorization": "sesame"},
                {"authorization": b"Bearer \xff\xfe"},
                {"x-api-key": ""},
                {"x-api-key": "Bearer sesame"},
                {"x-api-key": "wrong", "authorization": "Bearer wrong"},
            ):
                reply = server.http.get(path, headers=httpx.Headers(headers))
                assert error_of(reply, 401)["code"] == "invalid_api_key"
                assert reply.headers["www-authenticate"] == "Bearer"
        error_of(server.http.post("/tokenize", json={"prompt": "x"}), 401)
        # the path counts, not what the Host header makes of it
        assert raw_exchange(server, b"GET /v1/models HTTP/1.1\r\nHost: localhost/health?\r\n\r\n")[9:12] in (
            b"401",
            b"403",
        )
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/ping").status_code == 200
        for scheme in ("Bearer", "bearer"):
            assert server.http.get("/version", headers={"authorization": f"{scheme} sesame"}).status_code == 200
        for headers in ({"x-api-key": "sesame"}, {"x-api-key": "other", "authorization": "Bearer sesame"}):
            assert server.http.get("/version", headers=headers).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame") as client:
            assert client.models.list().data
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


@pytest.fixture(scope="module")
def good_origin_server() -> Iterator[LiveServer]:
    with running(config=ServerConfig(allowed_origins=("https://good.example",))) as live:
        yield live


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        ("localhost", None, True),
        ("LOCALHOST:1234", None, True),
        ("127.0.0.1:80", None, True),
        ("[::1]:80", None, True),
        ("evil.example", None, False),
        ("localhost.evil.example:8000", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("", None, False),
        ("[::1", None, False),
        ("localhost", "http://localhost:3000", True),
        ("localhost", "http://127.0.0.1", True),
        ("localhost", "https://evil.example", False),
        ("localhost", "null", False),
        ("localhost", "http://localhost@evil.example", False),
        ("localhost", "https://good.example", True),
    ],
)
def test_host_and_origin(good_origin_server: LiveServer, host: str, origin: str | None, allowed: bool) -> None:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    reply = good_origin_server.http.get("/v1/models", headers=headers)
    if allowed:
        assert reply.status_code == 200
        assert (reply.headers.get("access-control-allow-origin") is not None) == (origin == "https://good.example")
    else:
        assert error_of(reply, 403)["type"] == "permission_error"


def test_no_cors_by_default(server: LiveServer) -> None:
    reply = server.http.get("/v1/models", headers={"origin": "http://localhost:3000"})
    assert not [name for name in reply.headers if name.startswith("access-control")]
    preflight = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    assert server.http.options("/v1/completions", headers=preflight).status_code == 405


def test_cors_preflight_needs_no_key() -> None:
    config = ServerConfig(api_key="k", allowed_origins=("https://good.example",))
    with running(config=config) as server:
        headers = {
            "origin": "https://good.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        reply = server.http.options("/v1/completions", headers=headers)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://good.example"
        # errors carry the header, too, or pages could not read them
        reply = server.http.get("/v1/models", headers={"origin": "https://good.example"})
        assert reply.status_code == 401
        assert reply.headers["access-control-allow-origin"] == "https://good.example"


def test_request_ids(server: LiveServer) -> None:
    first, second = (server.http.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert server.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for name in ("x-request-id", "request-id"):
        assert server.http.get("/nope", headers={"x-request-id": "mine-2"}).headers[name] == "mine-2"
    assert len(server.http.get("/health", headers={"x-request-id": "x" * 200}).headers["x-request-id"]) == 32


def test_dead_engine() -> None:
    from caudal.core import EngineDeadError

    with running(FakeEngine(dead=EngineDeadError("the engine has died"))) as server:
        for path in ("/ping", "/metrics"):
            assert error_of(server.http.get(path), 503)["message"] == "the engine has died"
        for stream in (False, True):
            error_of(server.http.post("/v1/completions", json={"prompt": "x", "stream": stream}), 503)
