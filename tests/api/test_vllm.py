"""Tokens, health, version, and the metrics page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake import BOS, FakeEngine, LiveServer, running
from prometheus_client.parser import text_string_to_metric_families

from caudal import __version__
from caudal.api.metrics import Histogram, Metrics, RequestTracker, one_two_five
from caudal.core import FinishReason, Request, RequestOutput, SamplingParams, Timings


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running() as live:
        yield live


def samples(server: LiveServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of /metrics by name and labels other than model_name, read by Prometheus' own parser."""
    reply = server.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    result: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake", sample
            result[sample.name, tuple(sorted(labels.items()))] = sample.value
    return result


def test_health_and_version(server: LiveServer) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ping").status_code == 200
    assert server.http.get("/version").json() == {"version": __version__}


def test_tokenize(server: LiveServer) -> None:
    def tokenize(**body: Any) -> Any:
        return server.http.post("/tokenize", json=body).json()

    reply = tokenize(prompt="ab")
    assert reply == {"count": 3, "max_model_len": 4096, "tokens": [BOS, 97, 98], "token_strs": None}
    assert tokenize(model="fake", prompt="ab", add_special_tokens=False)["tokens"] == [97, 98]
    assert tokenize(prompt="ab", return_token_strs=True)["token_strs"] == ["<|begin|>", "a", "b"]
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenize(messages=messages)
    body = {"messages": messages, "max_tokens": 1}
    generated = server.http.post("/v1/chat/completions", json=body).json()
    assert chat["count"] == generated["usage"]["prompt_tokens"]  # exactly what a chat would cost
    assert chat["tokens"] == list(server.engine.received[-1].prompt_token_ids)
    assert tokenize(messages=messages, add_generation_prompt=False)["count"] < chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": 3}, 400),
        ("/tokenize", {"prompt": "x", "messages": []}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {"tokens": [1.5]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [100_000]}, 400),
        ("/detokenize", {"tokens": [], "model": "other"}, 404),
    ],
)
def test_bad_token_calls(server: LiveServer, path: str, body: dict[str, Any], status: int) -> None:
    reply = server.http.post(path, json=body)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]


def test_detokenize_inverts_tokenize(server: LiveServer) -> None:
    text = "Grüße, 你好"
    tokens = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text, "content": text}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": "", "content": ""}


def test_metrics_have_vllms_names_and_count() -> None:
    with running(FakeEngine(delay=0.001)) as server:
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:prefix_cache_queries_total",
            "vllm:prefix_cache_hits_total",
            "vllm:num_preemptions_total",
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
            "vllm:time_to_first_token_seconds_count",
            "vllm:inter_token_latency_seconds_count",
            "vllm:request_time_per_output_token_seconds_count",
            "vllm:e2e_request_latency_seconds_count",
            "vllm:request_queue_time_seconds_count",
            "vllm:request_prefill_time_seconds_count",
            "vllm:request_decode_time_seconds_count",
            "vllm:request_inference_time_seconds_count",
            "vllm:request_prompt_tokens_count",
            "vllm:request_generation_tokens_count",
            "vllm:request_params_n_count",
            "vllm:request_params_max_tokens_count",
        ):
            assert (name, ()) in samples(server), name
        assert not [name for name, _ in samples(server) if name.endswith("_created")]
        for _ in range(3):
            server.http.post("/v1/completions", json={"prompt": "abc", "n": 2, "max_tokens": 5})
        server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        seen = samples(server)
        assert seen["vllm:kv_cache_usage_perc", ()] == 0.25
        assert seen["vllm:prefix_cache_queries_total", ()] == 100
        assert seen["vllm:prefix_cache_hits_total", ()] == 40
        assert seen["vllm:num_preemptions_total", ()] == 3
        assert seen["vllm:spec_decode_num_drafts_total", ()] == 4
        assert seen["vllm:spec_decode_num_draft_tokens_total", ()] == 12
        assert seen["vllm:spec_decode_num_accepted_tokens_total", ()] == 7
        assert seen["vllm:request_success_total", (("finished_reason", "length"),)] == 7
        assert seen["vllm:request_success_total", (("finished_reason", "stop"),)] == 0
        assert seen["vllm:time_to_first_token_seconds_count", ()] == 7
        assert seen["vllm:inter_token_latency_seconds_count", ()] == 3 * 2 * 4  # n * (tokens - 1)
        assert seen["vllm:e2e_request_latency_seconds_count", ()] == 7
        assert seen["vllm:request_queue_time_seconds_sum", ()] == pytest.approx(0.7)
        assert seen["vllm:request_prefill_time_seconds_sum", ()] == pytest.approx(0.7)
        assert seen["vllm:request_inference_time_seconds_sum", ()] == pytest.approx(1.4)
        assert seen["vllm:request_prompt_tokens_count", ()] == 4
        assert seen["vllm:request_generation_tokens_sum", ()] == 31
        assert seen["vllm:request_generation_tokens_bucket", (("le", "1.0"),)] == 1
        assert seen["vllm:request_generation_tokens_bucket", (("le", "5.0"),)] == 7
        assert seen["vllm:request_generation_tokens_bucket", (("le", "+Inf"),)] == 7
        assert seen["vllm:request_params_n_bucket", (("le", "1.0"),)] == 1
        assert seen["vllm:request_params_n_bucket", (("le", "2.0"),)] == 4


def test_two_servers_in_one_process_count_apart() -> None:
    with running() as first, running() as second:
        first.http.post("/v1/completions", json={"prompt": "x"})
        name = ("vllm:request_params_n_count", ())
        assert (samples(first)[name], samples(second)[name]) == (1, 0)


def test_histogram_buckets_are_upper_bounds() -> None:
    histogram = Histogram("h", "help", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    histogram.observe(2.0, times=2)
    values = {sample.labels.get("le", sample.name): sample.value for sample in histogram.family("m").samples}
    assert values == {"1.0": 2, "2.0": 6, "+Inf": 7, "h_count": 7, "h_sum": 12.0}
    assert one_two_five(60) == (1, 2, 5, 10, 20, 50)


def test_tracker_counts_merged_outputs_token_by_token() -> None:
    """A slow reader gets the tokens of several steps in one output."""
    metrics = Metrics("m", 100)
    tracker = RequestTracker(metrics, Request("r", (1, 2), SamplingParams()))
    tracker.observe(RequestOutput("r", 0, "ab", (1, 2), num_prompt_tokens=2, num_output_tokens=2))
    last = RequestOutput("r", 0, "cde", (3, 4, 5), num_output_tokens=5, finish_reason=FinishReason.STOP)
    tracker.observe(last)
    tracker.close()
    assert sum(metrics.inter_token.counts) == 4
    assert sum(metrics.first_token.counts) == 1
    assert metrics.finished[FinishReason.STOP] == 1
    assert metrics.finished[FinishReason.ABORT] == 0


def test_tracker_counts_what_never_ended_as_aborted() -> None:
    metrics = Metrics("m", 100)
    tracker = RequestTracker(metrics, Request("r", (1,), SamplingParams(n=3)))
    tracker.observe(RequestOutput("r", 1, "", (), finish_reason=FinishReason.STOP, timings=Timings()))
    tracker.close()
    assert metrics.finished[FinishReason.STOP] == 1
    assert metrics.finished[FinishReason.ABORT] == 2
