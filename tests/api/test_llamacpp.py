"""llama.cpp's own routes, as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake import BOS, EOS, SEP, TEXT, FakeEngine, FakeTokenizer, LiveServer, running

from caudal.api.llamacpp_requests import CompletionBody
from caudal.config import ServerConfig
from caudal.core import CaudalError, EngineDeadError, Request

MEMBERS = {
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated"),
    *("generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached"),
    "timings",
}
TIMINGS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running(config=ServerConfig(max_request_bytes=8_000_000)) as live:
        yield live
        assert live.http.get("/health").status_code == 200


def post(server: LiveServer, path: str = "/completion", **body: Any) -> httpx.Response:
    return server.http.post(path, json={"prompt": "hi", "n_predict": 5} | body)


def complete(server: LiveServer, **body: Any) -> Any:
    reply = post(server, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *parts, rest = reply.text.split("\n\n")
    assert rest == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def error_of(reply: httpx.Response, status: int = 400, kind: str = "invalid_request_error") -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() >= {"code", "message", "type"}
    assert (body["error"]["code"], body["error"]["type"]) == (status, kind)
    assert body["error"]["message"]
    return body["error"]


def sent(server: LiveServer) -> Request:
    return server.engine.received[-1]


# ------------------------------------------------------------------------------------------- completion


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_completion(server: LiveServer, path: str) -> None:
    reply = post(server, path).json()
    assert reply.keys() == MEMBERS
    assert reply["content"] == TEXT[:5]
    assert (reply["stop"], reply["stop_type"], reply["stopping_word"], reply["truncated"]) == (True, "limit", "", False)
    assert (reply["index"], reply["id_slot"], reply["model"], reply["tokens"]) == (0, -1, "fake", [])
    assert (reply["tokens_predicted"], reply["tokens_evaluated"], reply["tokens_cached"]) == (5, 3, 1)
    assert reply["prompt"] == "<|begin|>hi"
    assert reply["has_new_line"] is False
    times = reply["timings"]
    assert times.keys() == TIMINGS
    # the fake's times: 0.1 s in the queue, the first token after 0.2, the last after 0.3
    assert (times["cache_n"], times["prompt_n"], times["predicted_n"]) == (1, 2, 5)
    assert times["prompt_ms"] == pytest.approx(100)
    assert times["prompt_per_token_ms"] == pytest.approx(50)
    assert times["prompt_per_second"] == pytest.approx(20)
    assert times["predicted_ms"] == pytest.approx(100)
    assert times["predicted_per_token_ms"] == pytest.approx(25)
    assert times["predicted_per_second"] == pytest.approx(40)


def test_defaults_are_llama_cpps(server: LiveServer) -> None:
    server.http.post("/completion", json={"prompt": "hi", "n_predict": 1})
    params = sent(server).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.typical_p, params.repetition_penalty, params.seed, params.logprobs) == (1.0, 1.0, None, None)


def test_fields_reach_the_engine(server: LiveServer) -> None:
    body: dict[str, Any] = {
        "temperature": -1,
        "top_k": -3,
        "top_p": 2.0,
        "min_p": 0.2,
        "typical_p": 0.5,
        "top_n_sigma": 1.5,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 7,
        "stop": "END",
        "ignore_eos": True,
    }
    settings = complete(server, **body)["generation_settings"]
    params = sent(server).params
    assert (params.temperature, params.top_k, params.top_p) == (0, 0, 1)
    assert (params.min_p, params.typical_p, params.top_n_sigma) == (0.2, 0.5, 1.5)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.5, 0.25)
    assert (params.seed, params.stop, params.ignore_eos, params.max_tokens) == (7, ("END",), True, 5)
    assert (settings["seed"], settings["stop"], settings["min_p"], settings["n_predict"]) == (7, ["END"], 0.2, 5)
    complete(server, top_p=0, seed=4294967295, repeat_penalty=1.1, repeat_last_n=0)
    params = sent(server).params
    assert 0 < params.top_p < 1e-5
    assert (params.seed, params.repetition_penalty) == (None, 1.0)
    for name in ("max_tokens", "max_completion_tokens"):
        server.http.post("/completion", json={"prompt": "hi", name: 3})
        assert sent(server).params.max_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [BOS, 97, 98]),
        ([97, 98], [97, 98]),
        ([97, "bc", 98, "d"], [97, 98, 99, 98, 100]),
        (["a", 98, "c"], [BOS, 97, 98, 99]),
        ({"prompt_string": "ab"}, [BOS, 97, 98]),
        (["ab"], [BOS, 97, 98]),
        ([[97, 98]], [97, 98]),
        ("a<|sep|>b", [BOS, 97, SEP, 98]),
    ],
)
def test_prompts(server: LiveServer, prompt: Any, ids: list[int]) -> None:
    assert complete(server, prompt=prompt)["tokens_evaluated"] == len(ids)
    assert list(sent(server).prompt_token_ids) == ids


def test_several_prompts_and_completions(server: LiveServer) -> None:
    reply = complete(server, prompt=["a", [98], [99, "d"]], n_cmpl=2)
    assert [member["index"] for member in reply] == [0, 1, 2, 3, 4, 5]
    assert [member["prompt"] for member in reply[::2]] == ["<|begin|>a", "b", "cd"]
    assert [member["content"][0] for member in reply] == ["0", "1"] * 3
    stream = events(post(server, prompt=["a", "b"], n_cmpl=2, stream=True))
    assert sorted(event["index"] for event in stream if event["stop"]) == [0, 1, 2, 3]


def test_stream(server: LiveServer) -> None:
    whole = complete(server, n_predict=30)
    *chunks, last = events(post(server, n_predict=30, stream=True))
    assert all(
        chunk.keys() == {"index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"}
        for chunk in chunks
    )
    assert not any(chunk["stop"] for chunk in chunks)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == list(TEXT.encode()[:30])
    assert [chunk["tokens_predicted"] for chunk in chunks] == list(range(1, 31))
    assert last.keys() == MEMBERS
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)
    ignored = {"content", "generation_settings"}
    assert {k: v for k, v in last.items() if k not in ignored} == {k: v for k, v in whole.items() if k not in ignored}


def test_why_it_stopped(server: LiveServer) -> None:
    reply = complete(server, stop=["wör"], n_predict=-1)
    assert (reply["content"], reply["stop_type"], reply["stopping_word"]) == ("Hello, ", "word", "wör")
    *_, last = events(post(server, stop=["wör"], n_predict=-1, stream=True))
    assert (last["stop_type"], last["stopping_word"]) == ("word", "wör")
    with running(FakeEngine(script=lambda request, index: iter([97, 10, EOS]))) as other:
        reply = complete(other, n_predict=9)
        assert (reply["content"], reply["stop_type"], reply["has_new_line"]) == ("a\n", "eos", True)
    with running(FakeEngine(max_model_len=8)) as other:
        for limit in (-1, 100):
            reply = complete(other, n_predict=limit)
            assert (reply["tokens_predicted"], reply["stop_type"], reply["truncated"]) == (5, "limit", True)


def test_no_tokens(server: LiveServer) -> None:
    reply = complete(server, n_predict=0)
    assert (reply["content"], reply["tokens_predicted"], reply["stop_type"]) == ("", 0, "limit")
    (event,) = events(post(server, n_predict=0, stream=True))
    assert event["stop"] is True


def test_probabilities(server: LiveServer) -> None:
    reply = complete(server, n_probs=2, n_predict=2)
    first, _ = reply["completion_probabilities"]
    assert first == {
        "id": ord("H"),
        "token": "H",
        "bytes": [ord("H")],
        "logprob": -1.0,
        "top_logprobs": [
            {"id": ord("I"), "token": "I", "bytes": [ord("I")], "logprob": -0.5},
            {"id": ord("H"), "token": "H", "bytes": [ord("H")], "logprob": -1.0},
        ],
    }
    *chunks, last = events(post(server, n_probs=2, n_predict=2, stream=True))
    assert [p for chunk in chunks for p in chunk["completion_probabilities"]] == reply["completion_probabilities"]
    assert "completion_probabilities" not in last


def test_logit_bias(server: LiveServer) -> None:
    for bias in ([[97, 1.5], ["bc", -2], [100, False]], {"97": 1.5, "bc": -2, "100": False}):
        complete(server, logit_bias=bias)
        params = sent(server).params
        assert params.logit_bias == ((97, 1.5), (98, -2), (99, -2))
        assert params.bad_token_ids == (100,)


def test_samplers(server: LiveServer) -> None:
    accepted = (
        (["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"], ["temperature", "min_p", "top_k"]),
        (["temperature", "top_k", "top_p"], ["temperature", "top_k", "top_p"]),
        ("kt", ["temperature", "top_k"]),
        ([], []),
    )
    for samplers, expected in accepted:
        reply = complete(server, samplers=samplers, repeat_penalty=1.5)
        assert reply["generation_settings"]["samplers"][: len(expected)] == expected
    params = sent(server).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1, 0, 1, 0)
    assert params.repetition_penalty == 1
    for samplers in (["top_p", "top_k", "temperature"], ["top_k", "magic"], "pkt", "z", ["top_k", "top_k"]):
        assert "ampler" in error_of(post(server, samplers=samplers))["message"]


def test_json_schema(server: LiveServer) -> None:
    complete(server, json_schema={"type": "object"})
    assert sent(server).matcher is not None
    complete(server)
    assert sent(server).matcher is None


def test_response_fields(server: LiveServer) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/none", "nothing", "content/deeper"]
    assert complete(server, response_fields=fields) == {"content": TEXT[:5], "n_predict": 5}


def test_tokens_on_request(server: LiveServer) -> None:
    assert complete(server, return_tokens=True)["tokens"] == list(TEXT.encode()[:5])


def test_without_the_prompt_cache(server: LiveServer) -> None:
    salts: set[str] = set()
    for _ in range(2):
        complete(server, cache_prompt=False)
        salts.add(sent(server).cache_salt)
    assert len(salts) == 2
    assert "" not in salts
    complete(server)
    assert sent(server).cache_salt == ""


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": None},
        {"prompt": 3},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [[1], 2]},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": {}},
        {"prompt": {"prompt_string": "x", "multimodal_data": ["x"]}},
        {"prompt": [70_000]},
        {"prompt": [2**70]},
        {"prompt": [-1]},
        {"prompt": ["x"] * 1025},
        {"n_predict": -3},
        {"n_predict": "5"},
        {"n_predict": 2**70},
        {"n_cmpl": 1000},
        {"temperature": 3},
        {"temperature": "hot"},
        {"min_p": 2},
        {"repeat_penalty": 0},
        {"seed": 2**70},
        {"stop": 3},
        {"stop": ["a"] * 50},
        {"n_probs": 100},
        {"n_probs": -1},
        {"logit_bias": 3},
        {"logit_bias": "text"},
        {"logit_bias": [3]},
        {"logit_bias": [[1]]},
        {"logit_bias": [[1, True]]},
        {"logit_bias": [[1, "x"]]},
        {"logit_bias": [[1.5, 1]]},
        {"logit_bias": [[70_000, 1]]},
        {"logit_bias": [[-1, False]]},
        {"logit_bias": [[1, 10**400]]},
        {"logit_bias": [["x" * 1000, 1]]},
        {"logit_bias": [[1, 1]] * 2000},
        {"samplers": 3},
        {"stream": "yes"},
        {"response_fields": "content"},
        {"grammar": 'root ::= "a"'},
        {"json_schema": "text"},
        {"mirostat": 2},
        {"mirostat": [2]},
        {"dry_multiplier": 0.8},
        {"xtc_probability": 0.5},
        {"dynatemp_range": 0.5},
        {"t_max_predict_ms": 100},
        {"t_max_predict_ms": "x"},
        {"lora": [{"id": 0, "scale": 1}]},
        {"n_probs": 1, "post_sampling_probs": True},
    ],
    ids=lambda body: json.dumps(body)[:50],
)
def test_bad_fields(server: LiveServer, body: dict[str, Any]) -> None:
    count = len(server.engine.received)
    for stream in (False, True):
        merged: dict[str, Any] = {"stream": stream} | body
        error_of(server.http.post("/completion", json={"prompt": "hi", "n_predict": 5} | merged))
    assert len(server.engine.received) == count


def test_neutral_values_of_what_is_not_there(server: LiveServer) -> None:
    complete(
        server,
        grammar="",
        json_schema=None,
        lora=[],
        mirostat=0,
        mirostat_tau=5.0,
        dry_multiplier=0,
        dry_base=1.75,
        xtc_probability=0.0,
        dynatemp_range=0,
        min_keep=0,
        t_max_predict_ms=-1,
        n_keep=0,
        id_slot=2,
        adaptive_target=-1.0,
        something="else",
    )


def test_errors_have_llama_cpps_shape(server: LiveServer) -> None:
    headers = {"content-type": "application/json"}
    for content in (b"", b"{", b"[]", b'{"prompt": "\xff"}', b"[" * 50_000, b'{"prompt": "\\ud800"}'):
        error_of(server.http.post("/completion", content=content, headers=headers))
    error_of(post(server, model="other"), 404, "not_found_error")
    error_of(server.http.get("/completion"), 405)
    error_of(post(server, x="y" * 9_000_000), 413)
    error_of(server.http.get("/props", headers={"host": "evil.example"}), 403, "permission_error")
    long = error_of(post(server, prompt=[97] * 5000), 400, "exceed_context_size_error")
    assert (long["n_prompt_tokens"], long["n_ctx"]) == (5000, 4096)
    error_of(post(server, prompt="x" * 1_000_000), 400, "exceed_context_size_error")
    with running(FakeEngine(max_unfinished=0)) as other:
        for stream in (False, True):
            error_of(post(other, stream=stream), 429, "rate_limit_error")
    with running() as other:
        other.service.stop()
        for path in ("/health", "/v1/health", "/props"):
            error_of(other.http.get(path), 503, "unavailable_error")
        error_of(post(other), 503, "unavailable_error")


def test_failure_before_and_in_a_stream() -> None:
    def script(request: Request, index: int) -> Iterator[int]:
        yield from b"ab" if len(request.prompt_token_ids) > 3 else b""
        raise CaudalError("out of luck")

    with running(FakeEngine(script=script)) as server:
        for stream in (False, True):
            assert error_of(post(server, stream=stream), 500, "server_error")["message"] == "out of luck"
        *_, last = events(post(server, prompt="longer", stream=True))
        assert last == {"error": {"code": 500, "message": "out of luck", "type": "server_error"}}


def test_a_server_that_stops_says_so() -> None:
    engine = FakeEngine(max_model_len=10**6)

    def script(request: Request, index: int) -> Iterator[int]:
        yield from b"abc"
        engine.closed = True
        yield from b"defgh"

    engine.script = script
    with running(engine) as server:
        *_, last = events(post(server, n_predict=100, stream=True))
        assert last["error"]["type"] == "unavailable_error"
        error_of(post(server, n_predict=100), 503, "unavailable_error")


# ----------------------------------------------------------------------------------------------- others


def test_infill(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"input_prefix": "ab", "input_suffix": "cd", "n_predict": 3}
    error_of(server.http.post("/infill", json=body), 400, "not_supported_error")
    # with bytes as markers, which the fake has anyway
    monkeypatch.setattr(FakeTokenizer, "fim_ids", {"fim_pre": 1, "fim_suf": 2, "fim_mid": 3})

    def ids(**more: Any) -> list[int]:
        reply = server.http.post("/infill", json=body | more)
        assert reply.status_code == 200, reply.text
        assert reply.json()["content"] == TEXT[:3]
        return list(sent(server).prompt_token_ids)

    assert ids() == [BOS, 1, *b"ab", 2, *b"cd", 3]
    assert ids(prompt="e") == [BOS, 1, *b"ab", 2, *b"cd", 3, *b"e"]
    assert ids(input_prefix="<|sep|>") == [BOS, 1, *b"<|sep|>", 2, *b"cd", 3]  # text, no marker
    extra = [{"filename": "f.py", "text": "x"}, {"text": "y"}]
    assert ids(input_extra=extra) == [BOS, *b"xy", 1, *b"ab", 2, *b"cd", 3]
    repo = {"fim_pre": 1, "fim_suf": 2, "fim_mid": 3, "fim_rep": 4, "fim_sep": 5}
    monkeypatch.setattr(FakeTokenizer, "fim_ids", repo)
    before = [4, *b"myproject\n", 5, *b"f.py\nx", 5, *b"tmp\ny", 5, *b"filename\n"]
    assert ids(input_extra=extra) == [BOS, *before, 1, *b"ab", 2, *b"cd", 3]
    bad: dict[str, Any]
    for bad in ({"input_prefix": 3}, {"input_extra": [3]}, {"input_extra": [{}]}, {"prompt": [1]}, {"grammar": "x"}):
        error_of(server.http.post("/infill", json=body | bad))


def test_apply_template(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    reply = server.http.post("/apply-template", json={"messages": messages})
    assert reply.json() == {"prompt": "user: hi\nassistant:"}
    error_of(server.http.post("/apply-template", json={}))
    error_of(server.http.post("/apply-template", json={"messages": [{"role": "user", "content": "refuse"}]}))


def test_tokens(server: LiveServer) -> None:
    def tokens(**body: Any) -> Any:
        reply = server.http.post("/tokenize", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    assert tokens(content="ab") == {"tokens": [97, 98]}
    assert tokens(content="ab", add_special=True) == {"tokens": [BOS, 97, 98]}
    assert tokens(content="<|sep|>") == {"tokens": [SEP]}
    assert tokens(content="<|sep|>", parse_special=False) == {"tokens": list(b"<|sep|>")}
    pieces = tokens(content="aé", with_pieces=True)["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert server.http.post("/detokenize", json={"tokens": [97, 98]}).json()["content"] == "ab"
    assert server.http.post("/tokenize", json={"content": 3}).status_code == 400


def test_props_and_lists(server: LiveServer) -> None:
    props = server.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    params = props["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_k"], params["n_predict"]) == (0.8, 40, -1)
    assert (props["bos_token"], props["eos_token"], props["model_alias"]) == ("<|begin|>", "<|end|>", "fake")
    assert props["chat_template"] == "the template"
    assert props["modalities"] == {"vision": False, "audio": False, "video": False}
    error_of(server.http.post("/props", json={}), 400, "not_supported_error")
    error_of(server.http.get("/slots"), 400, "not_supported_error")
    assert server.http.get("/lora-adapters").json() == []
    for path in ("/embedding", "/embeddings", "/rerank", "/reranking", "/v1/reranking"):
        error_of(server.http.post(path, json={"content": "x", "query": "x"}), 400, "not_supported_error")
    for path in ("/health", "/v1/health"):
        assert server.http.get(path).json() == {"status": "ok"}


def test_dead_engine() -> None:
    with running(FakeEngine(dead=EngineDeadError("the engine has died"))) as server:
        for path in ("/health", "/v1/health"):
            assert error_of(server.http.get(path), 503, "unavailable_error")["message"] == "the engine has died"
        for stream in (False, True):
            error_of(post(server, stream=stream), 503, "unavailable_error")


def test_health_needs_no_key() -> None:
    with running(config=ServerConfig(api_key="sesame")) as server:
        for path in ("/health", "/v1/health"):
            assert server.http.get(path).status_code == 200
        error_of(server.http.get("/props"), 401, "authentication_error")
        assert server.http.get("/props", headers={"authorization": "Bearer sesame"}).status_code == 200


def test_timings_of_openai_s_routes(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 3, "timings_per_token": True}
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert server.http.post(path, json=body).json()["timings"].keys() == TIMINGS
        lines = server.http.post(path, json=body | {"stream": True}).text.split("\n\n")
        *before, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert last["timings"]["predicted_n"] == 3
        assert last["choices"][0]["finish_reason"] == "length"
        assert not any("timings" in event for event in before)
        assert "timings" not in server.http.post(path, json=body | {"timings_per_token": False}).json()


def test_fields_have_one_name_for_the_order() -> None:
    body = CompletionBody.model_validate({"samplers": ["temp", "typical"]})
    assert body.order() == ["temperature", "typ_p"]
