import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from scripted_server import Answer, Route, error_answer, json_answer, serve, stream_answer

from octavo.loadtest.client import (
    RequestResult,
    ServerError,
    Target,
    first_model,
    open_client,
    run,
    send,
    text_token_ids,
)
from octavo.loadtest.workload import Prompt

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def text(value: str, finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": value, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": None}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


async def ask(
    route: Route, path: str = COMPLETIONS, prompt: Prompt | None = None, **fields: Any
) -> tuple[RequestResult, Any]:
    """The result of one request against a server that answers so, and the body it got."""
    with serve(**{path: route}) as server:
        async with open_client(server.url, {}) as client:
            result = await send(
                client, Target(path, "m", **fields), prompt or Prompt([1, 2, 3], 3, 4)
            )
        return result, server.bodies(path)[0]


async def test_text_tokens_and_gaps_of_a_stream() -> None:
    result, _ = await ask(
        stream_answer(
            b": keep-alive\n\n",
            text("a"),
            0.05,
            text("bc"),
            text(""),
            text("", "length"),
            usage(7, 5),
        )
    )
    assert result.error == ""
    assert result.text == "abc"
    assert (result.input_tokens, result.output_tokens) == (7, 5)
    assert len(result.itls) == 3
    assert result.latency == pytest.approx(result.ttft + sum(result.itls))


async def test_time_to_first_token_begins_with_the_first_choice() -> None:
    result, _ = await ask(stream_answer(usage(7, 0), 0.1, text("a"), usage(7, 1)))
    assert result.ttft >= 0.1


async def test_chat_chunks() -> None:
    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "hi"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        usage(9, 2),
    ]
    result, body = await ask(stream_answer(*chunks), CHAT, Prompt("hello", 2, 16))
    assert (result.text, result.output_tokens, len(result.itls)) == ("hi", 2, 2)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["max_completion_tokens"] == 16
    assert "prompt" not in body


async def test_request_body() -> None:
    _, body = await ask(stream_answer(text("a")))
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_optional_fields_of_the_body() -> None:
    _, body = await ask(
        stream_answer(text("a")),
        ignore_eos=True,
        temperature=0.0,
        extra_body={"top_k": 3, "max_tokens": 9},
    )
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0.0
    assert (body["top_k"], body["max_tokens"]) == (3, 9)


async def test_without_usage_chunks_with_text_are_counted() -> None:
    result, _ = await ask(stream_answer(text("a"), text("b"), text("", "stop")))
    assert (result.input_tokens, result.output_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("route", "error"),
    [
        (error_answer(429, "queue full"), "HTTP 429: queue full"),
        (Answer([b"oops"], 502), "HTTP 502: oops"),
        (stream_answer(text("a"), {"error": {"message": "died"}}, done=False), "died"),
        (stream_answer(text("a"), done=False), "the stream ended without [DONE]"),
        (stream_answer(usage(1, 0)), "the stream holds no choice"),
        (stream_answer(b"data: {\n\n"), "malformed chunk"),
        (stream_answer([]), "malformed chunk"),
    ],
)
async def test_faults_are_named(route: Answer, error: str) -> None:
    result, _ = await ask(route)
    assert result.error.startswith(error)


async def test_a_lost_connection_is_a_failed_request() -> None:
    async with open_client("http://127.0.0.1:9", {}) as client:
        result = await send(client, Target(COMPLETIONS, "m"), Prompt("x", 1, 1))
    assert result.error.startswith("ConnectError")


async def run_fake(
    count: int, arrivals: Sequence[float], limit: int | None
) -> tuple[list[RequestResult], int]:
    """Results of requests that each take a moment, and the most that were open at once."""
    open_now = most = 0

    async def send_one(prompt: Prompt) -> RequestResult:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        return RequestResult(prompt.input_len)

    prompts = [Prompt("x", number, 1) for number in range(count)]
    seen: list[RequestResult] = []
    results, duration = await run(send_one, prompts, arrivals, limit, seen.append)
    assert len(seen) == count
    assert duration > 0
    return results, most


@pytest.mark.parametrize(("limit", "most"), [(3, 3), (1, 1), (None, 10)])
async def test_concurrency_is_limited(limit: int | None, most: int) -> None:
    results, seen = await run_fake(10, [0.0] * 10, limit)
    assert seen == most
    assert [result.input_tokens for result in results] == list(range(10))


async def test_requests_start_at_their_times() -> None:
    arrivals = [0.02, 0.06, 0.1]
    results, _ = await run_fake(3, arrivals, None)
    assert all(result.start >= at for result, at in zip(results, arrivals, strict=True))


async def test_the_first_model_is_taken() -> None:
    models = json_answer({"data": [{"id": "a/b"}, {"id": "c"}]})
    with serve(**{"/v1/models": models}) as server:
        async with open_client(server.url, {"x-mine": "1"}) as client:
            assert await first_model(client) == "a/b"
            server.routes["/v1/models"] = json_answer({"data": []})
            with pytest.raises(ServerError, match="--model"):
                await first_model(client)
            server.routes["/v1/models"] = error_answer(503, "loading")
            with pytest.raises(ServerError, match="HTTP 503: loading"):
                await first_model(client)
        assert server.asked[0].headers["x-mine"] == "1"


async def test_no_server_is_said() -> None:
    async with open_client("http://127.0.0.1:9", {}) as client:
        with pytest.raises(ServerError, match=r"no answer from http://127\.0\.0\.1:9"):
            await first_model(client)


async def test_ids_come_from_the_servers_tokenizer() -> None:
    with serve(**{"/tokenize": json_answer({"count": 3, "tokens": [9, 4, 9]})}) as server:
        async with open_client(server.url, {}) as client:
            assert await text_token_ids(client, "m") == [4, 9]
            for other in (error_answer(404, "no"), json_answer({"tokens": ["x"]}), json_answer([])):
                server.routes["/tokenize"] = other
                assert await text_token_ids(client, "m") == []
        assert server.bodies("/tokenize")[0]["add_special_tokens"] is False
