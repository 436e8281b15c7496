"""From the items of /v1/responses to chat messages, which the model's template knows."""

from collections.abc import Mapping, Sequence
from typing import Any

Item = Mapping[str, Any]
"""An item as the protocol has validated it."""

Message = dict[str, Any]


def to_messages(instructions: str | None, given: str | Sequence[Item]) -> list[Message]:
    """Return the conversation as chat messages.

    Reasoning, text and calls that follow each other are one turn of the assistant, as chat has it.
    """
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        _add_item(messages, item)
    for message in messages:
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
    return messages


def _add_item(messages: list[Message], item: Item) -> None:
    match item.get("type", "message"):
        case "reasoning":
            _add_reasoning(messages, item)
        case "function_call":
            _add_call(messages, item)
        case "function_call_output":
            call_id, output = item["call_id"], _content(item["output"])
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case _:
            _add_message(messages, item)


def _add_message(messages: list[Message], item: Item) -> None:
    role, content = item["role"], _content(item["content"])
    last = messages[-1] if messages else None
    if role == "assistant" and last is not None and _awaits_text(last):
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _awaits_text(message: Message) -> bool:
    return (
        message["role"] == "assistant"
        and message["content"] is None
        and "tool_calls" not in message
    )


def _add_call(messages: list[Message], item: Item) -> None:
    call = {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _add_reasoning(messages: list[Message], item: Item) -> None:
    text = "\n".join(part["text"] for part in item.get("content") or item.get("summary") or ())
    message: Message = {"role": "assistant", "content": None}
    if text:
        # Templates know it by the one name or by the other.
        message |= {"reasoning": text, "reasoning_content": text}
    messages.append(message)


def _content(given: str | Sequence[Item]) -> str | list[Message]:
    if isinstance(given, str):
        return given
    return [
        {"type": "text", "text": part["refusal"] if part["type"] == "refusal" else part["text"]}
        for part in given
    ]
