"""OpenTelemetry traces: a span per HTTP request, with the stages of each prompt below it.

Spans are made when a request has ended, from the moments that were noted for the metrics anyhow;
so a trace costs the running request nothing. The SDK is optional: `pip install 'octavo[otel]'`.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.engine.core.errors import ConfigurationError
from octavo.server.context import RequestContext
from octavo.server.metrics import RequestSummary

_FIRST_SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """An answered HTTP request; `handler` is the route's pattern, the moments are monotonic."""

    method: str
    handler: str
    status: int
    started: float
    ended: float


class Tracer:
    """Sends spans to a collector, in a thread of its own.

    Raises ConfigurationError without the SDK.
    """

    def __init__(self, endpoint: str) -> None:
        # Slow to import, and most servers send no traces.
        try:
            from opentelemetry import trace  # noqa: PLC0415
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
            from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
                TraceContextTextMapPropagator,
            )
        except ImportError as error:
            raise ConfigurationError(
                "--otlp-endpoint needs the OpenTelemetry SDK; install it with "
                "pip install 'octavo[otel]'"
            ) from error
        self._api = trace
        self._propagator = TraceContextTextMapPropagator()
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")
        self._provider = TracerProvider(resource=Resource.create({"service.name": "octavo"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo")

    def record(self, exchange: HttpExchange, context: RequestContext) -> None:
        """Make the spans of a request that has ended; one that asked nothing of the model, none."""
        if not context.summaries:
            return
        parent = None
        if context.traceparent is not None:
            parent = self._propagator.extract({"traceparent": context.traceparent})
        offset = time.time() - time.monotonic()
        root = self._tracer.start_span(
            f"{exchange.method} {exchange.handler}",
            parent,
            self._api.SpanKind.SERVER,
            attributes={
                "http.request.method": exchange.method,
                "http.route": exchange.handler,
                "http.response.status_code": exchange.status,
                "octavo.request_id": context.request_id,
            },
            start_time=_nanoseconds(exchange.started + offset),
        )
        if exchange.status >= _FIRST_SERVER_ERROR:
            root.set_status(self._api.StatusCode.ERROR)
        below = self._api.set_span_in_context(root)
        for summary in context.summaries:
            for name, begin, end in _stages(summary):
                span = self._tracer.start_span(
                    name,
                    below,
                    attributes=_attributes(summary),
                    start_time=_nanoseconds(begin + offset),
                )
                span.end(_nanoseconds(end + offset))
        root.end(_nanoseconds(exchange.ended + offset))

    def shutdown(self) -> None:
        """Send what is left and stop; takes seconds when the collector does not answer."""
        self._provider.shutdown()


def _stages(summary: RequestSummary) -> Iterator[tuple[str, float, float]]:
    times = summary.times
    yield "queue", times.arrival, times.end if times.scheduled is None else times.scheduled
    if times.scheduled is None:
        return
    yield "prefill", times.scheduled, times.end if times.first_token is None else times.first_token
    if times.first_token is not None and times.last_token is not None:
        yield "decode", times.first_token, times.last_token


def _attributes(summary: RequestSummary) -> dict[str, str | int | tuple[str, ...]]:
    return {
        "gen_ai.request.max_tokens": summary.max_tokens,
        "gen_ai.request.choice.count": summary.n,
        "gen_ai.usage.input_tokens": summary.num_prompt_tokens,
        "gen_ai.usage.output_tokens": summary.num_output_tokens,
        "gen_ai.response.finish_reasons": (summary.reason.value,),
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
