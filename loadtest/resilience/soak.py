"""Mixed traffic for a long time, a good part of it from clients that misbehave."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from octavo.loadtest.resilience.connection import Connection, ConnectionLost, ask, request_bytes
from octavo.loadtest.resilience.outcome import Outcome, percentile
from octavo.loadtest.resilience.process import ServerProcess
from octavo.loadtest.resilience.watch import canary, demand_nothing_lost, when_idle

# The system hands out a cache page by page as blocks are first used, which in a large one takes
# hours: this one has been used up when memory is first looked at.
SERVE_ARGS = (
    *("--max-num-seqs", "8", "--max-num-queued-reqs", "8"),
    *("--num-gpu-blocks-override", "1500"),
)
_NUM_PLACES = 16
"""What `SERVE_ARGS` let in at once."""

_WORKERS = 12
_MISBEHAVING = 0.3
_SAMPLE_S = 1.0
_CANARY_S = 5.0
_RSS_GROWTH = 1.02
_WORDS = ("a", "press", "prints", "sheets", "that", "are", "folded", "into", "books", "of", "pages")


@dataclass(frozen=True, slots=True)
class SoakSize:
    """How much of it. The first `warm_up` (a share of the time) is left out of the growth."""

    seconds: float = 1200.0
    warm_up: float = 0.25
    max_tokens: int = 48


@dataclass(slots=True)
class _Soak:
    """One run. `faults` are answers that no client should have got."""

    port: int
    expected: str
    max_tokens: int
    random: random.Random
    end: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    wrong_canaries: int = 0

    def prompt(self) -> str:
        return " ".join(self.random.choices(_WORDS, k=self.random.randrange(4, 60)))

    def body(self, **more: object) -> dict[str, object]:
        tokens = self.random.randrange(1, self.max_tokens)
        return {"prompt": self.prompt(), "max_tokens": tokens} | more

    def chat(self, **more: object) -> dict[str, object]:
        messages = [{"role": "user", "content": self.prompt()}]
        tokens = self.random.randrange(1, self.max_tokens)
        return {"messages": messages, "max_tokens": tokens} | more


async def soak(server: ServerProcess, size: SoakSize) -> Outcome:
    """Ask for `seconds`, and look at what the server holds after a warm-up and at the end."""
    expected = await canary(server.port)
    run = _Soak(server.port, expected, size.max_tokens, random.Random(7))
    await _traffic(server, run, size.seconds * size.warm_up)
    before = await when_idle(server)
    samples = await _traffic(server, run, size.seconds * (1 - size.warm_up))
    after = await when_idle(server)
    part = max(len(samples) // 5, 1)
    first, last = percentile(samples[:part], 0.5), percentile(samples[-part:], 0.5)
    outcome = Outcome("soak")
    outcome.figures |= {name: run.done[name] for name in sorted(run.done)}
    outcome.figures |= {
        "RSS after warm-up, MiB": round(first, 1),
        "RSS at the end, MiB": round(last, 1),
    }
    if run.faults:
        outcome.figures["first fault"] = run.faults[0]
    outcome.none("answers that nobody should get", len(run.faults))
    outcome.none("canary answers that changed", run.wrong_canaries)
    outcome.none("errors in the log", len(server.log_faults()))
    outcome.at_most("RSS at the end / after warm-up", last / first, _RSS_GROWTH, only_long=True)
    demand_nothing_lost(outcome, before, after)
    outcome.none("places lost", await _places_lost(run))
    return outcome


async def _traffic(server: ServerProcess, run: _Soak, seconds: float) -> list[float]:
    """Ask for so long; returns samples of the server's RSS in MiB."""
    samples = []
    run.end = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(_WORKERS):
            group.create_task(_work(run))
        group.create_task(_ask_canary(run))
        while time.monotonic() < run.end:
            samples.append(server.usage().rss_mib)
            await asyncio.sleep(_SAMPLE_S)
    return samples


async def _work(run: _Soak) -> None:
    while time.monotonic() < run.end:
        kinds = _BAD if run.random.random() < _MISBEHAVING else _GOOD
        kind = run.random.choice(kinds)
        try:
            await kind(run)
        except ConnectionLost as error:
            run.faults.append(f"{kind.__name__}: {error}")
        run.done[kind.__name__.strip("_").replace("_", " ")] += 1


async def _ask_canary(run: _Soak) -> None:
    while time.monotonic() < run.end:
        run.wrong_canaries += await canary(run.port) != run.expected
        await asyncio.sleep(_CANARY_S)


async def _places_lost(run: _Soak) -> int:
    """Refusals among as many requests at once as a fresh server accepts."""
    replies = await asyncio.gather(
        *(ask(run.port, "/v1/completions", run.body()) for _ in range(_NUM_PLACES))
    )
    return sum(reply.status != 200 for reply in replies)


async def _expect(run: _Soak, path: str, body: object, *statuses: int, **headers: str) -> None:
    reply = await ask(run.port, path, body, **headers)
    whole = reply.is_whole_stream or "event-stream" not in reply.headers.get("content-type", "")
    if reply.status not in (*statuses, 429) or not whole:
        run.faults.append(f"{path} {reply.status}: {reply.body[:300]!r}")


async def _plain_completion(run: _Soak) -> None:
    await _expect(run, "/v1/completions", run.body(n=run.random.choice((1, 1, 1, 3))), 200)


async def _plain_chat(run: _Soak) -> None:
    await _expect(run, "/v1/chat/completions", run.chat(logprobs=True, top_logprobs=3), 200)


async def _streamed_completion(run: _Soak) -> None:
    await _expect(run, "/v1/completions", run.body(stream=True, stop=[" the", "zz"]), 200)


async def _streamed_chat(run: _Soak) -> None:
    options = {"include_usage": True}
    await _expect(run, "/v1/chat/completions", run.chat(stream=True, stream_options=options), 200)


async def _batch_of_prompts(run: _Soak) -> None:
    await _expect(run, "/v1/completions", run.body(prompt=[run.prompt(), run.prompt()]), 200)


async def _tokenized_text(run: _Soak) -> None:
    await _expect(run, "/tokenize", {"prompt": run.prompt()}, 200)


async def _client_that_leaves(run: _Soak) -> None:
    """Goes away while it waits, in a plain request or in a stream."""
    stream = run.random.random() < 0.5
    async with await Connection.open(run.port) as connection:
        body = run.body(stream=stream, ignore_eos=True)
        await connection.send(request_bytes("/v1/completions", body))
        await asyncio.sleep(run.random.random())


async def _client_that_leaves_a_stream(run: _Soak) -> None:
    """Goes away after the first events."""
    async with await Connection.open(run.port) as connection:
        await connection.send(request_bytes("/v1/chat/completions", run.chat(stream=True)))
        head = await connection.read_head()
        if head.status == 200:
            await connection.read_piece(head)


async def _client_that_leaves_its_body(run: _Soak) -> None:
    """Goes away before it has sent everything."""
    raw = request_bytes("/v1/completions", run.body())
    async with await Connection.open(run.port) as connection:
        await connection.send(raw[: run.random.randrange(1, len(raw))])
        await asyncio.sleep(run.random.random() / 10)


async def _client_that_reads_slowly(run: _Soak) -> None:
    body = run.body(stream=True, n=2, logprobs=5, ignore_eos=True)
    async with await Connection.open(run.port, small_buffer=True) as connection:
        await connection.send(request_bytes("/v1/completions", body))
        head = await connection.read_head()
        while head.status == 200 and await connection.read_piece(head):
            await asyncio.sleep(0.05)


async def _client_in_a_hurry(run: _Soak) -> None:
    """Gives its request less time than it may need."""
    seconds = f"{0.01 + run.random.random() / 2:.3f}"
    await _expect(run, "/v1/completions", run.body(), 200, 408, x_request_timeout=seconds)


async def _bad_request(run: _Soak) -> None:
    body = run.random.choice(
        (
            b"{",
            b"\xff\xfe",
            run.body(temperature="hot"),
            run.body(n=0),
            run.body(max_tokens=10**9),
            run.body(prompt=[-1]),
            run.body(logit_bias={"x": 1}),
        )
    )
    await _expect(run, "/v1/completions", body, 400)


async def _unknown_path_or_model(run: _Soak) -> None:
    path = run.random.choice(("/v1/completions", "/v1/nothing"))
    await _expect(run, path, run.body(model="no such model"), 404)


_Kind = Callable[[_Soak], Awaitable[None]]
_GOOD: tuple[_Kind, ...] = (
    _plain_completion,
    _plain_chat,
    _streamed_completion,
    _streamed_chat,
    _batch_of_prompts,
    _tokenized_text,
)
_BAD: tuple[_Kind, ...] = (
    _client_that_leaves,
    _client_that_leaves_a_stream,
    _client_that_leaves_its_body,
    _client_that_reads_slowly,
    _client_in_a_hurry,
    _bad_request,
    _unknown_path_or_model,
)
