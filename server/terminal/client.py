"""HTTP client of the terminal commands; any OpenAI-compatible server will do."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import httpx
import orjson

from octavo.loadtest.wire import DONE, SSEDecoder, error_message, message_of

_CONNECT_TIMEOUT = 10.0  # seconds; an answer itself may take as long as it takes
# States of a server from which it does not become ready again.
_FINAL_CODES = ("server_draining", "engine_dead")


class ClientError(Exception):
    """A request cannot be answered; the message is for the person at the terminal."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an answer; any field may be empty."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None


# Closing it before its end stops the answer.
Pieces = Generator[Piece, None, None]


class Client:
    """Talks to the server at `url` (with or without a trailing `/v1`)."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        try:
            self._http = httpx.Client(
                base_url=self._url,
                headers=headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ClientError(f"--url or --api-key cannot be used: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._url

    def models(self) -> list[str] | None:
        """Ids of the served models; None while the server is starting.

        Raises:
            ClientError: there is no server, or it refuses.
        """
        with self._translated_errors():
            response = self._http.get("/v1/models")
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            if _error_code(response.content) not in _FINAL_CODES:
                return None
        elif response.status_code == httpx.codes.OK:
            try:
                return [str(entry["id"]) for entry in response.json()["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ClientError(f"{self._url} does not list its models") from error
        raise _refusal(response.status_code, response.content)

    def chat(self, messages: list[dict[str, str]], fields: Mapping[str, Any]) -> Pieces:
        """Stream the answer to a conversation."""
        body = {"messages": messages, **fields}
        for choice in self._choices("/v1/chat/completions", body):
            delta = choice.get("delta") or {}
            yield Piece(
                delta.get("content") or "",
                delta.get("reasoning") or delta.get("reasoning_content") or "",
                choice.get("finish_reason"),
            )

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Pieces:
        """Stream the continuation of a text."""
        body = {"prompt": prompt, **fields}
        for choice in self._choices("/v1/completions", body):
            yield Piece(choice.get("text") or "", finish_reason=choice.get("finish_reason"))

    def _choices(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            content = orjson.dumps({**body, "stream": True})
        except orjson.JSONEncodeError as error:
            raise ClientError(f"the text cannot be sent: {error}") from error
        decoder = SSEDecoder()
        with (
            self._translated_errors(),
            self._http.stream("POST", path, content=content) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise _refusal(response.status_code, response.read())
            for chunk in response.iter_raw():
                for data in decoder.feed(chunk):
                    if data == DONE:
                        return
                    yield from _choices_of(data)
        raise ClientError("the answer ended too early")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ClientError(
                f"no server is listening at {self._url}; start one with: octavo serve"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ClientError(f"the connection to {self._url} failed: {error}") from error


def _choices_of(data: bytes) -> list[dict[str, Any]]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ClientError("the server sent something that is not JSON") from error
    if not isinstance(value, dict):
        raise ClientError("the server sent a chunk that is no object")
    if "error" in value:
        raise ClientError(message_of(value) or "the server failed")
    choices: list[dict[str, Any]] = value.get("choices") or []
    return choices


def _refusal(status: int, body: bytes) -> ClientError:
    message = error_message(body) or f"HTTP {status}"
    if status == httpx.codes.UNAUTHORIZED:
        message += " (give the server's key with --api-key)"
    return ClientError(message)


def _error_code(body: bytes) -> str | None:
    try:
        code = orjson.loads(body)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None
