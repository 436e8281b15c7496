"""When the reader of a request is woken."""

import asyncio

import pytest

from octavo.engine.core.errors import RequestFailedError
from octavo.engine.core.request import FinishReason
from octavo.engine.core.sampling_params import SamplingParams
from octavo.engine.output_processor import ChoiceOutput
from octavo.server.context import current_request
from octavo.server.engine_stream import EngineStream, GenerateRequest


def make_stream(interval: int, num_choices: int = 1) -> EngineStream:
    params = SamplingParams(max_tokens=20, n=num_choices)
    request = GenerateRequest("r", (1,), params)
    return EngineStream(request, current_request(), 0.0, None, interval, open_choices=num_choices)


def token(number: int, index: int = 0, end: FinishReason | None = None) -> ChoiceOutput:
    """The output that brings token `number` of a choice, counted from 1."""
    return ChoiceOutput(index, str(number), (number,), finish_reason=end, num_output_tokens=number)


async def texts(stream: EngineStream) -> list[str]:
    return [output.text for output in await stream.next()]


async def test_every_token_is_due_by_default() -> None:
    stream = make_stream(1)
    for number in (1, 2, 3):
        stream.put([token(number)])
        assert await texts(stream) == [str(number)]


async def test_tokens_wait_for_each_other_but_the_first_and_the_last() -> None:
    stream = make_stream(3)
    stream.put([token(1)])
    assert await texts(stream) == ["1"]
    for number in (2, 3):
        stream.put([token(number)])
        assert not stream.wakeup.is_set()
    stream.put([token(4)])
    assert await texts(stream) == ["234"]
    stream.put([token(5)])
    assert not stream.wakeup.is_set()
    stream.put([token(6, end=FinishReason.STOP)])
    assert await texts(stream) == ["56"]


async def test_the_first_token_of_each_choice_is_due() -> None:
    stream = make_stream(3, num_choices=2)
    stream.put([token(1)])
    assert await texts(stream) == ["1"]
    stream.put([token(2)])
    assert not stream.wakeup.is_set()
    stream.put([token(1, index=1)])
    assert await texts(stream) == ["2", "1"]


async def test_what_waits_comes_before_the_error() -> None:
    stream = make_stream(5)
    stream.put([token(1)])
    await stream.next()
    stream.put([token(2)])
    stream.fail(RequestFailedError("broken"))
    async with asyncio.timeout(5):
        assert await texts(stream) == ["2"]
        for _ in range(2):
            with pytest.raises(RequestFailedError, match="broken"):
                await stream.next()
