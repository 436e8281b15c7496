"""Input items of /v1/responses, validated as typed dicts."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, FailFast, Field, Tag, with_config
from typing_extensions import TypeAliasType, TypedDict

_OPEN = ConfigDict(strict=True, extra="allow")


@with_config(_OPEN)
class InputText(TypedDict):
    """Text that the client wrote."""

    type: Literal["input_text"]
    text: str


@with_config(_OPEN)
class OutputText(TypedDict):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str


@with_config(_OPEN)
class RefusalPart(TypedDict):
    """What an earlier answer said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


@with_config(_OPEN)
class ReasoningText(TypedDict):
    """A piece of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


def _kind_of_text(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    return "list" if isinstance(value, list) else None


def _kind_of_item(value: object) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None and "role" in value:
        return "message"
    return kind if isinstance(kind, str) else None


def _choose(kind_of: Any, text: str) -> Discriminator:  # noqa: ANN401 - a function of any value
    return Discriminator(
        kind_of,
        custom_error_type="octavo",
        custom_error_message="{text}",
        custom_error_context={"text": text},
    )


_BY_TEXT = _choose(_kind_of_text, "must be a string or an array of parts")

# Named aliases, since the markers inside cannot be hashed as members of a union.
Parts = TypeAliasType(
    "Parts",
    Annotated[
        list[Annotated[InputText | OutputText | RefusalPart, Discriminator("type")]],
        Field(min_length=1),
        FailFast(),
    ],
)
InputTexts = TypeAliasType(
    "InputTexts", Annotated[list[InputText], Field(min_length=1), FailFast()]
)
ReasoningTexts = TypeAliasType("ReasoningTexts", Annotated[list[ReasoningText], FailFast()])
ItemContent = TypeAliasType(
    "ItemContent",
    Annotated[Annotated[str, Tag("string")] | Annotated[Parts, Tag("list")], _BY_TEXT],
)
CallOutput = TypeAliasType(
    "CallOutput",
    Annotated[Annotated[str, Tag("string")] | Annotated[InputTexts, Tag("list")], _BY_TEXT],
)


@with_config(_OPEN)
class MessageItem(TypedDict):
    """One message of the conversation."""

    type: NotRequired[Literal["message"]]
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


@with_config(_OPEN)
class FunctionCallItem(TypedDict):
    """A call that the model made. `arguments` is the text of a JSON object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


@with_config(_OPEN)
class FunctionCallOutputItem(TypedDict):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: CallOutput


@with_config(_OPEN)
class ReasoningItem(TypedDict):
    """What the model thought before an earlier answer or call."""

    type: Literal["reasoning"]
    content: NotRequired[ReasoningTexts | None]
    summary: NotRequired[ReasoningTexts | None]


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
Items = TypeAliasType(
    "Items",
    Annotated[
        list[
            Annotated[
                Annotated[MessageItem, Tag("message")]
                | Annotated[FunctionCallItem, Tag("function_call")]
                | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
                | Annotated[ReasoningItem, Tag("reasoning")],
                _choose(
                    _kind_of_item,
                    "must be an item of type message, function_call, function_call_output or "
                    "reasoning",
                ),
            ]
        ],
        Field(min_length=1),
        FailFast(),
    ],
)
ResponseInput = Annotated[
    Annotated[str, Tag("string")] | Annotated[Items, Tag("list")],
    _choose(_kind_of_text, "must be a string or an array of items"),
]
