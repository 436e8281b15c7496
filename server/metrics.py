"""Prometheus metrics: one registry per application, never the library's global one."""

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Concatenate, ParamSpec

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.engine.core.request import FinishReason
from octavo.engine.core.request_output import EngineStats

logger = logging.getLogger(__name__)

P = ParamSpec("P")

_ENGINE = "0"
_LABELS = ("model_name", "engine")

# The edges that dashboards for vLLM expect, and finer ones below them.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LAG = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TOKENS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)

_OWN = re.compile(rb"(# (HELP|TYPE) )?octavo:")

REJECTIONS = ("queue_full", "key_limit", "not_ready", "invalid", "unauthorized")
"""Why a request was refused. `key_limit`: its key has used up what one key may."""

_STAGES = ("queue", "run")


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Moments of one request, in `time.monotonic()` seconds; None where it never got there."""

    arrival: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    end: float


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One prompt that ended. `longest_output` is the token count of its longest choice."""

    reason: FinishReason
    times: RequestTimes
    num_prompt_tokens: int
    num_output_tokens: int
    longest_output: int
    max_tokens: int
    n: int

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first, of the longest choice; None without any."""
        first, last = self.times.first_token, self.times.last_token
        if first is None or last is None or self.longest_output < 2:
            return None
        return (last - first) / (self.longest_output - 1)


def _guarded(
    method: "Callable[Concatenate[ServerMetrics, P], None]",
) -> "Callable[Concatenate[ServerMetrics, P], None]":
    """Keep a fault of the metrics away from the requests; each method's first one is logged."""

    @functools.wraps(method)
    def guarded(self: "ServerMetrics", /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            if method.__name__ not in self.faults:
                self.faults.add(method.__name__)
                logger.exception("Metrics fail in %s", method.__name__)

    return guarded


class _EngineCollector(Collector):
    """Gauges and counters that are read from the engine's last snapshot at scrape time."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        model_name: str,
        cache_info: Mapping[str, str],
    ) -> None:
        self._stats = stats
        self._labels = (model_name, _ENGINE)
        self._cache_info = cache_info

    def collect(self) -> Iterable[Metric]:
        """Yield the families; called by the registry."""
        stats = self._stats()
        yield self._gauge(
            "num_requests_running", "Sequences in the running batch.", stats.num_running
        )
        yield self._gauge(
            "num_requests_waiting", "Sequences waiting for their turn.", stats.num_waiting
        )
        yield self._gauge(
            "kv_cache_usage_perc", "Share of cache blocks in use, 0 to 1.", stats.kv_cache_usage
        )
        yield self._gauge(
            "kv_cache_waste_perc",
            "Share of the token slots of used blocks that hold no token, 0 to 1.",
            stats.kv_cache_waste,
        )
        yield self._counter(
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        )
        yield self._counter(
            "prefix_cache_hits",
            "Prompt tokens found in the prefix cache.",
            stats.prefix_cache_hits,
        )
        yield self._counter(
            "num_preemptions", "Sequences whose blocks were taken away.", stats.num_preemptions
        )
        by_mode = CounterMetricFamily(
            "octavo:num_preemptions_by_mode", "Preemptions by mode.", labels=(*_LABELS, "mode")
        )
        by_swap = stats.num_preemptions_by_swap
        by_mode.add_metric((*self._labels, "recompute"), stats.num_preemptions - by_swap)
        by_mode.add_metric((*self._labels, "swap"), by_swap)
        yield by_mode
        yield self._gauge(
            "swap_space_usage_perc",
            "Share of the swap space in use, 0 to 1.",
            stats.num_used_swap_blocks / max(stats.num_swap_blocks, 1),
        )
        swapped = CounterMetricFamily(
            "octavo:swapped_blocks", "Blocks copied by direction.", labels=(*_LABELS, "direction")
        )
        swapped.add_metric((*self._labels, "out"), stats.num_swapped_out_blocks)
        swapped.add_metric((*self._labels, "in"), stats.num_swapped_in_blocks)
        yield swapped
        yield self._gauge(
            "kv_offload_usage_perc",
            "Share of the host memory for evicted blocks in use, 0 to 1.",
            stats.num_used_offload_blocks / max(stats.num_offload_blocks, 1),
        )
        yield self._counter(
            "kv_offload_hits",
            "Evicted blocks that came back from host memory.",
            stats.num_offload_hits,
        )
        yield self._counter(
            "kv_cache_integrity_errors",
            "Contradictions in the bookkeeping of blocks, looked for when idle.",
            stats.num_integrity_errors,
        )
        info = GaugeMetricFamily(
            "octavo:cache_config_info",
            "Settings of the KV cache, as labels.",
            labels=(*_LABELS, *self._cache_info),
        )
        info.add_metric((*self._labels, *self._cache_info.values()), 1)
        yield info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"octavo:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"octavo:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


class ServerMetrics:
    """All metrics of one server. Used on the event loop thread only.

    `num_prompt_tokens` and `num_generation_tokens` repeat two counters as plain numbers, for the
    regular log line. `faults` names the methods that have failed; none of them ever raises.
    """

    def __init__(self, model_name: str = "") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.faults: set[str] = set()
        self._labels = (model_name, _ENGINE)
        self._registry = CollectorRegistry()
        # Memory, processor time and open files under the names that all exporters use.
        ProcessCollector(registry=self._registry)
        self._tasks = Gauge(
            "octavo:event_loop_tasks",
            "Tasks of the event loop.",
            _LABELS,
            registry=self._registry,
        )
        self._make_counters()
        self._make_histograms()

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens taken from the prefix cache."
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = self._counter(
            "request_success", "Prompts that ended, by reason.", "finished_reason"
        )
        self._rejected = self._counter(
            "requests_rejected", "Requests that were refused, by reason.", "reason"
        )
        self._timed_out = self._counter(
            "requests_timed_out", "Prompts that met the time limit, by stage.", "stage"
        )
        self._disconnects = self._counter(
            "client_disconnects", "Prompts whose client went away, by stage.", "stage"
        )
        self._corrupted = self._counter(
            "corrupted_requests", "Prompts that ended with an error since their logits were NaN."
        )
        self._http_requests = Counter(
            "http_requests",
            "HTTP requests by route, method and status.",
            ("handler", "method", "status"),
            registry=self._registry,
        )

    def _make_histograms(self) -> None:
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Gap between two outputs of a choice.", _PER_TOKEN
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, per request.",
            _PER_TOKEN,
        )
        self._end_to_end = self._histogram(
            "e2e_request_latency_seconds", "Arrival to end.", _REQUEST
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Arrival to first step.", _REQUEST
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "First step to end.", _REQUEST
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", _REQUEST
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "First token to last token.", _REQUEST
        )
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", _TOKENS
        )
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens per request.", _TOKENS
        )
        self._request_max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens per request.", _TOKENS
        )
        self._request_n = self._histogram("request_params_n", "n per request.", _CHOICES)
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed per step.", _STEP_TOKENS
        )
        self._lag = self._histogram(
            "event_loop_lag_seconds", "How late the event loop woke what had to wait.", _LAG
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "Time from the request's head to the end of the answer.",
            ("handler", "method"),
            buckets=_REQUEST,
            registry=self._registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"octavo:{name}", text, (*_LABELS, *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"octavo:{name}", text, _LABELS, buckets=buckets, registry=self._registry)

    def attach_engine(
        self, model_name: str, cache_info: Mapping[str, str], stats: Callable[[], EngineStats]
    ) -> None:
        """Add the engine's gauges and label everything from now on with the model's name."""
        self._labels = (model_name, _ENGINE)
        self._registry.register(_EngineCollector(stats, model_name, cache_info))
        # From 0 on, so that an alert sees the first increase.
        for counter, values in (
            (self._success, tuple(reason.value for reason in FinishReason)),
            (self._rejected, REJECTIONS),
            (self._timed_out, _STAGES),
            (self._disconnects, _STAGES),
        ):
            for value in values:
                counter.labels(*self._labels, value)
        for plain in (
            self._prompt_tokens,
            self._prompt_tokens_cached,
            self._generation_tokens,
            self._corrupted,
            self._tasks,
        ):
            plain.labels(*self._labels)

    def render(self, alias: str | None = None) -> bytes:
        """Return everything in Prometheus' text format.

        With `alias` our own metrics come a second time, under that prefix.
        """
        text = generate_latest(self._registry)
        if alias is None:
            return text
        own = [line for line in text.splitlines(keepends=True) if _OWN.match(line)]
        return text + b"".join(own).replace(b"octavo:", alias.encode() + b":")

    @_guarded
    def note_tasks(self, count: int) -> None:
        """Record how many tasks the event loop has now."""
        self._tasks.labels(*self._labels).set(count)

    @_guarded
    def observe_lag(self, seconds: float) -> None:
        """Record how late the event loop ran something."""
        self._lag.labels(*self._labels).observe(seconds)

    @_guarded
    def observe_step(self, num_tokens: int) -> None:
        """Record one step of the engine."""
        self._step_tokens.labels(*self._labels).observe(num_tokens)

    @_guarded
    def observe_prefill(self, num_tokens: int, num_cached: int) -> None:
        """Record a prompt that has been processed."""
        self.num_prompt_tokens += num_tokens
        self._prompt_tokens.labels(*self._labels).inc(num_tokens)
        self._prompt_tokens_cached.labels(*self._labels).inc(num_cached)

    # These two run for every token, where finding a child by its labels would cost the most.

    @cached_property
    def _generation_tokens_child(self) -> Counter:
        return self._generation_tokens.labels(*self._labels)

    @cached_property
    def _inter_token_child(self) -> Histogram:
        return self._inter_token.labels(*self._labels)

    @_guarded
    def observe_tokens(self, num_tokens: int, gap: float | None) -> None:
        """Record tokens of one choice; `gap` is seconds since the choice's tokens before."""
        self.num_generation_tokens += num_tokens
        self._generation_tokens_child.inc(num_tokens)
        if gap is not None:
            self._inter_token_child.observe(gap)

    @_guarded
    def observe_first_token(self, seconds: float) -> None:
        """Record the time from arrival to the first token."""
        self._first_token.labels(*self._labels).observe(seconds)

    @_guarded
    def observe_request(self, summary: RequestSummary) -> None:
        """Record a prompt that ended, whatever the reason."""
        self._success.labels(*self._labels, summary.reason.value).inc()
        self._request_prompt_tokens.labels(*self._labels).observe(summary.num_prompt_tokens)
        self._request_generation_tokens.labels(*self._labels).observe(summary.num_output_tokens)
        self._request_max_tokens.labels(*self._labels).observe(summary.max_tokens)
        self._request_n.labels(*self._labels).observe(summary.n)
        times = summary.times
        self._end_to_end.labels(*self._labels).observe(times.end - times.arrival)
        if times.scheduled is None:
            return
        self._queue.labels(*self._labels).observe(times.scheduled - times.arrival)
        self._inference.labels(*self._labels).observe(times.end - times.scheduled)
        if times.first_token is None or times.last_token is None:
            return
        self._prefill.labels(*self._labels).observe(times.first_token - times.scheduled)
        self._decode.labels(*self._labels).observe(times.last_token - times.first_token)
        if summary.time_per_output_token is not None:
            self._per_token.labels(*self._labels).observe(summary.time_per_output_token)

    @_guarded
    def count_rejected(self, reason: str) -> None:
        """Count a refused request; `reason` is one of REJECTIONS."""
        self._rejected.labels(*self._labels, reason).inc()

    @_guarded
    def count_corrupted(self) -> None:
        """Count a prompt whose logits could not be used."""
        self._corrupted.labels(*self._labels).inc()

    @_guarded
    def count_timed_out(self, stage: str) -> None:
        """Count a prompt that met the time limit in stage queue or run."""
        self._timed_out.labels(*self._labels, stage).inc()

    @_guarded
    def count_disconnect(self, stage: str) -> None:
        """Count a prompt whose client went away in stage queue or run."""
        self._disconnects.labels(*self._labels, stage).inc()

    @_guarded
    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Record an answered HTTP request; `handler` is the route's pattern."""
        self._http_requests.labels(handler, method, str(status)).inc()
        self._http_duration.labels(handler, method).observe(seconds)
