"""The event loop's side of the engine: one stream of outputs per request.

Two threads meet here. The engine thread hands over all deltas of a step with a single call; the
event loop thread owns everything else in this file.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, TypeVar

from octavo.engine.core.block_map import BlockMap
from octavo.engine.core.errors import (
    EngineDeadError,
    NotReadyError,
    OctavoError,
    RequestTimeoutError,
)
from octavo.engine.core.messages import (
    AbortRequest,
    AddRequest,
    Message,
    ResetPrefixCache,
    TakeBlockMap,
)
from octavo.engine.core.request import FinishReason
from octavo.engine.core.request_output import EngineStats, SequenceDelta
from octavo.engine.engine_loop import Heartbeat
from octavo.engine.output_processor import ChoiceOutput, OutputProcessor
from octavo.engine.tokenizer import Tokenizer
from octavo.server.context import current_request
from octavo.server.diagnostics import LastRequests, RequestTrace, describe_params
from octavo.server.engine_stream import EngineStream, GenerateRequest
from octavo.server.handoff import Handoff
from octavo.server.metrics import ServerMetrics
from octavo.server.time_limits import NO_LIMITS, TimeLimits

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# Deltas turned into text before other tasks of the event loop get a turn.
_SLICE = 64

# Deltas that may wait for the event loop before the engine waits for it in earnest.
_MAX_BACKLOG = 2048

OnStep = Callable[[list[SequenceDelta], EngineStats], None]
OnFatal = Callable[[str], None]


class EngineThread(Protocol):
    """The engine's thread as seen from here; EngineLoop is one and documents the methods."""

    @property
    def fatal_error(self) -> str | None: ...

    @property
    def heartbeat(self) -> Heartbeat: ...

    def start(self) -> None: ...

    def post(self, message: Message) -> None: ...

    def fail(self, reason: str) -> None: ...

    def shutdown(self, timeout: float | None = None) -> bool: ...


EngineThreadFactory = Callable[[OnStep, OnFatal], EngineThread]


class AsyncEngine:
    """Turns requests into streams of text outputs.

    Made and used on the event loop thread. `on_dead` is called once when the engine has failed.
    A stream goes on once `stream_interval` tokens wait.
    """

    def __init__(
        self,
        make_thread: EngineThreadFactory,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
        on_dead: OnFatal,
        limits: TimeLimits = NO_LIMITS,
        log_requests: bool = False,
        stream_interval: int = 1,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread = make_thread(self._step_from_thread, self._fatal_from_thread)
        self._processor = OutputProcessor(tokenizer)
        self._metrics = metrics
        self._on_dead = on_dead
        self._limits = limits
        self._log_requests = log_requests
        self._stream_interval = stream_interval
        self._handoff = Handoff(self._loop)
        self._streams: dict[str, EngineStream] = {}
        self._backlog: deque[SequenceDelta] = deque()
        self._stats = EngineStats()
        self._failure: str | None = None
        self._stopping = False
        self._num_waiting_tokens = 0
        self._last_requests = LastRequests()
        self._replies: set[asyncio.Future[Any]] = set()

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    async def shutdown(self, timeout: float) -> None:
        """Stop the engine's thread; gives up waiting after `timeout` seconds.

        Questions that the thread has not answered end with NotReadyError.
        """
        if self._failure is None:
            self._stopping = True
            await asyncio.to_thread(self._thread.shutdown, timeout)
            self._refuse_questions(_stopping())

    def step_seconds(self) -> float:
        """Seconds that the running step has taken so far; 0 between steps."""
        return self._thread.heartbeat.step_age(time.monotonic())

    def fail(self, reason: str) -> None:
        """Declare the engine dead, as when a step never ends."""
        self._thread.fail(reason)

    @property
    def failure(self) -> str | None:
        """Why the engine stopped for good; None while it lives."""
        return self._failure

    def stats(self) -> EngineStats:
        """The engine's last snapshot."""
        return self._stats

    def last_requests(self) -> list[str]:
        """Return a line for each of the last requests: their settings, never their text."""
        return self._last_requests.describe(time.monotonic())

    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the requests whose first step has not come yet."""
        return self._num_waiting_tokens

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[ChoiceOutput], None]:
        """Yield new outputs, at most one per choice each time, until every choice has ended.

        Close the generator (`contextlib.aclosing`) when leaving early: that aborts the request.
        Raises EngineDeadError, RequestFailedError, RequestTimeoutError or, for one that waited too
        long, NotReadyError; outputs yielded before stay valid.
        """
        stream = self._open(request)
        try:
            self._watch_deadline(stream)
            while stream.open_choices > 0 or stream.outputs:
                yield await stream.next()
        finally:
            self._close(stream)

    def _deadline(self, stream: EngineStream) -> float | None:
        waiting = stream.scheduled is None
        return self._limits.deadline(stream.arrival, waiting, stream.own_limit)

    def _watch_deadline(self, stream: EngineStream) -> None:
        """End a stream whose time is over, or look again when it will be.

        One timer per stream: a time limit around each wait would cost every token.
        """
        deadline = self._deadline(stream)
        if deadline is None:
            return
        if time.monotonic() < deadline:
            stream.timer = self._loop.call_at(deadline, self._watch_deadline, stream)
        elif stream.open_choices == 0:
            # All is there, but nobody takes it.
            stream.context.give_up()
        else:
            self._end_late(stream, deadline)

    def _end_late(self, stream: EngineStream, deadline: float) -> None:
        total = self._limits.deadline(stream.arrival, False, stream.own_limit)
        self._metrics.count_timed_out(stream.stage)
        if total is None or deadline < total:
            wait = math.ceil(deadline - stream.arrival)
            text = "The request waited too long for its turn"
            self._give_up(stream, NotReadyError(text, "queue_timeout", wait))
        else:
            self._give_up(stream, RequestTimeoutError("The request reached the time limit"))

    def _give_up(self, stream: EngineStream, error: OctavoError) -> None:
        """End a stream, and its work in the engine now: its reader may have stopped reading."""
        stream.fail(error)
        stream.context.give_up()
        self._processor.remove(stream.request.request_id)
        self._thread.post(AbortRequest(stream.request.request_id))

    async def reset_prefix_cache(self) -> bool:
        """Forget all blocks kept for reuse; False, with nothing done, while any is in use.

        Raises EngineDeadError or, while the engine is being stopped, NotReadyError, also when it
        ends before it answers.
        """
        return await self._ask(ResetPrefixCache)

    async def block_map(self) -> BlockMap:
        """Return a picture of the block pool between two steps.

        Raises EngineDeadError or, while the engine is being stopped, NotReadyError, also when it
        ends before it answers.
        """
        return await self._ask(TakeBlockMap)

    async def _ask(self, question: Callable[[Callable[[Answer], None]], Message]) -> Answer:
        """Post the message that `question` makes of where its answer goes, and wait for it."""
        if self._failure is not None:
            raise _dead()
        if self._stopping:
            raise _stopping()
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._replies.add(answer)
        answer.add_done_callback(self._replies.discard)

        def reply(value: Answer) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(_resolve, answer, value)

        self._thread.post(question(reply))
        return await answer

    def abort_all(self, error: OctavoError) -> None:
        """End every unfinished request with `error`."""
        for stream in self._streams.values():
            self._give_up(stream, error)

    def _open(self, request: GenerateRequest) -> EngineStream:
        if self._failure is not None:
            raise _dead()
        context = current_request()
        stream = EngineStream(
            request,
            context,
            time.monotonic(),
            context.timeout,
            self._stream_interval,
            open_choices=request.params.num_sequences,
        )
        # First the engine, which may refuse; its first answer cannot come before this returns.
        self._thread.post(
            AddRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                params=request.params,
                arrival_time=stream.arrival,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
        )
        self._processor.add(request.request_id, request.prompt_token_ids, request.params)
        self._streams[request.request_id] = stream
        self._num_waiting_tokens += len(request.prompt_token_ids)
        context.entered = True
        self._last_requests.add(
            RequestTrace(
                request.request_id,
                context.key_name,
                len(request.prompt_token_ids),
                request.params,
                stream.arrival,
            )
        )
        if self._log_requests:
            logger.info(
                "Request %s: %d prompt tokens, %s",
                request.request_id,
                len(request.prompt_token_ids),
                describe_params(request.params),
            )
        return stream

    def _close(self, stream: EngineStream) -> None:
        request_id = stream.request.request_id
        del self._streams[request_id]
        if stream.timer is not None:
            stream.timer.cancel()
        self._processor.remove(request_id)
        if stream.scheduled is None:
            self._num_waiting_tokens -= len(stream.request.prompt_token_ids)
        if stream.open_choices > 0:
            self._thread.post(AbortRequest(request_id))
            if stream.error is None:
                self._metrics.count_disconnect(stream.stage)
        summary = stream.summary()
        stream.context.summaries.append(summary)
        self._metrics.observe_request(summary)

    def _step_from_thread(self, deltas: list[SequenceDelta], stats: EngineStats) -> None:
        # RuntimeError: the event loop is closed, so nobody waits for these any more.
        with contextlib.suppress(RuntimeError):
            self._handoff.give()
            self._loop.call_soon_threadsafe(self._on_step, deltas, stats)
            # On its own thread the event loop would wait for a turn that only it can give.
            if threading.get_ident() != self._loop_thread:
                self._handoff.wait(has_backlog=len(self._backlog) > _MAX_BACKLOG)

    def _fatal_from_thread(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_fatal, reason)

    def _on_fatal(self, reason: str) -> None:
        self._failure = reason
        for stream in self._streams.values():
            # What the last steps gave may still be on its way to it.
            stream.fail(_dead())
        self._refuse_questions(_dead())
        self._on_dead(reason)

    def _refuse_questions(self, error: OctavoError) -> None:
        for answer in self._replies:
            # The engine's last answer may have come just before its end.
            if not answer.done():
                answer.set_exception(error)

    def _on_step(self, deltas: list[SequenceDelta], stats: EngineStats) -> None:
        if stats.num_steps > self._stats.num_steps:
            self._metrics.observe_step(stats.last_step_tokens)
        self._stats = stats
        draining = bool(self._backlog)
        self._backlog.extend(deltas)
        if not draining:
            self._drain()

    def _drain(self) -> None:
        """Deliver what the engine gave, a slice at a time; a fault here is the engine's end.

        Nothing else would ever take up what is left, and every stream would stand still.
        """
        try:
            self._drain_slice()
        except Exception as error:
            logger.exception("The engine's results could not be delivered")
            self._backlog.clear()
            self._handoff.release()
            self._thread.fail(f"{type(error).__name__}: {error}")

    def _drain_slice(self) -> None:
        slice_size = min(_SLICE, len(self._backlog))
        deltas = [self._backlog.popleft() for _ in range(slice_size)]
        for delta in deltas:
            self._note_start(delta)
        # One without tokens and end only tells that a long prompt has begun.
        processed = self._processor.process(
            delta for delta in deltas if delta.token_ids or delta.finish_reason is not None
        )
        for request_id, index in processed.aborts:
            self._thread.post(AbortRequest(request_id, index))
        now = time.monotonic()
        for request_id, outputs in processed.outputs.items():
            self._deliver(self._streams[request_id], outputs, now)
        broken = {delta.request_id for delta in deltas if _is_corrupted(delta)}
        for request_id, error in processed.errors.items():
            if request_id in broken:
                self._metrics.count_corrupted()
            # A dying engine reports its requests one by one before it says that it is dead.
            dead = self._thread.fatal_error is not None
            stream = self._streams[request_id]
            stream.reason = FinishReason.ERROR
            stream.fail(_dead() if dead else error)
        if self._backlog:
            self._loop.call_soon(self._drain)
        else:
            self._handoff.release()

    def _note_start(self, delta: SequenceDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is not None and stream.scheduled is None and delta.scheduled_time is not None:
            stream.scheduled = delta.scheduled_time
            self._num_waiting_tokens -= len(stream.request.prompt_token_ids)

    def _deliver(self, stream: EngineStream, outputs: list[ChoiceOutput], now: float) -> None:
        for output in outputs:
            self._observe(stream, output, now)
            if output.finish_reason is not None:
                stream.open_choices -= 1
                stream.reason = output.finish_reason
        stream.put(outputs)

    def _observe(self, stream: EngineStream, output: ChoiceOutput, now: float) -> None:
        if not stream.prefilled:
            stream.prefilled = True
            self._metrics.observe_prefill(output.num_prompt_tokens, output.num_cached_tokens)
        if not output.token_ids:
            return
        if stream.first_token is None:
            stream.first_token = now
            self._metrics.observe_first_token(now - stream.arrival)
        before = stream.last_tokens.get(output.index)
        gap = None if before is None else now - before
        self._metrics.observe_tokens(len(output.token_ids), gap)
        stream.last_tokens[output.index] = now
        stream.output_tokens[output.index] = output.num_output_tokens


def _is_corrupted(delta: SequenceDelta) -> bool:
    """True for a row of NaN; other errors come without ever running, or are refusals."""
    failed = delta.finish_reason is FinishReason.ERROR and delta.scheduled_time is not None
    return failed and delta.refusal is None


def _resolve(answer: asyncio.Future[Answer], value: Answer) -> None:
    if not answer.done():
        answer.set_result(value)


def _dead() -> EngineDeadError:
    return EngineDeadError("The engine has failed and serves no more requests")


def _stopping() -> NotReadyError:
    return NotReadyError("The server is shutting down", "server_draining", retry_after=10)
