"""SIGTERM while clients ask without a pause: what was accepted is answered."""

import asyncio
import signal
import time
from dataclasses import dataclass, field

from octavo.loadtest.resilience.connection import Connection, ConnectionLost
from octavo.loadtest.resilience.outcome import Outcome
from octavo.loadtest.resilience.process import ServerProcess

SERVE_ARGS = ("--max-num-seqs", "8", "--max-num-queued-reqs", "64")


@dataclass(frozen=True, slots=True)
class StopSize:
    """How much of it."""

    clients: int = 24
    seconds: float = 10.0
    max_tokens: int = 32


@dataclass(slots=True)
class _Tally:
    stopped: float | None = None
    answered: int = 0
    answered_after: int = 0
    refused_after: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


async def sigterm(server: ServerProcess, size: StopSize) -> Outcome:
    """Stop a busy server; it must be gone in the end, with code 0."""
    server.let_go_of_socket()
    tally = _Tally()
    async with asyncio.TaskGroup() as group:
        for number in range(size.clients):
            group.create_task(_client(server, number, size, tally))
        await asyncio.sleep(size.seconds)
        while tally.answered < size.clients:
            await asyncio.sleep(0.05)
        tally.stopped = time.monotonic()
        server.signal(signal.SIGTERM)
    code = await server.wait()
    outcome = Outcome("sigterm")
    outcome.figures |= {
        "answered before": tally.answered,
        "accepted before, answered after": tally.answered_after,
        "refused after (503)": tally.refused_after,
        "seconds to the end": round(time.monotonic() - tally.stopped, 2),
    }
    for name, found in (("lost", tally.lost), ("wrong", tally.wrong)):
        if found:
            outcome.figures[f"first {name}"] = found[0]
    outcome.at_least("accepted before, answered after", tally.answered_after, 1)
    outcome.none("accepted and lost", len(tally.lost))
    outcome.none("wrong answers", len(tally.wrong))
    outcome.equal("exit code", code, 0)
    outcome.none("errors in the log", len(server.log_faults()))
    return outcome


async def _client(server: ServerProcess, number: int, size: StopSize, tally: _Tally) -> None:
    """Ask again and again; every second client streams."""
    body = {"prompt": f"Client {number} says", "max_tokens": size.max_tokens, "ignore_eos": True}
    stream = number % 2 == 0
    while True:
        sent = time.monotonic()
        try:
            async with await Connection.open(server.port) as connection:
                sent = time.monotonic()
                reply = await connection.ask("/v1/completions", body | {"stream": stream})
        except ConnectionLost as error:
            # What comes after the signal is refused, in the end by a closed port.
            if tally.stopped is None or sent < tally.stopped:
                tally.lost.append(str(error))
            return
        if reply.status == 503 and tally.stopped is not None:
            if sent < tally.stopped and b"server_draining" not in reply.body:
                tally.wrong.append("503 before the signal")
            tally.refused_after += 1
            return
        if reply.status != 200 or (stream and not reply.is_whole_stream):
            tally.wrong.append(f"{reply.status} {reply.body[-200:]!r}")
        elif tally.stopped is None:
            tally.answered += 1
        else:
            tally.answered_after += 1
