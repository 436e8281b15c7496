"""POST /v1/embeddings over the real engine; a vector is the table's row of the last token."""

import asyncio
import base64
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from octavo_fixtures import VOCAB_SIZE, byte_ids, random_table
from octavo_serving import TableSettings, served

from octavo.engine.core.pooling import EmbeddingSpec, Pooling

MakeSettings = Callable[..., TableSettings]
PATH = "/v1/embeddings"
TABLE = random_table()


def unit(row: int, length: int = VOCAB_SIZE) -> np.ndarray:
    vector = TABLE[row, :length].astype(np.float64)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize(
    ("value", "last_ids", "num_tokens"),
    [
        ("abc!", [ord("!")], 4),
        (["x", "y?", "z"], [ord("x"), ord("?"), ord("z")], 4),
        ([5, 6, 7], [7], 3),
        ([[5], [6, 7]], [5, 7], 3),
        ([9] * 512, [9], 512),
    ],
)
async def test_kinds_of_input(
    drawn: MakeSettings, value: Any, last_ids: list[int], num_tokens: int
) -> None:
    async with served(drawn()) as app:
        answer = (await app.post(PATH, input=value)).json()
    assert answer["object"] == "list"
    assert answer["model"] == "M"
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert [(item["object"], item["index"]) for item in answer["data"]] == [
        ("embedding", index) for index in range(len(last_ids))
    ]
    for item, last_id in zip(answer["data"], last_ids, strict=True):
        np.testing.assert_allclose(item["embedding"], unit(last_id), atol=1e-6)


async def test_base64_is_the_bytes_of_little_endian_floats(drawn: MakeSettings) -> None:
    async with served(drawn()) as app:
        plain = (await app.post(PATH, input=[3])).json()["data"][0]["embedding"]
        coded = (await app.post(PATH, input=[3], encoding_format="base64")).json()
    vector = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    assert vector.tolist() == np.array(plain, np.float32).tolist()


async def test_the_largest_batch_goes_through_a_small_engine(drawn: MakeSettings) -> None:
    ids = [[number % VOCAB_SIZE] for number in range(2048)]
    settings = drawn(max_num_seqs=4, num_blocks=8, max_model_len=64)
    settings.server["max_num_queued_reqs"] = 0
    async with served(settings) as app:
        answer = (await app.post(PATH, input=ids, encoding_format="base64")).json()
        assert await app.is_alive()
    for place in (0, 1, 2047):
        raw = base64.b64decode(answer["data"][place]["embedding"])
        np.testing.assert_allclose(np.frombuffer(raw, "<f4"), unit(ids[place][0]), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", None),
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": ["a", ""]}, "input", None),
        ({"input": [[]]}, "input", None),
        ({"input": [[1], []]}, "input", None),
        ({"input": ["a", 1]}, "input", None),
        ({"input": [1, True]}, "input", None),
        ({"input": [1.5]}, "input", None),
        ({"input": {"a": 1}}, "input", None),
        ({"input": [-1]}, "input", None),
        ({"input": [VOCAB_SIZE]}, "input", None),
        ({"input": ["a"] * 2049}, "input", None),
        ({"input": [1] * 513}, "input", "context_length_exceeded"),
        ({"input": "x!" * 400}, "input", "context_length_exceeded"),
        ({"input": "x" * 1_000_000}, "input", "context_length_exceeded"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", None),
        ({"input": "a", "dimensions": 0}, "dimensions", None),
        ({"input": "a", "dimensions": 8}, "dimensions", "unsupported_parameter"),
        ({"input": "a", "normalize": False}, "normalize", "unsupported_parameter"),
        ({"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens", None),
    ],
)
async def test_bad_requests(
    drawn: MakeSettings, body: dict[str, Any], param: str, code: str | None
) -> None:
    async with served(drawn()) as app:
        response = await app.post(PATH, **body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        if code is not None:
            assert error["code"] == code
        assert await app.is_alive()


async def test_unknown_model(drawn: MakeSettings) -> None:
    async with served(drawn()) as app:
        response = await app.post(PATH, input="a", model="nope")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_dimensions_cut_and_bring_back_to_unit_length(drawn: MakeSettings) -> None:
    settings = drawn(embedding=EmbeddingSpec(dimensions=(8, 16)))
    async with served(settings) as app:
        answer = (await app.post(PATH, input=[3], dimensions=8)).json()
        refused = await app.post(PATH, input=[3], dimensions=9)
    np.testing.assert_allclose(answer["data"][0]["embedding"], unit(3, 8), atol=1e-6)
    assert refused.status_code == 400
    assert "8, 16" in refused.json()["error"]["message"]


async def test_an_encoder_makes_embeddings_only(drawn: MakeSettings) -> None:
    settings = drawn(generates=False, embedding=EmbeddingSpec(Pooling.MEAN))
    async with served(settings) as app:
        assert (await app.post(PATH, input="a")).status_code == 200
        assert (await app.client.get("/health_generate")).status_code == 200
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            response = await app.post(path, **body)
            assert response.status_code == 400
            assert "embeddings only" in response.json()["error"]["message"]


async def test_texts_and_embeddings_are_made_side_by_side(drawn: MakeSettings) -> None:
    async with served(drawn()) as app:
        texts = app.post("/v1/completions", prompt="abc", max_tokens=40, temperature=0, n=2)
        vectors = [app.post(PATH, input=byte_ids("q") * number) for number in range(1, 6)]
        text, *others = await asyncio.gather(texts, *vectors)
        assert text.json()["usage"]["completion_tokens"] == 80
        assert {response.status_code for response in others} == {200}
        assert await app.is_alive()


async def test_an_input_that_fails_ends_the_request(drawn: MakeSettings) -> None:
    settings = drawn()
    settings.table = settings.table.copy()
    async with served(settings) as app:
        app.executor.before_step = lambda step: (_ for _ in ()).throw(RuntimeError("broken"))
        response = await app.post(PATH, input=["a", "b"])
    assert response.status_code in (500, 503)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_client_that_leaves_frees_everything(drawn: MakeSettings) -> None:
    async with served(drawn(max_num_seqs=4)) as app:
        app.executor.before_step = lambda step: time.sleep(0.02)
        task = asyncio.create_task(app.post(PATH, input=["text"] * 300))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await app.is_alive()


async def test_a_full_queue_is_told(drawn: MakeSettings) -> None:
    settings = drawn(max_num_seqs=2)
    settings.server["max_num_queued_reqs"] = 0
    async with served(settings) as app:
        app.executor.before_step = lambda step: time.sleep(0.02)
        first = asyncio.create_task(app.post(PATH, input=["text"] * 20))
        await asyncio.sleep(0.05)
        second = await app.post(PATH, input="text")
        assert second.status_code == 429
        assert second.json()["error"]["code"] == "queue_full"
        assert (await first).status_code == 200
