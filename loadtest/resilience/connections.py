"""Many connections at once, slow readers among them, and connections that are used again."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from octavo.loadtest.resilience.connection import Connection, ConnectionLost, request_bytes
from octavo.loadtest.resilience.outcome import Outcome, percentile
from octavo.loadtest.resilience.process import ServerProcess
from octavo.loadtest.resilience.watch import demand_nothing_lost, when_idle

# Without a model, so that 500 streams run at once on any machine.
SERVE_ARGS = ("--load-format", "null", "--max-num-seqs", "600")
T = TypeVar("T")

_AT_ONCE = 50
_REUSED = 8


@dataclass(frozen=True, slots=True)
class ConnectionsSize:
    """How much of it. One of ten streams has a reader that sleeps until the others are done."""

    idle: int = 2000
    streams: int = 500
    max_tokens: int = 200
    reuse: int = 10_000


async def connections(server: ServerProcess, size: ConnectionsSize) -> Outcome:
    """Open them, stream over some, and use the idle ones afterwards."""
    outcome = Outcome("connections")
    before = await when_idle(server)
    async with _Idle(server.port) as idle:
        await idle.open(size.idle)
        alone = await _stream_all(server, size.streams - size.streams // 10, size, [])
        sleepers = [_Sleeper(server.port, size) for _ in range(size.streams // 10)]
        beside = await _stream_all(server, size.streams - len(sleepers), size, sleepers)
        late = await asyncio.gather(*(sleeper.rest() for sleeper in sleepers))
        broken = await idle.broken()
    started = time.monotonic()
    resets = await _reuse(server.port, size.reuse)
    outcome.figures |= {
        "idle connections": size.idle,
        "streams at once": size.streams,
        "of these, with sleeping readers": len(sleepers),
        "time to whole stream, P99 s, no sleepers": round(percentile(alone.seconds, 0.99), 3),
        "time to whole stream, P99 s, with sleepers": round(percentile(beside.seconds, 0.99), 3),
        "requests over kept connections, 1/s": round(size.reuse / (time.monotonic() - started)),
    }
    outcome.none("streams that were not whole", alone.broken + beside.broken)
    outcome.none("streams of sleepers that were not whole", late.count(False))
    outcome.none("idle connections that were closed", broken)
    outcome.none("resets in kept connections", resets)
    outcome.none("errors in the log", len(server.log_faults()))
    demand_nothing_lost(outcome, before, await when_idle(server))
    return outcome


class _Idle:
    """Connections that have asked once and then stay open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._all: list[Connection] = []

    async def __aenter__(self) -> "_Idle":
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._all:
            connection.abort()

    async def open(self, count: int) -> None:
        async def one() -> None:
            connection = await Connection.open(self._port)
            self._all.append(connection)
            await connection.ask("/health")

        await _some_at_once([one() for _ in range(count)])

    async def broken(self) -> int:
        """How many of them cannot be used a second time."""

        async def works(connection: Connection) -> bool:
            try:
                return (await connection.ask("/health")).status == 200
            except ConnectionLost:
                return False

        answers = await _some_at_once([works(connection) for connection in self._all])
        return answers.count(False)


@dataclass(slots=True)
class _Streams:
    seconds: list[float]
    broken: int


def _body(size: ConnectionsSize) -> dict[str, object]:
    return {"prompt": "Go on:", "max_tokens": size.max_tokens, "stream": True, "ignore_eos": True}


class _Sleeper:
    """Begins a stream and reads nothing of it until it is told to."""

    def __init__(self, port: int, size: ConnectionsSize) -> None:
        self._port = port
        self._size = size
        self._connection: Connection | None = None

    async def begin(self) -> None:
        self._connection = await Connection.open(self._port, small_buffer=True)
        await self._connection.send(request_bytes("/v1/completions", _body(self._size)))

    async def rest(self) -> bool:
        """Read everything; true for a whole stream."""
        assert self._connection is not None
        async with self._connection:
            try:
                return (await self._connection.read_reply()).is_whole_stream
            except ConnectionLost:
                return False


async def _stream_all(
    server: ServerProcess, count: int, size: ConnectionsSize, sleepers: Sequence[_Sleeper]
) -> _Streams:
    """Run `count` streams at once, after the sleepers have begun theirs."""
    await asyncio.gather(*(sleeper.begin() for sleeper in sleepers))
    result = _Streams([], 0)

    async def one() -> None:
        begin = time.monotonic()
        try:
            async with await Connection.open(server.port) as connection:
                reply = await connection.ask("/v1/completions", _body(size))
        except ConnectionLost:
            result.broken += 1
            return
        result.seconds.append(time.monotonic() - begin)
        result.broken += not reply.is_whole_stream

    await asyncio.gather(*(one() for _ in range(count)))
    return result


async def _reuse(port: int, count: int) -> int:
    """Send so many requests over a few connections; returns how often one was lost."""

    async def one() -> int:
        resets = 0
        connection = await Connection.open(port)
        for number in range(count // _REUSED):
            try:
                if number % 5:
                    reply = await connection.ask("/tokenize", {"prompt": "again"})
                else:
                    body = {"prompt": "again", "max_tokens": 1}
                    reply = await connection.ask("/v1/completions", body)
                resets += reply.status != 200
            except ConnectionLost:
                resets += 1
                connection = await Connection.open(port)
        connection.abort()
        return resets

    return sum(await asyncio.gather(*(one() for _ in range(_REUSED))))


async def _some_at_once(work: Sequence[Awaitable[T]]) -> list[T]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(item: Awaitable[T]) -> T:
        async with places:
            return await item

    return list(await asyncio.gather(*map(one, work)))
