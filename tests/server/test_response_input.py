"""Items of a conversation as chat messages."""

from typing import Any

import pytest

from octavo.server.response_input import to_messages

USER = {"role": "user", "content": "hi"}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"id-{name}", "name": name, "arguments": "{}"}


def tool_call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": "{}"}
    return {"id": f"id-{name}", "type": "function", "function": function}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": [part]}


def text_parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}
THOUGHT = {**REASONING, "content": [{"type": "reasoning_text", "text": "hm"}]}
THOUGHT_FIELDS = {"reasoning": "hm", "reasoning_content": "hm"}


def test_instructions_come_first() -> None:
    system = {"role": "system", "content": "S"}
    assert to_messages("S", "hi") == [system, USER]
    assert to_messages(None, [USER]) == [USER]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        pytest.param(
            [said("a"), USER],
            [{"role": "assistant", "content": text_parts("a")}, USER],
            id="an earlier answer",
        ),
        pytest.param(
            [call("f"), call("g")],
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [tool_call("f"), tool_call("g")],
                }
            ],
            id="parallel calls are one turn",
        ),
        pytest.param(
            [THOUGHT, said("a"), call("f")],
            [
                {
                    "role": "assistant",
                    "content": text_parts("a"),
                    "tool_calls": [tool_call("f")],
                    **THOUGHT_FIELDS,
                }
            ],
            id="reasoning, text and call are one turn",
        ),
        pytest.param(
            [{"type": "function_call_output", "call_id": "id-f", "output": "4"}],
            [{"role": "tool", "tool_call_id": "id-f", "content": "4"}],
            id="result of a call",
        ),
        pytest.param(
            [said("a"), said("b")],
            [
                {"role": "assistant", "content": text_parts("a")},
                {"role": "assistant", "content": text_parts("b")},
            ],
            id="two answers stay two",
        ),
        pytest.param(
            [THOUGHT, USER],
            [{"role": "assistant", "content": "", **THOUGHT_FIELDS}, USER],
            id="reasoning without an answer",
        ),
        pytest.param(
            [REASONING, said("a")],
            [{"role": "assistant", "content": text_parts("a")}],
            id="reasoning that is kept secret",
        ),
        pytest.param(
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [{"role": "assistant", "content": text_parts("no")}],
            id="a refusal",
        ),
    ],
)
def test_items(items: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    assert to_messages(None, items) == messages
