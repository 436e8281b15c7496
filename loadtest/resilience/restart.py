"""kill -9 and a new start, seen by clients that only know their library's retries."""

import asyncio
import signal
import time
from dataclasses import dataclass

import openai

from octavo.loadtest.resilience.connection import HOST
from octavo.loadtest.resilience.outcome import Outcome
from octavo.loadtest.resilience.process import ServerProcess
from octavo.loadtest.resilience.watch import canary

SERVE_ARGS = ("--max-num-seqs", "8", "--max-num-queued-reqs", "64")


@dataclass(frozen=True, slots=True)
class RestartSize:
    """How much of it."""

    clients: int = 8
    seconds: float = 5.0
    max_tokens: int = 16


async def restart(server: ServerProcess, size: RestartSize) -> Outcome:
    """Kill a busy server that keeps its socket, start it again, and look at its clients."""
    before = await canary(server.port)
    restarted = False
    done: list[float] = []
    served_again: set[int] = set()
    errors: list[str] = []

    async def client(number: int) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"http://{HOST}:{server.port}/v1", api_key="none"
        ) as library:
            name = (await library.models.list()).data[0].id
            while number not in served_again:
                try:
                    answer = await library.completions.create(
                        model=name, prompt=f"Client {number} asks", max_tokens=size.max_tokens
                    )
                except openai.OpenAIError as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    return
                assert answer.choices[0].finish_reason is not None
                done.append(time.monotonic())
                if restarted:
                    served_again.add(number)

    async with asyncio.TaskGroup() as group:
        for number in range(size.clients):
            group.create_task(client(number))
        await asyncio.sleep(size.seconds)
        while len(done) < size.clients and not errors:
            await asyncio.sleep(0.05)
        answered_before = len(done)
        server.signal(signal.SIGKILL)
        killed = time.monotonic()
        code = await server.wait()
        restarted = True
        server.start()
        await server.wait_until_ready()
        away = time.monotonic() - killed
    outcome = Outcome("restart")
    outcome.figures |= {
        "answered before": answered_before,
        "answered after": len(done) - answered_before,
        "seconds away": round(away, 2),
    }
    if errors:
        outcome.figures["first error"] = errors[0]
    outcome.equal("exit code", code, -signal.SIGKILL)
    outcome.at_least("answered before", answered_before, 1)
    outcome.none("clients with an error", len(errors))
    outcome.equal("canary", await canary(server.port), before)
    return outcome
