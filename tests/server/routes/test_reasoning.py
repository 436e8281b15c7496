"""Reasoning in the answers of the chat and the responses routes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo_fixtures import CHAT_TEMPLATE, END_THINK_ID, THINK_ID, make_byte_bpe_tokenizer, token_id
from octavo_serving import ServedTable, TableSettings, served, sse_events

MakeSettings = Callable[..., TableSettings]
MakeDir = Callable[..., Path]

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
OPENING = (
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
ABC, XYZ = token_id("abc"), token_id("xyz")
CLOSING = [token_id("</th"), token_id("ink>")]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def opening_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template opens the reasoning, or closes it when thinking is off."""
    directory = tmp_path_factory.mktemp("opening")
    return make_byte_bpe_tokenizer(directory, chat_template=CHAT_TEMPLATE + OPENING)


async def replay(server: ServedTable, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the streamed choice and all entries of its logprobs."""
    raw = (await server.post(CHAT, **body, stream=True)).content
    *events, _ = sse_events(raw)
    parts: dict[str, str] = {}
    choice: dict[str, Any] = {}
    entries = []
    for event in events:
        (choice,) = json.loads(event)["choices"]
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        assert len(delta.keys() & {"reasoning", "content"}) == (delta != {})
        for name in delta.keys() - {"role"}:
            parts[name] = parts.get(name, "") + delta[name]
        entries += (choice["logprobs"] or {"content": []})["content"]
    message = {name: parts.get(name) or None for name in ("content", "reasoning")}
    return {"message": message, "finish_reason": choice["finish_reason"]}, entries


@pytest.mark.parametrize(
    ("script", "fields", "reasoning", "content", "num_tokens"),
    [
        ([ABC, END_THINK_ID, XYZ], {}, "abc", "xyz", 2),
        ([ABC, *CLOSING, XYZ], {}, "abc", "xyz", 3),
        ([THINK_ID, ABC, END_THINK_ID, XYZ], {}, "abc", "xyz", 3),
        ([ABC, END_THINK_ID, XYZ], {"max_tokens": 1}, "abc", None, 1),
        ([ABC, *CLOSING, XYZ], {"max_tokens": 2}, "abc</th", None, 2),
        ([XYZ], OFF, None, "xyz", 0),
    ],
)
async def test_c08_reasoning_and_content_in_both_modes(
    scripted: MakeSettings,
    opening_dir: Path,
    script: list[int],
    fields: dict[str, Any],
    reasoning: str | None,
    content: str | None,
    num_tokens: int,
) -> None:
    settings = scripted(script, server={"reasoning_parser": "qwen3"})
    settings.tokenizer_dir = opening_dir
    body = {"messages": HI, "temperature": 0, "logprobs": True, **fields}
    async with served(settings) as server:
        answer = (await server.post(CHAT, **body)).json()
        streamed, entries = await replay(server, body)
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }
    details = {"reasoning_tokens": num_tokens}
    assert answer["usage"]["completion_tokens_details"] == details
    assert streamed["message"] == {"content": content, "reasoning": reasoning}
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert entries == choice["logprobs"]["content"]


async def test_c08_the_usage_of_a_stream_counts_reasoning(
    scripted: MakeSettings, opening_dir: Path
) -> None:
    settings = scripted([ABC, END_THINK_ID, XYZ], server={"reasoning_parser": "deepseek_r1"})
    settings.tokenizer_dir = opening_dir
    body = {"messages": HI, "temperature": 0, "stream": True, "n": 2}
    async with served(settings) as server:
        options = {"include_usage": True}
        raw = (await server.post(CHAT, **body, stream_options=options)).content
    last = json.loads(sse_events(raw)[-2])
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


@pytest.mark.parametrize(("echo", "reasoning"), [(False, "abc"), (True, "so abc")])
async def test_c08_a_continued_message_goes_on_reasoning(
    scripted: MakeSettings, echo: bool, reasoning: str
) -> None:
    body = {
        "messages": [*HI, {"role": "assistant", "content": "<think>so "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "echo": echo,
        "temperature": 0,
    }
    settings = scripted([ABC, END_THINK_ID, XYZ], server={"reasoning_parser": "qwen3"})
    async with served(settings) as server:
        message = (await server.post(CHAT, **body)).json()["choices"][0]["message"]
        streamed, _ = await replay(server, body)
    assert (message["reasoning"], message["content"]) == (reasoning, "xyz")
    assert streamed["message"] == {"reasoning": reasoning, "content": "xyz"}


@pytest.mark.parametrize(
    ("script", "content", "num_tokens"),
    [([ABC, XYZ], "<think>so</think>", 0), ([ABC, END_THINK_ID, XYZ], "<think>so ", 2)],
)
async def test_an_echo_has_no_tokens_of_its_own(
    scripted: MakeSettings, script: list[int], content: str, num_tokens: int
) -> None:
    body = {
        "messages": [*HI, {"role": "assistant", "content": content}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "echo": True,
        "temperature": 0,
    }
    settings = scripted(script, server={"reasoning_parser": "qwen3"})
    async with served(settings) as server:
        usage = (await server.post(CHAT, **body)).json()["usage"]
        options = {"include_usage": True}
        raw = (await server.post(CHAT, **body, stream=True, stream_options=options)).content
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    assert json.loads(sse_events(raw)[-2])["usage"] == usage


RESPONSES = "/v1/responses"


def response_events(raw: bytes) -> list[dict[str, Any]]:
    blocks = raw.decode().removesuffix("\n\n").split("\n\n")
    return [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]


async def test_c08_a_response_has_an_item_of_reasoning(
    scripted: MakeSettings, opening_dir: Path
) -> None:
    settings = scripted([ABC, *CLOSING, XYZ], server={"reasoning_parser": "qwen3"})
    settings.tokenizer_dir = opening_dir
    body = {"input": "hi", "temperature": 0, "top_logprobs": 1}
    async with served(settings) as server:
        plain = (await server.post(RESPONSES, **body)).json()
        raw = (await server.post(RESPONSES, **body, stream=True)).content
    thought, message = plain["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "abc"}]
    assert (thought["type"], thought["status"], thought["summary"]) == (
        "reasoning",
        "completed",
        [],
    )
    assert message["content"][0]["text"] == "xyz"
    tokens = [entry["token"] for entry in message["content"][0]["logprobs"]]
    assert tokens == ["xyz", "<|eos|>"]
    assert plain["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}

    events = response_events(raw)
    kinds = [event["type"].removeprefix("response.") for event in events]
    kinds = [kind for place, kind in enumerate(kinds) if kind not in kinds[place - 1 : place]]
    item = ("output_item.added", "content_part.added")
    done = ("content_part.done", "output_item.done")
    assert kinds == [
        *("created", "in_progress"),
        *(*item, "reasoning_text.delta", "reasoning_text.done", *done),
        *(*item, "output_text.delta", "output_text.done", *done),
        "completed",
    ]
    completed = events[-1]["response"]
    for own, other in zip(plain["output"], completed["output"], strict=True):
        assert {**own, "id": None} == {**other, "id": None}
    finished = [event["item"] for event in events if event["type"].endswith("output_item.done")]
    assert finished == completed["output"]
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places)
    assert set(places) == {0, 1}
    assert completed["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


async def test_c08_a_response_cut_while_reasoning_has_no_message(
    scripted: MakeSettings, opening_dir: Path
) -> None:
    settings = scripted([ABC, END_THINK_ID, XYZ], server={"reasoning_parser": "qwen3"})
    settings.tokenizer_dir = opening_dir
    body = {"input": "hi", "temperature": 0, "max_output_tokens": 1}
    async with served(settings) as server:
        plain = (await server.post(RESPONSES, **body)).json()
        raw = (await server.post(RESPONSES, **body, stream=True)).content
    (thought,) = plain["output"]
    assert (plain["status"], thought["status"]) == ("incomplete", "incomplete")
    (streamed,) = response_events(raw)[-1]["response"]["output"]
    assert {**streamed, "id": thought["id"]} == thought
