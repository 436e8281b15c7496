"""Requests of every bad shape on every route: a clear refusal, and a server that is as before."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from whole_server import CHAT, COMPLETIONS, WholeServer, whole_server

from octavo.config.server import ServerConfig
from octavo.server.auth import OPEN_PATHS

KEY = {"Authorization": "Bearer k"}
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    RESPONSES: {"input": "a", "max_output_tokens": 2},
    EMBEDDINGS: {"input": "a"},
    TOKENIZE: {"prompt": "a"},
    DETOKENIZE: {"tokens": [97]},
}
"""A body that each route with a body takes."""
CANARY = {"prompt": "canary", "max_tokens": 4, "temperature": 0}
LONGEST_ANSWER_S = 10
"""The server promises two seconds; the rest is for the machines that run the tests."""


class Attacker:
    """Sends bad requests and asserts that each is refused and has no effect."""

    def __init__(self, server: WholeServer) -> None:
        self.server = server
        self.canary: str | None = None

    async def refuse(self, path: str, content: Any, status: int = 400) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        async with asyncio.timeout(LONGEST_ANSWER_S):
            response = await self.server.client.post(path, content=content, headers=headers)
        return check_error(response, status)

    async def check_alive(self) -> None:
        (text,) = await self.server.texts(**CANARY)
        self.canary = self.canary or text
        assert text == self.canary
        assert (await self.server.client.get("/health")).status_code == 200
        assert await self.server.is_idle()


def check_error(response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, (response.request.url, response.text[:300])
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) < 16 * 1024
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    if code is not None:
        assert error["code"] == code
    return error


def nested(levels: int, opening: str, inner: str, closing: str) -> bytes:
    return (opening * levels + inner + closing * levels).encode()


def deep(path: str, value: bytes) -> Iterator[bytes]:
    """The value as the whole body, and as a field of a good one."""
    yield value
    for name in ("metadata", "model", "chat_template_kwargs", "stop", *GOOD[path]):
        yield b'{"%b": %b}' % (name.encode(), value)


def huge_bodies(path: str) -> Iterator[bytes]:
    good = json.dumps(GOOD[path])[1:-1]
    yield from deep(path, nested(20_000, "[", "1", "]"))
    yield from deep(path, nested(20_000, '{"a":', "1", "}"))
    yield b"[" * 20_000
    yield b'{"a":' * 20_000
    for number in ("1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "1e-", "0x10", "01"):
        yield f'{{{good}, "temperature": {number}}}'.encode()
    for name in GOOD[path]:
        yield f'{{"{name}": {"9" * 5000}}}'.encode()
        yield f'{{"{name}": {json.dumps(["x", 1] * 100_000)}}}'.encode()
        yield f'{{"{name}": {json.dumps([None] * 300_000)}}}'.encode()
        yield f'{{"{name}": {json.dumps({str(i): i for i in range(50_000)})}}}'.encode()
    yield f'{{{good}, "model": {json.dumps("m" * 1_000_000)}}}'.encode()
    yield b'{"prompt": "\xff\xfe"}'
    yield b""
    yield b"null"
    yield b'"' + b"x" * 1_000_000 + b'"'


@pytest.mark.parametrize("path", GOOD)
async def test_huge_and_deep_bodies(random_llama_dir: Path, path: str) -> None:
    async with whole_server(random_llama_dir) as server:
        attacker = Attacker(server)
        await attacker.check_alive()
        for body in huge_bodies(path):
            response_status = 404 if b'"model": "mmm' in body else 400
            if path in (TOKENIZE, DETOKENIZE, EMBEDDINGS) and b'"temperature"' in body[-6000:]:
                continue  # not a field of theirs
            await attacker.refuse(path, body, response_status)
        await attacker.check_alive()


WRONG_MESSAGES: list[Any] = [
    {"role": "user"},
    {"role": "user", "content": 1},
    {"role": "banana", "content": "x"},
    {"content": "x"},
    {"role": "user", "content": [{"type": "image_url"}] * 5},
    {"role": "assistant", "tool_calls": [{"function": {"arguments": 1}}]},
    {"role": "tool", "content": "x"},
    1,
    None,
    [],
    "user",
]


@pytest.mark.parametrize("path", [CHAT, TOKENIZE, RESPONSES])
async def test_5000_wrong_messages(random_llama_dir: Path, path: str) -> None:
    name = "input" if path == RESPONSES else "messages"
    async with whole_server(random_llama_dir) as server:
        attacker = Attacker(server)
        for message in WRONG_MESSAGES:
            body = json.dumps({name: [message] * 5000}).encode()
            assert (await attacker.refuse(path, body))["param"] == name
        await attacker.check_alive()


@pytest.mark.parametrize("path", GOOD)
async def test_100_megabytes_are_refused_while_they_are_read(
    random_llama_dir: Path, path: str
) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        piece = b" " * 2**20
        for _ in range(100):
            sent += len(piece)
            yield piece

    async with whole_server(random_llama_dir) as server:
        attacker = Attacker(server)
        error = await attacker.refuse(path, body(), 413)
        assert error["code"] == "request_too_large"
        assert sent <= ServerConfig().max_body_size + 2**20
        await attacker.check_alive()


LONE = '"\\ud800"'
PARTS = '[{"type": "text", "text": %s}]'
CALL = '{"id": "c", "type": "function", "function": {"name": %s, "arguments": %s}}'
SURROGATES = {
    COMPLETIONS: (
        *('{"prompt": %s}', '{"prompt": ["a", %s]}', '{"prompt": "a", "model": %s}'),
        *('{"prompt": "a", "stop": %s}', '{"prompt": "a", "stop": ["b", %s]}'),
        *('{"prompt": "a", "user": %s}', '{"prompt": "a", "bad_words": [%s]}'),
        *('{"prompt": "a", "cache_salt": %s}', '{"prompt": "a", "unheard_of": %s}'),
        *('{"prompt": "a", %s: 1}', '{"prompt": "a", "request_id": %s}'),
    ),
    CHAT: (
        '{"messages": [{"role": "user", "content": %s}]}',
        '{"messages": [{"role": "user", "content": ' + PARTS + "}]}",
        '{"messages": [{"role": "user", "content": "a", "name": %s}]}',
        '{"messages": [{"role": %s, "content": "a"}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [' + CALL % ("%s", '"{}"') + "]}]}",
        '{"messages": [{"role": "assistant", "tool_calls": [' + CALL % ('"f"', "%s") + "]}]}",
        '{"messages": [{"role": "tool", "tool_call_id": %s, "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": %s}}',
        '{"messages": [{"role": "user", "content": "a"}], "stop": %s}',
        '{"messages": [{"role": "user", "content": "a"}], "model": %s}',
        '{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", '
        '"function": {"name": "f", "description": %s}}]}',
        '{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": '
        '"json_schema", "json_schema": {"name": "s", "schema": {"title": %s}}}}',
    ),
    RESPONSES: ('{"input": %s}', '{"input": "a", "instructions": %s}'),
    EMBEDDINGS: ('{"input": %s}', '{"input": ["a", %s]}'),
    TOKENIZE: ('{"prompt": %s}', '{"messages": [{"role": "user", "content": %s}]}'),
    DETOKENIZE: ('{"tokens": [1], "model": %s}',),
}


@pytest.mark.parametrize("path", SURROGATES)
async def test_b07_lone_surrogates_in_all_fields(random_llama_dir: Path, path: str) -> None:
    async with whole_server(random_llama_dir) as server:
        attacker = Attacker(server)
        for shape in SURROGATES[path]:
            for streamed in (False, True):
                body = (shape % LONE)[:-1] + f', "stream": {json.dumps(streamed)}}}'
                await attacker.refuse(path, body.encode())
        # Inside the JSON text of arguments the escape comes out only in the template.
        arguments = json.dumps('{"a": "\\ud800"}')
        call = CALL % ('"f"', arguments)
        for template in (None, "{{ messages[0].tool_calls[0].function.arguments['a'] }}"):
            if path == CHAT and template is None:
                raw = f'{{"messages": [{{"role": "assistant", "tool_calls": [{call}]}}]}}'
                response = await server.client.post(CHAT, json=json.loads(raw))
                assert response.status_code in (200, 400)
        await attacker.check_alive()


async def test_b07_valid_pairs_and_zero(random_llama_dir: Path) -> None:
    async with whole_server(random_llama_dir) as server:
        for path, shapes in SURROGATES.items():
            if path in (COMPLETIONS, EMBEDDINGS, TOKENIZE):
                for text in ("\U0001f600", "ab\0cd"):
                    body = shapes[0] % json.dumps(text)
                    response = await server.client.post(path, json=json.loads(body))
                    assert response.status_code == 200, response.text
        short, long = [await server.tokens_of(prompt=text) for text in ("ab", "ab\0cd")]
        assert len(long) > len(short)


WRONG: list[Any] = [
    *([], {}, "", "x", "\0", -1, 0, 1, 1.5, 2**31, 2**63, 10**30, True, False),
    *([None], [[]], [0], [-1], ["x"], [1.5], [{}], {"a": None}, {"": []}, {"type": "x"}, [[1]]),
]
"""Values that hardly any field takes all of."""
_FRUGAL = {"n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens"}


@pytest.mark.parametrize("path", GOOD)
async def test_every_field_with_values_of_every_type(random_llama_dir: Path, path: str) -> None:
    async with whole_server(random_llama_dir) as server:
        attacker = Attacker(server)
        document = (await server.client.get("/openapi.json")).json()
        content = document["paths"][path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]
        names = {
            name
            for choice in schema.get("anyOf", [schema])
            for name in choice.get("properties", ())
        }
        assert len(names) > 1
        seen = set()
        for name in sorted(names):
            for value in WRONG:
                body = GOOD[path] | {name: value}
                async with asyncio.timeout(LONGEST_ANSWER_S):
                    response = await server.client.post(path, json=body)
                seen.add(response.status_code)
                if response.status_code != 200:
                    check_error(
                        response, 404 if name == "model" and isinstance(value, str) else 400
                    )
        assert seen >= {200, 400}
        await attacker.check_alive()


async def test_what_no_context_holds_is_refused_without_work(random_llama_dir: Path) -> None:
    text = "word " * 2_000_000
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = [{"role": "assistant", "tool_calls": [call] * 100_000}]
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        (TOKENIZE, "prompt", {"prompt": text}),
        (DETOKENIZE, "tokens", {"tokens": [97] * 1_000_000}),
        (COMPLETIONS, "prompt", {"prompt": text}),
        (COMPLETIONS, "prompt", {"prompt": [97] * 1_000_000}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": text}]}),
        (CHAT, "messages", {"messages": GOOD[CHAT]["messages"] * 100_000}),
        (CHAT, "messages", {"messages": GOOD[CHAT]["messages"] + calls}),
        (EMBEDDINGS, "input", {"input": text}),
    ]
    async with whole_server(random_llama_dir) as server:
        attacker = Attacker(server)
        for path, param, body in bodies:
            error = await attacker.refuse(path, json.dumps(body).encode())
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        await attacker.check_alive()


async def test_random_bytes(random_llama_dir: Path) -> None:
    generator = random.Random(11)
    async with whole_server(random_llama_dir) as server:
        attacker = Attacker(server)
        for path, good in GOOD.items():
            whole = json.dumps(good).encode()
            for _ in range(40):
                place = generator.randrange(len(whole))
                cut = whole[:place] + generator.randbytes(3) + whole[place + 1 :]
                headers = {"content-type": "application/json"}
                response = await server.client.post(path, content=cut, headers=headers)
                if response.status_code != 200:
                    check_error(response, response.status_code)
                    assert response.status_code in (400, 404)
        await attacker.check_alive()


async def test_every_route_and_every_status(random_llama_dir: Path) -> None:
    """What holds for all routes is asked of the application's own list of them."""
    async with whole_server(random_llama_dir, api_key=("k",), max_body_size=1000) as server:
        client = server.client
        document = (await client.get("/openapi.json", headers=KEY)).json()
        assert GOOD.keys() <= document["paths"].keys()
        for path, methods in document["paths"].items():
            url = path.replace("{model_id}", "M")
            for method in methods:
                bare = await client.request(method, url)
                if path not in OPEN_PATHS:
                    check_error(bare, 401, "invalid_api_key")
                    assert bare.headers["www-authenticate"] == "Bearer"
            wrong = await client.request("PATCH", url, headers=KEY)
            check_error(wrong, 405, "method_not_allowed")
            assert wrong.headers["allow"]
        for path, good in GOOD.items():
            check_error(
                await client.post(path, content=json.dumps(good), headers=KEY),
                415,
                "unsupported_media_type",
            )
            large = await client.post(path, json=good | {"user": "u" * 2000}, headers=KEY)
            check_error(large, 413, "request_too_large")
            check_error(await client.post(path, json=[], headers=KEY), 400)
            unknown = await client.post(path, json=good | {"model": "nope"}, headers=KEY)
            error = check_error(unknown, 404, "model_not_found")
            assert error["param"] == "model"
            assert "nope" in error["message"]
        check_error(await client.get("/v1/nothing", headers=KEY), 404, "not_found")
        check_error(await client.get("/v1/models/nope", headers=KEY), 404, "model_not_found")
