"""Bad and borderline requests on both routes; after each the server is as it was."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from octavo_fixtures import BOS_ID, random_table, token_id
from octavo_serving import ServedTable, TableSettings, served

from octavo.server.generation import PromptEncoder
from octavo.server.protocol.completion import CompletionRequest

MakeSettings = Callable[..., TableSettings]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ROUTES = [COMPLETIONS, CHAT]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return {"messages": HI, **fields} if path == CHAT else {"prompt": "a", **fields}


def check_error(
    response: httpx.Response,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
) -> str:
    """Assert the form of an error; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) < 16 * 1024
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert "Traceback" not in error["message"]
    message: str = error["message"]
    assert message
    return message


async def check_refused(server: ServedTable, path: str, param: str | None, **fields: Any) -> str:
    """Assert the same 400 with and without stream, and that nothing is left over."""
    messages = [
        check_error(await server.post(path, **body_of(path, **fields), **extra), 400, param)
        for extra in ({}, {"stream": True})
    ]
    assert messages[0] == messages[1]
    assert await server.is_alive()
    return messages[0]


@pytest.mark.parametrize(
    ("value", "tokens"), [(None, 16), ("absent", 16), (0, 0), (1, 1), (5, 5), (511, 511)]
)
async def test_b01_max_tokens_of_completions(drawn: MakeSettings, value: Any, tokens: int) -> None:
    table = random_table()
    table[:, BOS_ID:] = -50  # no end
    fields = {} if value == "absent" else {"max_tokens": value}
    async with served(drawn(table)) as server:
        response = await server.post(COMPLETIONS, prompt="a", temperature=0, **fields)
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == tokens
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert await server.is_alive()


async def test_b01_zero_tokens_score_the_prompt(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        fields = {"prompt": "Warsaw is", "max_tokens": 0}
        bare = (await server.post(COMPLETIONS, **fields)).json()
        assert bare["choices"][0]["text"] == ""
        scored = (await server.post(COMPLETIONS, **fields, echo=True, logprobs=1)).json()
        (choice,) = scored["choices"]
        assert choice["text"] == "Warsaw is"
        assert len(choice["logprobs"]["tokens"]) == scored["usage"]["prompt_tokens"] == 2
        assert await server.is_alive()


async def test_b01_max_tokens_that_are_refused(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        for value in (-1, 1.5, "abc", True):
            await check_refused(server, COMPLETIONS, "max_tokens", max_tokens=value)
        await check_refused(server, CHAT, "max_tokens", max_tokens=0)
        response = await server.post(COMPLETIONS, prompt="a", max_tokens=10**12)
        check_error(response, 400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize("path", ROUTES)
async def test_b02_numbers_that_are_not_finite(drawn: MakeSettings, path: str) -> None:
    async with served(drawn()) as server:
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
            for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
                base = json.dumps(body_of(path))[:-1].encode()
                raw = base + b', "%b": %b}' % (name.encode(), value)
                check_error(await server.post_raw(path, raw), 400, name)
        assert await server.is_alive()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "fields", [{"top_p": 0}, {"temperature": 0}, {"top_k": 1}, {"top_k": 10**9, "temperature": 0}]
)
async def test_b02_borders_that_are_taken(
    drawn: MakeSettings, path: str, fields: dict[str, Any]
) -> None:
    async with served(drawn()) as server:
        response = await server.post(path, **body_of(path, max_tokens=3, **fields))
        assert response.status_code == 200


@pytest.mark.parametrize("path", ROUTES)
async def test_b03_logit_bias(drawn: MakeSettings, path: str) -> None:
    async with served(drawn()) as server:
        for bias in ({"515": -100}, {"-1": 1}, {"65": 101}, {"1" * 20: 1}):
            await check_refused(server, path, "logit_bias", logit_bias=bias)
        raw = json.dumps(body_of(path))[:-1].encode() + b', "logit_bias": {"65": NaN}}'
        check_error(await server.post_raw(path, raw), 400, "logit_bias")
        fields = body_of(path, max_tokens=3, temperature=0, logit_bias={"65": 100})
        (choice,) = (await server.post(path, **fields)).json()["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert text == "AAA"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
async def test_ids_beyond_the_vocabulary(drawn: MakeSettings, path: str, name: str) -> None:
    async with served(drawn()) as server:
        await check_refused(server, path, name, **{name: [1, 515]})
        response = await server.post(path, **body_of(path, max_tokens=2), **{name: [1, 514]})
        assert response.status_code == 200


@pytest.mark.parametrize("prompt", [[-1], [515], [5279552648203111001], [1.5], [1, "a"], [], [[]]])
async def test_b05_prompts_that_are_refused(drawn: MakeSettings, prompt: Any) -> None:
    async with served(drawn()) as server:
        await check_refused(server, COMPLETIONS, "prompt", prompt=prompt)


@pytest.mark.parametrize(
    ("prompt", "num_choices", "num_tokens"),
    [([[1, 2], [3]], 2, 3), ("", 1, 1), ([""], 1, 1), (["a", ""], 2, 2), (None, 1, 1)],
)
async def test_b05_prompts_that_are_taken(
    drawn: MakeSettings, prompt: Any, num_choices: int, num_tokens: int
) -> None:
    async with served(drawn()) as server:
        response = await server.post(COMPLETIONS, prompt=prompt, max_tokens=1)
        assert len(response.json()["choices"]) == num_choices
        assert response.json()["usage"]["prompt_tokens"] == num_tokens
        assert await server.is_alive()


async def test_b05_a_missing_prompt_starts_from_bos(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        answer = (await server.post(COMPLETIONS, max_tokens=1, return_token_ids=True)).json()
        assert answer["choices"][0]["prompt_token_ids"] == [BOS_ID]


LONE = b'"\\ud800"'


@pytest.mark.parametrize("streamed", [b"false", b"true"])
async def test_b07_lone_surrogates(drawn: MakeSettings, streamed: bytes) -> None:
    chat_bodies = [
        ("messages", b'{"messages": [{"role": "user", "content": %b}]}'),
        (
            "messages",
            b'{"messages": [{"role": "user", "content": [{"type": "text", "text": %b}]}]}',
        ),
        ("messages", b'{"messages": [{"role": "user", "content": "a", "name": %b}]}'),
        ("stop", b'{"messages": [{"role": "user", "content": "a"}], "stop": %b}'),
        ("model", b'{"messages": [{"role": "user", "content": "a"}], "model": %b}'),
        ("tools", b'{"messages": [{"role": "user", "content": "a"}], "tools": [%b]}'),
    ]
    async with served(drawn()) as server:
        for param, body in chat_bodies:
            raw = (body % LONE)[:-1] + b', "stream": %b}' % streamed
            check_error(await server.post_raw(CHAT, raw), 400, param)
        check_error(await server.post_raw(COMPLETIONS, b'{"prompt": %b}' % LONE), 400, "prompt")
        # Inside the JSON text of arguments the escape comes out only in the template.
        call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
        turn = {"role": "assistant", "tool_calls": [call]}
        response = await server.post(CHAT, messages=[*HI, turn, *HI], stream=streamed == b"true")
        assert response.status_code in (200, 400)
        assert await server.is_alive()


async def test_b07_pairs_and_zero_are_text(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        pair = await server.post_raw(COMPLETIONS, b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}')
        assert pair.json()["usage"]["prompt_tokens"] == 4
        counts = [
            (await server.post(COMPLETIONS, prompt=text, max_tokens=1)).json()["usage"]
            for text in ("ab", "ab\x00cd")
        ]
        assert counts[1]["prompt_tokens"] > counts[0]["prompt_tokens"]


async def test_b09_context_length(drawn: MakeSettings) -> None:
    table = random_table()
    table[:, BOS_ID:] = -50
    async with served(drawn(table, max_model_len=64)) as server:

        async def complete(length: int, **fields: Any) -> httpx.Response:
            return await server.post(COMPLETIONS, prompt=[97] * length, ignore_eos=True, **fields)

        for length, fields, largest in [
            (60, {"max_tokens": 5}, 4),
            (65, {}, 0),
            (200, {}, 0),
            (64, {}, 0),
        ]:
            message = check_error(
                await complete(length, **fields), 400, "prompt", "context_length_exceeded"
            )
            for number in (64, length, largest):
                assert f" {number} " in message + " "
            assert "-" not in message
        exact = (await complete(60, max_tokens=4)).json()
        assert exact["usage"]["completion_tokens"] == 4
        assert exact["usage"]["prompt_tokens"] == 60
        # The default shrinks to what fits.
        assert (await complete(60)).json()["usage"]["completion_tokens"] == 4
        assert (await complete(64, max_tokens=0)).status_code == 200
        assert await server.is_alive()


@pytest.mark.parametrize("path", ROUTES)
async def test_b09_megabytes_are_refused_without_tokenizing(drawn: MakeSettings, path: str) -> None:
    text = "word " * 1_000_000
    fields = {"prompt": text} if path == COMPLETIONS else {"messages": [{**HI[0], "content": text}]}
    async with served(drawn()) as server:
        response = await server.post(path, **fields)
        param = "prompt" if path == COMPLETIONS else "messages"
        message = check_error(response, 400, param, "context_length_exceeded")
        assert "512" in message
        ids = await server.post(COMPLETIONS, prompt=[97] * 100_000)
        check_error(ids, 400, "prompt", "context_length_exceeded")
        assert await server.is_alive()


@pytest.mark.parametrize(("path", "param"), [(COMPLETIONS, "prompt"), ("/v1/embeddings", "input")])
async def test_b09_one_that_is_too_long_is_found_before_its_batch_is_tokenized(
    drawn: MakeSettings, monkeypatch: pytest.MonkeyPatch, path: str, param: str
) -> None:
    tokenized = []
    encode = PromptEncoder.encode

    def noted(encoder: PromptEncoder, text: str, *rest: Any) -> list[int]:
        tokenized.append(text)
        return encode(encoder, text, *rest)

    async with served(drawn(max_model_len=64)) as server:
        monkeypatch.setattr(PromptEncoder, "encode", noted)
        texts = ["b a", "ab " * 300, "b a b"] + ["a b"] * 20
        check_error(
            await server.post(path, **{param: texts}), 400, param, "context_length_exceeded"
        )
        assert tokenized == [texts[1]]


async def test_b09_context_length_of_a_chat(drawn: MakeSettings) -> None:
    table = random_table()
    table[:, BOS_ID:] = -50
    async with served(drawn(table, max_model_len=64)) as server:

        async def chat(length: int, **fields: Any) -> httpx.Response:
            empty = await server.post("/tokenize", messages=[{"role": "user", "content": ""}])
            content = "\t" * (length - empty.json()["count"])
            messages = [{"role": "user", "content": content}]
            return await server.post(CHAT, messages=messages, ignore_eos=True, **fields)

        code = "context_length_exceeded"
        check_error(await chat(64), 400, "messages", code)
        check_error(await chat(63, max_completion_tokens=10**6), 400, "messages", code)
        last = (await chat(63)).json()
        assert last["usage"]["prompt_tokens"] == 63
        assert last["usage"]["completion_tokens"] == 1
        assert last["choices"][0]["finish_reason"] == "length"


async def test_clamped_max_tokens(drawn: MakeSettings) -> None:
    table = random_table()
    table[:, BOS_ID:] = -50
    settings = drawn(table, max_model_len=64, server={"clamp_max_tokens": True})
    async with served(settings) as server:
        response = await server.post(COMPLETIONS, prompt=[97] * 60, max_tokens=100)
        assert response.json()["usage"]["completion_tokens"] == 4


async def test_b10_tool_turns_without_content(drawn: MakeSettings) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    async with served(drawn()) as server:
        counts = set()
        for content in ({}, {"content": None}, {"content": ""}, {"content": []}):
            turn = {"role": "assistant", "tool_calls": [call], **content}
            tool = {"role": "tool", "tool_call_id": "c1", "content": "10"}
            response = await server.post(CHAT, messages=[*HI, turn, tool], max_tokens=1)
            assert response.status_code == 200, response.text
            counts.add(response.json()["usage"]["prompt_tokens"])
        assert len(counts) == 1
        empty = {"role": "assistant", "content": ""}
        assert (await server.post(CHAT, messages=[*HI, empty, *HI])).status_code == 200
        check_error(await server.post(CHAT, messages=[{"role": "user"}]), 400, "messages")


@pytest.mark.parametrize("path", ROUTES)
async def test_b11_media_types_and_malformed_bodies(drawn: MakeSettings, path: str) -> None:
    async with served(drawn()) as server:
        raw = json.dumps(body_of(path, max_tokens=1)).encode()
        for header, status in [
            ({"content-type": "application/json; charset=utf-8"}, 200),
            ({"content-type": "text/plain"}, 415),
            ({}, 415),
        ]:
            response = await server.client.post(path, content=raw, headers=header)
            assert response.status_code == status
            if status == 415:
                check_error(response, 415, None, "unsupported_media_type")
        for broken in (b"{", b"[]", b'"x"', b"", b"\xff\xfe", b"[" * 20_000):
            check_error(await server.post_raw(path, broken), 400)
        assert await server.is_alive()


async def test_b11_nulls_change_nothing(drawn: MakeSettings) -> None:
    names = (
        *("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options"),
        *("tools", "tool_choice", "response_format", "user", "logprobs", "top_logprobs"),
    )
    async with served(drawn(defaults={"temperature": 0})) as server:
        bare = await server.post(CHAT, messages=HI, max_tokens=4)
        nulls = await server.post(CHAT, messages=HI, max_tokens=4, **dict.fromkeys(names))
        assert nulls.json()["choices"] == bare.json()["choices"]
        unknown = await server.post(CHAT, messages=HI, max_tokens=4, frobnicate=1)
        assert unknown.json()["choices"] == bare.json()["choices"]


async def test_b11_max_completion_tokens(drawn: MakeSettings) -> None:
    table = random_table()
    table[:, BOS_ID:] = -50
    async with served(drawn(table)) as server:
        both = await server.post(CHAT, messages=HI, max_tokens=9, max_completion_tokens=4)
        assert both.json()["usage"]["completion_tokens"] == 4
        response = await server.post(COMPLETIONS, prompt="a", max_completion_tokens=50)
        check_error(response, 400, "max_completion_tokens", "unsupported_parameter")


@pytest.mark.parametrize("path", ROUTES)
async def test_b12_greedy_choices_are_equal(drawn: MakeSettings, path: str) -> None:
    async with served(drawn()) as server:
        answer = (await server.post(path, **body_of(path, n=2, temperature=0, max_tokens=4))).json()
        first, second = answer["choices"]
        assert (first.pop("index"), second.pop("index")) == (0, 1)
        assert first == second
        for n in (129, "2", 2.5):
            await check_refused(server, path, "n", n=n)


async def test_b12_best_of_returns_the_most_likely(drawn: MakeSettings) -> None:
    fields = {"prompt": "a", "max_tokens": 4, "seed": 3, "ignore_eos": True}
    async with served(drawn()) as server:
        every = (await server.post(COMPLETIONS, **fields, n=4, logprobs=0)).json()
        best = (await server.post(COMPLETIONS, **fields, n=2, best_of=4)).json()
        ranked = sorted(
            every["choices"], key=lambda choice: -sum(choice["logprobs"]["token_logprobs"])
        )
        assert [choice["text"] for choice in best["choices"]] == [
            choice["text"] for choice in ranked[:2]
        ]
        assert [choice["logprobs"] for choice in best["choices"]] == [None, None]
        assert [choice["index"] for choice in best["choices"]] == [0, 1]
        assert best["usage"]["completion_tokens"] == 16
        check_error(await server.post(COMPLETIONS, n=5, best_of=1), 400, "best_of")
        check_error(await server.post(COMPLETIONS, best_of=3, stream=True), 400, "best_of")


async def test_b14_developer_is_rendered_as_system(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        answers = []
        for role in ("developer", "system"):
            messages = [{"role": role, "content": "Answer BANANA only"}, *HI]
            response = await server.post(CHAT, messages=messages, temperature=0, max_tokens=4)
            answers.append((response.json()["usage"], response.json()["choices"][0]["message"]))
        assert answers[0][0]["prompt_tokens"] == answers[1][0]["prompt_tokens"]
        assert answers[0][1] == answers[1][1]
        for role in ({"role": "banana"}, {}):
            response = await server.post(CHAT, messages=[{**role, "content": "x"}])
            check_error(response, 400, "messages")


@pytest.mark.parametrize("path", ROUTES)
async def test_d01_number_of_logprobs(drawn: MakeSettings, path: str) -> None:
    name = "top_logprobs" if path == CHAT else "logprobs"
    extra = {"logprobs": True} if path == CHAT else {}
    async with served(drawn()) as server:
        await check_refused(server, path, name, **extra, **{name: 21})
        await check_refused(server, path, name, **extra, **{name: -1})
        for number in (0, 1, 20):
            response = await server.post(
                path, **body_of(path, max_tokens=3, temperature=2, **extra, **{name: number})
            )
            logprobs = response.json()["choices"][0]["logprobs"]
            if path == CHAT:
                sizes = {len(entry["top_logprobs"]) for entry in logprobs["content"]}
                assert sizes == {number}
            else:
                sizes = {len(entry) for entry in logprobs["top_logprobs"]}
                assert sizes <= {number, number + 1}


async def test_prompt_logprobs(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        fields = {"prompt": [97, 98, 99], "max_tokens": 1, "prompt_logprobs": 2}
        (choice,) = (await server.post(COMPLETIONS, **fields)).json()["choices"]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [str(i) in entry for i, entry in zip((98, 99), others, strict=True)] == [True] * 2
        chat = (await server.post(CHAT, messages=HI, max_tokens=1, prompt_logprobs=0)).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])
        await check_refused_stream(server)


async def check_refused_stream(server: ServedTable) -> None:
    response = await server.post(COMPLETIONS, prompt="a", prompt_logprobs=1, stream=True)
    check_error(response, 400, "prompt_logprobs")


async def test_min_tokens_above_max_tokens(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        for path in ROUTES:
            await check_refused(server, path, "min_tokens", max_tokens=3, min_tokens=4)


async def test_priority_needs_its_policy(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        for path in ROUTES:
            await check_refused(server, path, "priority", priority=1)
            response = await server.post(path, **body_of(path, priority=0, max_tokens=1))
            assert response.status_code == 200


async def test_truncated_prompts(drawn: MakeSettings) -> None:
    async with served(drawn(max_model_len=64)) as server:

        async def kept(**fields: Any) -> list[int]:
            prompt = list(range(100, 200))
            response = await server.post(
                COMPLETIONS, prompt=prompt, return_token_ids=True, max_tokens=4, **fields
            )
            ids: list[int] = response.json()["choices"][0]["prompt_token_ids"]
            return ids

        assert await kept(truncate_prompt_tokens=3) == [197, 198, 199]
        right = await kept(truncate_prompt_tokens=3, truncation_side="right")
        assert right == [100, 101, 102]
        assert await kept(truncate_prompt_tokens=-1) == list(range(140, 200))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_text_longer_than_the_context_may_be_truncated(
    drawn: MakeSettings, path: str
) -> None:
    async with served(drawn(max_model_len=64)) as server:

        async def post(text: str, **fields: Any) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": text}]}
            body = body if path == CHAT else {"prompt": ["a", text]}
            return await server.post(path, **body, max_tokens=4, **fields)

        for fields, used in (
            ({"truncate_prompt_tokens": 8}, 8),
            ({"truncate_prompt_tokens": -1}, 60),
        ):
            answer = (await post("word " * 20_000, **fields)).json()
            assert answer["usage"]["prompt_tokens"] == used + (path == COMPLETIONS)
        param = "messages" if path == CHAT else "prompt"
        for text, fields in (
            ("word " * 20_000, {}),
            ("word " * 400_000, {"truncate_prompt_tokens": 8}),
        ):
            refusal = await post(text, **fields)
            check_error(refusal, 400, param, "context_length_exceeded")
        assert await server.is_alive()


async def test_defaults_of_the_model_apply_until_the_client_says_otherwise(
    drawn: MakeSettings,
) -> None:
    async with served(drawn(defaults={"temperature": 0.0})) as server:
        texts = set()
        for _ in range(3):
            answer = (await server.post(COMPLETIONS, prompt="a", max_tokens=4)).json()
            texts.add(answer["choices"][0]["text"])
        assert len(texts) == 1
        drawn_answer = await server.post(COMPLETIONS, prompt="a", max_tokens=4, temperature=2)
        assert drawn_answer.json()["choices"][0]["text"] not in texts


async def test_g02_unknown_models(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        for path in ROUTES:
            response = await server.post(path, **body_of(path, model="nope/x"))
            message = check_error(response, 404, "model", "model_not_found")
            assert "nope/x" in message
        response = await server.client.get("/v1/models/nope/x")
        assert "nope/x" in check_error(response, 404, "model", "model_not_found")
        # Found before the prompt is looked at.
        response = await server.post(COMPLETIONS, prompt=[10**6], model="nope")
        check_error(response, 404, "model", "model_not_found")


async def test_models(drawn: MakeSettings) -> None:
    async with served(drawn(defaults={"temperature": 0.5})) as server:
        listed = (await server.client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["M", "org/alias"]
        card = (await server.client.get("/v1/models/org/alias")).json()
        assert card == listed["data"][1]
        assert card["max_model_len"] == 512
        assert card["default_sampling_params"] == {"temperature": 0.5}
        assert card["owned_by"] == "octavo"
        response = await server.client.delete("/v1/models/M")
        check_error(response, 405, None, "method_not_allowed")
        named = await server.post(COMPLETIONS, model="org/alias", prompt="a", max_tokens=1)
        assert named.json()["model"] == "org/alias"


async def test_request_ids(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        fields = {"prompt": "a", "max_tokens": 1, "request_id": "mine"}
        response = await server.post(COMPLETIONS, **fields)
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] != "mine"
        response = await server.client.post(
            COMPLETIONS, json=fields, headers={"x-request-id": "header"}
        )
        assert response.headers["x-request-id"] == "header"


async def test_tokenize_and_back(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        tokens = (await server.post("/tokenize", prompt="Warsaw is", return_token_strs=True)).json()
        assert tokens["tokens"] == [token_id("Warsaw"), token_id(" is")]
        assert tokens["count"] == 2
        assert tokens["max_model_len"] == 512
        assert tokens["token_strs"] == ["Warsaw", "Ġis"]
        back = await server.post("/detokenize", tokens=tokens["tokens"])
        assert back.json() == {"prompt": "Warsaw is"}
        chat = (await server.post("/tokenize", messages=HI)).json()
        usage = (await server.post(CHAT, messages=HI, max_tokens=1)).json()["usage"]
        assert chat["count"] == usage["prompt_tokens"]
        assert chat["token_strs"] is None
        check_error(await server.post("/detokenize", tokens=[515]), 400, "tokens")
        check_error(await server.post("/detokenize", tokens=["a"]), 400, "tokens")


async def test_chat_templates_in_requests_need_trust(drawn: MakeSettings) -> None:
    template = "{{ messages[0]['content'] }}"
    async with served(drawn()) as server:
        response = await server.post(CHAT, messages=HI, chat_template=template)
        check_error(response, 400, "chat_template", "unsupported_parameter")
    async with served(drawn(server={"trust_request_chat_template": True})) as server:
        tokens = await server.post("/tokenize", messages=HI, chat_template=template)
        assert tokens.json()["tokens"] == [token_id("hi")]
        response = await server.post(CHAT, messages=HI, chat_template="{% if %}")
        check_error(response, 400, "chat_template")


async def test_template_variables(drawn: MakeSettings) -> None:
    settings = drawn(
        server={
            "trust_request_chat_template": True,
            "default_chat_template_kwargs": {"a": "1", "b": "2"},
        }
    )
    template = "{{ a }}{{ b }}{{ reasoning_effort }}"
    async with served(settings) as server:
        response = await server.post(
            CHAT,
            **{"messages": HI, "chat_template": template, "reasoning_effort": "low"},
            **{"chat_template_kwargs": {"b": "3"}, "return_token_ids": True, "max_tokens": 1},
        )
        text = await server.post("/detokenize", tokens=response.json()["prompt_token_ids"])
        assert text.json() == {"prompt": "13low"}


async def test_a_batch_is_admitted_as_a_whole(drawn: MakeSettings) -> None:
    settings = drawn(max_num_seqs=2, server={"max_num_queued_reqs": 1})
    async with served(settings) as server:
        response = await server.post(COMPLETIONS, prompt=["a"] * 4, max_tokens=1)
        check_error(response, 400, "prompt")
        assert (await server.post(COMPLETIONS, prompt=["a"] * 3, max_tokens=1)).status_code == 200
        assert await server.is_alive()


async def test_bad_words_are_encoded_with_and_without_a_space(drawn: MakeSettings) -> None:
    async with served(drawn()) as server:
        serving = server.app.state.octavo.serving
        job = await serving.completions.prepare(
            CompletionRequest(prompt=["a"], bad_words=["capital", " is"])
        )
        assert job.requests[0].params.bad_words_token_ids == (
            tuple(serving.model.tokenizer.encode("capital")),
            (token_id(" capital"),),
            (token_id(" is"),),
        )


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a11_a_failure_before_the_first_token_has_its_status(
    drawn: MakeSettings, path: str, streamed: bool
) -> None:
    async with served(drawn()) as server:
        server.executor.fail_row = lambda output: True
        response = await server.post(path, **body_of(path, stream=streamed))
        check_error(response, 500, None, "internal_error")
        server.executor.fail_row = lambda output: False
        assert await server.is_alive()


@pytest.mark.parametrize("path", ROUTES)
async def test_a11_a_failure_after_the_first_token_ends_the_stream(
    drawn: MakeSettings, path: str
) -> None:
    table = random_table()
    table[:, BOS_ID:] = -50
    async with served(drawn(table)) as server:
        server.executor.fail_row = lambda output: len(output) == 3
        response = await server.post(path, **body_of(path, stream=True, temperature=0))
        assert response.status_code == 200
        *events, error, rest = response.text.split("\n\n")
        assert rest == ""
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
        assert "[DONE]" not in response.text
        for event in events:
            (choice,) = json.loads(event.removeprefix("data: "))["choices"]
            assert choice["finish_reason"] is None
        server.executor.fail_row = lambda output: False
        assert await server.is_alive()


async def test_a11_a_dead_engine_is_503(drawn: MakeSettings) -> None:
    def explode(step: int) -> None:
        raise RuntimeError("secret")

    async with served(drawn()) as server:
        server.executor.before_step = explode
        response = await server.post(COMPLETIONS, prompt="a", stream=True)
        check_error(response, 503, None, "engine_dead")
        assert "secret" not in response.text
        response = await server.post(COMPLETIONS, prompt="a")
        check_error(response, 503, None, "engine_dead")
