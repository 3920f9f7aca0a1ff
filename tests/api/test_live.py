"""The whole of it: a real model, the real server in a process of its own, OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import ROOT

CONTEXT = 2048
PROMPTS = [
    "The old lighthouse keeper climbed the stairs every evening to",
    "Water boils at",
    "def fibonacci(n):\n",
    "Los ríos de España son",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "東京は",
    "The three primary colours are red,",
]


@dataclass
class Server:
    """`caudal serve`, running."""

    process: subprocess.Popen[str]
    url: str
    model: str
    http: httpx.Client

    def metric(self, name: str) -> float:
        """The value of a metric without labels other than the model's name."""
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels == {"model_name": self.model}:
                    return sample.value
        raise AssertionError(f"no metric {name}")

    def until_idle(self) -> None:
        end = time.monotonic() + 20
        while self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < end, "requests are left over"
            time.sleep(0.02)

    def complete(self, **body: Any) -> dict[str, Any]:
        reply = self.http.post("/v1/completions", json={"model": self.model, "temperature": 0, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator[Server]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", "caudal", "serve", str(model), "--port", "0", "--ctx", str(CONTEXT), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    try:
        assert process.stdout is not None
        said: list[str] = []
        while not (line := process.stdout.readline()).startswith("Listening on "):
            said.append(line)
            assert line, f"the server ended: {said}"
        url = line.removeprefix("Listening on ").strip()
        with httpx.Client(base_url=url, timeout=120) as http:
            name = http.get("/v1/models").json()["data"][0]["id"]
            yield Server(process, url, name, http)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    with serving(smollm2) as running:
        yield running


@pytest.fixture(scope="module")
def alone(server: Server) -> list[list[int]]:
    """Greedy tokens of each prompt, computed when nothing else was running."""
    return [
        server.complete(prompt=prompt, max_tokens=48, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]
        for prompt in PROMPTS
    ]


def test_text_ids_and_streams_agree(server: Server, alone: list[list[int]]) -> None:
    for prompt, ids in zip(PROMPTS, alone, strict=True):
        tokens = server.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
        text = server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        from_ids = server.complete(prompt=tokens, max_tokens=48, ignore_eos=True)["choices"][0]["text"]
        body = {"prompt": prompt, "max_tokens": 48, "ignore_eos": True, "temperature": 0, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
        assert from_ids == "".join(json.loads(line)["choices"][0]["text"] for line in lines) == text


def test_llama_cpps_completion_is_openais(server: Server, alone: list[list[int]]) -> None:
    http = server.http
    props = http.get("/props").json()
    assert (props["model_alias"], props["eos_token"]) == (server.model, "<|im_end|>")
    assert props["default_generation_settings"]["n_ctx"] == CONTEXT
    for prompt, ids in zip(PROMPTS[:2], alone, strict=False):
        body = {"prompt": prompt, "n_predict": 48, "ignore_eos": True, "temperature": 0, "return_tokens": True}
        reply = http.post("/completion", json=body).json()
        assert (reply["tokens"], reply["prompt"]) == (ids, prompt)
        assert http.post("/tokenize", json={"content": prompt}).json()["tokens"] == tokens_of(server, prompt)
        times = reply["timings"]
        assert 0 < times["prompt_ms"] < 60_000
        assert times["predicted_per_second"] == pytest.approx(47_000 / times["predicted_ms"])
        with http.stream("POST", "/completion", json=body | {"stream": True}) as stream:
            chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line]
        assert [token for chunk in chunks for token in chunk["tokens"]] == ids
        assert "".join(chunk["content"] for chunk in chunks) == reply["content"]
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    reply = http.post("/completion", json={"prompt": "n = 7, as JSON:", "json_schema": schema, "n_predict": 64}).json()
    assert json.loads(reply["content"]).keys() == {"n"}
    assert http.post("/infill", json={"input_prefix": "a"}).json()["error"]["type"] == "not_supported_error"


def tokens_of(server: Server, prompt: str) -> list[int]:
    return server.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]


def test_chat(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Say hello."}]
        whole = client.chat.completions.create(model=server.model, messages=messages, temperature=0, max_tokens=24)
        stream = client.chat.completions.create(
            model=server.model, messages=messages, temperature=0, max_tokens=24, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == text
    assert text
    assert "<|im_" not in text


def test_responses(server: Server) -> None:
    """A response, its stream and its continuation agree with chat completions."""
    messages: Any = [{"role": "user", "content": "Say hello."}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        call: Any = {"model": server.model, "temperature": 0, "max_output_tokens": 40}
        whole = client.responses.create(**call, input="Say hello.")
        with client.responses.stream(**call, input=messages) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        more: Any = {"role": "user", "content": "And in Spanish?"}
        second = client.responses.create(**call, input=[*messages, *whole.output, more])
        history = [*messages, {"role": "assistant", "content": text}, more]
        reference = client.chat.completions.create(
            model=server.model,
            temperature=0,
            max_tokens=40,
            messages=history,  # type: ignore[arg-type]
        )
    assert whole.output_text == text
    assert text
    assert second.output_text == reference.choices[0].message.content
    assert (second.usage.input_tokens, second.usage.output_tokens) == (
        reference.usage.prompt_tokens,
        reference.usage.completion_tokens,
    )


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "maximum": 150, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_structured_outputs(server: Server) -> None:
    """Every answer is valid, streamed or not, also of many requests at the same time."""
    messages: Any = [{"role": "user", "content": "Describe a person."}]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        create = client.chat.completions.create
        several = create(model=server.model, messages=messages, response_format=schema, n=4, max_tokens=100, seed=5)
        for choice in several.choices:
            person = json.loads(choice.message.content or "")
            assert choice.finish_reason == "stop"
            assert person.keys() == {"name", "age"}
            assert 0 <= person["age"] <= 150
        stream = create(
            model=server.model, messages=messages, response_format=schema, max_tokens=100, seed=5, stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in stream) == several.choices[0].message.content
        for extra, pattern in (
            ({"guided_choice": ["left", "right"]}, "left|right"),
            ({"guided_regex": "[a-z]{2}-[0-9]{2}"}, "[a-z]{2}-[0-9]{2}"),
            ({"structured_outputs": {"grammar": 'start: "x" "x"? "y"'}}, "xx?y"),
        ):
            answer = create(model=server.model, messages=messages, max_tokens=60, seed=1, extra_body=extra)
            assert re.fullmatch(pattern, answer.choices[0].message.content or "")
        broken: Any = {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}
        with pytest.raises(openai.BadRequestError, match="thing"):
            create(model=server.model, messages=messages, response_format=broken)


def test_anthropic_messages(server: Server) -> None:
    """A call, its stream and its token count agree, with each other and with OpenAI's route."""
    messages: Any = [{"role": "user", "content": "Say hello."}]
    greedy = {"temperature": 0}
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        call: Any = {"model": server.model, "messages": messages, "max_tokens": 24, "extra_body": greedy}
        whole = client.messages.create(**call)
        with client.messages.stream(**call) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        count = client.messages.count_tokens(model=server.model, messages=messages).input_tokens
        assert [card.id for card in client.models.list()] == [server.model]
        hello: Any = [*messages, {"role": "assistant", "content": text[:5]}]
        prefilled = client.messages.create(**call | {"messages": hello})
        greeting = {"type": "object", "properties": {"greeting": {"enum": ["hi", "hello"]}}, "required": ["greeting"]}
        output = {"format": {"type": "json_schema", "schema": {**greeting, "additionalProperties": False}}}
        structured = client.messages.create(**call, output_config=output)  # type: ignore[arg-type]
        assert json.loads(structured.content[0].text)["greeting"] in ("hi", "hello")
        assert structured.stop_reason == "end_turn"
    body = {"messages": messages, "max_tokens": 24, **greedy}
    reference = server.http.post("/v1/chat/completions", json=body).json()
    assert whole.content[0].text == text == reference["choices"][0]["message"]["content"]
    assert (streamed.content[0].text, streamed.stop_reason) == (text, whole.stop_reason)
    for message in (whole, streamed):
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == count
    assert count == reference["usage"]["prompt_tokens"]
    assert text[5:].startswith(prefilled.content[0].text[:5])
    assert "<|im_" not in text


def test_seeds_and_choices(server: Server) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[0], "n": 4, "temperature": 1.0, "max_tokens": 12, "seed": 7}
    first, again = (server.complete(**body)["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in again]
    assert len({choice["text"] for choice in first}) > 1


def test_stop_string(server: Server) -> None:
    choice = server.complete(prompt="1, 2, 3, 4,", stop=[" 7"], max_tokens=48)["choices"][0]
    assert choice["text"] == " 5, 6,"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " 7")


def test_scoring_a_text(server: Server) -> None:
    """The logprobs of a prompt are those with which its tokens would have been generated."""
    generated = server.complete(prompt=PROMPTS[0], max_tokens=8, logprobs=0, return_token_ids=True)["choices"][0]
    ids = generated["prompt_token_ids"] + generated["token_ids"]
    scored = server.complete(prompt=ids, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert scored["token_logprobs"][-8:] == pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-4)
    assert scored["token_logprobs"][0] is None


def test_64_streams_of_which_a_third_is_cancelled(server: Server, alone: list[list[int]]) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> None:
        wanted = 8 + number % 41
        stream = await client.completions.create(
            model=server.model,
            prompt=PROMPTS[number % 8],
            max_tokens=1000 if number % 3 == 0 else wanted,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        ids: list[int] = []
        async for chunk in stream:
            ids += chunk.choices[0].model_dump().get("token_ids") or []
            if number % 3 == 0 and len(ids) >= 4:
                await stream.close()
                return
        assert ids == alone[number % 8][:wanted]

    async def all_of_them() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=120) as client:
            await asyncio.gather(*(one(client, number) for number in range(64)))

    asyncio.run(all_of_them())
    server.until_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_shared_beginning_is_computed_once(server: Server) -> None:
    sentence = "The river bends twice before the mill and then runs straight to the sea. "
    ids = server.http.post("/tokenize", json={"prompt": sentence * 80}).json()["tokens"][:1000]
    before = {name: server.metric(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits")}
    endings = [[1000 + number, 2000 + number] for number in range(32)]
    reply = server.complete(prompt=[ids + ending for ending in endings], max_tokens=2)
    hits = server.metric("vllm:prefix_cache_hits_total") - before["hits"]
    assert server.metric("vllm:prefix_cache_queries_total") - before["queries"] == 32 * 1002
    assert hits >= 31 * 960  # whole blocks only
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == hits


def test_what_can_never_fit_is_refused_with_the_numbers(server: Server) -> None:
    reply = server.http.post("/v1/completions", json={"prompt": [1] * (CONTEXT + 5)})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
    assert str(CONTEXT + 5) in error["message"]


def test_a_cache_too_small_for_the_load(smollm2: Path, alone: list[list[int]]) -> None:
    """24 sequences of 40 tokens and more in a cache for a few hundred: they wait, none fails, all are right."""
    with serving(smollm2, "--kv-cache-memory", "6MiB") as small:
        reply = small.complete(prompt=PROMPTS * 3, max_tokens=48, ignore_eos=True, return_token_ids=True)
        assert [choice["token_ids"] for choice in reply["choices"]] == alone * 3
        small.until_idle()
        assert small.metric("vllm:kv_cache_usage_perc") == 0
        too_long = small.http.post("/v1/completions", json={"prompt": [1] * 1500})
        assert too_long.status_code == 400
        assert "cache" in too_long.json()["error"]["message"]


def test_sigterm_finishes_what_runs(smollm2: Path) -> None:
    with serving(smollm2) as server:
        body = {"prompt": PROMPTS[0], "max_tokens": 100, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(20) == 0
