"""The openai client over a real socket: sync, async, streams and error classes."""

from collections.abc import Callable, Iterator

import openai
import pytest
from octavo_fixtures import EOS_ID, make_byte_bpe_tokenizer, script_table, token_id
from octavo_serving import TableExecutor, TableSettings, served_on_socket

HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
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


@pytest.fixture
def failing_row(settings: TableSettings) -> Iterator[Callable[[int], None]]:
    """Makes rows fail once a sequence has that many generated tokens."""
    (executor,) = settings.executors
    before = executor.fail_row

    def fail_at(length: int) -> None:
        executor.fail_row = lambda output: len(output) == length

    yield fail_at
    executor.fail_row = before


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="M", messages=HI, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.message.content == TEXT
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 6
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_chat_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="M",
        messages=HI,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_the_accumulating_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="M", messages=HI, temperature=0) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="M", prompt=["a", "b"], temperature=0, logprobs=1)
    assert [choice.text for choice in answer.choices] == [TEXT] * 2
    with client.completions.create(model="M", prompt="a", temperature=0, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


async def test_async_client(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="M", messages=HI, temperature=0)
        assert answer.choices[0].message.content == TEXT
        async with await client.completions.create(
            model="M", prompt="a", temperature=0, stream=True
        ) as stream:
            texts = [chunk.choices[0].text async for chunk in stream]
        assert "".join(texts) == TEXT


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["M", "org/alias"]
    assert client.models.retrieve("org/alias").owned_by == "octavo"


def test_g02_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HI)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    assert isinstance(missing.value.body, dict)
    assert "nope" in missing.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("unknown")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="M", messages=[])
    assert wrong.value.param == "messages"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="M", prompt="a", n=200, stream=True)


def test_a11_a_stream_that_fails_raises(
    client: openai.OpenAI, failing_row: Callable[[int], None]
) -> None:
    failing_row(2)
    pieces: list[str] = []
    with (
        pytest.raises(openai.APIError) as caught,
        client.completions.create(model="M", prompt="a", temperature=0, stream=True) as stream,
    ):
        pieces.extend(chunk.choices[0].text for chunk in stream)
    assert caught.value.code == "internal_error"
    failing_row(0)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="M", messages=HI, stream=True)


def test_leaving_a_stream_ends_its_request(client: openai.OpenAI, settings: TableSettings) -> None:
    executor: TableExecutor = settings.executors[0]
    table = executor.table
    executor.table = script_table(SCRIPT, SCRIPT[0])  # round and round
    try:
        with client.completions.create(
            model="M", prompt="a", temperature=0, stream=True, max_tokens=500
        ) as stream:
            next(iter(stream))
    finally:
        executor.table = table
    answer = client.completions.create(model="M", prompt="a", temperature=0)
    assert answer.choices[0].text == TEXT
