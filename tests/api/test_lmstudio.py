"""LM Studio's API v0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake import EOS, FakeEngine, LiveServer, fake_model, running

from caudal import __version__
from caudal.api.service import ModelDetails

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
CARD = {
    "id": "fake",
    "object": "model",
    "type": "llm",
    "publisher": "",
    "arch": "llama",
    "compatibility_type": "gguf",
    "quantization": "Q4_K",
    "state": "loaded",
    "max_context_length": 4096,
    "loaded_context_length": 4096,
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running() as live:
        live.service.set_model(described(live))
        yield live


def described(live: LiveServer) -> Any:
    model = fake_model(live.engine)
    model.details = ModelDetails("llama", "Q4_K")
    return model


def post(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return server.http.post(f"/api/v0/{path}", json={"messages": HELLO, "prompt": "hi"} | body)


def test_models(server: LiveServer) -> None:
    assert server.http.get("/api/v0/models").json() == {"object": "list", "data": [CARD]}
    assert server.http.get("/api/v0/models/fake").json() == CARD
    reply = server.http.get("/api/v0/models/other")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_replies_are_openais_with_statistics(server: LiveServer, path: str) -> None:
    reply = post(server, path, max_tokens=5).json()
    theirs = server.http.post(f"/v1/{path}", json={"messages": HELLO, "prompt": "hi", "max_tokens": 5}).json()
    assert reply.keys() == theirs.keys() | {"stats", "model_info", "runtime"}
    assert (reply["choices"], reply["usage"]) == (theirs["choices"], theirs["usage"])
    assert reply["stats"] == {
        "tokens_per_second": pytest.approx(40),  # 4 tokens after the first, in 0.1 s
        "time_to_first_token": pytest.approx(0.2),
        "generation_time": pytest.approx(0.1),
        "stop_reason": "maxPredictedTokensReached",
    }
    assert reply["model_info"] == {"arch": "llama", "quant": "Q4_K", "format": "gguf", "context_length": 4096}
    assert reply["runtime"] == {"name": "caudal", "version": __version__, "supported_formats": ["gguf"]}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_streams_end_with_statistics(server: LiveServer, path: str) -> None:
    lines = post(server, path, max_tokens=5, stream=True).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *before, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert not any("stats" in event for event in before)
    assert last["stats"]["stop_reason"] == "maxPredictedTokensReached"
    assert {"model_info", "runtime"} <= last.keys()
    assert last["choices"][0]["finish_reason"] == "length"


def test_openais_client(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/api/v0", api_key="x", max_retries=0) as client:
        assert client.models.list().data[0].id == "fake"
        reply = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5)
        assert reply.choices[0].message.content == "Hello"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=HELLO)


def test_why_it_stopped(server: LiveServer) -> None:
    def reason(live: LiveServer, **body: Any) -> str:
        return post(live, "completions", **body).json()["stats"]["stop_reason"]

    assert reason(server, stop=["wör"]) == "stopStringFound"
    with running(FakeEngine(script=lambda request, index: iter([97, EOS]))) as other:
        assert reason(other) == "eosFound"
    with running(FakeEngine(max_model_len=10)) as other:
        for body in ({}, {"max_tokens": -1}):
            assert reason(other, **body) == "contextLengthReached"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": -2},
        {"max_tokens": "5"},
        {"max_tokens": [1]},
        {"temperature": 9},
        {"model": 5},
        {"prompt": 5, "messages": 5},
        {"functions": [{}]},
    ],
    ids=str,
)
def test_bad_fields(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    reply = post(server, path, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}


def test_embeddings_are_refused(server: LiveServer) -> None:
    assert server.http.post("/api/v0/embeddings", json={"input": "x"}).status_code == 400
    assert server.http.post("/api/v0/completions", content=b"{").json()["error"]["code"] == "invalid_json"
