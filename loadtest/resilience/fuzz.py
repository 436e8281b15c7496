"""Requests with damaged bytes: each is refused or answered, and nothing else happens."""

import asyncio
import random
import re
from collections import Counter
from dataclasses import dataclass, field

from octavo.loadtest.resilience.connection import Connection, ConnectionLost, ask, request_bytes
from octavo.loadtest.resilience.outcome import Outcome
from octavo.loadtest.resilience.process import ServerProcess
from octavo.loadtest.resilience.watch import canary, demand_nothing_lost, when_idle

# The time limit ends answers whose length the damage has taken away. The system hands out a cache
# page by page as blocks are first used: a small one has been used up when memory is looked at.
SERVE_ARGS = (
    *("--max-num-seqs", "16", "--max-num-queued-reqs", "64", "--request-timeout", "10"),
    *("--num-gpu-blocks-override", "256"),
)
_CACHE_TOKENS = 256 * 16
"""What the cache of `SERVE_ARGS` holds."""

_PROMPT_TOKENS = 256
_WORKERS = 8
_PATIENCE_S = 60.0
_BAD = 400
_SERVER_FAULT = 500
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
_SEEDS: tuple[tuple[str, object], ...] = (
    ("/v1/completions", {"prompt": "ab", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "n": 2, "stop": ["x", "yz"]}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logit_bias": {"5": 1.5}, "seed": 7}),
    (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi \u00e9\u4e16"}]},
            ],
            "max_tokens": 2,
            "response_format": {"type": "text"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [_TOOL],
            "tool_choice": "none",
        },
    ),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "metadata": {"a": "b"}}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "some text", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/models", None),
    ("/health", None),
)
_PIECES = (
    *(b"null", b"true", b"[]", b"{}", b'""', b"NaN", b"-Infinity", b"1e999", b"-1", b"-0.0"),
    *(
        b"9" * 30,
        b"[" * 200,
        b'{"a":' * 50,
        b'"\\ud800"',
        b"\\u0000",
        b"\x00",
        b"\xff\xfe",
        b"\x80",
    ),
    *(b"\r\n", b"\r\n\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 3\r\n", b"HTTP/9"),
    *(b"Expect: 100-continue\r\n", b"x-request-id: \xc3\xa9\r\n", b"x-request-timeout: nan\r\n"),
    *(b"..", b"%00", b"%ff", b"?a=%", b"//", b" ", b'"n":', b'"stream":true,', b"\xe2\x80\xa8"),
)


@dataclass(frozen=True, slots=True)
class FuzzSize:
    """How much of it: requests that the server must have refused."""

    bad: int = 10_000
    seed: int = 1
    warm_up_tokens: int = 2 * _CACHE_TOKENS


@dataclass(slots=True)
class _Fuzz:
    """One run. Requests count as bad when they are refused, or when the connection just ends."""

    port: int
    wanted: int
    random: random.Random
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0
    faults: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        refused = sum(n for status, n in self.statuses.items() if status >= _BAD)
        return refused + self.unanswered


async def fuzz(server: ServerProcess, size: FuzzSize) -> Outcome:
    """Send damaged requests until so many were refused."""
    expected = await canary(server.port)
    await _use_up_cache(server.port, size.warm_up_tokens)
    await _send_some(_Fuzz(server.port, min(size.bad // 10, 200), random.Random(size.seed + 1)))
    before = await when_idle(server)
    run = _Fuzz(server.port, size.bad, random.Random(size.seed))
    await _send_some(run)
    after = await when_idle(server)
    outcome = Outcome("fuzz")
    outcome.figures |= {f"status {status}": n for status, n in sorted(run.statuses.items())}
    outcome.figures |= {
        "closed without an answer": run.unanswered,
        "RSS before, MiB": round(before.rss_mib, 1),
        "RSS after, MiB": round(after.rss_mib, 1),
    }
    for name, found in (("5xx", run.faults), ("stuck", run.stuck), ("log", server.log_faults())):
        if found:
            outcome.figures[f"first {name}"] = found[0]
    outcome.at_least("bad requests", run.bad, size.bad)
    outcome.none("answers 5xx", len(run.faults))
    outcome.none("requests that got stuck", len(run.stuck))
    outcome.none("errors in the log", len(server.log_faults()))
    demand_nothing_lost(outcome, before, after)
    outcome.at_most("RSS after / before", after.rss_mib / before.rss_mib, 1.05, only_long=True)
    outcome.equal("canary", await canary(server.port), expected)
    return outcome


async def _use_up_cache(port: int, num_tokens: int) -> None:
    """Send prompts of so many tokens in all, no two of which begin alike."""
    for start in range(0, num_tokens, _PROMPT_TOKENS):
        body = {"prompt": list(range(start, start + _PROMPT_TOKENS)), "max_tokens": 1}
        await ask(port, "/v1/completions", body)


async def _send_some(run: _Fuzz) -> None:
    async def work() -> None:
        while run.bad < run.wanted:
            await _one(run, damaged_request(run.random))

    async with asyncio.TaskGroup() as group:
        for _ in range(_WORKERS):
            group.create_task(work())


async def _one(run: _Fuzz, raw: bytes) -> None:
    async with await Connection.open(run.port) as connection:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await connection.send(raw)
                if not _is_complete(raw):
                    # The server would wait for the rest.
                    connection.end()
                head = await connection.read_head()
        except ConnectionLost:
            run.unanswered += 1
            return
        except TimeoutError:
            run.stuck.append(repr(raw))
            return
    run.statuses[head.status] += 1
    if head.status >= _SERVER_FAULT:
        run.faults.append(f"{head.status} for {raw!r}")


def _is_complete(raw: bytes) -> bool:
    head, separator, content = raw.partition(b"\r\n\r\n")
    lengths = [int(number) for number in _LENGTH.findall(head)]
    return bool(separator) and b"chunked" not in head and len(content) >= max(lengths, default=0)


def damaged_request(draw: random.Random) -> bytes:
    """A real request with a few bytes damaged: mostly in the body, which then has its length."""
    path, body = draw.choice(_SEEDS)
    raw = request_bytes(path, body)
    if body is None or draw.random() < 0.3:
        return _damage(raw, draw)
    _, _, content = raw.partition(b"\r\n\r\n")
    return request_bytes(path, _damage(content, draw))


def _damage(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        start = draw.randrange(len(data) + 1)
        end = min(start + draw.choice((1, 2, 5, 20)), len(data))
        match draw.randrange(6):
            case 0:
                data = data[:start] + data[end:]
            case 1:
                data = data[:start] + draw.randbytes(end - start) + data[end:]
            case 2:
                data = data[:start] + draw.choice(_PIECES) + data[start:]
            case 3:
                data = data[:start] + draw.choice(_PIECES) + data[end:]
            case 4:
                data = data[:end] + data[start:end] * draw.choice((1, 50)) + data[end:]
            case _:
                data = data[:start]
    return data
