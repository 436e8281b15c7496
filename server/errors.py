"""The only map from errors to HTTP: statuses, bodies, headers, and error events in streams."""

import http
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.engine.core.errors import (
    AdminKeyError,
    BodyTooLargeError,
    ClientDisconnectedError,
    EngineDeadError,
    ModelNotFoundError,
    NotReadyError,
    OctavoError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
)

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"

CLIENT_CLOSED_REQUEST = 499
"""Status in logs and metrics for a client that went away; nobody receives it."""

_MAX_MESSAGE_CHARS = 2000
"""At six bytes for an escaped character a body then stays under 16 KiB."""

_REQUEST_ERROR_STATUS: Mapping[type[RequestError], int] = {
    ModelNotFoundError: 404,
    BodyTooLargeError: 413,
    UnsupportedMediaTypeError: 415,
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """One error as clients see it."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The JSON object with its four keys."""
        # A template's own message may hold anything, lone surrogates too.
        message = self.message[:_MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
        error = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def response(self) -> Response:
        """The answer before the first byte of a body was sent."""
        return Response(
            self.body(),
            status_code=self.status,
            headers=dict(self.headers),
            media_type="application/json",
        )

    def event(self) -> bytes:
        """The answer inside a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"


def describe_error(error: Exception) -> ErrorAnswer:
    """Return the answer for any exception; those that Octavo does not raise on purpose are 500."""
    match error:
        case RequestError():
            status = _REQUEST_ERROR_STATUS.get(type(error), 400)
            return ErrorAnswer(status, error.message, INVALID_REQUEST, error.code, error.param)
        case QueueFullError():
            headers = {"Retry-After": str(error.retry_after)}
            return ErrorAnswer(429, str(error), RATE_LIMIT, error.code, headers=headers)
        case AdminKeyError():
            return unauthorized()
        case NotReadyError():
            headers = {"Retry-After": str(error.retry_after)}
            return ErrorAnswer(503, str(error), SERVER_ERROR, error.code, headers=headers)
        case RequestTimeoutError():
            headers = {"x-should-retry": "false"}
            return ErrorAnswer(408, str(error), SERVER_ERROR, "request_timeout", headers=headers)
        case EngineDeadError():
            message = "The engine has failed and serves no more requests"
            return ErrorAnswer(503, message, SERVER_ERROR, "engine_dead")
        case ClientDisconnectedError():
            message = "The client closed the connection"
            return ErrorAnswer(CLIENT_CLOSED_REQUEST, message, INVALID_REQUEST)
        case HTTPException():
            return _describe_http_exception(error)
        case RequestValidationError():
            return ErrorAnswer(400, "The request is not valid", INVALID_REQUEST)
        case _:
            message = "The server failed to answer this request"
            return ErrorAnswer(500, message, SERVER_ERROR, "internal_error")


def unauthorized() -> ErrorAnswer:
    """The answer to a missing or wrong key."""
    return ErrorAnswer(
        401,
        "The API key is missing or wrong; send it as `Authorization: Bearer KEY`",
        INVALID_REQUEST,
        "invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _describe_http_exception(error: HTTPException) -> ErrorAnswer:
    headers = error.headers or {}
    if error.status_code == 404:
        return ErrorAnswer(404, "There is no such path", INVALID_REQUEST, "not_found")
    if error.status_code == 405:
        message = "This path does not take this method"
        return ErrorAnswer(405, message, INVALID_REQUEST, "method_not_allowed", headers=headers)
    kind = INVALID_REQUEST if error.status_code < 500 else SERVER_ERROR
    phrase = http.HTTPStatus(error.status_code).phrase
    return ErrorAnswer(error.status_code, phrase, kind, headers=headers)


async def _handle_error(request: Request, error: Exception) -> Response:
    return describe_error(error).response()


class ErrorBoundary:
    """ASGI middleware: turns what nobody expected into a 500 and logs it once.

    It sits inside the other middlewares, so that they see a plain response. After the first byte
    nothing can be answered any more; the exception then goes on.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            logger.exception("A request failed")
            await describe_error(error).response()(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of `app` an answer of the one form; call before adding middlewares."""
    for kind in (OctavoError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _handle_error)
    app.add_middleware(ErrorBoundary)
