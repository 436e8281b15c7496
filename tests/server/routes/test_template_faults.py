"""Which field is to blame when a conversation cannot become a prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from octavo_fixtures import make_byte_bpe_tokenizer, random_table
from octavo_serving import TableSettings, served

MakeSettings = Callable[..., TableSettings]

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def check_error(response: httpx.Response, param: str) -> str:
    """Assert that the request was refused for this field; returns the message."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    return str(error["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"documents": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"documents": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"count": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"count": 1}, "reasoning_effort": "max"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "bad"}]}, "messages"),
        (
            {
                "messages": [{"role": "user", "content": "bad"}],
                "chat_template_kwargs": {"count": 1},
            },
            "messages",
        ),
    ],
)
async def test_a_template_that_fails_names_the_field_at_fault(
    drawn: MakeSettings, fields: dict[str, Any], param: str
) -> None:
    template = (
        "{{ count + 1 }}{{ messages[0].content }}"
        "{% if reasoning_effort == 'max' %}{{ raise_exception('no such effort') }}{% endif %}"
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no such words') }}{% endif %}"
    )
    settings = drawn(
        server={
            "trust_request_chat_template": True,
            "default_chat_template_kwargs": {"count": 0},
        }
    )
    async with served(settings) as server:
        body = {"messages": HI, "chat_template": template} | fields
        for path in (CHAT, "/tokenize"):
            if path == CHAT or param != "reasoning_effort":
                message = check_error(await server.post(path, **body), param)
                assert ("words" in message) == (param == "messages")
                assert (param in message) == (param != "messages")
        assert await server.is_alive()


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": HI}])
async def test_tokenize_takes_either_a_prompt_or_messages(
    drawn: MakeSettings, fields: dict[str, Any]
) -> None:
    async with served(drawn()) as server:
        message = check_error(await server.post("/tokenize", **fields), "prompt")
        assert "`prompt` and `messages`" in message


async def test_a_response_calls_the_effort_by_its_own_name(tmp_path: Path) -> None:
    template = "{% if reasoning_effort %}{{ raise_exception('no efforts') }}{% endif %}"
    tokenizer_dir = make_byte_bpe_tokenizer(tmp_path, chat_template=template)
    async with served(TableSettings(tokenizer_dir, random_table())) as server:
        body = {"input": "hi", "reasoning": {"effort": "low"}}
        message = check_error(await server.post("/v1/responses", **body), "reasoning")
        assert "`reasoning` the chat template fails: no efforts" in message
