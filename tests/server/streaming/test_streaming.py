"""The stream's frame: separators, keep-alive comments, errors, and what is freed at its end."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from octavo.engine.core.errors import RequestFailedError
from octavo.engine.output_processor import ChoiceOutput
from octavo.server import streaming
from octavo.server.context import RequestContext, enter_request
from octavo.server.generation import AnswerHead
from octavo.server.output_stream import OutputStream
from octavo.server.streaming import (
    DONE,
    KEEP_ALIVE,
    ChunkFrame,
    EventStream,
    json_line,
    write_events,
)
from octavo.server.usage import UsageCounter


@pytest.mark.parametrize("text", ["a\nb\r\tc", "x\u2028y\u2029z\x85w", '\x00\x1f"\\/', "é😀"])
def test_json_line_is_one_line_for_every_reader(text: str) -> None:
    rendered = json_line(text)
    assert json.loads(rendered) == text
    assert len(rendered.decode().splitlines()) == 1


def test_json_line_keeps_other_characters_literal() -> None:
    assert json_line("é😀") == '"é😀"'.encode()


def frame(usage: UsageCounter, include: bool, continuous: bool) -> ChunkFrame:
    return ChunkFrame(AnswerHead("M", "cmpl"), "text_completion", usage, include, continuous)


def data_of(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    value: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return value


@pytest.mark.parametrize("more", [b"", b',"prompt_token_ids":[1]'])
def test_a07_usage_in_chunks(more: bytes) -> None:
    usage = UsageCounter([3])
    output = ChoiceOutput(0, "a", (1,), num_cached_tokens=2, num_output_tokens=1)
    usage.add(0, output)
    assert "usage" not in data_of(frame(usage, False, False).chunk(b"{}", more))
    assert data_of(frame(usage, True, False).chunk(b"{}", more))["usage"] is None
    running = data_of(frame(usage, True, True).chunk(b"{}", more))
    assert running["usage"]["total_tokens"] == 4
    assert running["choices"] == [{}]
    assert ("prompt_token_ids" in running) == bool(more)


def test_a07_the_end_of_a_stream() -> None:
    usage = UsageCounter([3])
    assert frame(usage, False, False).last() == DONE
    chunk, done, rest = frame(usage, True, False).last().split(b"\n\n")
    assert json.loads(chunk.removeprefix(b"data: "))["choices"] == []
    assert (done, rest) == (b"data: [DONE]", b"")


def test_usage_sums_choices_and_counts_prompts_once() -> None:
    usage = UsageCounter([3, 4])
    for number, index, tokens in [(0, 0, 1), (0, 1, 1), (0, 0, 2), (1, 0, 5)]:
        usage.add(
            number,
            ChoiceOutput(index, "", (), num_cached_tokens=number * 2, num_output_tokens=tokens),
        )
    assert usage.as_dict() == {
        "prompt_tokens": 7,
        "completion_tokens": 8,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


class EchoWriter:
    """Renders the text of each output as it is."""

    def write(self, number: int, outputs: list[ChoiceOutput]) -> bytes:
        return b"".join(output.text.encode() for output in outputs)

    def last(self) -> bytes:
        return b"end"


class ScriptedEngine:
    """Stands for AsyncEngine: waits for `gate` before it yields each text."""

    def __init__(self, texts: list[str | Exception]) -> None:
        self.gate = asyncio.Semaphore(0)
        self.closed = 0
        self._texts = texts

    async def generate(self, request: Any) -> AsyncGenerator[list[ChoiceOutput], None]:
        try:
            for text in self._texts:
                await self.gate.acquire()
                if isinstance(text, Exception):
                    raise text
                yield [ChoiceOutput(0, text, (1,))]
        finally:
            self.closed += 1


def open_stream(engine: ScriptedEngine, num_prompts: int = 1) -> OutputStream:
    requests: list[Any] = [None] * num_prompts
    return OutputStream(engine, requests)  # type: ignore[arg-type]


async def test_a14_comments_fill_silence_and_never_split_an_event() -> None:
    engine = ScriptedEngine(["", "b"])
    stream = open_stream(engine)
    events = write_events(stream, EchoWriter(), keep_alive=0.01)
    assert [await anext(events), await anext(events)] == [KEEP_ALIVE] * 2
    engine.gate.release()  # an output without text does not end the silence
    assert await anext(events) == KEEP_ALIVE
    engine.gate.release()
    data = [event async for event in events if event != KEEP_ALIVE]
    assert data == [b"b", b"end"]
    await stream.aclose()


async def test_a14_zero_is_no_comments() -> None:
    engine = ScriptedEngine(["a"])
    stream = open_stream(engine)
    events = write_events(stream, EchoWriter(), keep_alive=0)
    first = asyncio.ensure_future(anext(events))
    done, _ = await asyncio.wait({first}, timeout=0.05)
    assert not done
    engine.gate.release()
    assert await first == b"a"
    await events.aclose()
    await stream.aclose()


async def test_outputs_of_several_prompts_are_merged() -> None:
    engine = ScriptedEngine(["a", "b"])
    stream = open_stream(engine, 3)
    for _ in range(6):
        engine.gate.release()
    seen = []
    while (item := await stream.next()) is not None:
        seen.append((item[0], item[1][0].text))
    assert sorted(seen) == [(number, text) for number in range(3) for text in "ab"]
    for number in range(3):
        assert [text for place, text in seen if place == number] == ["a", "b"]
    await stream.aclose()
    assert engine.closed == 3


async def test_closing_early_closes_the_engines_streams() -> None:
    engine = ScriptedEngine(["a", "b", "c"])
    stream = open_stream(engine, 2)
    engine.gate.release()
    assert await stream.next() is not None
    await stream.aclose()
    assert engine.closed == 2


async def send_all(response: EventStream, leave_after: int | None = None) -> list[bytes]:
    """Run a response as a server does; the client leaves after that many bodies."""
    bodies: list[bytes] = []
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))
        if len(bodies) == leave_after:
            gone.set()
            await asyncio.sleep(3600)

    await response({"type": "http", "method": "POST"}, receive, send)
    return bodies


class Closer:
    """Counts how often a stream was closed."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> None:
        self.calls += 1


async def test_a11_an_error_after_the_first_byte_is_one_event_without_done() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 2\n\n"
        raise RequestFailedError("secret")

    closer = Closer()
    response = EventStream(b"data: 1\n\n", events(), closer)
    body = b"".join(await send_all(response))
    first, second, error, rest = body.split(b"\n\n")
    assert (first, second, rest) == (b"data: 1", b"data: 2", b"")
    answer = json.loads(error.removeprefix(b"data: "))
    assert answer["error"]["code"] == "internal_error"
    assert b"secret" not in body
    assert closer.calls == 1


async def test_headers_of_a_stream() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b""

    response = EventStream(b"data: 1\n\n", events(), Closer())
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    await send_all(response)


@pytest.mark.parametrize("leave_after", [1, 2, 3])
async def test_a_client_that_leaves_closes_everything(leave_after: int) -> None:
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    rest = events()
    closer = Closer()
    await send_all(EventStream(b"data: 1\n\n", rest, closer), leave_after)
    assert closer.calls == 1
    # What never began has nothing to clean up.
    assert closed == [True] or leave_after <= 2
    await rest.aclose()


async def endless_events() -> AsyncGenerator[bytes, None]:
    while True:
        yield b"data: x\n\n"


async def send_to_nobody(response: EventStream, bodies_taken: int) -> list[bytes]:
    """Run a response whose client takes that many bodies and stays connected."""
    taken: list[bytes] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if len(taken) == bodies_taken:
                await asyncio.Event().wait()
            taken.append(message["body"])

    async with asyncio.timeout(10):
        await response({"type": "http", "method": "POST"}, receive, send)
    return taken


@pytest.mark.parametrize("given_up", ["never", "before", "while blocked"])
async def test_a_client_that_stops_reading_is_left(
    monkeypatch: pytest.MonkeyPatch, given_up: str
) -> None:
    limit = "READER_TIMEOUT_S" if given_up == "never" else "LAST_WORDS_S"
    monkeypatch.setattr(streaming, limit, 0.02)
    context = RequestContext()
    enter_request(context)
    if given_up == "before":
        context.give_up()
    if given_up == "while blocked":
        asyncio.get_running_loop().call_later(0.02, context.give_up)
    closer = Closer()
    await send_to_nobody(EventStream(b"data: 1\n\n", endless_events(), closer), 2)
    assert closer.calls == 1


async def test_the_end_of_a_stream_is_not_waited_for_without_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_events() -> AsyncGenerator[bytes, None]:
        return
        yield

    monkeypatch.setattr(streaming, "READER_TIMEOUT_S", 0.02)
    closer = Closer()
    await send_to_nobody(EventStream(b"data: 1\n\n", no_events(), closer), 1)
    assert closer.calls == 1


async def test_a_large_event_goes_in_pieces() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"y" * 200_000

    bodies = await send_all(EventStream(b"x", events(), Closer()))
    assert b"".join(bodies) == b"x" + b"y" * 200_000
    assert max(map(len, bodies)) <= 65536
