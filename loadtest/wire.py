"""Reading what OpenAI-compatible servers send: event streams and error bodies."""

from typing import Any

import orjson

DONE = b"[DONE]"
_LONGEST_QUOTE = 200


class SSEDecoder:
    """Cuts the bytes of an event stream into the data of its events.

    Every event of these servers has one `data:` line, so a line is an event. Only LF and CRLF
    end a line: JSON may hold other line separators literally.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that `chunk` completes; the beginning of the next one is kept."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def error_message(body: bytes) -> str:
    """The message of an error body, or the beginning of a body of some other form."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace").strip()[:_LONGEST_QUOTE]
    return message_of(value) or body.decode(errors="replace")[:_LONGEST_QUOTE]


def message_of(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """The message of `{"error": {"message": ...}}` or of its older forms; "" if there is none."""
    if not isinstance(value, dict):
        return ""
    error = value.get("error", value)
    if isinstance(error, str):
        return error
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""
