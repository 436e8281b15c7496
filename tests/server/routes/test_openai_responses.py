"""The openai client's responses and embeddings over a real socket."""

from collections.abc import Iterator

import numpy as np
import openai
import pytest
from octavo_fixtures import EOS_ID, make_byte_bpe_tokenizer, script_table, token_id
from octavo_serving import TableSettings, served_on_socket

SCRIPT = [token_id(text) for text in ("alpha ", "beta", " gam", "ma", " delta")]
TEXT = "alpha beta gamma delta"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TableSettings:
    directory = make_byte_bpe_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return TableSettings(directory, script_table(SCRIPT, EOS_ID))


@pytest.fixture(scope="module")
def base_url(settings: TableSettings) -> Iterator[str]:
    with served_on_socket(settings) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_create(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="M", input="hi", temperature=0)
    assert answer.output_text == TEXT
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 6


def test_create_as_a_stream(client: openai.OpenAI) -> None:
    with client.responses.create(model="M", input="hi", temperature=0, stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == TEXT


def test_the_accumulating_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="M", input="hi", temperature=0) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert answer.output_text == TEXT


def test_a_conversation_that_the_client_keeps(client: openai.OpenAI) -> None:
    first = client.responses.create(model="M", input="hi", temperature=0)
    history: list[openai.types.responses.ResponseInputItemParam] = [
        {"role": "user", "content": "hi"},
        *[item.to_dict() for item in first.output],  # type: ignore[list-item]
        {"role": "user", "content": "more"},
    ]
    second = client.responses.create(model="M", input=history, temperature=0)
    assert second.output_text == TEXT
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 6


async def test_async_client(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        async with client.responses.stream(model="M", input="hi", temperature=0) as stream:
            answer = await stream.get_final_response()
        assert answer.output_text == TEXT


def test_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="M", input="hi", previous_response_id="resp_1")
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_a_stream_that_breaks_off(client: openai.OpenAI, settings: TableSettings) -> None:
    (executor,) = settings.executors
    before = executor.fail_row
    executor.fail_row = lambda output: len(output) == 2
    try:
        with client.responses.create(model="M", input="hi", temperature=0, stream=True) as stream:
            events = list(stream)
    finally:
        executor.fail_row = before
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"


def test_embeddings(client: openai.OpenAI, settings: TableSettings) -> None:
    # The client asks for base64 by itself and decodes it.
    coded = client.embeddings.create(model="M", input=["a", "b"])
    plain = client.embeddings.create(model="M", input=["a", "b"], encoding_format="float")
    for left, right in zip(coded.data, plain.data, strict=True):
        np.testing.assert_allclose(left.embedding, right.embedding, atol=1e-7)
    row = settings.table[ord("b")]
    np.testing.assert_allclose(coded.data[1].embedding, row / np.linalg.norm(row), atol=1e-6)
    assert coded.usage.prompt_tokens == 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="M", input="a", dimensions=3)
    assert caught.value.param == "dimensions"
