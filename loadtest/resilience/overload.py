"""Several times more requests than can be served: the work that gets done must not shrink."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from octavo.loadtest.resilience.connection import Connection, ConnectionLost
from octavo.loadtest.resilience.outcome import Outcome, percentile
from octavo.loadtest.resilience.process import ServerProcess
from octavo.loadtest.resilience.watch import demand_nothing_lost, when_idle

# A cache that is soon used up: memory that is touched for the first time would count as growth.
SERVE_ARGS = (
    *("--max-num-seqs", "8", "--max-num-queued-reqs", "8"),
    *("--num-gpu-blocks-override", "600"),
)
_CLIENTS = 16
"""As many as are accepted at once."""

_GOODPUT = 0.9
_REFUSAL_S = 0.05
_RSS_GROWTH = 1.05
_SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True)
class OverloadSize:
    """How much of it."""

    calibrate_s: float = 30.0
    seconds: float = 120.0
    factor: float = 5.0
    max_tokens: int = 32


@dataclass(slots=True)
class _Tally:
    """Moments of good answers, seconds to each refusal, and what should not happen."""

    done: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    no_retry_after: int = 0
    other: int = 0

    def rate(self, begin: float, end: float) -> float:
        """Good answers per second between two moments."""
        return sum(begin <= moment < end for moment in self.done) / (end - begin)


async def overload(server: ServerProcess, size: OverloadSize) -> Outcome:
    """Find the rate that the server keeps up with, before and after `factor` times as much."""
    outcome = Outcome("overload")
    numbers = itertools.count()

    def body() -> dict[str, object]:
        # No prompt begins like another: every answer is the same work.
        prompt = f"{next(numbers)} times I have asked what comes after this."
        return {"prompt": prompt, "max_tokens": size.max_tokens, "ignore_eos": True}

    peak = await _closed_loop(server, body(), size.calibrate_s)
    before = await when_idle(server)
    tally, kept = _Tally(), list[Connection]()
    begin = time.monotonic()
    watcher = asyncio.create_task(_largest_rss(server))
    async with asyncio.TaskGroup() as group:
        for number in range(int(size.factor * peak * size.seconds)):
            delay = begin + number / (size.factor * peak) - time.monotonic()
            await asyncio.sleep(max(delay, 0))
            group.create_task(_one(server, body(), kept, tally))
        end = time.monotonic()
    rss = await _stop(watcher)
    for connection in kept:
        connection.abort()
    # While the queue fills, nothing is refused and nothing has ended yet.
    goodput = tally.rate(begin + 0.1 * size.seconds, end)
    after = await when_idle(server)
    peak_after = await _closed_loop(server, body(), size.calibrate_s)
    outcome.figures |= {
        "peak before, answers/s": round(peak, 2),
        "peak after, answers/s": round(peak_after, 2),
        "answers/s under overload": round(goodput, 2),
        "sent, requests/s": round(size.factor * peak, 2),
        "good answers": len(tally.done),
        "refusals": len(tally.refusals),
        "time to refuse, median ms": round(percentile(tally.refusals, 0.5) * 1e3, 2),
        "time to refuse, longest ms": round(max(tally.refusals, default=0) * 1e3, 2),
        "RSS before, MiB": round(before.rss_mib, 1),
        "RSS at most, MiB": round(rss, 1),
    }
    # Machines change their pace within minutes, so the peak is that of before and after.
    share = goodput / ((peak + peak_after) / 2)
    outcome.at_least("goodput / peak", share, _GOODPUT, only_long=True)
    outcome.at_most(
        "time to refuse, P99 s", percentile(tally.refusals, 0.99), _REFUSAL_S, only_long=True
    )
    outcome.at_least("refusals", len(tally.refusals), 1)
    outcome.none("refusals without Retry-After", tally.no_retry_after)
    outcome.none("neither answered nor refused", tally.other)
    outcome.at_most("RSS at most / before", rss / before.rss_mib, _RSS_GROWTH, only_long=True)
    demand_nothing_lost(outcome, before, after)
    return outcome


async def _closed_loop(server: ServerProcess, body: dict[str, object], seconds: float) -> float:
    """Answers per second with as many clients as the server accepts."""
    begin = time.monotonic()
    done = 0

    async def client(number: int) -> None:
        nonlocal done
        async with await Connection.open(server.port) as connection:
            for turn in itertools.count():
                prompt = f"{number} {turn} {body['prompt']}"
                reply = await connection.ask("/v1/completions", body | {"prompt": prompt})
                if time.monotonic() > begin + seconds:
                    return
                done += reply.status == 200

    async with asyncio.TaskGroup() as group:
        for number in range(_CLIENTS):
            group.create_task(client(number))
    return done / seconds


async def _one(
    server: ServerProcess, body: dict[str, object], kept: list[Connection], tally: _Tally
) -> None:
    """One request, over a connection that an earlier one has left, as clients and proxies do."""
    connection = kept.pop() if kept else await Connection.open(server.port)
    try:
        sent = time.monotonic()
        reply = await connection.ask("/v1/completions", body)
        kept.append(connection)
    except ConnectionLost:
        tally.other += 1
        return
    now = time.monotonic()
    if reply.status == 200:
        tally.done.append(now)
    elif reply.status == 429:
        tally.refusals.append(now - sent)
        tally.no_retry_after += int(reply.headers.get("retry-after", "0")) < 1
    else:
        tally.other += 1


async def _largest_rss(server: ServerProcess) -> float:
    largest = 0.0
    try:
        while True:
            largest = max(largest, server.usage().rss_mib)
            await asyncio.sleep(_SAMPLE_S)
    except asyncio.CancelledError:
        return largest


async def _stop(watcher: asyncio.Task[float]) -> float:
    watcher.cancel()
    return await watcher
