"""Prometheus metrics under vLLM's names, so that dashboards made for vLLM work.

Counts that the engine keeps are read from its `stats()` when somebody scrapes. Times are measured here, from the
outputs that clients get. Each `Metrics` belongs to one server; there is no global registry.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from caudal.core import FinishReason, Request, RequestOutput

if TYPE_CHECKING:
    from caudal.engine.worker import EngineStats

# vLLM's buckets: seconds
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
# vLLM's buckets: numbers
NUM_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    bounds: list[float] = []
    power = 1
    while power <= limit:
        bounds += [float(m * power) for m in (1, 2, 5) if m * power <= limit]
        power *= 10
    return tuple(bounds)


class Histogram:
    """Counts of values per bucket. Only the event loop's thread touches it, so it needs no lock."""

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, model_name: str) -> HistogramMetricFamily:
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), cumulative))
        family = HistogramMetricFamily(self.name, self.help, labels=["model_name"])
        family.add_metric([model_name], buckets, self.total)
        return family


class Metrics(Collector):
    """Everything that `/metrics` shows of one model."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.model_name = model_name
        self.finished = dict.fromkeys(FinishReason, 0)
        tokens = one_two_five(max_model_len)

        def histogram(name: str, help: str, bounds: Sequence[float]) -> Histogram:
            self.histograms.append(Histogram(f"vllm:{name}", help, bounds))
            return self.histograms[-1]

        self.histograms: list[Histogram] = []
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN)
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between two tokens of one sequence.", BETWEEN_TOKENS
        )
        self.time_per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, by sequence.", BETWEEN_TOKENS
        )
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the last token.", REQUEST)
        self.queue_time = histogram("request_queue_time_seconds", "Waiting before the first step.", REQUEST)
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", REQUEST
        )
        self.inference_time = histogram(
            "request_inference_time_seconds", "From the first step to the last token.", REQUEST
        )
        self.decode_time = histogram("request_decode_time_seconds", "From the first token to the last.", REQUEST)
        self.request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.request_generation = histogram("request_generation_tokens", "Tokens generated for a sequence.", tokens)
        self.params_max_tokens = histogram("request_params_max_tokens", "max_tokens of a request.", tokens)
        self.params_n = histogram("request_params_n", "n of a request.", NUM_CHOICES)

    def collect(self) -> Iterable[Metric]:
        """The families that this layer counts itself."""
        names = ["model_name"]
        success = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended, by reason.", labels=[*names, "finished_reason"]
        )
        for reason, count in self.finished.items():
            success.add_metric([self.model_name, reason.value], count)
        yield success
        for histogram in self.histograms:
            yield histogram.family(self.model_name)

    def render(self, stats: EngineStats) -> bytes:
        """The page in Prometheus' text format 0.0.4."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        registry.register(_EngineCollector(self.model_name, stats))
        return generate_latest(registry)


class _EngineCollector(Collector):
    """The families that the engine counts."""

    def __init__(self, model_name: str, stats: EngineStats) -> None:
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        gauges = (
            ("vllm:num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences waiting to run.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Used part of the KV cache blocks; 1 is full.", stats.kv_cache_usage),
        )
        for name, help, value in gauges:
            gauge = GaugeMetricFamily(name, help, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        counters = (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("vllm:num_preemptions", "Sequences that lost their blocks and were recomputed.", stats.num_preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of sequences that gave a token.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("vllm:spec_decode_num_drafts", "Drafts that were checked.", stats.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Tokens in these drafts.", stats.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.num_accepted_tokens),
            ("caudal:engine_steps", "Steps of the engine.", stats.num_steps),
            ("caudal:computed_tokens", "Tokens that went through the model, in all steps.", stats.num_computed_tokens),
        )
        for name, help, value in counters:
            counter = CounterMetricFamily(name, help, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter


class RequestTracker:
    """Turns the outputs of one request into measurements."""

    __slots__ = ("_first", "_last", "_metrics", "_open", "_request")

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._first: dict[int, float] = {}  # by sequence index; seconds, monotonic clock
        self._last: dict[int, float] = {}
        self._open = request.params.n
        metrics.params_n.observe(request.params.n)
        if request.params.max_tokens is not None:
            metrics.params_max_tokens.observe(request.params.max_tokens)

    def observe(self, output: RequestOutput) -> None:
        now = time.monotonic()
        metrics = self._metrics
        count = len(output.token_ids)
        if count:
            last = self._last.get(output.index)
            if last is None:
                if not self._first:
                    metrics.request_prompt.observe(output.num_prompt_tokens)
                self._first[output.index] = now
                metrics.first_token.observe(now - self._request.arrival_time)
                if count > 1:
                    metrics.inter_token.observe(0.0, count - 1)
            else:
                metrics.inter_token.observe((now - last) / count, count)
            self._last[output.index] = now
        if output.finish_reason is not None:
            self._open -= 1
            self._finish(output, now)

    def close(self) -> None:
        """No more outputs come: sequences that have not ended were aborted."""
        self._metrics.finished[FinishReason.ABORT] += self._open
        self._open = 0

    def _finish(self, output: RequestOutput, now: float) -> None:
        metrics = self._metrics
        assert output.finish_reason is not None
        metrics.finished[output.finish_reason] += 1
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return
        metrics.end_to_end.observe(now - self._request.arrival_time)
        metrics.request_generation.observe(output.num_output_tokens)
        first = self._first.get(output.index)
        if first is not None:
            metrics.decode_time.observe(now - first)
            if output.num_output_tokens > 1:
                metrics.time_per_token.observe((now - first) / (output.num_output_tokens - 1))
        if output.timings is not None:
            metrics.queue_time.observe(output.timings.queued)
            metrics.prefill_time.observe(output.timings.first_token - output.timings.queued)
            metrics.inference_time.observe(output.timings.total - output.timings.queued)
