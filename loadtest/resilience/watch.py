"""Looking for what a server has lost: blocks, requests, tasks, files, and its right answers."""

import asyncio
import re
import time
from dataclasses import dataclass

from octavo.loadtest.client import ServerError
from octavo.loadtest.resilience.connection import ask
from octavo.loadtest.resilience.outcome import Outcome
from octavo.loadtest.resilience.process import ServerProcess

_IDLE_S = 90
_CANARY = {"prompt": "The first three letters are a, b,", "max_tokens": 16, "temperature": 0}
_SAMPLE = re.compile(r"^octavo:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_BUSY = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
# The one of the scrape itself and its kin may come and go.
_TASKS_MARGIN = 2
_FILES_MARGIN = 2
# Pools make their few threads when they are first needed.
_THREADS_MARGIN = 8


@dataclass(frozen=True, slots=True)
class Held:
    """What an idle server holds."""

    num_tasks: int
    num_files: int
    num_threads: int
    rss_mib: float


async def metrics(port: int) -> dict[str, float]:
    """Samples of the server's own metrics by name; those that differ in labels are summed."""
    page = (await ask(port, "/metrics")).body.decode()
    samples: dict[str, float] = {}
    for name, value in _SAMPLE.findall(page):
        samples[name] = samples.get(name, 0.0) + float(value)
    return samples


async def canary(port: int) -> str:
    """A greedy answer, which must stay what it is. Raises ServerError without one."""
    while (reply := await ask(port, "/v1/completions", _CANARY)).status == 429:
        await asyncio.sleep(0.5)
    if reply.status != 200:
        raise ServerError(f"the canary got {reply.status}")
    return str(reply.json()["choices"][0]["text"])


async def when_idle(server: ServerProcess) -> Held:
    """Wait until nothing is asked of the server, and tell what it holds then.

    Raises ServerError when it never comes to rest: something of a request was lost.
    """
    deadline = time.monotonic() + _IDLE_S
    while True:
        samples = await metrics(server.port)
        busy = {name: samples[name] for name in _BUSY if samples[name]}
        if not busy:
            break
        if time.monotonic() > deadline:
            raise ServerError(f"the server never came to rest: {busy}")
        await asyncio.sleep(0.1)
    # Connections that were left are closed in the event loop's next rounds.
    await asyncio.sleep(0.5)
    samples = await metrics(server.port)
    usage = server.usage()
    return Held(
        num_tasks=int(samples["event_loop_tasks"]),
        num_files=usage.num_files,
        num_threads=usage.num_threads,
        rss_mib=usage.rss_mib,
    )


def demand_nothing_lost(outcome: Outcome, before: Held, after: Held) -> None:
    """Add demands on what an idle server may hold after all that was asked of it."""
    num_threads = after.num_threads - before.num_threads
    outcome.at_most("tasks more than before", after.num_tasks - before.num_tasks, _TASKS_MARGIN)
    outcome.at_most("files more than before", after.num_files - before.num_files, _FILES_MARGIN)
    outcome.at_most("threads more than before", num_threads, _THREADS_MARGIN)
