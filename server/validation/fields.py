"""From a JSON object to a request model, with errors that name the field."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from octavo.engine.core.errors import InvalidRequestError
from octavo.server.protocol.common import INT64_MAX, RequestBody
from octavo.server.protocol.unsupported import check_unsupported
from octavo.server.validation.json_body import parse_json_object, read_body

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=RequestBody)

_SMALL_BODY = 64 * 1024
_MAX_LOGGED_NAMES = 1000
_logged_names: set[str] = set()

_TEXTS = {
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must hold at least {min_length} item(s)",
    "too_long": "must hold at most {max_length} item(s)",
    "literal_error": "must be one of {expected}",
    "union_tag_invalid": "must have a {discriminator} of {expected_tags}",
    "union_tag_not_found": "must have a {discriminator}",
    "string_pattern_mismatch": "must be 1 to 128 visible ASCII characters",
    "octavo": "{text}",
}
"""Texts per pydantic error type; none of them quotes what the client sent."""

_NESTED_NAMES = {
    *("role", "content", "type", "text", "name", "tool_calls", "function", "arguments", "id"),
    *("tool_call_id", "include_usage", "continuous_usage_stats"),
    *("call_id", "output", "refusal", "summary", "format", "effort"),
}
"""Field names that may follow in a path; anything else in there may be the client's own key."""


async def read_fields(request: Request, choose: Callable[[Mapping[str, Any]], type[Body]]) -> Body:
    """Return the body of `request` as the model that `choose` names for it.

    Raises the errors of `read_body` and `validate_fields`.
    """
    raw = await read_body(request)

    def parse() -> Body:
        body = parse_json_object(raw)
        return validate_fields(choose(body), body)

    # A thread costs more than a small body, but megabytes must not stop the event loop.
    return parse() if len(raw) <= _SMALL_BODY else await asyncio.to_thread(parse)


def validate_fields(model: type[Body], body: Mapping[str, Any]) -> Body:
    """Return `body` as `model`. Raises InvalidRequestError and UnsupportedParameterError.

    A null field is absent. Unknown fields are left out and logged once per name.
    """
    given = {name: value for name, value in body.items() if value is not None}
    check_unsupported(given, model.unsupported, model.hints)
    _log_unknown(model, given)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        raise _invalid_request(details) from None


def _invalid_request(details: ErrorDetails) -> InvalidRequestError:
    location = details["loc"]
    param = str(location[0]) if location else None
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for place, part in enumerate(location)
        if place == 0 or isinstance(part, int) or part in _NESTED_NAMES
    ).removeprefix(".")
    context = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in details.get("ctx", {}).items()
    }
    text = _TEXTS.get(details["type"], "is not valid").format(**context)
    given = details["input"]
    if details["type"] == "int_type" and isinstance(given, float) and abs(given) > INT64_MAX:
        # The JSON parser makes a float of an integer that is too large for its own.
        text = "must be an integer of at most 64 bits"
    return InvalidRequestError(f"`{path}` {text}" if path else text, param)


def _log_unknown(model: type[RequestBody], given: Mapping[str, Any]) -> None:
    for name in given.keys() - model.known_fields() - _logged_names:
        if len(_logged_names) < _MAX_LOGGED_NAMES:
            _logged_names.add(name)
            logger.info("Ignoring the unknown request field %r", name[:64])
