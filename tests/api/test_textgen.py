"""Internal routes of text-generation-webui."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake import BOS, EOS, FakeEngine, LiveServer, running

from caudal.core import EngineDeadError


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running() as live:
        yield live
        assert live.http.get("/health").status_code == 200


def post(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return server.http.post(f"/v1/internal/{path}", json=body)


def test_model(server: LiveServer) -> None:
    def get(path: str) -> Any:
        return server.http.get(f"/v1/internal/{path}").json()

    assert get("health") == {"status": "ok"}
    assert get("model/info") == {"model_name": "fake", "lora_names": []}
    assert get("model/list") == {"model_names": ["fake"]}
    assert get("lora/list") == {"lora_names": []}


def test_tokens(server: LiveServer) -> None:
    assert post(server, "encode", text="ab").json() == {"tokens": [BOS, 97, 98], "length": 3}
    assert post(server, "token-count", text="ab").json() == {"length": 3}
    assert post(server, "decode", tokens=[BOS, 97, 98, EOS]).json() == {"text": "ab"}


def test_logits(server: LiveServer) -> None:
    reply = post(server, "logits", prompt="x", top_logits=2).json()
    assert reply == {"logits": {"I": pytest.approx(math.exp(-0.5)), "H": pytest.approx(math.exp(-1))}}
    assert list(reply["logits"]) == ["I", "H"]
    assert len(post(server, "logits", prompt="x").json()["logits"]) == 20
    request = server.engine.received[-1]
    assert (request.prompt_token_ids, request.params.max_tokens) == ((BOS, ord("x")), 1)


def test_chat_prompt(server: LiveServer) -> None:
    reply = post(server, "chat-prompt", messages=[{"role": "user", "content": "hi"}])
    assert reply.json() == {"prompt": "user: hi\nassistant:"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("encode", {}),
        ("encode", {"text": 3}),
        ("token-count", {"text": ["x"]}),
        ("decode", {"tokens": "x"}),
        ("decode", {"tokens": [-1]}),
        ("decode", {"tokens": [100_000]}),
        ("logits", {}),
        ("logits", {"prompt": 3}),
        ("logits", {"prompt": "x", "top_logits": 0}),
        ("logits", {"prompt": "x", "top_logits": 21}),
        ("logits", {"prompt": "x", "use_samplers": True}),
        ("logits", {"prompt": "x" * 5000}),
        ("logits", {"prompt": "x" * 1_000_000}),
        ("chat-prompt", {}),
        ("chat-prompt", {"messages": [{"role": "user", "content": "refuse"}]}),
        ("stop-generation", {}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    reply = post(server, path, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}


def test_dead_engine() -> None:
    with running(FakeEngine(dead=EngineDeadError("the engine has died"))) as server:
        assert server.http.get("/v1/internal/health").status_code == 503
        assert post(server, "logits", prompt="x").status_code == 503
