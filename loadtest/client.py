"""The measuring client: sends requests, reads their streams, notes the times.

It often shares its machine with the server, so the work per chunk is kept small.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx
import orjson

from octavo.loadtest.wire import DONE, SSEDecoder, error_message, message_of
from octavo.loadtest.workload import WORDS, Prompt

_CONNECT_TIMEOUT = 30.0  # seconds; an answer itself may take as long as it takes


class ServerError(Exception):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and the fields that all of them share.

    A field of `extra_body` replaces the one of the same name; null takes it away, for servers that
    refuse what they do not know.
    """

    path: str
    model: str
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether the route takes messages in place of a prompt."""
        return self.path.endswith("/chat/completions")

    def body(self, prompt: Prompt) -> bytes:
        """The request body, as JSON."""
        body: dict[str, Any] = {"model": self.model}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt.content}]
            body["max_completion_tokens"] = prompt.output_len
        else:
            body["prompt"] = prompt.content
            body["max_tokens"] = prompt.output_len
        body["repetition_penalty"] = 1.0
        if self.temperature is not None:
            body["temperature"] = self.temperature
        body["logprobs"] = None
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        body |= self.extra_body
        return orjson.dumps(
            {key: value for key, value in body.items() if self.extra_body.get(key, 0) is not None}
        )


@dataclass(slots=True)
class RequestResult:
    """What one request gave; times in seconds. A request with an `error` has failed."""

    input_tokens: int
    output_tokens: int = 0
    start: float = 0.0  # when it was sent, since the start of the run
    ttft: float = 0.0  # from sending to the first chunk with a choice
    itls: list[float] = field(default_factory=list)  # gaps between chunks with a choice
    text: str = ""
    error: str = ""
    asked_tokens: int = 0  # how many output tokens the request asked for

    @property
    def latency(self) -> float:
        """From sending to the last chunk with a choice."""
        return self.ttft + sum(self.itls)


class _StreamState:
    """What has been read of one stream."""

    def __init__(self, result: RequestResult, sent: float) -> None:
        self._result = result
        self._sent = sent
        self._last = 0.0
        self._pieces: list[str] = []
        self.done = False

    def event(self, data: bytes, now: float) -> None:
        """Take one event that arrived at `now`."""
        if data == DONE:
            self.done = True
            return
        value = orjson.loads(data)
        result = self._result
        if "error" in value:
            result.error = message_of(value) or "the stream holds an error without a message"
            return
        if usage := value.get("usage"):
            result.input_tokens = usage["prompt_tokens"]
            result.output_tokens = usage["completion_tokens"]
        if choices := value.get("choices"):
            if self._last:
                result.itls.append(now - self._last)
            else:
                result.ttft = now - self._sent
            self._last = now
            choice = choices[0]
            # Some servers close the stream after this, without [DONE].
            self.done = self.done or choice.get("finish_reason") is not None
            delta = choice.get("delta")
            text = delta.get("content") if delta is not None else choice.get("text")
            self._pieces.append(text or "")

    def finish(self) -> None:
        """Complete the result at the end of the stream."""
        result = self._result
        result.text = "".join(self._pieces)
        # A server that sends no usage: as many tokens as chunks with text is the best guess.
        result.output_tokens = result.output_tokens or sum(map(bool, self._pieces))
        if result.error:
            return
        if not self._last:
            result.error = "the stream holds no choice"
        elif not self.done:
            result.error = "the stream ended without [DONE]"


async def send(client: httpx.AsyncClient, target: Target, prompt: Prompt) -> RequestResult:
    """Send one request and read its stream to the end; faults are noted in the result."""
    result = RequestResult(prompt.input_len, asked_tokens=prompt.output_len)
    body = target.body(prompt)
    sent = perf_counter()
    try:
        async with client.stream("POST", target.path, content=body) as response:
            if response.status_code != httpx.codes.OK:
                message = error_message(await response.aread())
                result.error = f"HTTP {response.status_code}: {message}"
                return result
            state = _StreamState(result, sent)
            decoder = SSEDecoder()
            async for chunk in response.aiter_raw():
                now = perf_counter()
                for data in decoder.feed(chunk):
                    state.event(data, now)
            state.finish()
    except httpx.HTTPError as error:
        result.error = f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        result.error = f"malformed chunk: {error!r}"
    return result


def open_client(base_url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """A client for `base_url` without limits on connections or on the time of an answer."""
    return httpx.AsyncClient(
        base_url=base_url,
        # Chunks are read raw, so they have to come uncompressed.
        headers={"content-type": "application/json", **headers, "accept-encoding": "identity"},
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def run(
    send_one: Callable[[Prompt], Awaitable[RequestResult]],
    prompts: Sequence[Prompt],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    on_result: Callable[[RequestResult], None],
) -> tuple[list[RequestResult], float]:
    """Send each prompt at its time, at most `max_concurrency` at once (later ones wait).

    Returns the results in the order of the prompts, and the duration in seconds.
    """
    slots = asyncio.Semaphore(max_concurrency or len(prompts))
    begin = perf_counter()

    async def one(prompt: Prompt) -> RequestResult:
        async with slots:
            start = perf_counter() - begin
            result = await send_one(prompt)
        result.start = start
        on_result(result)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt, arrival in zip(prompts, arrivals, strict=True):
            if (delay := begin + arrival - perf_counter()) > 0:
                await asyncio.sleep(delay)
            tasks.append(group.create_task(one(prompt)))
    return [task.result() for task in tasks], perf_counter() - begin


async def first_model(client: httpx.AsyncClient) -> str:
    """The id of the first model that the server lists.

    Raises:
        ServerError: no server answers, it is not ready, or it lists no model.
    """
    response = await _ask(client, "GET", "/v1/models")
    if response.status_code != httpx.codes.OK:
        message = error_message(response.content)
        raise ServerError(f"GET /v1/models: HTTP {response.status_code}: {message}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError("GET /v1/models lists no model; give --model") from error


async def text_token_ids(client: httpx.AsyncClient, model: str) -> list[int]:
    """Ids of ordinary text in the vocabulary of the served model, by the server's own tokenizer.

    Such ids are valid whatever the size of the vocabulary, and none is a special token. Empty
    when the server has no `/tokenize`.

    Raises:
        ServerError: no server answers.
    """
    body = {"model": model, "prompt": WORDS, "add_special_tokens": False}
    response = await _ask(client, "POST", "/tokenize", content=orjson.dumps(body))
    if response.status_code != httpx.codes.OK:
        return []
    try:
        tokens = response.json()["tokens"]
    except (ValueError, KeyError, TypeError):
        return []
    return sorted(set(tokens)) if all(isinstance(token, int) for token in tokens) else []


async def metrics_text(client: httpx.AsyncClient) -> str:
    """The page of `/metrics`; "" when the server has none."""
    response = await _ask(client, "GET", "/metrics")
    return response.text if response.status_code == httpx.codes.OK else ""


async def _ask(
    client: httpx.AsyncClient, method: str, path: str, content: bytes | None = None
) -> httpx.Response:
    try:
        return await client.request(method, path, content=content)
    except httpx.HTTPError as error:
        raise ServerError(f"no answer from {client.base_url}: {error}") from error
