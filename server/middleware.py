"""ASGI middlewares around all routes.

From outside in: RequestContextMiddleware, CORS, AuthMiddleware, BodyLimitMiddleware, and the
boundary that turns unexpected exceptions into answers. They are plain ASGI: Starlette's
BaseHTTPMiddleware would hide a client's disconnect from the routes.
"""

import logging
import re
import time
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.engine.core.errors import BodyTooLargeError
from octavo.server.context import TIMEOUT_HEADER, RequestContext, enter_request
from octavo.server.errors import CLIENT_CLOSED_REQUEST
from octavo.server.logs import FIELDS
from octavo.server.metrics import ServerMetrics
from octavo.server.request_log import describe_figures, request_figures
from octavo.server.tracing import HttpExchange, Tracer

access_logger = logging.getLogger("octavo.access")

REQUEST_ID_HEADER = "x-request-id"
# What may go into a header and a log line unchanged.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_NO_ROUTE = "none"
_KNOWN_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})
_REJECTIONS = {
    400: "invalid",
    404: "invalid",
    413: "invalid",
    415: "invalid",
    401: "unauthorized",
    429: "queue_full",
    503: "not_ready",
}


POLLED_PATHS = frozenset({"/health", "/health/ready", "/ready", "/ping", "/metrics"})
"""Asked every few seconds by machines; logged at debug as long as they get what they ask for."""
_EXPECTED_OF_POLLED = frozenset({200, 503})


class RequestContextMiddleware:
    """Gives each request an id, counts it and logs it.

    The id is the client's `x-request-id` or a fresh one; it is at `scope["state"]["request_id"]`,
    and a route may put another there before it answers. `quiet_paths` are left out of the log.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        quiet_paths: Collection[str] = (),
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._quiet_paths = frozenset(quiet_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and look at what it answers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        enter_request(exchange.context)
        started = time.monotonic()
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            self._record(scope, exchange, started, time.monotonic())

    def _record(self, scope: Scope, exchange: "_Exchange", started: float, ended: float) -> None:
        path, method, status = path_in_app(scope), scope["method"], exchange.status
        route = scope.get("route")
        # Paths and methods come from clients: only known ones may become labels.
        answered = HttpExchange(
            method=method if method in _KNOWN_METHODS else "other",
            handler=_NO_ROUTE if route is None else route.path,
            status=status,
            started=started,
            ended=ended,
        )
        self._metrics.observe_http(answered.handler, answered.method, status, ended - started)
        reason = exchange.context.rejection or _REJECTIONS.get(status)
        refused = status == 401 or (method == "POST" and path != "/ping")
        # What the engine took and could not end is counted by how it ended.
        if reason is not None and refused and not exchange.context.entered:
            self._metrics.count_rejected(reason)
        if self._tracer is not None:
            self._tracer.record(answered, exchange.context)
        if path not in self._quiet_paths:
            polled = path in POLLED_PATHS and status in _EXPECTED_OF_POLLED
            level = logging.DEBUG if polled else logging.INFO
            _log(level, method, _printable(path), answered, exchange.context)


def _log(
    level: int, method: str, path: str, answered: HttpExchange, context: RequestContext
) -> None:
    milliseconds = (answered.ended - answered.started) * 1000
    figures = request_figures(context.summaries)
    key = "" if context.key_name is None else f" key={context.key_name}"
    fields = {
        "request_id": context.request_id,
        "method": method,
        "path": path,
        "status": answered.status,
        "duration_ms": round(milliseconds, 3),
        "key_name": context.key_name,
        **figures,
    }
    access_logger.log(
        level,
        "%s %s %d %.1f ms %s%s%s",
        method,
        path,
        answered.status,
        milliseconds,
        context.request_id,
        key,
        describe_figures(figures),
        extra={FIELDS: fields},
    )


class _Exchange:
    """One request's channels, watched."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._complete = False
        # What is logged when the application fails before it answers.
        self.status = 500
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER, "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.context = RequestContext(
            state=state,
            timeout_header=headers.get(TIMEOUT_HEADER),
            traceparent=headers.get("traceparent"),
        )

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._complete:
            self.status = CLIENT_CLOSED_REQUEST
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self.status != CLIENT_CLOSED_REQUEST:
                self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID_HEADER] = self.context.request_id
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True
        await self._send(message)


class BodyLimitMiddleware:
    """Lets a route read at most `max_body_size` bytes; then its read raises BodyTooLargeError.

    The check happens where the body is read, so that keys, paths and the queue are checked first.
    """

    def __init__(self, app: ASGIApp, max_body_size: int) -> None:
        self._app = app
        self._limit = max_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with a counted `receive`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        declared_size = int(declared) if declared.isdecimal() else 0
        counted = 0

        async def limited_receive() -> Message:
            nonlocal counted
            if declared_size > self._limit:
                raise self._too_large()
            message = await receive()
            if message["type"] == "http.request":
                counted += len(message.get("body", b""))
                if counted > self._limit:
                    raise self._too_large()
            return message

        await self._app(scope, limited_receive, send)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body is larger than {self._limit} bytes")


def path_in_app(scope: Scope) -> str:
    """Return the path as the routes see it, without what a proxy in front has taken away."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _printable(path: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in path[:256])
