"""How tokens are written: special ones in the text, all of them in logprobs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo_fixtures import make_word_tokenizer, script_table
from octavo_serving import ServedTable, TableSettings, served, sse_events

MakeSettings = Callable[..., TableSettings]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "one"},
    CHAT: {"messages": [{"role": "user", "content": "one"}]},
}
UNK, BOS, EOS, ONE, TWO, THREE = range(6)


async def choices(server: ServedTable, path: str, streamed: bool, **fields: Any) -> list[Any]:
    """The one choice of a plain answer, or its pieces in the chunks of a stream."""
    response = await server.post(path, **PROMPTS[path], **fields, stream=streamed)
    assert response.status_code == 200, response.text
    if not streamed:
        return list(response.json()["choices"])
    return [json.loads(event)["choices"][0] for event in sse_events(response.content)[:-1]]


def text_of(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


def tokens_of(choice: dict[str, Any]) -> list[str]:
    """All that stands for a token in the logprobs of a choice."""
    logprobs = choice["logprobs"]
    if logprobs is None:
        return []
    if "content" not in logprobs:
        names = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
        return [name for token, top in names for name in (token, *top)]
    return [
        entry["token"]
        for record in logprobs["content"]
        for entry in (record, *record["top_logprobs"])
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "</s> <unk> two <s> three"),
        ({"spaces_between_special_tokens": True}, "</s> <unk> two <s> three"),
        ({"spaces_between_special_tokens": False}, "</s><unk> two <s> three"),
        ({"spaces_between_special_tokens": False, "skip_special_tokens": True}, "two three"),
    ],
)
async def test_spaces_between_special_tokens(
    tmp_path: Path, path: str, streamed: bool, fields: dict[str, Any], expected: str
) -> None:
    table = script_table([EOS, UNK, TWO, BOS, THREE])
    async with served(TableSettings(make_word_tokenizer(tmp_path), table)) as server:
        given = {"skip_special_tokens": False, "temperature": 0, "max_tokens": 9} | fields
        text = "".join(map(text_of, await choices(server, path, streamed, **given)))
        assert text.strip() == expected


async def test_an_echo_has_no_spaces_between_special_tokens_either(tmp_path: Path) -> None:
    async with served(
        TableSettings(make_word_tokenizer(tmp_path), script_table([TWO, BOS]))
    ) as server:
        fields = {"prompt": [UNK, BOS, ONE], "echo": True, "skip_special_tokens": False}
        fields |= {"max_tokens": 2, "temperature": 0}
        texts = [
            (await server.post(COMPLETIONS, **fields, spaces_between_special_tokens=spaces)).json()
            for spaces in (True, False)
        ]
    assert [answer["choices"][0]["text"] for answer in texts] == [
        "<unk> <s> one two <s>",
        "<unk><s> one two <s>",
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("of_server", "of_request", "expected"),
    [(False, True, True), (True, None, True), (True, False, False), (False, None, False)],
)
async def test_tokens_as_token_ids(
    drawn: MakeSettings,
    path: str,
    streamed: bool,
    of_server: bool,
    of_request: bool | None,
    expected: bool,
) -> None:
    fields: dict[str, Any] = {"return_tokens_as_token_ids": of_request, "return_token_ids": True}
    fields |= {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    fields |= {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    async with served(drawn(server={"return_tokens_as_token_ids": of_server})) as server:
        found = await choices(server, path, streamed, **fields)
    ids = [token_id for choice in found for token_id in choice.get("token_ids", [])]
    names = [name for choice in found for name in tokens_of(choice)]
    assert len(names) == 15  # of each of five tokens itself and the best two
    assert all(name.startswith("token_id:") for name in names) == expected
    if expected:
        # At temperature 0 the best one is the token itself.
        assert names[::3] == names[1::3] == [f"token_id:{token_id}" for token_id in ids]
