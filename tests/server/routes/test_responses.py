"""POST /v1/responses: plain answers, the order of events, and what is refused."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from octavo_fixtures import byte_ids, token_id
from octavo_serving import TableSettings, served

MakeSettings = Callable[..., TableSettings]
PATH = "/v1/responses"
SCRIPT = [token_id(text) for text in ("alpha ", "beta", " gam", "ma")]
TEXT = "alpha beta gamma"
BODY: dict[str, Any] = {"input": "hi", "temperature": 0}


def read_events(raw: bytes) -> list[dict[str, Any]]:
    """The data of all events; asserts that each names its type twice and is numbered."""
    events = []
    for number, block in enumerate(raw.decode().removesuffix("\n\n").split("\n\n")):
        kind, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


async def test_plain_answer(scripted: MakeSettings) -> None:
    async with served(scripted(SCRIPT)) as app:
        answer = (
            await app.post(
                PATH,
                **BODY,
                instructions="Be brief.",
                metadata={"a": "b"},
                store=True,
                max_output_tokens=40,
                reasoning={"effort": "low"},
                include=["reasoning.encrypted_content"],
                truncation="disabled",
                tools=[],
                tool_choice="auto",
                text={"format": {"type": "text"}, "verbosity": "low"},
                previous_response_id=None,
                background=False,
            )
        ).json()
    assert answer["id"].startswith("resp_")
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    assert answer["error"] is None
    assert answer["incomplete_details"] is None
    (item,) = answer["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}],
    }
    usage = answer["usage"]
    assert usage["output_tokens"] == 5
    assert usage["total_tokens"] == usage["input_tokens"] + 5
    assert usage["input_tokens_details"] == {"cached_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    echoed = ("instructions", "metadata", "store", "max_output_tokens", "temperature", "model")
    assert [answer[name] for name in echoed] == ["Be brief.", {"a": "b"}, True, 40, 0, "M"]
    assert answer["reasoning"] == {"effort": "low", "summary": None}


async def test_the_text_is_cut_at_max_output_tokens(scripted: MakeSettings) -> None:
    async with served(scripted(SCRIPT)) as app:
        answer = (await app.post(PATH, **BODY, max_output_tokens=2)).json()
        raw = (await app.post(PATH, **BODY, max_output_tokens=2, stream=True)).content
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["output"][0]["content"][0]["text"] == "alpha beta"
    last = read_events(raw)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_order_of_events(scripted: MakeSettings) -> None:
    async with served(scripted(SCRIPT)) as app:
        response = await app.post(PATH, **BODY, stream=True)
        plain = (await app.post(PATH, **BODY)).json()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = read_events(response.content)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert deltas
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(event["delta"] for event in deltas) == TEXT
    created, completed = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert events[2]["item"]["status"] == "in_progress"
    assert events[2]["item"]["content"] == []
    assert events[3]["part"]["text"] == ""
    assert events[-4]["text"] == TEXT
    assert events[-3]["part"]["text"] == TEXT
    assert events[-2]["item"] == completed["output"][0]
    item_id = completed["output"][0]["id"]
    assert {event["item_id"] for event in events if "item_id" in event} == {item_id}
    assert created["id"] == completed["id"]
    for answer in (plain, completed):
        del answer["id"], answer["created_at"], answer["output"][0]["id"]
        del answer["usage"]["input_tokens_details"]
    assert completed == plain


async def test_logprobs_are_those_of_the_chat_route(scripted: MakeSettings) -> None:
    include = ["message.output_text.logprobs"]
    async with served(scripted(SCRIPT)) as app:
        plain = (await app.post(PATH, **BODY, include=include, top_logprobs=2)).json()
        raw = (await app.post(PATH, **BODY, top_logprobs=2, stream=True)).content
        own = (await app.post(PATH, **BODY, include=include)).json()
        chat = await app.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
    wanted = chat.json()["choices"][0]["logprobs"]["content"]
    assert plain["output"][0]["content"][0]["logprobs"] == wanted
    events = read_events(raw)
    streamed = [entry for event in events if "delta" in event for entry in event["logprobs"]]
    assert streamed == wanted
    entries = own["output"][0]["content"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in entries] == [[]] * len(wanted)


@pytest.mark.parametrize(
    "items",
    [
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    ],
)
async def test_forms_of_input_make_the_prompt_of_the_chat_route(
    scripted: MakeSettings, items: Any
) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    async with served(scripted(SCRIPT)) as app:
        chat = (await app.post("/tokenize", messages=messages)).json()
        answer = await app.post(PATH, input=items, instructions="S", max_output_tokens=1)
    assert answer.json()["usage"]["input_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", None),
        ({"input": []}, "input", None),
        ({"input": 5}, "input", None),
        ({"input": ["hi"]}, "input", None),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", None),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input", None),
        ({"input": [{"role": "user"}]}, "input", None),
        ({"input": [{"role": "robot", "content": 5}] * 5000}, "input", None),
        ({"input": [{"role": "user", "content": []}]}, "input", None),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", None),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", None),
        ({"input": "x " * 2000}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 10_000}, "input", "context_length_exceeded"),
        (
            {"input": [{"role": "user", "content": "x"}] * 5000},
            "input",
            "context_length_exceeded",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "unsupported_parameter"),
        ({"text": {"format": {"type": "yaml"}}}, "text", None),
        ({"reasoning": {"effort": "huge"}}, "reasoning", None),
        ({"top_logprobs": 21}, "top_logprobs", None),
        ({"include": ["everything"]}, "include", None),
        ({"metadata": {"a": 1}}, "metadata", None),
        ({"temperature": 3}, "temperature", None),
        ({"stream": True, "max_output_tokens": 10_000}, "input", "context_length_exceeded"),
    ],
)
async def test_bad_requests(
    scripted: MakeSettings, fields: dict[str, Any], param: str, code: str | None
) -> None:
    async with served(scripted(SCRIPT)) as app:
        response = await app.post(PATH, **BODY | fields)
        assert response.status_code == 400
        assert len(response.content) < 16 * 1024
        error = response.json()["error"]
        assert error["param"] == param
        assert error["code"] == code
        assert await app.is_alive()


async def test_nothing_is_kept(scripted: MakeSettings) -> None:
    async with served(scripted(SCRIPT)) as app:
        made = (await app.post(PATH, **BODY)).json()
        found = await app.client.get(f"{PATH}/{made['id']}")
        listed = await app.client.get(PATH)
        unknown = await app.post(PATH, **BODY, model="nope")
    assert found.status_code == 404
    assert found.json()["error"]["code"] == "not_found"
    assert listed.status_code == 405
    assert unknown.json()["error"]["code"] == "model_not_found"


async def test_a_stream_that_breaks_off_ends_with_a_failed_event(scripted: MakeSettings) -> None:
    async with served(scripted(SCRIPT)) as app:
        app.executor.fail_row = lambda output: len(output) == 2
        raw = (await app.post(PATH, **BODY, stream=True)).content
        app.executor.fail_row = lambda output: True
        early = await app.post(PATH, **BODY, stream=True)
        plain = await app.post(PATH, **BODY)
        app.executor.fail_row = lambda output: False
        assert await app.is_alive()
    events = read_events(raw)
    assert [event["type"] for event in events if "response" in event] == [
        *("response.created", "response.in_progress", "response.failed")
    ]
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert failed["output"][0]["status"] == "incomplete"
    assert early.status_code == plain.status_code == 500


async def test_line_separators_and_split_characters(scripted: MakeSettings) -> None:
    text = "a\u2028é\u0085日"
    async with served(scripted(byte_ids(text))) as app:
        raw = (await app.post(PATH, **BODY, stream=True)).content
    for separator in ("\u2028", "\u0085", "\ufffd"):
        assert separator not in raw.decode()
    events = read_events(raw)
    assert "".join(event["delta"] for event in events if "delta" in event) == text


async def test_leaving_a_stream_frees_everything(drawn: MakeSettings) -> None:
    async with served(drawn()) as app:
        task = asyncio.create_task(app.post(PATH, **BODY, max_output_tokens=400, stream=True))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await app.is_alive()
