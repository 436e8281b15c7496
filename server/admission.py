"""How many requests may be accepted and unfinished at once."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from octavo.engine.core.errors import InvalidRequestError, QueueFullError
from octavo.server.context import current_request

_RETRY_AFTER_S = 1


class Ticket:
    """The places of one HTTP request; a context manager that gives them back."""

    __slots__ = ("_admission", "_places")

    def __init__(self, admission: "Admission", places: int) -> None:
        self._admission = admission
        self._places = places

    def resize(self, places: int, param: str | None = "prompt") -> None:
        """Hold `places` places in all, one per prompt of a batch.

        Raises InvalidRequestError for a batch that could never fit and QueueFullError for one
        that does not fit now; the ticket then keeps what it had.
        """
        if places > self._admission.capacity:
            raise InvalidRequestError(
                f"{places} prompts in one request are more than this server accepts at once "
                f"({self._admission.capacity})",
                param,
            )
        self._admission._take(places - self._places)
        self._places = places

    def release(self) -> None:
        """Give all places back; a second call does nothing."""
        self._admission._give(self._places)
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
    are waiting for their first step; above `max_queued_tokens` no more is taken.
    """

    def __init__(
        self, capacity: int, max_queued_tokens: int | None, queued_tokens: Callable[[], int]
    ) -> None:
        self.capacity = capacity
        self._max_queued_tokens = max_queued_tokens
        self._queued_tokens = queued_tokens
        self._accepted = 0

    @property
    def num_accepted(self) -> int:
        """Prompts accepted and not finished."""
        return self._accepted

    def admit(self, places: int = 1) -> Ticket:
        """Take places for `places` prompts.

        Raises QueueFullError, or InvalidRequestError for a time limit that is none.
        """
        _ = current_request().timeout
        self._take(places)
        return Ticket(self, places)

    def _take(self, places: int) -> None:
        if places > 0 and self._accepted + places > self.capacity:
            raise QueueFullError(
                f"The server's queue is full: {self._accepted} requests are unfinished, "
                f"at most {self.capacity} are accepted",
                _RETRY_AFTER_S,
            )
        limit = self._max_queued_tokens
        if places > 0 and limit is not None and self._queued_tokens() >= limit:
            raise QueueFullError(
                f"The server's queue is full: the waiting requests hold {limit} prompt tokens "
                "or more",
                _RETRY_AFTER_S,
            )
        self._accepted += places

    def _give(self, places: int) -> None:
        self._accepted -= places
        assert self._accepted >= 0
