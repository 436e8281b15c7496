"""How many requests may be accepted and unfinished at once."""

import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from octavo.engine.core.errors import InvalidRequestError, KeyLimitError, QueueFullError
from octavo.server.context import RequestContext, current_request
from octavo.server.key_limits import KeyLimits

_WINDOW_S = 30.0
_MAX_RETRY_AFTER_S = 60
_MAX_REMEMBERED = 4096


class DrainRate:
    """How fast accepted prompts end, and from that when a refused client should come back.

    Refused clients get places in an imagined line that moves at this rate: if all of them came
    back when the first place is free, all but one would be refused again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin = clock()
        self._ended: deque[float] = deque(maxlen=_MAX_REMEMBERED)
        self._line_end = 0.0

    def record(self, count: int) -> None:
        """Count prompts that have ended now."""
        self._ended.extend([self._clock()] * count)

    def retry_after(self, places: int) -> int:
        """Return whole seconds, 1 to 60, after which `places` more may be asked for."""
        now = self._clock()
        self._line_end = max(self._line_end, now) + places / self._per_second(now)
        # The line is not longer than what is told, so that it is gone soon after an overload.
        self._line_end = min(self._line_end, now + _MAX_RETRY_AFTER_S)
        return max(math.ceil(self._line_end - now), 1)

    def _per_second(self, now: float) -> float:
        while self._ended and self._ended[0] < now - _WINDOW_S:
            self._ended.popleft()
        begin = max(self._begin, now - _WINDOW_S)
        if len(self._ended) == self._ended.maxlen:
            begin = self._ended[0]
        # Before anything has ended, as if one did now.
        return max(len(self._ended), 1) / max(now - begin, 1.0)


class Ticket:
    """The places of one HTTP request; a context manager that gives them back."""

    __slots__ = ("_admission", "_key_name", "_places")

    def __init__(self, admission: "Admission", places: int, key_name: str | None) -> None:
        self._admission = admission
        self._places = places
        self._key_name = key_name

    def resize(self, places: int, param: str | None = "prompt") -> None:
        """Hold `places` places in all, one per prompt of a batch.

        Raises InvalidRequestError for a batch that could never fit, and QueueFullError or
        KeyLimitError for one that does not fit now; the ticket then keeps what it had.
        """
        if places > self._admission.capacity:
            raise InvalidRequestError(
                f"{places} prompts in one request are more than this server accepts at once "
                f"({self._admission.capacity})",
                param,
            )
        try:
            self._admission._take(places - self._places, current_request())
        except QueueFullError:
            self._admission._uncount(self._places, self._key_name)
            raise
        self._places = places

    def release(self) -> None:
        """Give all places back; a second call does nothing."""
        self._admission._give(self._places, self._key_name)
        self._places = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Admission:
    """Counts accepted and unfinished prompts. Used on the event loop thread only.

    `capacity` is what may run plus what may wait. `queued_tokens` says how many prompt tokens
    are waiting for their first step; above `max_queued_tokens` no more is taken. `key_limits`
    bounds what one key may have besides.
    """

    def __init__(
        self,
        capacity: int,
        max_queued_tokens: int | None,
        queued_tokens: Callable[[], int],
        key_limits: KeyLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self._max_queued_tokens = max_queued_tokens
        self._queued_tokens = queued_tokens
        self._key_limits = key_limits
        self._drain = DrainRate(clock)
        self._accepted = 0

    @property
    def num_accepted(self) -> int:
        """Prompts accepted and not finished."""
        return self._accepted

    def admit(self, places: int = 1) -> Ticket:
        """Take places for `places` prompts.

        Raises QueueFullError, KeyLimitError, or InvalidRequestError for a time limit that is none.
        """
        context = current_request()
        _ = context.timeout
        self._take(places, context)
        return Ticket(self, places, context.key_name)

    def _take(self, places: int, context: RequestContext) -> None:
        if places > 0:
            self._check_key(places, context)
            self._check_queue(places)
        self._accepted += places
        if self._key_limits is not None and context.key_name is not None:
            self._key_limits.take(context.key_name, places)

    def _check_key(self, places: int, context: RequestContext) -> None:
        if self._key_limits is None or context.key_name is None:
            return
        try:
            self._key_limits.check(context.key_name, places)
        except KeyLimitError:
            context.rejection = "key_limit"
            raise

    def _check_queue(self, places: int) -> None:
        if self._accepted + places > self.capacity:
            raise QueueFullError(
                f"The server's queue is full: {self._accepted} requests are unfinished, "
                f"at most {self.capacity} are accepted",
                self._drain.retry_after(places),
            )
        limit = self._max_queued_tokens
        if limit is not None and self._queued_tokens() >= limit:
            raise QueueFullError(
                f"The server's queue is full: the waiting requests hold {limit} prompt tokens "
                "or more",
                self._drain.retry_after(places),
            )

    def _uncount(self, places: int, key_name: str | None) -> None:
        """Leave the places of a refused request out of what its key may send in a minute."""
        if self._key_limits is not None and key_name is not None:
            self._key_limits.uncount(key_name, places)

    def _give(self, places: int, key_name: str | None) -> None:
        self._accepted -= places
        assert self._accepted >= 0
        self._drain.record(places)
        if self._key_limits is not None and key_name is not None:
            self._key_limits.give(key_name, places)
