"""Paged memory through the whole server: too large requests, repeated prompts, shared blocks."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from octavo_fixtures import make_random_checkpoint
from whole_server import COMPLETIONS, WholeServer, whole_server

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 49)
GREEDY = {"temperature": 0, "ignore_eos": True}


def ids(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * number) % 250 for number in range(length)]


def num_cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def test_f01_what_exceeds_the_cache_is_refused_and_holds_nobody_up(tmp_path: Path) -> None:
    checkpoint = make_random_checkpoint(tmp_path, max_position_embeddings=4096)
    follower = {"prompt": ids(10), "max_tokens": 3, **GREEDY}
    async with whole_server(checkpoint, num_blocks=32) as server:
        models = (await server.client.get("/v1/models")).json()
        assert models["data"][0]["max_model_len"] == 32 * 16
        expected = await server.texts(**follower)
        for body in (
            {"prompt": ids(600), "max_tokens": 1},
            {"prompt": ids(400), "max_tokens": 400, "ignore_eos": True},
        ):
            error = await server.refused(COMPLETIONS, **body)
            assert error["code"] == "context_length_exceeded"
            assert await server.texts(**follower) == expected
        choices = {"prompt": ids(300), "max_tokens": 100, "n": 4, "temperature": 1, "seed": 3}
        four, after = await asyncio.gather(
            server.texts(**choices, ignore_eos=True), server.texts(**follower)
        )
        assert len(four) == 4 and after == expected
        assert await server.is_idle()


async def answers_to(server: WholeServer, length: int) -> list[dict[str, Any]]:
    body = {"prompt": ids(length, start=length), "max_tokens": 20, "logprobs": 5, **GREEDY}
    return [await server.post(COMPLETIONS, **body) for _ in range(3)]


async def test_f03_a_repeated_prompt_keeps_its_answer_and_computes_its_last_token(
    random_llama_dir: Path,
) -> None:
    async with whole_server(random_llama_dir) as server:
        for length in LENGTHS:
            answers = await answers_to(server, length)
            first, *repeats = (answer["choices"][0] for answer in answers)
            for repeat in repeats:
                assert repeat["text"] == first["text"]
                assert repeat["logprobs"]["token_logprobs"] == pytest.approx(
                    first["logprobs"]["token_logprobs"], abs=1e-4
                )
            hits = (length - 1) // 16 * 16
            assert [num_cached(answer) for answer in answers] == [0, hits, hits]


async def test_f05_blocks_are_shared_only_with_equal_history_and_salt(
    random_llama_dir: Path,
) -> None:
    x, y, z = (ids(16, start) for start in (1, 60, 120))
    changed_first, changed_last = [200, *x[1:]], [*x[:-1], 200]
    asked = [
        ([*x, *y, 5], None, 0),
        ([*z, *y, 5], None, 0),
        ([*y, *x, 5], None, 0),
        ([*x, *y, 5], "a", 0),
        ([*changed_first, *y, 5], None, 0),
        ([*changed_last, *y, 5], None, 0),
        ([*x, *y, 9, 9], None, 32),
        ([*x, *y, 9, 9], "a", 32),
    ]
    async with whole_server(random_llama_dir) as server:
        for prompt, salt, hits in asked:
            body = {"prompt": prompt, "max_tokens": 12, **GREEDY}
            # A salt that nobody else uses finds nothing.
            alone = await server.post(COMPLETIONS, **body, cache_salt=f"alone {prompt} {salt}")
            answer = await server.post(COMPLETIONS, **body, cache_salt=salt)
            assert (num_cached(alone), num_cached(answer)) == (0, hits)
            assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
