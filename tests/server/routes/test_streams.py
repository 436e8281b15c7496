"""Streams of both routes: their chunks, and that they say the same as the plain answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo_fixtures import (
    EOS_ID,
    make_byte_bpe_tokenizer,
    make_spm_tokenizer,
    random_table,
    token_id,
)
from octavo_serving import ServedTable, TableSettings, served, sse_events

MakeSettings = Callable[..., TableSettings]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
SPLIT = [0xF0, 0x9F, 0xA7, 0xA1, 0xC4, 0x8F, token_id("ok")]
"""A heart and a d with caron, byte by byte, and one whole token; then the end."""


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return {"messages": HI, **fields} if path == CHAT else {"prompt": "a", **fields}


async def stream(server: ServedTable, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream; asserts what holds for all of them."""
    response = await server.post(path, **body_of(path, **fields), stream=True)
    assert response.status_code == 200, response.text
    *events, done = sse_events(response.content)
    assert done == "[DONE]"
    chunks: list[dict[str, Any]] = [json.loads(event) for event in events]
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert {chunk["object"] for chunk in chunks} == {kind}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    return chunks


async def plain(server: ServedTable, path: str, **fields: Any) -> dict[str, Any]:
    response = await server.post(path, **body_of(path, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


class Replay:
    """What a client puts together from a stream, choice by choice."""

    def __init__(self, chunks: list[dict[str, Any]]) -> None:
        self.texts: dict[int, str] = {}
        self.finish: dict[int, tuple[str, Any]] = {}
        self.usage: dict[str, Any] | None = None
        for chunk in chunks:
            if not chunk["choices"]:
                self.usage = chunk["usage"]
                continue
            (choice,) = chunk["choices"]
            self._add(choice)

    def _add(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        assert index not in self.finish, "a chunk after the last one"
        assert "logprobs" in choice
        if "delta" in choice:
            assert ("role" in choice["delta"]) == (index not in self.texts)
            text = choice["delta"].get("content", "")
            assert choice["finish_reason"] is None or choice["delta"] == {}
        else:
            text = choice["text"]
        self.texts[index] = self.texts.get(index, "") + text
        if choice["finish_reason"] is not None:
            self.finish[index] = (choice["finish_reason"], choice["stop_reason"])


def texts_of(answer: dict[str, Any]) -> dict[int, str]:
    return {
        choice["index"]: choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in answer["choices"]
    }


def finish_of(answer: dict[str, Any]) -> dict[int, tuple[str, Any]]:
    return {
        choice["index"]: (choice["finish_reason"], choice["stop_reason"])
        for choice in answer["choices"]
    }


async def check_same(server: ServedTable, path: str, **fields: Any) -> Replay:
    """Assert that stream and plain answer agree; returns what the stream gave."""
    answer = await plain(server, path, **fields)
    chunks = await stream(server, path, **fields, stream_options={"include_usage": True})
    replay = Replay(chunks)
    assert replay.texts == texts_of(answer)
    assert replay.finish == finish_of(answer)
    # The prefix cache may have served the second request.
    for usage in (answer["usage"], replay.usage):
        assert usage is not None
        usage.pop("prompt_tokens_details")
    assert replay.usage == answer["usage"]
    return replay


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a01_split_character(scripted: MakeSettings, path: str) -> None:
    async with served(scripted(SPLIT)) as server:
        replay = await check_same(server, path, max_tokens=20, temperature=0)
        assert replay.texts == {0: "🧡ďok"}
        assert replay.finish == {0: ("stop", None)}
        assert replay.usage is not None
        assert replay.usage["completion_tokens"] == len(SPLIT) + 1
        raw = await server.post(path, **body_of(path, max_tokens=20, temperature=0, stream=True))
        assert b"\xef\xbf\xbd" not in raw.content
        assert b"\\ufffd" not in raw.content


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("include", [False, True])
async def test_a04_stop_string_over_several_tokens(
    scripted: MakeSettings, path: str, include: bool
) -> None:
    script = [token_id(text) for text in ("xy", "alpha ", "beta", " gam", "ma", " delta")]
    async with served(scripted(script)) as server:
        replay = await check_same(
            server,
            path,
            **{"max_tokens": 20, "temperature": 0, "stop": ["beta gamma"]},
            include_stop_str_in_output=include,
        )
        assert replay.texts == {0: "xyalpha beta gamma" if include else "xyalpha "}
        assert replay.finish == {0: ("stop", "beta gamma")}
        assert replay.usage is not None
        assert replay.usage["completion_tokens"] == 5


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_a07_usage_chunk(
    scripted: MakeSettings, path: str, options: dict[str, Any] | None
) -> None:
    async with served(scripted(SPLIT)) as server:
        chunks = await stream(server, path, temperature=0, max_tokens=20, stream_options=options)
        *others, last = chunks
        if options and options["include_usage"]:
            assert last["choices"] == []
            assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
            assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
        else:
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_continuous_usage(scripted: MakeSettings, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with served(scripted(SPLIT)) as server:
        chunks = await stream(server, path, temperature=0, max_tokens=20, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == len(SPLIT) + 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a08_several_choices_of_different_length(drawn: MakeSettings, path: str) -> None:
    table = random_table(spread=0.5)
    table[:, EOS_ID] = 4  # each token has a fair chance to be the last
    async with served(drawn(table)) as server:
        fields = {"n": 8, "max_tokens": 5, "temperature": 1, "seed": 1}
        replay = await check_same(server, path, **fields)
        assert set(replay.finish) == set(range(8))
        assert len({reason for reason, _ in replay.finish.values()}) == 2


async def test_a08_the_role_comes_first_for_each_choice(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        chunks = await stream(server, CHAT, n=3, max_tokens=3, temperature=1, seed=1)
        first: dict[int, Any] = {}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            first.setdefault(choice["index"], choice)
        for choice in first.values():
            assert choice["delta"] == {"role": "assistant", "content": ""}
            assert choice["finish_reason"] is None


async def test_chunks_byte_for_byte(scripted: MakeSettings) -> None:
    async with served(scripted([token_id("ok")])) as server:
        response = await server.post(
            CHAT,
            **{"messages": HI, "temperature": 0, "stream": True},
            stream_options={"include_usage": True},
        )
        first, second, third, usage, done = sse_events(response.content)
        head = first[: first.index(',"choices"')]
        assert first == head + (
            ',"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
            '"finish_reason":null}],"usage":null}'
        )
        assert second == head + (
            ',"choices":[{"index":0,"delta":{"content":"ok"},"logprobs":null,'
            '"finish_reason":null}],"usage":null}'
        )
        assert third == head + (
            ',"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop",'
            '"stop_reason":null}],"usage":null}'
        )
        assert usage == head + (
            ',"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,'
            '"prompt_tokens_details":{"cached_tokens":0},'
            '"completion_tokens_details":{"reasoning_tokens":0}}}'
        )
        assert done == "[DONE]"


@pytest.mark.parametrize("top", [0, 3])
async def test_a10_echo_with_logprobs(drawn: MakeSettings, top: int) -> None:
    fields = {"prompt": "Warsaw is", "echo": True, "logprobs": top, "max_tokens": 5}
    table = random_table()
    table[:, 128:256] = -50  # no halves of characters
    async with served(drawn(table)) as server:
        answer = await plain(server, COMPLETIONS, **fields, temperature=0)
        (choice,) = answer["choices"]
        logprobs, usage = choice["logprobs"], answer["usage"]
        tokens = logprobs["tokens"]
        assert choice["text"].startswith("Warsaw is")
        assert "".join(tokens) == choice["text"]
        assert len(tokens) == usage["prompt_tokens"] + usage["completion_tokens"]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]

        chunks = await stream(server, COMPLETIONS, **fields, temperature=0)
        joined: dict[str, list[Any]] = {name: [] for name in logprobs}
        for chunk in chunks:
            for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
                joined[name] += values
        assert joined == logprobs


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("kind", ["spm", "byte_bpe"])
async def test_a10_tokens_join_to_the_echo(tmp_path: Path, kind: str, add_bos: bool) -> None:
    make = {"spm": make_spm_tokenizer, "byte_bpe": make_byte_bpe_tokenizer}[kind]
    table = random_table()
    table[:, :256] = -50
    async with served(TableSettings(make(tmp_path, add_bos=add_bos), table)) as server:
        for prompt in ("hello world", "  hello"):
            # The end tokens of the table are ordinary text in some of these vocabularies.
            fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 4}
            answer = await plain(server, COMPLETIONS, **fields, ignore_eos=True)
            (choice,) = answer["choices"]
            tokens = choice["logprobs"]["tokens"]
            assert choice["text"].startswith(prompt)
            assert "".join(tokens) == choice["text"]
            offsets = choice["logprobs"]["text_offset"]
            assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_line_separators_are_escaped(scripted: MakeSettings, path: str) -> None:
    text = "\u2028\x85"
    async with served(scripted(list(text.encode()))) as server:
        fields = {"temperature": 0, "logprobs": True if path == CHAT else 1}
        response = await server.post(path, **body_of(path, stream=True, **fields))
        assert len(response.text.splitlines()) == len(response.content.split(b"\n")) - 1
        replay = await check_same(server, path, **fields)
        assert replay.texts == {0: text}


async def test_d01_streamed_chat_logprobs_equal_the_plain_ones(drawn: MakeSettings) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6, "seed": 5, "n": 2}
    async with served(drawn()) as server:
        answer = await plain(server, CHAT, **fields)
        chunks = await stream(server, CHAT, **fields)
        for choice in answer["choices"]:
            parts = [
                chunk["choices"][0]["logprobs"]["content"]
                for chunk in chunks
                if chunk["choices"][0]["index"] == choice["index"]
                and chunk["choices"][0]["logprobs"] is not None
            ]
            assert [entry for part in parts for entry in part] == choice["logprobs"]["content"]
            assert len(choice["logprobs"]["content"]) == 6


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_token_ids_in_stream_and_answer(scripted: MakeSettings, path: str) -> None:
    async with served(scripted(SPLIT)) as server:
        fields = {"return_token_ids": True, "temperature": 0, "max_tokens": 20}
        answer = await plain(server, path, **fields)
        chunks = await stream(server, path, **fields)
        holder = answer if path == CHAT else answer["choices"][0]
        firsts = [chunk if path == CHAT else chunk["choices"][0] for chunk in chunks]
        ids = [chunk["choices"][0].get("token_ids", []) for chunk in chunks]
        assert [i for part in ids for i in part] == [*SPLIT, EOS_ID]
        assert answer["choices"][0]["token_ids"] == [*SPLIT, EOS_ID]
        assert firsts[0]["prompt_token_ids"] == holder["prompt_token_ids"]
        assert not any("prompt_token_ids" in first for first in firsts[1:])


async def test_a_batch_is_numbered_prompt_by_prompt(drawn: MakeSettings) -> None:
    prompts = {"prompt": ["a", "b", ""], "n": 2, "max_tokens": 4, "temperature": 0}
    async with served(drawn()) as server:
        replay = await check_same(server, COMPLETIONS, **prompts)
        assert list(sorted(replay.texts)) == list(range(6))
        for number, prompt in enumerate(("a", "b", "")):
            alone = await plain(server, COMPLETIONS, prompt=prompt, max_tokens=4, temperature=0)
            text = alone["choices"][0]["text"]
            assert replay.texts[2 * number] == replay.texts[2 * number + 1] == text
        assert replay.usage is not None
        assert replay.usage["prompt_tokens"] == 3
        assert replay.usage["completion_tokens"] == 24


async def test_echo_without_logprobs_leads_each_choice(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        replay = await check_same(
            server, COMPLETIONS, prompt=[[97], [97, 98]], n=2, echo=True, max_tokens=2, seed=1
        )
        starts = [text[: 1 + place // 2] for place, text in sorted(replay.texts.items())]
        assert starts == ["a", "a", "ab", "ab"]


async def test_continued_message_in_chat(scripted: MakeSettings) -> None:
    messages = [*HI, {"role": "assistant", "content": "x y"}]
    fields = {"messages": messages, "add_generation_prompt": False, "temperature": 0}
    async with served(scripted([token_id("ok")])) as server:
        new = await check_same(server, CHAT, **fields, continue_final_message=True)
        assert new.texts == {0: "ok"}
        whole = await check_same(server, CHAT, **fields, continue_final_message=True, echo=True)
        assert whole.texts == {0: "x yok"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_interval_of_a_stream_joins_its_tokens(drawn: MakeSettings, path: str) -> None:
    fields = {"n": 2, "max_tokens": 17, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    async with served(drawn(server={"stream_interval": 8})) as server:
        await check_same(server, path, **fields)
        for index in (0, 1):
            chunks = [
                chunk["choices"][0]["token_ids"]
                for chunk in await stream(server, path, **fields)
                if chunk["choices"][0]["index"] == index and chunk["choices"][0].get("token_ids")
            ]
            # Both wake the reader: the first token of each choice, each eighth, and the last.
            assert sum(map(len, chunks)) == 17
            assert len(chunks) <= 6
