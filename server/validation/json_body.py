"""Reading the raw body: content type and strict JSON."""

import re
from email.message import Message
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from octavo.engine.core.errors import (
    ClientDisconnectedError,
    InvalidRequestError,
    UnsupportedMediaTypeError,
)

MAX_DEPTH = 128
"""Most levels of arrays and objects; deeper bodies could exhaust the stack of a template."""

_MAX_SEARCHED_CHARS = 1_000_000
# The end of the text may cut a string off.
_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\]:,]', re.DOTALL)
_FIELD_NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_UTF8_NAMES = {"utf-8", "utf8"}


def check_content_type(content_type: str | None) -> None:
    """Raise UnsupportedMediaTypeError unless the header says JSON in UTF-8."""
    header = Message()
    header["content-type"] = content_type or ""
    charset = header.get_param("charset", "utf-8")
    if (
        not content_type
        or header.get_content_type() != "application/json"
        or not isinstance(charset, str)
        or charset.lower() not in _UTF8_NAMES
    ):
        raise UnsupportedMediaTypeError("The body must be sent as `Content-Type: application/json`")


async def read_body(request: Request) -> bytes:
    """Return the raw body of `request`, which claims to be JSON.

    Raises UnsupportedMediaTypeError, BodyTooLargeError and ClientDisconnectedError.
    """
    check_content_type(request.headers.get("content-type"))
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientDisconnectedError("The client left while sending its request") from None


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parse strictly: no NaN, Infinity or overflow, no invalid UTF-8, no lone surrogates."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        # Only the position is told: the parser's own text is not ours to promise.
        name = _field_at(error.doc, error.pos)
        where = f"line {error.lineno}, column {error.colno}"
        if name is None:
            raise InvalidRequestError(f"The body is not valid JSON ({where})") from None
        raise InvalidRequestError(
            f"`{name}` is not valid JSON ({where}); numbers must be finite and texts valid Unicode",
            name,
        ) from None
    if not isinstance(body, dict):
        raise InvalidRequestError("The body must be a JSON object")
    # Brackets are counted first, since walking is slow and hardly any body needs it.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth_exceeds(body, MAX_DEPTH):
        raise InvalidRequestError(f"The body is nested more than {MAX_DEPTH} levels deep")
    return body


def _field_at(text: str, position: int) -> str | None:
    """Return the name of the top-level field whose value stands at `position`."""
    if position > _MAX_SEARCHED_CHARS:
        return None
    depth, last, name = 0, "", None
    for match in _JSON_TOKENS.finditer(text, 0, position):
        match token := match[0]:
            case "{" | "[":
                depth += 1
            case "}" | "]":
                depth -= 1
            case ":" if depth == 1:
                name = last
            case "," if depth == 1:
                name = None
            case _:
                last = token.strip('"')
    if depth == 0 or (depth == 1 and _follows_value(text, position)):
        return None
    return name if name is not None and _FIELD_NAME.fullmatch(name) else None


def _follows_value(text: str, position: int) -> bool:
    """True for a comma or the end of the object at `position` whose value is there."""
    return text[position : position + 1] in (",", "}") and not text[:position].rstrip().endswith(
        ":"
    )


def _depth_exceeds(value: dict[str, Any], limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
