"""Server-sent events: the frame of a chunk, keep-alive comments, errors inside a stream."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from typing import Protocol

import anyio
import orjson
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from octavo.engine.core.errors import OctavoError
from octavo.engine.output_processor import ChoiceOutput
from octavo.server.context import current_request
from octavo.server.errors import ErrorAnswer, describe_error
from octavo.server.generation import AnswerHead
from octavo.server.output_stream import OutputStream
from octavo.server.rendering import render
from octavo.server.usage import UsageCounter

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

READER_TIMEOUT_S = 60.0
"""A client that takes no piece of its stream for so long is taken to be gone."""

LAST_WORDS_S = 5.0
"""What a client gets to take the rest of a stream that the server has given up."""

_PIECE_BYTES = 65536
"""Large events are sent in pieces, so that a slow client shows that it reads."""

# The library would cut all streams at the first sign of a shutdown; accepted requests go on.
AppStatus.enable_automatic_graceful_drain = False


def json_line(value: object) -> bytes:
    """Return `value` as JSON without any character that some reader takes for a line end.

    JSON escapes those below U+0020; U+0085, U+2028 and U+2029 may stand in JSON but end a line
    for clients that split text rather than bytes.
    """
    encoded = orjson.dumps(value)
    if encoded.isascii():
        return encoded
    return (
        encoded.replace(b"\xc2\x85", b"\\u0085")
        .replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
    )


class ChunkFrame:
    """What surrounds the choice of a chunk; everything that stays the same is rendered once."""

    def __init__(
        self,
        head: AnswerHead,
        kind: str,
        usage: UsageCounter,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._start = b"data: " + json_line(head.fields(kind))[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._usage = usage
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    def chunk(self, choice: bytes, more: bytes = b"") -> bytes:
        """Return the event of one choice; `more` are further top-level fields, comma first."""
        if self._continuous_usage:
            return b"".join((self._start, choice, self._usage_end(more)))
        if more:
            return b"".join((self._start, choice, b"]", more, self._end[1:]))
        return b"".join((self._start, choice, self._end))

    def last(self) -> bytes:
        """Return the usage chunk, if wanted, and the mark of the end."""
        return self._start + self._usage_end() + DONE if self._include_usage else DONE

    def _usage_end(self, more: bytes = b"") -> bytes:
        return b"".join((b"]", more, b',"usage":', orjson.dumps(self._usage.as_dict()), b"}\n\n"))


class ChunkWriter(Protocol):
    """Turns outputs into events; one per HTTP request."""

    def write(self, number: int, outputs: list[ChoiceOutput]) -> bytes:
        """Return the events for new outputs of the prompt with this number; may be empty."""

    def last(self) -> bytes:
        """Return the events that end the stream."""

    def failed(self, error: ErrorAnswer) -> bytes:
        """Return the event that ends a stream which breaks off."""


async def write_events(
    outputs: OutputStream, writer: ChunkWriter, keep_alive: float
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream, and a comment after each `keep_alive` seconds of silence.

    0 is no comments. Raises what the engine raises.
    """
    silence = _Silence(keep_alive, outputs.interrupt)
    num_records, prompt_records = 0, 0
    try:
        while (item := await outputs.next()) is not None:
            number, new = item
            here = sum(len(output.logprobs) for output in new)
            num_records += here
            # After an echo each choice tells of the prompt, the later ones in later outputs.
            prompt_records += sum(len(output.prompt_logprobs or ()) for output in new)
            write = partial(writer.write, number, new)
            data = await render(write, here + prompt_records) if new else KEEP_ALIVE
            if data:
                yield data
                silence.restart()
        # Some streams end with all of the text again.
        yield await render(writer.last, num_records)
    finally:
        silence.stop()


class _Silence:
    """Calls `remind` after each `limit` seconds without a `restart`; 0 is never.

    One timer that looks at a clock: a timer per event would cost every token.
    """

    def __init__(self, limit: float, remind: Callable[[], None]) -> None:
        self._limit = limit
        self._remind = remind
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.restart()
        if limit > 0:
            self._check()

    def restart(self) -> None:
        """Begin to count anew."""
        self._since = self._loop.time()

    def stop(self) -> None:
        """Call nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        if self._loop.time() >= self._since + self._limit:
            self._remind()
            self.restart()
        self._timer = self._loop.call_at(self._since + self._limit, self._check)


class _Reader:
    """Watches whether the client takes what is sent; `leave` is called when it does not.

    One timer that looks at a clock, as in `_Silence`.
    """

    def __init__(self, send: Send, leave: Callable[[], None]) -> None:
        self._send = send
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._blocked_since: float | None = None
        self._last_words: asyncio.TimerHandle | None = None
        self._timer = self._loop.call_later(READER_TIMEOUT_S, self._check)

    async def send(self, message: Message) -> None:
        """Send and note for how long it takes."""
        self._blocked_since = self._loop.time()
        await self._send(message)
        self._blocked_since = None

    def give_up(self) -> None:
        """Leave soon, whatever is still to be sent."""
        if self._last_words is None:
            self._last_words = self._loop.call_later(LAST_WORDS_S, self._leave)

    def stop(self) -> None:
        """Watch no more."""
        self._timer.cancel()
        if self._last_words is not None:
            self._last_words.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        since = now if self._blocked_since is None else self._blocked_since
        if now >= since + READER_TIMEOUT_S:
            self._leave()
        else:
            self._timer = self._loop.call_at(since + READER_TIMEOUT_S, self._check)


class EventStream(EventSourceResponse):
    """A response that begins with an event at hand, so that earlier errors keep their status.

    `on_close` is awaited exactly once, whatever becomes of the response. `write_error` renders
    an error that comes later. A client that stops reading is left like one that went away: after
    `READER_TIMEOUT_S`, or after `LAST_WORDS_S` when the engine has given its request up.
    """

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        on_close: Callable[[], Awaitable[None]],
        write_error: Callable[[ErrorAnswer], bytes] = ErrorAnswer.event,
    ) -> None:
        self._events = _with_error_event(first, rest, write_error)
        super().__init__(
            self._events,
            headers={"Cache-Control": "no-cache"},
            ping=0,  # comments come from `_Silence`, which knows when the last event left
            sep="\n",
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        context = current_request()
        try:
            async with contextlib.aclosing(self._events):
                with anyio.CancelScope() as sending:
                    reader = _Reader(send, sending.cancel)
                    context.watch(reader.give_up)
                    try:
                        await super().__call__(scope, receive, reader.send)
                    finally:
                        reader.stop()
                if sending.cancelled_caught:
                    logger.warning("Request %s: the client does not read", context.request_id)
        finally:
            await self._on_close()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # `_Reader` keeps the time; a cancel scope per event would cost every token.
        await send(message)


async def _with_error_event(
    first: bytes,
    rest: AsyncGenerator[bytes, None],
    write_error: Callable[[ErrorAnswer], bytes],
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(rest):
        for piece in _in_pieces(first):
            yield piece
        try:
            async for data in rest:
                if len(data) <= _PIECE_BYTES:
                    yield data
                    continue
                for piece in _in_pieces(data):
                    yield piece
        except Exception as error:  # the boundary of a request whose status has been sent
            if not isinstance(error, OctavoError):
                logger.exception("A stream failed")
            yield write_error(describe_error(error))


def _in_pieces(data: bytes) -> Iterator[bytes]:
    return (data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))
