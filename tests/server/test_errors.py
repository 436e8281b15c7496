"""Each error of the tree has one answer."""

import json

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from starlette.exceptions import HTTPException

from octavo.engine.core.errors import (
    BodyTooLargeError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
    UnsupportedParameterError,
)
from octavo.server.errors import describe_error, install_error_handlers, unauthorized

INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (InvalidRequestError("m", "n"), 400, INVALID, None, "n"),
        (UnsupportedParameterError("m", "n"), 400, INVALID, "unsupported_parameter", "n"),
        (ContextLengthError("m", "prompt"), 400, INVALID, "context_length_exceeded", "prompt"),
        (ModelNotFoundError("m", "model"), 404, INVALID, "model_not_found", "model"),
        (HTTPException(404), 404, INVALID, "not_found", None),
        (HTTPException(405), 405, INVALID, "method_not_allowed", None),
        (RequestTimeoutError("m"), 408, "server_error", "request_timeout", None),
        (BodyTooLargeError("m"), 413, INVALID, "request_too_large", None),
        (UnsupportedMediaTypeError("m"), 415, INVALID, "unsupported_media_type", None),
        (QueueFullError("m", 3), 429, "rate_limit_error", "queue_full", None),
        (RequestFailedError("m"), 500, "server_error", "internal_error", None),
        (ZeroDivisionError("m"), 500, "server_error", "internal_error", None),
        (NotReadyError("m", "server_starting", 5), 503, "server_error", "server_starting", None),
        (EngineDeadError("m"), 503, "server_error", "engine_dead", None),
    ],
)
def test_status_and_body(
    error: Exception, status: int, kind: str, code: str | None, param: str | None
) -> None:
    answer = describe_error(error)
    body = json.loads(answer.body())
    assert answer.status == status
    assert body["error"].pop("message")
    assert body == {"error": {"type": kind, "param": param, "code": code}}


def test_headers() -> None:
    assert describe_error(QueueFullError("m", 3)).headers == {"Retry-After": "3"}
    assert describe_error(NotReadyError("m", "c", 7)).headers == {"Retry-After": "7"}
    assert describe_error(RequestTimeoutError("m")).headers == {"x-should-retry": "false"}
    assert unauthorized().headers == {"WWW-Authenticate": "Bearer"}
    assert (unauthorized().status, unauthorized().code) == (401, "invalid_api_key")


@pytest.mark.parametrize("error", [RequestFailedError("/a/b.py: KeyError"), KeyError("secret")])
def test_faults_of_the_server_tell_nothing(error: Exception) -> None:
    message = describe_error(error).message
    assert message == "The server failed to answer this request"


def test_the_body_stays_small_and_valid_whatever_the_message() -> None:
    for text in ("\x00" * 100_000, "😀" * 100_000, "\ud800" * 100_000):
        body = describe_error(InvalidRequestError(text)).body()
        assert len(body) < 16 * 1024
        assert json.loads(body)["error"]["message"]


def test_an_event_is_one_line() -> None:
    event = describe_error(InvalidRequestError("two\nlines")).event()
    assert event.startswith(b'data: {"error":{')
    assert event.endswith(b"}}\n\n")
    assert event.count(b"\n") == 2


async def test_g02_every_status_has_an_error_object(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/broken")
    async def broken() -> None:
        raise ZeroDivisionError("secret")

    @app.post("/typed")
    async def typed(number: int) -> None:
        pass

    async with AsyncClient(transport=ASGITransport(app=app), base_url="http://x") as client:
        for method, path, status in [
            ("POST", "/broken", 500),
            ("GET", "/broken", 405),
            ("GET", "/nowhere", 404),
            ("POST", "/typed?number=x", 400),
        ]:
            response = await client.request(method, path)
            assert response.status_code == status
            assert response.headers["content-type"] == "application/json"
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}
            assert "secret" not in response.text
            if status == 405:
                assert response.headers["allow"] == "POST"
    assert [record.getMessage() for record in caplog.records] == ["A request failed"]
