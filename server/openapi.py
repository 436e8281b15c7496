"""What the OpenAPI document says of bodies that the routes read by themselves."""

from typing import Any

from pydantic import BaseModel, TypeAdapter

from octavo.server.protocol.common import ErrorBody

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in (
        (400, "The request is not valid"),
        (401, "The API key is missing or wrong"),
        (404, "The model is not served"),
        (408, "The time limit was reached"),
        (413, "The body is too large"),
        (415, "The body is not JSON"),
        (429, "The queue is full"),
        (500, "The server failed"),
        (503, "The server is starting, draining or failed"),
    )
}
"""Answers that any route may give."""


def describe_body(
    body: Any,  # noqa: ANN401 - a type form
    answer: type[BaseModel],
    streams: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a route decorator that document a body and its answer.

    `body` is a model or a union of models.
    """
    responses: dict[int | str, dict[str, Any]] = dict(ERROR_RESPONSES)
    responses[200] = {"model": answer, "description": "The answer"}
    if streams:
        responses[200]["content"] = {
            "text/event-stream": {"schema": {"type": "string"}},
        }
    schema = TypeAdapter(body).json_schema()
    return {
        "responses": responses,
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _inline(schema)}},
            }
        },
    }


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` with its definitions written out, since it has no root of its own here."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(node, list):
            return [resolve(child) for child in node]
        if not isinstance(node, dict):
            return node
        reference = node.get("$ref")
        if reference is not None:
            rest = {name: child for name, child in node.items() if name != "$ref"}
            return resolve(definitions[reference.removeprefix("#/$defs/")]) | resolve(rest)
        return {name: resolve(child) for name, child in node.items() if name != "discriminator"}

    resolved: dict[str, Any] = resolve(schema)
    return resolved
