"""The engine thread: inbox, wake-up, one callback per step, and the end in all its forms."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from octavo.engine.core.errors import EngineDeadError, InvalidRequestError, RequestError
from octavo.engine.core.messages import (
    AbortRequest,
    AddRequest,
    Message,
    ResetPrefixCache,
    TakeBlockMap,
)
from octavo.engine.core.request import FinishReason
from octavo.engine.core.request_output import EngineStats, SequenceDelta
from octavo.engine.llm_engine import LLMEngine

logger = logging.getLogger(__name__)

# Idle for so long, the engine has time to look at its bookkeeping: some 100 ms for a large pool.
IDLE_CHECK_S = 2.0

OnStep = Callable[[list[SequenceDelta], EngineStats], None]
OnFatal = Callable[[str], None]


class Heartbeat(NamedTuple):
    """`time.monotonic()` seconds at which the last step began and ended; 0 before the first.

    A step is running while `started` is above `ended`.
    """

    started: float = 0.0
    ended: float = 0.0

    def step_age(self, now: float) -> float:
        """Seconds that the running step has taken so far; 0 when none is running."""
        return now - self.started if self.started > self.ended else 0.0


class EngineLoop:
    """Runs the only loop over an engine, in a thread of its own.

    `on_step` gets the deltas of each step and is called from the engine thread. `on_fatal` is
    called once, with the reason, when the engine stops for good by itself. Each choice of a posted
    request gets exactly one terminal delta, also when its request is refused, when the engine
    dies, and at shutdown: the loop keeps count of the open choices itself, so that this holds
    whatever state the engine is in.
    """

    def __init__(
        self,
        engine: LLMEngine,
        on_step: OnStep,
        on_fatal: OnFatal,
        idle_work: Callable[[], bool] | None = None,
    ) -> None:
        """`idle_work` is called while there is nothing else to do, until it returns False.

        It does a little each time: a request waits until it returns.
        """
        self._engine = engine
        self._on_step = on_step
        self._on_fatal = on_fatal
        self._idle_work = idle_work
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # Guards what follows; the thread waits on it when idle.
        self._wakeup = threading.Condition()
        self._inbox: list[Message] = []
        self._open: dict[str, set[int]] = {}
        self._stopping = False
        self._closed = False
        self._fatal_error: str | None = None
        self._heartbeat = Heartbeat()
        self._stats = EngineStats()

    @property
    def alive(self) -> bool:
        """True while the thread runs and takes requests."""
        return self._thread.is_alive() and not self._closed

    @property
    def fatal_error(self) -> str | None:
        """Why the engine stopped by itself; None while it is well or after a plain shutdown."""
        return self._fatal_error

    @property
    def heartbeat(self) -> Heartbeat:
        """When the last step began and ended; for a watchdog in another thread."""
        return self._heartbeat

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def post(self, message: Message) -> None:
        """Put a message into the inbox; from any thread, before `start` too.

        Raises EngineDeadError for a request after the end, InvalidRequestError for a request id
        that is open. Other messages after the end are dropped: nothing is left to act on.
        """
        with self._wakeup:
            if isinstance(message, AddRequest):
                if self._closed:
                    raise EngineDeadError(self._fatal_error or "the engine has been shut down")
                if message.request_id in self._open:
                    raise InvalidRequestError("a request with this id is open already")
                self._open[message.request_id] = set(range(message.params.num_sequences))
            if not self._closed:
                self._inbox.append(message)
                self._wakeup.notify()

    def shutdown(self, timeout: float | None = None) -> bool:
        """Stop after the running step; open requests end with an error. True once it has ended.

        Called from any thread but the engine's own. False when `timeout` seconds were not enough.
        """
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        if self._thread.ident is None:
            self._finish()
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def fail(self, reason: str) -> None:
        """Declare the engine dead from outside, as a watchdog does when a step never ends.

        Open requests end with an error now. Should the step end after all, its results are
        dropped.
        """
        if self._close(reason, fatal=True):
            self._on_fatal(reason)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_step()
        except Exception as error:
            logger.exception("the engine loop failed")
            self.fail(f"{type(error).__name__}: {error}")
        self._finish()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the loop has to end.

        Once it has been idle for a while, the bookkeeping is verified.
        """
        while self._idle_work is not None and not self._is_awake():
            if not self._idle_work():
                self._idle_work = None
        with self._wakeup:
            if self._wakeup.wait_for(self._is_awake, IDLE_CHECK_S):
                return not (self._stopping or self._closed)
        self._engine.verify()
        self._deliver([])
        with self._wakeup:
            self._wakeup.wait_for(self._is_awake)
            return not (self._stopping or self._closed)

    def _is_awake(self) -> bool:
        return bool(self._inbox or self._stopping or self._closed or self._engine.has_work())

    def _run_step(self) -> None:
        deltas = self._read_inbox()
        if self._engine.has_work():
            started = time.monotonic()
            self._heartbeat = Heartbeat(started, self._heartbeat.ended)
            results = self._engine.step()
            deltas += results + self._engine.take_starts(results)
            self._heartbeat = Heartbeat(started, time.monotonic())
        self._deliver(deltas)

    def _read_inbox(self) -> list[SequenceDelta]:
        """Hand all messages to the engine; return terminal deltas of requests it refused."""
        with self._wakeup:
            messages, self._inbox = self._inbox, []
        deltas: list[SequenceDelta] = []
        for message in messages:
            match message:
                case AddRequest():
                    try:
                        self._engine.add_request(message)
                    except RequestError as error:
                        choices = range(message.params.num_sequences)
                        refused = _error_deltas(message.request_id, choices, error.message)
                        deltas += [delta._replace(refusal=error) for delta in refused]
                case AbortRequest():
                    self._engine.abort(message.request_id, message.index)
                case ResetPrefixCache():
                    done = self._engine.reset_prefix_cache()
                    if not done:
                        logger.warning("prefix cache not reset: blocks are in use")
                    if message.reply is not None:
                        message.reply(done)
                case TakeBlockMap():
                    message.reply(self._engine.block_map())
        return deltas

    def _deliver(self, deltas: list[SequenceDelta]) -> None:
        with self._wakeup:
            if self._closed:
                return
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._forget(delta)
        self._stats = self._engine.stats()
        self._on_step(deltas, self._stats)

    def _forget(self, delta: SequenceDelta) -> None:
        choices = self._open[delta.request_id]
        choices.remove(delta.index)
        if not choices:
            del self._open[delta.request_id]

    def _finish(self) -> None:
        self._close("the server is shutting down", fatal=False)
        # It may hold what the engine gives up.
        self._idle_work = None
        self._engine.shutdown()

    def _close(self, reason: str, fatal: bool) -> bool:
        """End all open requests with an error; False if that has been done already."""
        with self._wakeup:
            if self._closed:
                return False
            self._closed = True
            self._fatal_error = reason if fatal else None
            deltas = [
                delta
                for request_id, choices in self._open.items()
                for delta in _error_deltas(request_id, sorted(choices), reason)
            ]
            self._open.clear()
            self._inbox.clear()
            self._wakeup.notify()
            stats = replace(
                self._stats,
                num_running=0,
                num_waiting=0,
                num_used_blocks=0,
                num_wasted_slots=0,
                num_used_swap_blocks=0,
            )
        try:
            self._on_step(deltas, stats)
        except Exception:
            # The receiver may be what failed; the end of the loop must not hang on it.
            logger.exception("the last results could not be handed out")
        return True


def _error_deltas(request_id: str, choices: Iterable[int], error: str) -> list[SequenceDelta]:
    return [
        SequenceDelta(request_id, index, (), finish_reason=FinishReason.ERROR, error=error)
        for index in choices
    ]
