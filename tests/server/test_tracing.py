"""Traces, as a collector gets them."""

import http.server
import sys
import threading
from collections.abc import Iterator

import pytest
from octavo_fixtures import byte_ids, token_id
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from served_app import ServeApp

from octavo.engine.core.errors import ConfigurationError
from octavo.server import tracing
from octavo.server.lifecycle import Phase

HELLO = [*byte_ids("hello"), token_id("<|eos|>")]
BODY = {"prompt": "abc", "max_tokens": 10, "temperature": 0}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


class Collector:
    """Receives OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    receiver = Collector()
    thread = threading.Thread(target=receiver.server.serve_forever)
    thread.start()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()
    thread.join()


async def test_a_request_has_spans_for_its_stages(
    serve_app: ServeApp, collector: Collector
) -> None:
    parent = f"00-{TRACE_ID}-b7ad6b7169203331-01"
    async with serve_app(HELLO, otlp_endpoint=collector.url) as served:
        await served.wait_for(Phase.READY)
        served.executor.step_seconds = 0.01
        answer = await served.client.post(
            "/v1/completions",
            json=BODY | {"prompt": ["one", "two"], "stream": True},
            headers={"traceparent": parent, "x-request-id": "mine"},
        )
        await served.client.get("/version")

    assert answer.status_code == 200
    [root] = collector.named("POST /v1/completions")
    assert root.trace_id.hex() == TRACE_ID and root.parent_span_id.hex() == "b7ad6b7169203331"
    values = {item.key: item.value for item in root.attributes}
    assert values["octavo.request_id"].string_value == "mine"
    assert values["http.response.status_code"].int_value == 200
    assert len(collector.spans) == 7
    for number in range(2):
        queue, prefill, decode = (
            collector.named(name)[number] for name in ("queue", "prefill", "decode")
        )
        assert {span.parent_span_id for span in (queue, prefill, decode)} == {root.span_id}
        assert root.start_time_unix_nano <= queue.start_time_unix_nano
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano
        assert decode.end_time_unix_nano - decode.start_time_unix_nano > 40e6
        assert decode.end_time_unix_nano <= root.end_time_unix_nano
        used = {item.key: item.value.int_value for item in decode.attributes}
        assert used["gen_ai.usage.output_tokens"] == 6
    assert "hello" not in str(collector.spans) and "one" not in str(collector.spans)


async def test_a_client_that_does_not_trace_its_request_gets_no_spans(
    serve_app: ServeApp, collector: Collector
) -> None:
    async with serve_app(HELLO, otlp_endpoint=collector.url) as served:
        await served.wait_for(Phase.READY)
        for header in (f"00-{TRACE_ID}-b7ad6b7169203331-00", "no trace parent"):
            await served.client.post("/v1/completions", json=BODY, headers={"traceparent": header})

    [root] = collector.named("POST /v1/completions")
    assert root.trace_id.hex() != TRACE_ID and not root.parent_span_id


async def test_a_request_that_never_ran_shows_its_wait(
    serve_app: ServeApp, collector: Collector
) -> None:
    async with serve_app(HELLO, otlp_endpoint=collector.url, queue_timeout=0.02) as served:
        await served.wait_for(Phase.READY)
        served.executor.gate.clear()
        await served.client.post("/v1/completions", json=BODY)

    assert sorted(span.name for span in collector.spans) == ["POST /v1/completions", "queue"]
    [root] = collector.named("POST /v1/completions")
    assert root.status.code == 2


def test_without_the_sdk_the_start_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(ConfigurationError, match=r"octavo\[otel\]"):
        tracing.Tracer("http://localhost:4318")
