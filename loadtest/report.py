"""From request results to the printed report and its JSON form.

Names, order and definitions are those of vLLM's serving benchmark, so that figures of both can be
laid side by side.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.loadtest.client import RequestResult
from octavo.loadtest.speculation import SpeculationCounts

WIDTH = 50
METRICS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How the run was made, as it goes into the report."""

    date: str
    backend: str
    label: str | None
    model_id: str
    tokenizer_id: str
    num_prompts: int
    request_rate: float  # requests per second; inf = all at once
    burstiness: float
    max_concurrency: int | None
    seed: int | None = None

    @property
    def rate_text(self) -> float | str:
        """The rate as JSON can hold it."""
        return "inf" if math.isinf(self.request_rate) else self.request_rate


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What the reader asked to see."""

    metrics: Sequence[str] = tuple(METRICS)
    percentiles: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)  # metric -> limit in ms


def tpot(result: RequestResult) -> float | None:
    """Seconds per output token after the first; None for answers of at most one token."""
    if result.output_tokens <= 1:
        return None
    return (result.latency - result.ttft) / (result.output_tokens - 1)


def samples_ms(results: Sequence[RequestResult]) -> dict[str, list[float]]:
    """All measured values of each metric, in milliseconds."""
    return {
        "ttft": [result.ttft * 1e3 for result in results],
        "tpot": [value * 1e3 for result in results if (value := tpot(result)) is not None],
        "itl": [gap * 1e3 for result in results for gap in result.itls],
        "e2el": [result.latency * 1e3 for result in results],
    }


def meets(result: RequestResult, limits_ms: Mapping[str, float]) -> bool:
    """Whether a request keeps all limits; one token has no time per output token to exceed."""
    values = {"ttft": result.ttft, "tpot": tpot(result) or 0.0, "e2el": result.latency}
    return all(values[name] * 1e3 <= limit for name, limit in limits_ms.items())


def tokens_by_second(results: Sequence[RequestResult]) -> dict[int, float]:
    """Tokens that arrived in each second, counted from the start of the run.

    A chunk may hold several tokens; those of an answer are spread evenly over its chunks.
    """
    tokens: defaultdict[int, float] = defaultdict(float)
    for result in results:
        per_chunk = result.output_tokens / (1 + len(result.itls))
        time = result.start + result.ttft
        for gap in (0.0, *result.itls):
            time += gap
            tokens[int(time)] += per_chunk
    return dict(tokens)


def peak_output_throughput(results: Sequence[RequestResult]) -> float:
    """Tokens of the best second."""
    return max(tokens_by_second(results).values(), default=0.0)


def peak_concurrency(results: Sequence[RequestResult]) -> int:
    """The largest number of requests that were open at one time."""
    events = [(result.start, 1) for result in results]
    events += [(result.start + result.latency, -1) for result in results]
    most = current = 0
    for _, change in sorted(events):
        current += change
        most = max(most, current)
    return most


class Report:
    """The figures of one run."""

    def __init__(
        self,
        settings: RunSettings,
        options: ReportOptions,
        results: Sequence[RequestResult],
        duration: float,
        speculation: SpeculationCounts | None = None,
    ) -> None:
        self.settings = settings
        self._options = options
        self._results = results
        self._duration = duration
        self._speculation = speculation
        self._good = [result for result in results if not result.error]
        self._samples = samples_ms(self._good)

    @property
    def errors(self) -> list[str]:
        """Messages of the failed requests, in order."""
        return [result.error for result in self._results if result.error]

    @property
    def samples(self) -> Mapping[str, Sequence[float]]:
        """All measured values of each metric, in milliseconds."""
        return self._samples

    def throughput_over_time(self) -> list[tuple[float, float]]:
        """(middle of a second, tokens that arrived in it), for each second of the run."""
        tokens = tokens_by_second(self._good)
        return [(second + 0.5, tokens.get(second, 0.0)) for second in range(int(self._duration))]

    @property
    def completed(self) -> int:
        """Number of requests that did not fail."""
        return len(self._good)

    @property
    def off_length(self) -> int:
        """Number of answers with more or fewer tokens than asked for."""
        return sum(result.output_tokens != result.asked_tokens for result in self._good)

    def to_json(self, detailed: bool = False) -> dict[str, Any]:
        """All figures by their names; with `detailed` also lists with one entry per request."""
        settings = self.settings
        value: dict[str, Any] = {
            "date": settings.date,
            "backend": settings.backend,
            "label": settings.label,
            "model_id": settings.model_id,
            "tokenizer_id": settings.tokenizer_id,
            "num_prompts": settings.num_prompts,
            "request_rate": settings.rate_text,
            "burstiness": settings.burstiness,
            "max_concurrency": settings.max_concurrency,
            "seed": settings.seed,
            **self._totals(),
        }
        for metric, samples in self._samples.items():
            value |= self._statistics(metric, samples)
        if self._speculation:
            value |= self._speculation.to_json()
        return value | self._details() if detailed else value

    def _totals(self) -> dict[str, Any]:
        good = self._good
        input_tokens = sum(result.input_tokens for result in good)
        output_tokens = sum(result.output_tokens for result in good)
        limits = self._options.goodput
        within = sum(meets(result, limits) for result in good)
        return {
            "duration": self._duration,
            "completed": len(good),
            "failed": len(self._results) - len(good),
            "total_input_tokens": input_tokens,
            "total_output_tokens": output_tokens,
            "request_throughput": len(good) / self._duration,
            "request_goodput": within / self._duration if limits else None,
            "output_throughput": output_tokens / self._duration,
            "total_token_throughput": (input_tokens + output_tokens) / self._duration,
            "max_output_tokens_per_s": peak_output_throughput(good),
            "max_concurrent_requests": peak_concurrency(good),
        }

    def _statistics(self, metric: str, samples: Sequence[float]) -> dict[str, float]:
        """Mean, median, standard deviation and percentiles; all 0 when nothing was measured."""
        values = np.asarray(samples or [0.0])
        percentiles = dict.fromkeys([*self._options.percentiles, 99.0])
        return {
            f"mean_{metric}_ms": float(values.mean()),
            f"median_{metric}_ms": float(np.median(values)),
            f"std_{metric}_ms": float(values.std()),
        } | {f"p{p:g}_{metric}_ms": float(np.percentile(values, p)) for p in percentiles}

    def _details(self) -> dict[str, Any]:
        results = self._results
        return {
            "input_lens": [result.input_tokens for result in results],
            "output_lens": [result.output_tokens for result in results],
            "ttfts": [result.ttft for result in results],
            "itls": [result.itls for result in results],
            "start_times": [result.start for result in results],
            "generated_texts": [result.text for result in results],
            "errors": [result.error for result in results],
        }

    def render(self) -> str:
        """The printed block."""
        value = self.to_json()
        lines = [
            f"{' Serving Benchmark Result ':=^{WIDTH}}",
            _line("Successful requests:", value["completed"]),
            _line("Failed requests:", value["failed"]),
            _line("Maximum request concurrency:", value["max_concurrency"] or "none"),
            _line("Request rate configured (RPS):", value["request_rate"]),
            _line("Benchmark duration (s):", value["duration"]),
            _line("Total input tokens:", value["total_input_tokens"]),
            _line("Total generated tokens:", value["total_output_tokens"]),
            _line("Request throughput (req/s):", value["request_throughput"]),
        ]
        if value["request_goodput"] is not None:
            lines.append(_line("Request goodput (req/s):", value["request_goodput"]))
        lines += [
            _line("Output token throughput (tok/s):", value["output_throughput"]),
            _line("Peak output token throughput (tok/s):", value["max_output_tokens_per_s"]),
            _line("Peak concurrent requests:", value["max_concurrent_requests"]),
            _line("Total token throughput (tok/s):", value["total_token_throughput"]),
        ]
        for metric in self._options.metrics:
            lines += self._metric_lines(metric, value)
        if self._speculation:
            lines += _speculation_lines(self._speculation)
        return "\n".join([*lines, "=" * WIDTH])

    def _metric_lines(self, metric: str, value: Mapping[str, Any]) -> list[str]:
        title, short = METRICS[metric]
        names = {"mean": "Mean", "median": "Median"}
        names |= {f"p{p:g}": f"P{p:g}" for p in self._options.percentiles}
        return [
            f"{title:-^{WIDTH}}",
            *(
                _line(f"{name} {short} (ms):", value[f"{key}_{metric}_ms"])
                for key, name in names.items()
            ),
        ]


def _speculation_lines(counts: SpeculationCounts) -> list[str]:
    return [
        f"{'Speculative Decoding':-^{WIDTH}}",
        _line("Acceptance rate (%):", counts.acceptance_rate),
        _line("Acceptance length:", counts.acceptance_length),
        _line("Drafts:", counts.drafts),
        _line("Draft tokens:", counts.draft_tokens),
        _line("Accepted tokens:", counts.accepted_tokens),
    ]


def _line(name: str, value: float | str) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {text:<9}".rstrip()
