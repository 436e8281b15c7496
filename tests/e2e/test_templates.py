"""Messages of every shape through the whole server, on templates of different kinds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo_fixtures import CHAT_TEMPLATE
from whole_server import CHAT, WholeServer, whole_server

MakeMarkov = Callable[..., Path]

PARTS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}[{{ part['text'] }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ message['content'].split('x')[0] }}{% endfor %}"
)
TEMPLATES = {"string": CHAT_TEMPLATE, "parts": PARTS_TEMPLATE}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def history(role: str, content: Any) -> list[dict[str, Any]]:
    """A conversation in which one message of this role has this content."""
    user = {"role": "user", "content": "q"}
    if role == "user":
        return [{"role": "user", "content": content}]
    if role == "system":
        return [{"role": "system", "content": content}, user]
    answer = {"role": "assistant", "content": content}
    if role == "assistant":
        return [user, answer, user]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [user, asked, {"role": "tool", "tool_call_id": "c1", "content": content}]


async def prompt_of(server: WholeServer, messages: list[dict[str, Any]], **fields: Any) -> str:
    tokens = await server.tokens_of(messages=messages, **fields)
    text: str = (await server.post("/detokenize", tokens=tokens))["prompt"]
    return text


@pytest.mark.parametrize("kind", TEMPLATES)
async def test_c04_content_as_parts(markov_dir: MakeMarkov, kind: str) -> None:
    async with whole_server(markov_dir(chat_template=TEMPLATES[kind])) as server:
        for role in ("user", "system", "assistant", "tool"):
            plain = await prompt_of(server, history(role, "Hello"))
            assert await prompt_of(server, history(role, [part("Hello")])) == plain
            two = await prompt_of(server, history(role, [part("Hello"), part("World")]))
            assert ("Hello\nWorld" if kind == "string" else "[Hello][World]") in two
        same = [
            await server.post(CHAT, messages=history("user", content), temperature=0, max_tokens=4)
            for content in ("Hello", [part("Hello")])
        ]
        assert same[0]["choices"] == same[1]["choices"]
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        for bad in (image, {"type": "text"}, {"type": "smell", "text": "x"}, {}):
            error = await server.refused(CHAT, messages=history("user", [bad]))
            assert error["param"] == "messages"


@pytest.mark.parametrize("kind", TEMPLATES)
async def test_b10_b14_turns_of_every_role(markov_dir: MakeMarkov, kind: str) -> None:
    user = {"role": "user", "content": "q"}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    tool = {"role": "tool", "tool_call_id": "c1", "content": "10"}
    async with whole_server(markov_dir(chat_template=TEMPLATES[kind])) as server:
        counts = []
        for content in ({}, {"content": None}, {"content": []}, {"content": ""}):
            asked = {"role": "assistant", "tool_calls": [call], **content}
            messages = [user, asked, tool]
            counts.append((await server.post(CHAT, messages=messages, max_tokens=1))["usage"])
        assert len({usage["prompt_tokens"] for usage in counts[:3]}) == 1
        empty = {"role": "assistant", "content": ""}
        await server.post(CHAT, messages=[user, empty, user], max_tokens=1)
        developer, system = [
            await server.post(
                CHAT,
                messages=[{"role": role, "content": "Answer BANANA only"}, user],
                temperature=0,
                max_tokens=4,
            )
            for role in ("developer", "system")
        ]
        assert developer["choices"] == system["choices"]
        middle = [user, {"role": "system", "content": "KEEP ME"}, user]
        assert "KEEP ME" in await prompt_of(server, middle)
        for bad in ({"role": "user"}, {"role": "banana", "content": "x"}, {"content": "x"}):
            assert (await server.refused(CHAT, messages=[bad]))["param"] == "messages"


@pytest.mark.parametrize("streamed", [False, True])
async def test_c03_template_errors_are_the_clients(markov_dir: MakeMarkov, streamed: bool) -> None:
    user = {"role": "user", "content": "a"}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    async with whole_server(markov_dir(chat_template=ALTERNATING)) as server:
        error = await server.refused(CHAT, messages=[user, user], stream=streamed)
        assert "Roles must alternate" in error["message"]
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        response = await server.client.post(
            CHAT, json={"messages": [user, asked, user], "stream": streamed, "max_tokens": 1}
        )
        assert response.status_code in (200, 400)
    async with whole_server(markov_dir(chat_template=None)) as server:
        error = await server.refused(CHAT, messages=[user], stream=streamed)
        assert "no chat template" in error["message"]


def arguments_template(expression: str) -> str:
    return (
        "{% for message in messages %}{% for call in message.get('tool_calls') or [] %}"
        f"{expression}"
        "{% endfor %}{{ message['content'] or '' }}|{% endfor %}"
    )


ARGUMENTS = {
    "items": "{% for name, value in call.function.arguments|items %}{{ name }}={{ value }};"
    "{% endfor %}",
    "tojson": "{{ call.function.arguments|tojson }}",
    "text": "{{ '<' + call.function.arguments + '>' }}",
}
RENDERED = {
    "items": ("city=Paris;", ""),
    "tojson": ('{"city": "Paris"}', "{}"),
    "text": ('<{"city":"Paris"}>', "<{}>"),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
async def test_c06_arguments_of_past_calls(markov_dir: MakeMarkov, kind: str) -> None:
    def messages(arguments: str) -> list[dict[str, Any]]:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        user = {"role": "user", "content": "q"}
        tool = {"role": "tool", "tool_call_id": "c1", "content": "10"}
        return [user, {"role": "assistant", "tool_calls": [call]}, tool]

    template = arguments_template(ARGUMENTS[kind])
    async with whole_server(markov_dir(chat_template=template)) as server:
        full, empty = RENDERED[kind]
        paris = json.dumps({"city": "Paris"}, separators=(",", ":"))
        assert await prompt_of(server, messages(paris)) == f"q|{full}|10|"
        assert await prompt_of(server, messages("")) == f"q|{empty}|10|"
        for broken in ("{", "[1]", '"x"', "1e999", '{"a": NaN}'):
            error = await server.refused(CHAT, messages=messages(broken))
            assert error["param"] == "messages"
            assert "arguments" in error["message"]
