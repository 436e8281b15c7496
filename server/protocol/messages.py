"""Chat messages. They are validated as typed dicts: the template gets what the client sent."""

from typing import Annotated, Literal, NotRequired, Required

from pydantic import ConfigDict, Discriminator, FailFast, Field, Tag, with_config
from typing_extensions import TypeAliasType, TypedDict

_OPEN = ConfigDict(strict=True, extra="allow")


@with_config(_OPEN)
class TextPart(TypedDict):
    """A piece of text; the only kind of part that a text model takes."""

    type: Literal["text"]
    text: str


@with_config(_OPEN)
class FunctionCall(TypedDict):
    """A call that the assistant made. `arguments` is the text of a JSON object, or empty."""

    name: str
    arguments: NotRequired[str]


@with_config(_OPEN)
class ToolCall(TypedDict):
    """One call of an assistant turn."""

    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCall


def _content_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "text"
    return "parts" if isinstance(value, list) else None


def _by_kind() -> Discriminator:
    return Discriminator(
        _content_kind,
        custom_error_type="octavo",
        custom_error_message="{text}",
        custom_error_context={"text": "must be a string or an array of parts"},
    )


# Named aliases, since the markers inside cannot be hashed as members of a union.
NonEmptyParts = TypeAliasType(
    "NonEmptyParts", Annotated[list[TextPart], Field(min_length=1), FailFast()]
)
TextParts = TypeAliasType("TextParts", Annotated[list[TextPart], FailFast()])
ToolCalls = TypeAliasType("ToolCalls", Annotated[list[ToolCall], FailFast()])
Content = TypeAliasType(
    "Content",
    Annotated[Annotated[str, Tag("text")] | Annotated[NonEmptyParts, Tag("parts")], _by_kind()],
)
AssistantContent = TypeAliasType(
    "AssistantContent",
    Annotated[Annotated[str, Tag("text")] | Annotated[TextParts, Tag("parts")], _by_kind()],
)


@with_config(_OPEN)
class SystemMessage(TypedDict):
    """Instructions."""

    role: Literal["system"]
    content: Content
    name: NotRequired[str | None]


@with_config(_OPEN)
class DeveloperMessage(TypedDict):
    """Instructions; rendered as system where the template has no such role."""

    role: Literal["developer"]
    content: Content
    name: NotRequired[str | None]


@with_config(_OPEN)
class UserMessage(TypedDict):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: NotRequired[str | None]


@with_config(_OPEN)
class AssistantMessage(TypedDict):
    """A past answer; without content beside tool calls."""

    role: Literal["assistant"]
    content: NotRequired[AssistantContent | None]
    name: NotRequired[str | None]
    tool_calls: NotRequired[ToolCalls | None]


@with_config(_OPEN)
class ToolMessage(TypedDict):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Required[str]


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage,
    Discriminator("role"),
]
Messages = Annotated[list[Message], Field(min_length=1), FailFast()]
